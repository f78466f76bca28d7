"""Moves put into an order that needs too much memory: what is needed last leaves, and comes back in time.

    at most 2 | F0 F1 F2 .  I0 W0        F2 finds two there: 1, whose backward comes last, has left by then,
              |       >1     <1          and is back in time; no F, I or W runs at another time than before

As in paging (Belady), that keeps memory free for longest; the schedule's own order says what will be needed when. A way
goes over the first time that its link has to spare behind the forward, and back over the last in front of the backward.
What finds no such time stays, and the order may then exceed the limit: `simulate` judges.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from ..ir import BACKWARD_OPS, Action, Op, Schedule
from ..timing.costs import Costs, CostTable
from ..timing.timeline import Timeline, in_time
from .problem import Problem, Table

MoveKind = Literal["offload"]
MOVE_KINDS: tuple[MoveKind, ...] = ("offload",)

_What = tuple[int, int]  # stage and microbatch of activations


class _Way(NamedTuple):
    """A way out and back of one microbatch of a stage: when each half begins, and where in the program."""

    stage: int
    index: int  # type: ignore[assignment]  # hides tuple.index
    out: float
    back: float
    out_at: int
    back_at: int


class _Link:
    """One direction of a link: the times at which it is taken, in ascending order."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, float]] = []

    def first(self, earliest: float, seconds: float, deadline: float) -> float | None:
        """The first start of so many free seconds that end by the deadline."""
        start = earliest
        for begin, end in self.taken[max(0, bisect_left(self.taken, (earliest, 0.0)) - 1) :]:
            if begin >= start + seconds:
                break
            start = max(start, end)
        return start if start + seconds <= deadline else None

    def last(self, earliest: float, seconds: float, deadline: float) -> float | None:
        """The last start of so many free seconds that end by the deadline."""
        start = deadline - seconds
        for begin, end in reversed(self.taken[: bisect_right(self.taken, (deadline, math.inf))]):
            if end <= start:
                break
            start = min(start, begin - seconds)
        return start if start >= earliest else None

    def take(self, start: float, seconds: float) -> None:
        insort(self.taken, (start, start + seconds))


@dataclass(slots=True, kw_only=True)
class _Rank:
    """The own work of a rank as it was simulated.

    Attributes: `turns`, T[q] when the action before q has ended; `backward`, where the backward of each microbatch
    stands, `here`, where the forward of those that wait and have not left; `comes`, by position, what comes back in
    front of it; `to_host`, `from_host`, the directions of its link; `ways`, chosen so far.
    """

    program: Sequence[Action]
    starts: list[float]
    turns: list[float]
    backward: dict[_What, int] = field(default_factory=dict)
    here: dict[_What, int] = field(default_factory=dict)
    comes: dict[int, list[_What]] = field(default_factory=dict)
    to_host: _Link = field(default_factory=_Link)
    from_host: _Link = field(default_factory=_Link)
    ways: list[_Way] = field(default_factory=list)

    def turn_before(self, time: float) -> int:
        """The last position in front of which a move begins by this time."""
        return bisect_right(self.turns, time) - 1


def with_moves(timeline: Timeline, problem: Problem, costs: Costs) -> Schedule:
    """The schedule of a timeline without moves, with those that keep it within the memory, as far as they can."""
    return _Spill(timeline, problem, costs.table_for(timeline.schedule)).run()


def peaks_in_time(timeline: Timeline, problem: Problem, waiting: Table | None = None) -> list[float]:
    """[P] the most memory that each rank holds at once: what leaves counts until it has.

    Arguments:
        problem: with what activations take, [S][M].
        waiting: what they take between a forward and its backward, which makes the rest again; None: as much.
    """
    held, kept = problem.held, problem.kept
    waiting = held if waiting is None else waiting
    peaks = []
    for trace, program in zip(timeline.ranks, timeline.schedule.programs, strict=True):
        now = peak = 0.0
        for stage, op, k in in_time(trace, program) if trace.moves else program:
            whole, part = held[stage][k], waiting[stage][k]
            if op is Op.F or op is Op.RELOAD:
                now += part
            elif op is Op.OFFLOAD:
                now -= part
            elif op in BACKWARD_OPS:
                now += whole - part
            peak = max(peak, now)
            if op in BACKWARD_OPS:
                now -= whole if op is Op.B else whole - kept[stage][k]
            elif op is Op.W:
                now -= kept[stage][k]
        peaks.append(peak)
    return peaks


class _Spill:
    def __init__(self, timeline: Timeline, problem: Problem, table: CostTable) -> None:
        self.schedule, self.problem, self.table = timeline.schedule, problem, table
        self.ranks = []
        for trace, program in zip(timeline.ranks, timeline.schedule.programs, strict=True):
            spans = trace.compute[: len(program)]  # updates stand behind
            turns = [0.0, *(span.end for span in spans)]
            self.ranks.append(_Rank(program=program, starts=[span.start for span in spans], turns=turns))

    def run(self) -> Schedule:
        for own, limit in zip(self.ranks, self.problem.limits, strict=True):
            self._plan(own, limit)
        return replace(self.schedule, programs=tuple(map(self._program, self.ranks)))

    def _plan(self, own: _Rank, limit: float) -> None:
        """Walk along a rank's program; what does not fit makes others leave in time."""
        held, kept = self.problem.held, self.problem.kept
        own.backward = {(s, k): at for at, (s, op, k) in enumerate(own.program) if op in BACKWARD_OPS}
        now = 0.0
        for at, (stage, op, k) in enumerate(own.program):
            for back in own.comes.get(at, ()):
                now += held[back[0]][back[1]]
                now -= self._evict(own, limit, at, own.turns[at], now)
            if op is Op.F:
                now += held[stage][k]
                now -= self._evict(own, limit, at, own.starts[at], now)
                own.here[stage, k] = at
            own.here.pop((stage, k) if op in BACKWARD_OPS else (-1, -1), None)
            if op is Op.I:
                now -= held[stage][k] - kept[stage][k]
            elif op is not Op.F:
                now -= (held if op is Op.B else kept)[stage][k]

    def _evict(self, own: _Rank, limit: float, at: int, deadline: float, now: float) -> float:
        """Let leave by the deadline what is needed last, until the rest fits; returns how much has left."""
        gone = 0.0
        while now - gone > limit:
            best: _Way | None = None
            for what in own.here:
                if best is not None and own.backward[what] <= best.back_at:
                    continue
                way = self._way(own, what, at, deadline)
                if way is not None and (best is None or way.back_at > best.back_at):
                    best = way
            if best is None:
                break
            what = best.stage, best.index
            del own.here[what]
            gone += self.problem.held[best.stage][best.index]
            own.to_host.take(best.out, self.table.offload[best.stage])
            own.from_host.take(best.back, self.table.reload[best.stage])
            own.ways.append(best)
            own.comes.setdefault(best.back_at, []).append(what)
        return gone

    def _way(self, own: _Rank, what: _What, at: int, deadline: float) -> _Way | None:
        """A way out that is through by the deadline, and back behind position `at`; None where there is none."""
        stage, k = what
        needed = own.backward[what]
        seconds = self.table.offload[stage]
        out = own.to_host.first(own.turns[own.here[what] + 1], seconds, deadline)
        if out is None:
            return None
        from_then = max(out + seconds, own.turns[at + 1])
        back = own.from_host.last(from_then, self.table.reload[stage], own.starts[needed])
        if back is None:
            return None
        return _Way(stage, k, out, back, own.turn_before(out), min(own.turn_before(back), needed))

    def _program(self, own: _Rank) -> tuple[Action, ...]:
        """The program with all moves where they begin: of one place those that leave first, each in turn."""
        before: dict[int, list[tuple[bool, float, Action]]] = {}
        for way in own.ways:
            before.setdefault(way.out_at, []).append((False, way.out, Action(way.stage, Op.OFFLOAD, way.index)))
            before.setdefault(way.back_at, []).append((True, way.back, Action(way.stage, Op.RELOAD, way.index)))
        return tuple(
            step
            for at in range(len(own.program) + 1)
            for step in (*(move for _, _, move in sorted(before.get(at, ()))), *own.program[at : at + 1])
        )
