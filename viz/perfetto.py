"""Timelines as trace files for ui.perfetto.dev (and chrome://tracing).

    process "simulated rank 0"   thread "compute"     | F 0 | F 1 |      | B 0 |
                                 thread "receive"              | grad 0 |          flow arrows go from the
                                 thread "receive 2"                 | grad 1 |     maker to the consumer
    process "simulated rank 1"   ...

Format: "Trace Event Format" (Duffy et al., the Catapult project). Perfetto picks a slice's colour from its
name without the digits, hence `F 3`; slices of one thread that overlap must nest, hence the lanes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..schedules import Action, Collective, Idle, Message, Op, Span, Timeline
from ..schedules.timing.timeline import What
from ..schedules.timing.waits import find_gaps
from ..schedules.versions import derive_versions
from .rows import assign_lanes, find_arrows

Event = dict[str, Any]  # as the Trace Event Format has it

# Times are rounded to 1/8 us: times 1000 these are exact in a double, so that slices which touch here still touch as
# whole nanoseconds in the reader, and can't overlap by one.
_TICKS_PER_US = 8
OWN_KEY = "stagewrightTimelines"  # a key that other readers skip: the exact timelines
_COMPUTE, _RECEIVE, _TOGETHER, _MOVES, _WITHIN = 0, 100, 200, 300, 400  # first thread id of each kind of lane
_LANES = {_COMPUTE: "compute", _RECEIVE: "receive", _TOGETHER: "together", _MOVES: "moves", _WITHIN: "exchanges"}


def write_perfetto(timelines: Timeline | Sequence[tuple[str, Timeline]], path: str | Path) -> None:
    """Write a trace in which each rank is a process; times in microseconds from each timeline's first start.

    The same timelines always give the same bytes. O(actions + messages).

    Arguments:
        timelines: one, or several as (name, timeline) such as ("simulated", t), one below the other.
        path: of the JSON file.

    Raises ValueError for an empty sequence or a repeated name.
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
    """The exact named timelines in a file of `write_perfetto`; None for other files.

    Arguments:
        data: the file's JSON.
        source: its name, for errors.

    Raises ValueError for a file of this package that cannot be read.
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


class _Trace:
    """The events of one timeline: metadata, then slices, then flows.

    The order in the file matters for equal times: a flow binds to the slice that is open when the flow is read.
    """

    def __init__(self, name: str, timeline: Timeline, *, first_pid: int, first_arrow: int) -> None:
        self.timeline = timeline
        self.first_pid = first_pid
        self.first_arrow = first_arrow
        self.num_arrows = 0
        self._origin = timeline.start
        self._versions = derive_versions(timeline.schedule) if timeline.schedule.is_asynchronous else None
        # Of each rank's slices the thread, start and end [ticks].
        self._places: list[dict[Action | Message | Collective, tuple[int, int, int]]] = [{} for _ in timeline.ranks]
        self._rows = [dict(trace.rows) for trace in timeline.ranks]
        slices = [event for rank, gaps in enumerate(find_gaps(timeline)) for event in self._slices(rank, gaps)]
        self.events = [*self._metadata(name), *slices, *self._flows()]

    def _slices(self, rank: int, gaps: Mapping[Action, Idle]) -> Iterator[Event]:
        trace = self.timeline.ranks[rank]
        yield from self._lane(rank, _COMPUTE, trace.compute, partial(self._action_args, rank, gaps))
        yield from self._lane(rank, _RECEIVE, trace.comm, self._message_args)
        yield from self._lane(
            rank,
            _TOGETHER,
            trace.collectives,
            lambda it: {"collective": str(it), "stages": list(it.stages), "update_group": it.index},
        )
        yield from self._lane(
            rank, _WITHIN, trace.exchanges, lambda it: {"stage": it.stages[0], **self._part(it.index)}
        )
        yield from self._lane(rank, _MOVES, trace.moves, lambda move: {"stage": move.stage, **self._part(move.index)})

    def _lane(
        self, rank: int, first_tid: int, spans: Sequence[Span[What]], args: Callable[[What], Event]
    ) -> Iterator[Event]:
        """Spans on as many tracks as necessary for none to overlap; `args`: the details of a slice."""
        ticks = [(self._ticks(start), self._ticks(end)) for _, start, end in spans]
        for (what, _, _), (start, end), lane in zip(spans, ticks, assign_lanes(ticks), strict=True):
            self._places[rank][what] = (first_tid + lane, start, end)
            kind = what.kind if isinstance(what, Message) else what.op
            yield {
                "ph": "X",
                "pid": self.first_pid + rank,
                "tid": first_tid + lane,
                "ts": start / _TICKS_PER_US,
                "dur": (end - start) / _TICKS_PER_US,
                "name": f"{kind.value} {what.index}",
                "cat": _LANES[first_tid],
                "args": args(what),
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
            for tid in sorted({_COMPUTE, *(tid for tid, _, _ in places.values())}):
                first = max(each for each in _LANES if each <= tid)
                kind, lane = _LANES[first], tid - first
                yield record("thread_name", tid, name=f"{kind} {lane + 1}" if lane else kind)
                yield record("thread_sort_index", tid, sort_index=tid)

    def _flows(self) -> Iterator[Event]:
        """Two events per arrow: `s` in the last tick of the maker's slice, `f` at the consumer's start."""
        for arrow in find_arrows(self.timeline):
            sender, start, end = self._places[arrow.sender][arrow.maker]
            receiver, used, _ = self._places[arrow.receiver][arrow.user]
            leaves = max(start, min(end - 1, used))
            if leaves > used:
                continue  # clocks of two hosts that disagree: an arrow back in time can't be drawn
            for phase, rank, tid, at in (("s", arrow.sender, sender, leaves), ("f", arrow.receiver, receiver, used)):
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

    def _action_args(self, rank: int, gaps: Mapping[Action, Idle], action: Action) -> Event:
        """Arguments of an action's event: the idle time before it [us] and its cause, its weight version, and the error
        of its rank's clock [us]."""
        stage, op, index = action
        args: Event = {"action": str(action), "stage": stage}
        args |= {"update_group": index} if op is Op.U else self._part(index)
        if (gap := gaps.get(action)) is not None:
            args |= {"idle_before_us": round(gap.seconds * 1e6, 3), "idle_cause": gap.cause}
        if op is not Op.U and self._versions is not None:
            args["weight_version"] = self._versions.read_by(action)
        if (rows := self._rows[rank].get(action)) is not None:
            args["experts"] = str(rows)
        if self.timeline.clock_error:
            args["clock_error_us"] = round(self.timeline.clock_error[rank] * 1e6, 3)
        return args

    def _message_args(self, message: Message) -> Event:
        _, src, dst, index = message  # an activation or a gradient: sums are collectives
        return {"message": str(message), "from_stage": src, "to_stage": dst, **self._part(index)}

    def _part(self, index: int) -> Event:
        """The microbatch of an index, and its slice of the sequence if there are several."""
        num_slices = self.timeline.schedule.num_slices
        if num_slices == 1:
            return {"microbatch": index}
        return {"microbatch": index // num_slices, "sequence_slice": index % num_slices}
