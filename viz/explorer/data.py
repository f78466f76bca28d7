"""Data of the page as compact JSON. Everything is computed here, not in the page.

Times are whole ticks from each timeline's own start; `tick` is their length in seconds. Long lists are columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...schedules import (
    Action,
    Idle,
    MemoryCurve,
    MemoryPart,
    MessageKind,
    Op,
    RankTrace,
    Span,
    Straggler,
    Timeline,
    compare,
    find_stragglers,
)
from ...schedules.dependencies import Dependencies
from ...schedules.explain.critical_path import PathKind, critical_path
from ...schedules.messages import STAGE_KINDS, Message
from ...schedules.timing.links import wire_bytes
from ...schedules.traces.clocks import clock_note
from ...schedules.versions import derive_versions
from ..exhibit import SIMULATED, Exhibit, headline
from ..idle import idle_shares, idle_stretches, is_window
from ..palette import (
    CAUSE_HUES,
    COLLECTIVE_HUES,
    COLLECTIVE_WORDS,
    MEMORY_HUES,
    MESSAGE_HUES,
    MESSAGE_WORDS,
    OP_HUES,
    OP_WORDS,
    OTHER_HUE,
    box_colour,
    hex_of,
    ink,
)
from ..rows import Bar, bars_of, find_arrows, num_chunks

_KINDS, _PATH_KINDS, _PARTS = list(MessageKind), list(PathKind), list(MemoryPart)
_CAUSES = list(Idle._fields)
_NONE = -1
_BYTE_STEPS = 20_000  # from nothing to the highest line: finer than any row is drawn
_MOST_CHUNKS = 8  # a rank, of schedules that the page builds itself
_TICKS = 1e8  # at least as many on the whole scale: finer than a pixel of a useful zoom

Columns = dict[str, Any]
# Programs of ranks, by actions and their weight versions (empty if there is one). Each has one number, since the steps
# of a run repeat them.
Programs = dict[tuple[tuple[Action, ...], tuple[int, ...]], int]


def page_data(exhibits: Sequence[Exhibit]) -> dict[str, Any]:
    """The data that the scripts read (see `model.js`)."""
    longest = max(timeline.makespan for exhibit in exhibits for timeline in _timelines(exhibit))
    tick = float(10.0 ** math.floor(math.log10(longest / _TICKS))) if longest > 0 else 1e-9
    programs: Programs = {}
    shown = [_exhibit(exhibit, tick, programs) for exhibit in exhibits]
    columns = [
        {
            "ops": "".join(action.op.value for action in actions),
            "stages": [action.stage for action in actions],
            "indices": [action.index for action in actions],
            "versions": list(versions),
        }
        for actions, versions in programs
    ]
    return {"tick": tick, "palette": _palette(), "programs": columns, "exhibits": shown}


def _exhibit(exhibit: Exhibit, tick: float, programs: Programs) -> dict[str, Any]:
    simulated = exhibit.simulated
    return {
        "name": exhibit.name,
        "notes": list(exhibit.notes),
        "figures": [list(figure) for figure in headline(exhibit)],
        "memory": exhibit.memory_words,
        "simulated": None if simulated is None else TimelineColumns(exhibit, simulated, tick, programs).columns(),
        "measured": [
            {
                "step": step.number,
                **TimelineColumns(exhibit, step.timeline, tick, programs).columns(),
                "difference": _difference_columns(simulated, step.timeline),
            }
            for step in exhibit.measured
        ],
    }


def _timelines(exhibit: Exhibit) -> list[Timeline]:
    simulated = [] if exhibit.simulated is None else [exhibit.simulated]
    return [*simulated, *(step.timeline for step in exhibit.measured)]


def _palette() -> dict[str, Any]:
    return {
        "ops": {op.value: [OP_HUES[op], OP_WORDS[op]] for op in OP_HUES},
        "other": OTHER_HUE,
        "messages": [[kind.value, MESSAGE_HUES[kind], MESSAGE_WORDS[kind]] for kind in MessageKind],
        "shades": {
            op.value: [[_shade(op, chunk, count)[0] for chunk in range(count)] for count in range(1, _MOST_CHUNKS + 1)]
            for op in OP_HUES
        },
        "collectives": {
            op.value: [COLLECTIVE_HUES.get(op, OTHER_HUE), COLLECTIVE_WORDS.get(op, op.value)] for op in COLLECTIVE_HUES
        },
        "memory": [[MEMORY_HUES[part], part.value] for part in MemoryPart],
        "path_kinds": [kind.value for kind in PathKind],
        "causes": [[CAUSE_HUES[cause], cause.replace("_", " ")] for cause in Idle._fields],
    }


def _shade(op: Op, chunk: int, num_chunks: int) -> list[list[str]]:
    """Colour and ink in an even, and in an odd batch."""
    both = [box_colour(op, chunk=chunk, num_chunks=num_chunks, batch=batch) for batch in range(2)]
    return [[hex_of(colour), ink(colour)] for colour in both]


class TimelineColumns:
    """Everything that is drawn of one timeline."""

    def __init__(self, exhibit: Exhibit, timeline: Timeline, tick: float, programs: Programs) -> None:
        self.exhibit, self.timeline, self.tick, self.programs = exhibit, timeline, tick, programs
        self.schedule = timeline.schedule
        self.start = timeline.start
        self.window = is_window(timeline)
        places = [(rank, action) for rank, trace in enumerate(timeline.ranks) for action in trace.actions]
        self.number_of = {place: number for number, place in enumerate(places)}  # replicas make equal updates
        self.versions = derive_versions(self.schedule) if self.schedule.is_asynchronous else None

    def columns(self) -> Columns:
        timeline, schedule = self.timeline, self.schedule
        lanes = [bars_of(trace) for trace in timeline.ranks]
        return {
            "measured": timeline.measured,
            "schedule": {
                "name": schedule.name,
                "ranks": schedule.num_ranks,
                "stages": schedule.num_stages,
                "chunks": num_chunks(timeline),
                "microbatches": schedule.num_microbatches,
                "slices": schedule.num_slices,
                "batches": schedule.num_batches,
                "groups": schedule.groups_per_batch,
                "asynchronous": schedule.is_asynchronous,
            },
            "makespan": timeline.makespan,
            "batch_seconds": timeline.batch_seconds,
            "bubble": timeline.bubble,
            "span_bubble": timeline.span_bubble,
            "window": self.window,
            "shades": self._shades(),
            "rows": [self._row(rank, *at) for rank, at in enumerate(zip(lanes, idle_stretches(timeline), strict=True))],
            "idle_shares": [[round(share, 6) for share in idle] for idle in idle_shares(timeline)],
            "missing": list(timeline.missing),
            "clocks": clock_note(timeline),
            "messages": self._messages(lanes),
            "path": _path_columns(timeline, self.number_of, self._ticks),
            "memory": _memory_columns(self.exhibit, timeline, self._ticks),
        }

    def _ticks(self, seconds: float) -> int:
        return round((seconds - self.start) / self.tick)

    def _row(self, rank: int, bars: Sequence[Bar], idle: Sequence[Span[str]]) -> Columns:
        trace = self.timeline.ranks[rank]
        times: list[int] = []
        at, rows = 0, dict(trace.rows)
        experts = {number: str(rows[what]) for number, what in enumerate(trace.actions) if what in rows}
        for _, start, end in trace.compute:
            begin, stop = self._ticks(start), self._ticks(end)
            times += [begin - at, stop - begin]
            at = stop
        return {
            "stages": list(self.schedule.placement[rank]),
            "program": self.programs.setdefault((trace.actions, self._used(trace)), len(self.programs)),
            "times": times,
            "idle": [] if rank in self.timeline.missing else self._idle(idle),
            "together": [
                [str(bar.what), bar.what.op.value, self._ticks(bar.start), self._ticks(bar.end), bar.lane]
                for bar in bars
                if not isinstance(bar.what, Message)
            ],
            "lanes": 1 + max((bar.lane for bar in bars), default=-1),
            **({"experts": experts} if experts else {}),
        }

    def _shades(self) -> Columns:
        """Op -> [V chunks] of [colour, ink] in even and in odd batches."""
        chunks = num_chunks(self.timeline)
        ops = {action.op for trace in self.timeline.ranks for action in trace.actions}
        return {op.value: [_shade(op, chunk, chunks) for chunk in range(chunks)] for op in sorted(ops)}

    def _used(self, trace: RankTrace) -> tuple[int, ...]:
        versions = self.versions
        if versions is None:
            return ()
        return tuple(each.index + 1 if each.op is Op.U else versions.read_by(each) for each in trace.actions)

    def _idle(self, stretches: Sequence[Span[str]]) -> list[int]:
        """Idle time by cause: start, length, cause, start, length, cause, ... [ticks]."""
        found: list[int] = []
        for cause, start, end in stretches:
            begin, stop = self._ticks(start), self._ticks(end)
            if stop > begin:
                found += (begin, stop - begin, _CAUSES.index(cause))
        return found

    def _messages(self, lanes: Sequence[Sequence[Bar]]) -> Columns:
        """Messages by receiving rank: those that took time on a link, with their lane, then the others."""
        arrows = {arrow.message: arrow for arrow in find_arrows(self.timeline)}
        sizes = self._sizes()
        rows: list[tuple[int, ...]] = []
        seen: set[Message] = set()
        ends = {what: end for trace in self.timeline.ranks for what, _, end in trace.compute}

        def add(message: Message, receiver: int, start: float, end: float, lane: int) -> None:
            arrow = arrows.get(message)
            maker = _NONE if arrow is None else self.number_of.get((arrow.sender, arrow.maker), _NONE)
            user = _NONE if arrow is None else self.number_of.get((arrow.receiver, arrow.user), _NONE)
            rows.append(
                (
                    _KINDS.index(message.kind),
                    message.src,
                    message.dst,
                    message.index,
                    maker,
                    user,
                    receiver,
                    self._ticks(start),
                    self._ticks(max(start, end)),  # clocks of two hosts may disagree
                    lane,
                )
            )

        for rank, bars in enumerate(lanes):
            for bar in bars:
                if isinstance(bar.what, Message):
                    add(bar.what, rank, bar.start, bar.end, bar.lane)
                    seen.add(bar.what)
        for message, arrow in arrows.items():
            if message not in seen:
                add(message, arrow.receiver, ends[arrow.maker], ends[arrow.maker], _NONE)
        columns = _transposed("kind src dst index maker user receiver start end lane", rows)
        columns["bytes"] = [[_KINDS.index(kind), src, dst, size] for (kind, src, dst), size in sizes.items()]
        return columns

    def _sizes(self) -> dict[tuple[MessageKind, int, int], float]:
        """Bytes of each message, by kind and stages; empty if not known."""
        links, simulated = self.exhibit.links, self.exhibit.simulated
        same = simulated is not None and simulated.schedule.stage_edges == self.schedule.stage_edges
        if links is None or not same:
            return {}
        found = wire_bytes(self.schedule, links, Dependencies(self.schedule).wires)
        return {wire[:3]: size for wire, size in found.items() if size > 0 and wire.kind in STAGE_KINDS}


def _path_columns(
    timeline: Timeline, number_of: Mapping[tuple[int, Action], int], ticks: Callable[[float], int]
) -> Columns:
    """Steps in the order of time, and shares of the makespan by kind, link, sum and rank, the largest first."""
    path = critical_path(timeline)
    whole = path.seconds or 1.0
    steps = [
        (
            _PATH_KINDS.index(step.kind),
            number_of.get((step.rank, step.what), _NONE) if isinstance(step.what, Action) else _NONE,
            step.rank,
            _NONE if step.sender is None else step.sender,
            ticks(step.start),
            ticks(step.end),
        )
        for step in path.steps
    ]
    links = {f"rank {src} to rank {dst}": seconds for (src, dst), seconds in path.by_link.items()}
    sums = {f"gradients of stage{'s' * (len(s) > 1)} {', '.join(map(str, s))}": x for s, x in path.by_sum.items()}
    groups = {
        "kinds": {str(kind): seconds for kind, seconds in path.by_kind.items()},
        "links": dict(sorted((links | sums).items(), key=lambda pair: -pair[1])),
        "ranks": {f"rank {rank}": seconds for rank, seconds in path.by_rank.items()},
    }
    shares = {
        name: [[text, round(seconds / whole, 6)] for text, seconds in group.items()] for name, group in groups.items()
    }
    return {**_transposed("kind action rank sender start end", steps), "shares": shares}


def _transposed(names: str, rows: Sequence[Sequence[int]]) -> Columns:
    columns = map(list, zip(*rows, strict=True)) if rows else ([] for _ in names.split())
    return dict(zip(names.split(), columns, strict=True))


def _memory_columns(exhibit: Exhibit, timeline: Timeline, ticks: Callable[[float], int]) -> Columns | None:
    curves = exhibit.curves(timeline)
    if curves is None:
        return None
    unit = max([1.0, *(curve.peak / _BYTE_STEPS for curve in curves)])
    lines = {
        "limit": exhibit.memory_limit,
        "predicted_peak": exhibit.predicted_peak,
        "measured_peak": exhibit.measured_peak,
    }
    return {
        "unit": unit,
        "rows": [
            None if rank in timeline.missing else _memory_row(curve, unit, ticks) for rank, curve in enumerate(curves)
        ],
        **{name: list(map(round, values)) for name, values in lines.items() if values is not None},
    }


def _memory_row(curve: MemoryCurve, unit: float, ticks: Callable[[float], int]) -> Columns:
    times = [ticks(time) for time in curve.times]
    return {
        "steps": [after - before for before, after in zip([0, *times], times, strict=False)],
        "parts": [[_PARTS.index(part), _units(values, unit)] for part, values in curve.parts.items()],
        "peak": round(curve.peak),
    }


def _units(values: Sequence[float], unit: float) -> list[int] | int:
    units = [round(value / unit) for value in values]
    return units[0] if len(set(units)) == 1 else units


def _difference_columns(simulated: Timeline | None, measured: Timeline) -> Columns:
    """Departures as [rank, action, simulated, measured], causes as [name, seconds more] of the mean rank, stragglers by
    name; without a simulation only the stragglers among their peers."""
    if simulated is None:
        return {"departures": [], "causes": [], "stragglers": [_straggler(s) for s in find_stragglers(measured)]}
    found = compare(simulated, measured)
    return {
        "departures": [[each.rank, str(each.action), each.before, each.after] for each in found.departures],
        "causes": [[change.name.replace("_", " "), change.seconds] for change in found.causes],
        "stragglers": [_straggler(each) for each in found.stragglers],
        "notes": list(found.notes),
    }


def _straggler(each: Straggler) -> Columns:
    rank = each.who if isinstance(each.who, int) else each.who[1]
    against = each.against.replace("the other timeline", SIMULATED)
    return {"name": each.name, "rank": rank, "ratio": each.ratio, "seconds": each.seconds, "against": against}
