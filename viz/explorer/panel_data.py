"""A timeline as columns: programs, times, idle time by cause, messages, collectives and moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...schedules import Action, Idle, MessageKind, Op, RankTrace, Timeline
from ...schedules.messages import STAGE_KINDS, Message
from ...schedules.needs import Needs
from ...schedules.timing.clocks import clock_note
from ...schedules.timing.links import wire_bytes
from ...schedules.versions import derive_versions
from ..arrows import find_arrows
from ..exhibit import Exhibit
from ..gantt import num_chunks
from ..idle import IdleStretch, idle_shares, idle_stretches, is_window
from ..lanes import assign_lanes
from ..palette import OP_HUES, OTHER_HUE, RGB, batch_shade, ink, shade
from .memory_data import memory_columns
from .path_data import path_columns

_KINDS = list(MessageKind)
_CAUSES = list(Idle._fields)
_NONE = -1

Columns = dict[str, Any]


class Programs:
    """Programs of ranks, each kept once: the steps of a run repeat them."""

    def __init__(self) -> None:
        self.columns: list[Columns] = []
        self._number: dict[tuple[tuple[Action, ...], tuple[int, ...]], int] = {}

    def number(self, actions: tuple[Action, ...], versions: tuple[int, ...]) -> int:
        """Number of a program.

        Arguments:
            versions: of the weights that each action uses (an update: makes); empty where there is one alone.
        """
        key = (actions, versions)
        if key not in self._number:
            self._number[key] = len(self.columns)
            self.columns.append(
                {
                    "ops": "".join(action.op.value for action in actions),
                    "stages": [action.stage for action in actions],
                    "indices": [action.index for action in actions],
                    "versions": list(versions),
                }
            )
        return self._number[key]


def timeline_panel(exhibit: Exhibit, timeline: Timeline, tick: float, programs: Programs) -> Columns:
    """Everything that is drawn of one timeline."""
    return _Panel(exhibit, timeline, tick, programs).columns()


class _Panel:
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
        lanes = [_lanes(trace) for trace in timeline.ranks]
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
            "path": path_columns(timeline, self.number_of, self._ticks),
            "memory": memory_columns(self.exhibit, timeline, self._ticks),
        }

    def _ticks(self, seconds: float) -> int:
        return round((seconds - self.start) / self.tick)

    def _row(self, rank: int, lanes: _Lanes, idle: Sequence[IdleStretch]) -> Columns:
        trace = self.timeline.ranks[rank]
        times: list[int] = []
        at = 0
        for _, start, end in trace.compute:
            begin, stop = self._ticks(start), self._ticks(end)
            times += [begin - at, stop - begin]
            at = stop
        return {
            "stages": list(self.schedule.placement[rank]),
            "program": self.programs.number(trace.actions, self._used(trace)),
            "times": times,
            "idle": [] if rank in self.timeline.missing else self._idle(idle),
            "together": [
                [str(what), what.op.value, self._ticks(start), self._ticks(end), lane]
                for (what, start, end), lane in zip(trace.beside, lanes.beside, strict=True)
            ],
            "lanes": lanes.count,
        }

    def _shades(self) -> Columns:
        """Op -> [V chunks] of [colour, ink] in even and in odd batches."""
        chunks = num_chunks(self.timeline)
        ops = {action.op for trace in self.timeline.ranks for action in trace.actions}
        colours = {
            op: [shade(OP_HUES.get(op, OTHER_HUE), chunk=chunk, num_chunks=chunks) for chunk in range(chunks)]
            for op in sorted(ops)
        }
        return {
            op.value: [[[_hex(each), ink(each)] for each in (own, batch_shade(own, 1))] for own in shades]
            for op, shades in colours.items()
        }

    def _used(self, trace: RankTrace) -> tuple[int, ...]:
        """The weight version of each action, where there are several."""
        versions = self.versions
        if versions is None:
            return ()
        return tuple(each.index + 1 if each.op is Op.U else versions.read_by(each) for each in trace.actions)

    def _idle(self, stretches: Sequence[IdleStretch]) -> list[int]:
        """Idle time by cause: start, length, cause, start, length, cause, ... [ticks]."""
        found: list[int] = []
        for cause, start, end in stretches:
            begin, stop = self._ticks(start), self._ticks(end)
            if stop > begin:
                found += (begin, stop - begin, _CAUSES.index(cause))
        return found

    def _messages(self, lanes: list[_Lanes]) -> Columns:
        """Messages by receiving rank: those that took time on a link, with their lane, and those that took none."""
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

        for rank, (trace, found) in enumerate(zip(self.timeline.ranks, lanes, strict=True)):
            for (message, start, end), lane in zip(trace.comm, found.messages, strict=True):
                add(message, rank, start, end, lane)
                seen.add(message)
        for message, arrow in arrows.items():
            if message not in seen:
                add(message, arrow.receiver, ends[arrow.maker], ends[arrow.maker], _NONE)
        names = ("kind", "src", "dst", "index", "maker", "user", "receiver", "start", "end", "lane")
        columns: Columns = dict(zip(names, map(list, zip(*rows, strict=True)) if rows else [[]] * 10, strict=True))
        columns["bytes"] = [[_KINDS.index(kind), src, dst, size] for (kind, src, dst), size in sizes.items()]
        return columns

    def _sizes(self) -> dict[tuple[MessageKind, int, int], float]:
        """Bytes of each message, by kind and stages; empty where they are not known."""
        links, predicted = self.exhibit.links, self.exhibit.predicted
        same = predicted is not None and predicted.schedule.stage_edges == self.schedule.stage_edges
        if links is None or not same:
            return {}
        found = wire_bytes(self.schedule, links, Needs(self.schedule).wires)
        return {wire[:3]: size for wire, size in found.items() if size > 0 and wire.kind in STAGE_KINDS}


def _hex(colour: RGB) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)


class _Lanes:
    """The lanes of a rank below its boxes: messages, collectives and moves, beside each other where they overlap."""

    def __init__(self, messages: list[int], beside: list[int]) -> None:
        self.messages, self.beside = messages, beside
        self.count = 1 + max([*messages, *beside], default=-1)


def _lanes(trace: RankTrace) -> _Lanes:
    spans = [(start, end) for _, start, end in (*trace.comm, *trace.beside)]
    order = sorted(range(len(spans)), key=spans.__getitem__)
    lane_of = dict(zip(order, assign_lanes([spans[at] for at in order]), strict=True))
    lanes = [lane_of[at] for at in range(len(spans))]
    return _Lanes(lanes[: len(trace.comm)], lanes[len(trace.comm) :])
