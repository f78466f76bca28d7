"""The critical path: the chain of actions, messages and collectives that determines when a timeline ends.

    rank 0 | 0F0 | 0F1 |                       | 0B0 | 0B1 |      followed from the last end back to the start: each
                \\ message             message /                   step is what the next one waited for
    rank 1       | 1F0 | 1B0 | 1F1 | 1B1 |

Its steps cover the timeline without gaps, so that its shares add up to the makespan. If several inputs arrived last at
the same time there are several such chains; the one that stays longest on its ranks is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, TypeVar

from ..collectives import place_collectives
from ..dependencies import Dependencies
from ..ir import BACKWARD_OPS, MOVE_OPS, Action, Collective, Op
from ..messages import Message
from ..timing.timeline import Span, Timeline
from ..timing.waits import waits
from ..versions import derive_versions


class PathKind(StrEnum):
    """Kind of a step of the path; those without an action, message or collective are waits."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRAD = "input gradient"
    WEIGHT_GRAD = "weight gradient"
    UPDATE = "update"
    MESSAGE = "message"  # from made to arrived, queueing included; if measured, while its receiver waited for it
    SUM = "all-reduce of gradients"  # from its begin on the last of its ranks to its end
    GATHER = "gather of weights"  # likewise
    MOVE = "activations away"  # offload or reload, from begin to end
    BEFORE_UPDATE = "before update"  # wait: the global norm and clipping, for which an optimizer step waits
    DATA = "data"  # wait: measured only, for the batch
    NOT_SEEN = "not seen"  # wait: its input is not in the timeline (a window of a stream, a missing rank)
    UNEXPLAINED = "unexplained"  # wait: measured only, all inputs had arrived and nothing ran


Key = TypeVar("Key")
WAITS = frozenset({PathKind.BEFORE_UPDATE, PathKind.DATA, PathKind.NOT_SEEN, PathKind.UNEXPLAINED})
_KIND_OF_OP = {
    Op.F: PathKind.FORWARD,
    Op.B: PathKind.BACKWARD,
    Op.I: PathKind.INPUT_GRAD,
    Op.W: PathKind.WEIGHT_GRAD,
    Op.U: PathKind.UPDATE,
    Op.REDUCE_GRAD: PathKind.SUM,
    Op.UNSHARD: PathKind.GATHER,
    Op.RESHARD: PathKind.GATHER,
    **dict.fromkeys(MOVE_OPS, PathKind.MOVE),
}


class PathStep(NamedTuple):
    """One step, from `start` to `end` [s]."""

    kind: PathKind
    what: Action | Message | Collective | None  # None for a wait
    # where it ran; for a message the receiver, for a collective the last rank that began it, for a wait the waiting
    # rank
    rank: int
    start: float
    end: float
    sender: int | None = None  # of a message, else None

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """Steps in the order of time, each beginning where the one before ends."""

    steps: tuple[PathStep, ...]

    @property
    def seconds(self) -> float:
        """The whole path [s]: the makespan."""
        return self.steps[-1].end - self.steps[0].start if self.steps else 0.0

    @property
    def by_kind(self) -> dict[PathKind, float]:
        """Seconds of each kind above 0, the most first; they add up to the makespan."""
        return _added((step.kind, step.seconds) for step in self.steps)

    @property
    def by_link(self) -> dict[tuple[int, int], float]:
        """Seconds of messages by (sending rank, receiving rank), the most first."""
        return _added(((s.sender, s.rank), s.seconds) for s in self.steps if s.sender is not None)

    @property
    def by_sum(self) -> dict[tuple[int, ...], float]:
        """Seconds of all-reduces of gradients by their stages, the most first."""
        return _added(
            (step.what.stages, step.seconds)
            for step in self.steps
            if step.kind is PathKind.SUM and isinstance(step.what, Collective)
        )

    @property
    def by_rank(self) -> dict[int, float]:
        """Seconds of actions by the rank that ran them, the most first."""
        return _added((step.rank, step.seconds) for step in self.steps if isinstance(step.what, Action))


def critical_path(timeline: Timeline) -> CriticalPath:
    """The chain that determines the end of a timeline, simulated or measured; for a stream, of the whole window.

    O(actions + messages).
    """
    steps = list(_PathWalk(timeline).back_from_the_end())
    steps.reverse()
    return CriticalPath(steps=tuple(steps))


class _PathWalk:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._schedule = timeline.schedule
        self._origin = timeline.start
        self._needs = Dependencies(timeline.schedule)
        self._compute = [rank.compute for rank in timeline.ranks]
        self._place = [{span.what: at for at, span in enumerate(spans)} for spans in self._compute]
        self._waits = waits(timeline, self._needs)
        self._moves = [{span.what: span for span in rank.moves} for rank in timeline.ranks]
        self._collectives: dict[Collective, dict[int, Span[Collective]]] = {}
        for rank, trace in enumerate(timeline.ranks):
            for span in trace.collectives:
                self._collectives.setdefault(span.what, {})[rank] = span

    def back_from_the_end(self) -> Iterator[PathStep]:
        last = [self._action(rank, len(spans) - 1) for rank, spans in enumerate(self._compute) if spans]
        node = _latest([*last, *(self._collective(each) for each in self._collectives)])
        now = self._timeline.end
        while node is not None:
            start = max(min(node.start, now), self._origin)
            yield node._replace(start=start, end=now)
            latest = self._latest_input(node, start)
            now = self._origin if latest is None else max(min(latest.end, start), self._origin)
            if now < start:
                yield PathStep(self._wait(node, latest, now, start), None, node.rank, now, start)
            node = latest

    def _wait(self, node: PathStep, latest: PathStep | None, begin: float, end: float) -> PathKind:
        if any(since < end and to > begin for since, to in self._timeline.ranks[node.rank].data):
            return PathKind.DATA
        if latest is None:
            return PathKind.NOT_SEEN
        if _is_update(node.what) and not _is_update(latest.what):
            return PathKind.BEFORE_UPDATE
        return PathKind.UNEXPLAINED if self._timeline.measured else PathKind.MESSAGE  # its own has not left

    def _latest_input(self, node: PathStep, start: float) -> PathStep | None:
        """The input that `node` waited for last; None if the timeline has none. Of equals the first in `_inputs`."""
        latest = _latest(self._inputs(node))
        if _is_update(node.what) and self._schedule.has_epilogue and (latest is None or latest.end < start):
            # Neither its rank nor its sum delayed it but the global norm, which synchronises all ranks.
            together = [each for each in self._gradients if each.end <= start]
            return _latest([*([] if latest is None else [latest]), *together])
        return latest

    def _inputs(self, node: PathStep) -> Iterator[PathStep]:
        """Nodes that must end before it, its rank's own program first."""
        match node.what:
            case Message():
                maker = self._needs.maker(node.what)
                if node.sender is not None and maker in self._place[node.sender]:
                    made = self._action(node.sender, self._place[node.sender][maker])
                    yield made
                    if node.start > made.end:  # measured: its receiver still computed during the transfer
                        yield from self._action_before(node.rank, node.start)
            case Collective():
                before = self._begun_after(node.what, node.rank)
                if before in self._place[node.rank]:
                    yield self._action(node.rank, self._place[node.rank][before])
            case Action(op=op) if op in MOVE_OPS:
                yield from self._action_before(self._needs.rank(node.what), node.start)
                if op is Op.RELOAD:
                    yield from self._move(node.what._replace(op=Op.OFFLOAD))
            case Action():
                at = self._place[node.rank][node.what]
                if at:
                    yield self._action(node.rank, at - 1)
                yield from self._messages(node.what, node.rank)
                yield from (self._collective(each, seen_by=node.rank) for each in self._awaited(node.what))
                if node.what.op in BACKWARD_OPS:  # its activations are reloaded
                    yield from self._move(node.what._replace(op=Op.RELOAD))

    def _messages(self, action: Action, rank: int) -> Iterator[PathStep]:
        for each, made, way in self._waits[action]:
            if way is not None:
                yield PathStep(PathKind.MESSAGE, each.message, rank, way.start, way.end, each.sender)
            elif made is not None:  # it took no time, or was not seen to arrive
                yield PathStep(PathKind.MESSAGE, each.message, rank, made, made, each.sender)

    def _move(self, move: Action) -> Iterator[PathStep]:
        for rank, moves in enumerate(self._moves):
            if move in moves:
                yield PathStep(PathKind.MOVE, move, rank, moves[move].start, moves[move].end)

    def _awaited(self, action: Action) -> Iterable[Collective]:
        if action.op is Op.U:
            return self._sums.get((action.stage, action.index), ())
        if action.op is not Op.F or not self._gathered:
            return ()
        if self._schedule.has_epilogue:
            group = 0 if action.stage in self._ahead else None
        else:
            group = self._used[action.stage, action.index] - 1
        gather = Collective((action.stage,), Op.UNSHARD, -1 if group is None else group)
        return (gather,) if gather in self._collectives else ()

    def _action_before(self, rank: int, moment: float) -> Iterator[PathStep]:
        at = bisect_right(self._compute[rank], moment, key=lambda span: span.end)
        if at:
            yield self._action(rank, at - 1)

    def _action(self, rank: int, at: int) -> PathStep:
        what, start, end = self._compute[rank][at]
        return PathStep(_KIND_OF_OP[what.op], what, rank, start, end)

    def _collective(self, each: Collective, *, seen_by: int | None = None) -> PathStep:
        """It begins when the last of its ranks begins it."""
        begun = self._collectives[each]
        rank = max(sorted(begun), key=lambda one: begun[one].start)
        end = begun[seen_by].end if seen_by in begun else max(span.end for span in begun.values())
        return PathStep(_KIND_OF_OP[each.op], each, rank, begun[rank].start, end)

    def _begun_after(self, each: Collective, rank: int) -> Action | None:
        if each.op is Op.UNSHARD and each.stages[0] not in self._ahead:
            return Action(each.stages[0], Op.U, each.index)
        program = self._schedule.programs[rank][: self._positions[rank].get(each, 0)]
        return next((action for action in reversed(program) if action in self._place[rank]), None)

    @cached_property
    def _gradients(self) -> list[PathStep]:
        """Nodes that must end before a global norm: the last backward of each rank, and all sums."""
        found = []
        for rank, spans in enumerate(self._compute):
            last = next((at for at in reversed(range(len(spans))) if not _is_update(spans[at].what)), None)
            found += [] if last is None else [self._action(rank, last)]
        return found + [self._collective(each) for each in self._collectives if each.op is Op.REDUCE_GRAD]

    @cached_property
    def _sums(self) -> Mapping[tuple[int, int], list[Collective]]:
        found: dict[tuple[int, int], list[Collective]] = {}
        for each in self._collectives:
            for stage in each.stages if each.op is Op.REDUCE_GRAD else ():
                found.setdefault((stage, each.index), []).append(each)
        return found

    @cached_property
    def _gathered(self) -> frozenset[int]:
        return frozenset(each.stages[0] for each in self._collectives if each.op is Op.UNSHARD)

    @cached_property
    def _ahead(self) -> frozenset[int]:
        """The stages whose weights are gathered before the batch, not after an update."""
        begun = {each.stages[0]: each for each in self._collectives if each.op is Op.UNSHARD}
        updated = {s.what.stage: s.end for spans in self._compute for s in spans if s.what.op is Op.U}
        return frozenset(
            stage
            for stage, each in begun.items()
            if self._schedule.has_epilogue and self._collective(each).start < updated.get(stage, self._timeline.end)
        )

    @cached_property
    def _positions(self) -> list[dict[Collective, int]]:
        """Per rank, the position in its program before which it begins each collective."""
        after_updates = {
            each for each in self._collectives if each.op is Op.UNSHARD and each.stages[0] not in self._ahead
        }
        placed = place_collectives(self._schedule, self._collectives.keys() - after_updates)
        return [{each: position for position, each in own} for own in placed]

    @cached_property
    def _used(self) -> Mapping[tuple[int, int], int]:
        return derive_versions(self._schedule).used


def _latest(nodes: Iterable[PathStep]) -> PathStep | None:
    return max(nodes, key=lambda each: each.end, default=None)


def _is_update(what: Action | Message | Collective | None) -> bool:
    return isinstance(what, Action) and what.op is Op.U


def _added(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for key, seconds in pairs:
        if seconds > 0:
            found[key] = found.get(key, 0.0) + seconds
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))
