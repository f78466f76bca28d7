"""Timelines as trace files for ui.perfetto.dev (and chrome://tracing).

    process "predicted rank 0"   thread "compute"     | F 0 | F 1 |      | B 0 |
                                 thread "receive"              | grad 0 |          flow arrows go from the
                                 thread "receive 2"                 | grad 1 |     maker to the consumer
    process "predicted rank 1"   ...

Format: "Trace Event Format" (Duffy et al., the Catapult project). Perfetto picks a slice's colour from its
name without the digits, hence `F 3`; slices of one thread that overlap must nest, hence the lanes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..schedules import Action, Collective, Message, Op, Span, Timeline
from ..schedules.messages import STAGE_KINDS
from ..schedules.timing.attribution import Gap, find_gaps
from ..schedules.timing.timeline import What
from ..schedules.versions import derive_versions
from .rows import assign_lanes, find_arrows

Event = dict[str, Any]  # as the Trace Event Format has it

# Times are rounded to 1/8 us: such a number times 1000 is exact in a double, so that slices which touch here
# still touch when the reader makes whole nanoseconds of them, and can't overlap by one.
_TICKS_PER_US = 8
OWN_KEY = "stagewrightTimelines"  # a key that other readers skip: what the slices were made of, unrounded
_COMPUTE, _RECEIVE, _TOGETHER, _MOVES = 0, 100, 200, 300  # first thread id of each kind of lane
_LANES = {_COMPUTE: "compute", _RECEIVE: "receive", _TOGETHER: "together", _MOVES: "moves"}


def write_perfetto(timelines: Timeline | Sequence[tuple[str, Timeline]], path: str | Path) -> None:
    """Write a trace in which each rank is a process; times in microseconds from each timeline's first start.

    The same timelines always give the same bytes. O(actions + messages).

    Arguments:
        timelines: one, or several as (name, timeline) such as ("predicted", t), one below the other.
        path: of the JSON file.

    Raises ValueError for an empty sequence or a name that stands twice.
    """
    named = [("", timelines)] if isinstance(timelines, Timeline) else list(timelines)
    names = [name for name, _ in named]
    if not names:
        raise ValueError("timelines=[]: expected a Timeline, or at least one (name, Timeline)")
    if len(set(names)) < len(names):
        raise ValueError(f"timelines named {names}: expected another name for each")
    events: list[Event] = []
    pid = arrow_id = 0
    for name, timeline in named:
        trace = _Trace(name, timeline, first_pid=pid, first_arrow=arrow_id)
        events += trace.events
        pid += len(timeline.ranks)
        arrow_id += trace.num_arrows
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    facts = json.dumps({name or "timeline": _facts(timeline) for name, timeline in named})
    whole = json.dumps([{"name": name, "timeline": json.loads(timeline.to_json())} for name, timeline in named])
    text = f'{{"displayTimeUnit":"ms",\n"otherData":{facts},\n"{OWN_KEY}":{whole},\n"traceEvents":[\n{lines}\n]}}\n'
    Path(path).write_text(text, encoding="utf-8")


def read_perfetto(data: Mapping[str, Any], *, source: str) -> list[tuple[str, Timeline]] | None:
    """The named timelines of which `write_perfetto` made a file, to the last bit; None for a file of others.

    Arguments:
        data: the file's JSON.
        source: its name, for errors.

    Raises ValueError where one is written by this package, and cannot be read.
    """
    kept = data.get(OWN_KEY)
    if kept is None:
        return None
    try:
        return [(str(each["name"]), Timeline.from_json(json.dumps(each["timeline"]))) for each in kept]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{source}: {OWN_KEY}: {error!r}: expected what write_perfetto writes") from None


def _facts(timeline: Timeline) -> Event:
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "measured": timeline.measured,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "num_slices": schedule.num_slices,
        "num_batches": schedule.num_batches,
        "makespan_seconds": timeline.makespan,
        "batch_seconds": timeline.batch_seconds,
        "makespan_bubble": timeline.makespan_bubble,
        "span_bubble": timeline.span_bubble,
        "clock_error_us": [round(error * 1e6, 3) for error in timeline.clock_error],
        "missing_ranks": list(timeline.missing),
    }


class _Place(NamedTuple):
    """Place of a slice: its thread, start and end [ticks]."""

    tid: int
    start: int
    end: int


class _Trace:
    """The events of one timeline: metadata, then slices, then flows.

    The order in the file matters where times are equal: a flow binds to the slice that is open when the flow
    is read.
    """

    def __init__(self, name: str, timeline: Timeline, *, first_pid: int, first_arrow: int) -> None:
        self.timeline = timeline
        self.first_pid = first_pid
        self.first_arrow = first_arrow
        self.num_arrows = 0
        self._origin, self._words = timeline.start, _SliceWords(timeline)
        self._places: list[dict[Action | Message | Collective, _Place]] = [{} for _ in timeline.ranks]
        slices = [event for rank, gaps in enumerate(find_gaps(timeline)) for event in self._slices(rank, gaps)]
        self.events = [*self._metadata(name), *slices, *self._flows()]

    def _slices(self, rank: int, gaps: dict[Action, Gap]) -> Iterator[Event]:
        trace = self.timeline.ranks[rank]
        tell = self._words
        compute = lambda what: tell.of_action(rank, what, gaps.get(what))  # noqa: E731
        yield from self._lane(rank, _COMPUTE, trace.compute, compute)
        yield from self._lane(rank, _RECEIVE, trace.comm, tell.of_message)
        yield from self._lane(rank, _TOGETHER, trace.collectives, tell.of_collective)
        yield from self._lane(rank, _MOVES, trace.moves, tell.of_move)

    def _lane(
        self, rank: int, first_tid: int, spans: Sequence[Span[What]], describe: Callable[[What], Event]
    ) -> Iterator[Event]:
        """Spans on as many tracks as it takes to have none overlap."""
        ticks = [(self._ticks(start), self._ticks(end)) for _, start, end in spans]
        for (what, _, _), (start, end), lane in zip(spans, ticks, assign_lanes(ticks), strict=True):
            self._places[rank][what] = _Place(first_tid + lane, start, end)
            times = {"ts": start / _TICKS_PER_US, "dur": (end - start) / _TICKS_PER_US}
            yield {
                "ph": "X",
                "pid": self.first_pid + rank,
                "tid": first_tid + lane,
                **times,
                **describe(what),
            }

    def _ticks(self, seconds: float) -> int:
        return round((seconds - self._origin) * 1e6 * _TICKS_PER_US)

    def _metadata(self, name: str) -> Iterator[Event]:
        def record(kind: str, tid: int, **args: str | int) -> Event:
            return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}

        for rank, places in enumerate(self._places):
            pid = self.first_pid + rank
            yield record("process_name", _COMPUTE, name=f"{name} rank {rank}".strip())
            yield record("process_sort_index", _COMPUTE, sort_index=pid)
            for tid in sorted({_COMPUTE, *(place.tid for place in places.values())}):
                first = max(each for each in _LANES if each <= tid)
                kind, lane = _LANES[first], tid - first
                yield record("thread_name", tid, name=f"{kind} {lane + 1}" if lane else kind)
                yield record("thread_sort_index", tid, sort_index=tid)

    def _flows(self) -> Iterator[Event]:
        """Two events per arrow: `s` in the last tick of the maker's slice, `f` at the consumer's start."""
        for arrow in find_arrows(self.timeline):
            maker = self._places[arrow.sender][arrow.maker]
            consumer = self._places[arrow.receiver][arrow.user]
            leaves = max(maker.start, min(maker.end - 1, consumer.start))
            if leaves > consumer.start:
                continue  # clocks of two hosts that disagree: an arrow back in time can't be drawn
            ends = (
                ("s", arrow.sender, maker.tid, leaves),
                ("f", arrow.receiver, consumer.tid, consumer.start),
            )
            for phase, rank, tid, at in ends:
                yield {
                    "ph": phase,
                    "pid": self.first_pid + rank,
                    "tid": tid,
                    "ts": at / _TICKS_PER_US,
                    "id": self.first_arrow + self.num_arrows,
                    "name": f"{arrow.message.kind.value} {arrow.maker.index}",
                    "cat": "flow",
                    **({"bp": "e"} if phase == "f" else {}),
                }
            self.num_arrows += 1


class _SliceWords:
    """Name, category and args of the slices of one timeline: what a reader sees who clicks on one."""

    def __init__(self, timeline: Timeline) -> None:
        schedule = timeline.schedule
        self._versions = derive_versions(schedule) if schedule.is_asynchronous else None
        self._clock_error = timeline.clock_error
        self._num_slices = schedule.num_slices

    def of_action(self, rank: int, action: Action, gap: Gap | None) -> Event:
        """An action, with the idle time before it [us] and its cause, the version of the weights that it uses, and by
        how much the clock of its rank may be wrong [us]."""
        stage, op, index = action
        args: Event = {"action": str(action), "stage": stage}
        args |= {"update_group": index} if op is Op.U else self._part(index)
        if gap is not None:
            args |= {"idle_before_us": round(gap.seconds * 1e6, 3), "idle_cause": gap.cause}
        if op is not Op.U and self._versions is not None:
            args["weight_version"] = self._versions.read_by(action)
        if self._clock_error:
            args["clock_error_us"] = round(self._clock_error[rank] * 1e6, 3)
        return {"name": f"{op.value} {index}", "cat": "compute", "args": args}

    def of_message(self, message: Message) -> Event:
        """A message that arrives."""
        kind, src, dst, index = message
        args: Event = {"message": str(message)}
        if kind in STAGE_KINDS:
            args |= {"from_stage": src, "to_stage": dst, **self._part(index)}
        else:
            args |= {"from_rank": src, "to_rank": dst, "update_group": index}
        return {"name": f"{kind.value} {index}", "cat": "receive", "args": args}

    def of_move(self, move: Action) -> Event:
        """Activations that leave the rank, or come."""
        stage, op, index = move
        return {"name": f"{op.value} {index}", "cat": "moves", "args": {"stage": stage, **self._part(index)}}

    def _part(self, index: int) -> Event:
        """The microbatch of an index, and its slice of the sequence where there are several."""
        if self._num_slices == 1:
            return {"microbatch": index}
        return {"microbatch": index // self._num_slices, "sequence_slice": index % self._num_slices}

    def of_collective(self, collective: Collective) -> Event:
        """A step that ranks take together."""
        stages, op, index = collective
        args: Event = {"collective": str(collective), "stages": list(stages), "update_group": index}
        return {"name": f"{op.value} {index}", "cat": "together", "args": args}
