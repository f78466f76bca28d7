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
from dataclasses import replace
from typing import Literal

from ..ir import BACKWARD_OPS, Action, Op, Schedule
from ..liveness import peak_held
from ..timing.costs import Costs, CostTable
from ..timing.timeline import RankTrace, Timeline, in_time
from .problem import Problem, Table

MoveKind = Literal["offload"]
MOVE_KINDS: tuple[MoveKind, ...] = ("offload",)

_What = tuple[int, int]  # stage and microbatch of activations


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


def with_moves(timeline: Timeline, problem: Problem, costs: Costs) -> Schedule:
    """The schedule of a timeline without moves, with those that keep it within the memory, as far as they can."""
    schedule, table = timeline.schedule, costs.table_for(timeline.schedule)
    ranks = zip(timeline.ranks, schedule.programs, problem.limits, strict=True)
    programs = [_Spill(trace, program, limit, problem, table).run() for trace, program, limit in ranks]
    return replace(schedule, programs=tuple(programs))


def peaks_in_time(timeline: Timeline, problem: Problem, waiting: Table | None = None) -> list[float]:
    """[P] the most memory that each rank holds at once: what leaves counts until it has; `waiting`: see `peak_held`."""
    return [
        peak_held(in_time(trace, program) if trace.moves else program, problem.held, kept=problem.kept, waiting=waiting)
        for trace, program in zip(timeline.ranks, timeline.schedule.programs, strict=True)
    ]


class _Spill:
    """The moves of one rank.

    Attributes: `starts`, when its actions start as they were simulated; `turns`, T[q] when the action before q has
    ended; `backward`, where the backward of each microbatch stands; `here`, where the forward of those that wait and
    have not left; `comes`, by position, what comes back in front of it; `before`, likewise, moves with when they begin.
    """

    def __init__(
        self, trace: RankTrace, program: Sequence[Action], limit: float, problem: Problem, table: CostTable
    ) -> None:
        self.program, self.limit, self.problem, self.table = program, limit, problem, table
        spans = trace.compute[: len(program)]  # updates stand behind
        self.starts = [span.start for span in spans]
        self.turns = [0.0, *(span.end for span in spans)]
        self.backward = {(s, k): at for at, (s, op, k) in enumerate(program) if op in BACKWARD_OPS}
        self.here: dict[_What, int] = {}
        self.comes: dict[int, list[_What]] = {}
        self.to_host, self.from_host = _Link(), _Link()
        self.before: dict[int, list[tuple[bool, float, Action]]] = {}

    def run(self) -> tuple[Action, ...]:
        """Walk along the program; what does not fit makes others leave in time."""
        held, kept = self.problem.held, self.problem.kept
        now = 0.0
        for at, (stage, op, k) in enumerate(self.program):
            for back in self.comes.get(at, ()):
                now += held[back[0]][back[1]]
                now -= self._evict(at, self.turns[at], now)
            if op is Op.F:
                now += held[stage][k]
                now -= self._evict(at, self.starts[at], now)
                self.here[stage, k] = at
            elif op in BACKWARD_OPS:
                self.here.pop((stage, k), None)
            if op is Op.I:
                now -= held[stage][k] - kept[stage][k]
            elif op is not Op.F:
                now -= (held if op is Op.B else kept)[stage][k]
        return self._with_ways()

    def _evict(self, at: int, deadline: float, now: float) -> float:
        """Let leave by the deadline what is needed last, until the rest fits; returns how much has left."""
        gone = 0.0
        while now - gone > self.limit:
            latest, best = -1, None
            for what in self.here:
                if self.backward[what] > latest and (way := self._way(what, at, deadline)) is not None:
                    out, back, back_at = way
                    if back_at > latest:
                        latest, best = back_at, (what, out, back)
            if best is None:
                break
            (stage, k), out, back = best
            del self.here[stage, k]
            gone += self.problem.held[stage][k]
            self.to_host.take(out, self.table.offload[stage])
            self.from_host.take(back, self.table.reload[stage])
            self.before.setdefault(self._turn_before(out), []).append((False, out, Action(stage, Op.OFFLOAD, k)))
            self.before.setdefault(latest, []).append((True, back, Action(stage, Op.RELOAD, k)))
            self.comes.setdefault(latest, []).append((stage, k))
        return gone

    def _way(self, what: _What, at: int, deadline: float) -> tuple[float, float, int] | None:
        """When a way out begins that is through by the deadline, and one back behind position `at`, and the position in
        front of which that stands; None where there is none."""
        stage, _ = what
        needed, seconds = self.backward[what], self.table.offload[stage]
        out = self.to_host.first(self.turns[self.here[what] + 1], seconds, deadline)
        if out is None:
            return None
        from_then = max(out + seconds, self.turns[at + 1])
        back = self.from_host.last(from_then, self.table.reload[stage], self.starts[needed])
        if back is None:
            return None
        return out, back, min(self._turn_before(back), needed)

    def _turn_before(self, time: float) -> int:
        return bisect_right(self.turns, time) - 1

    def _with_ways(self) -> tuple[Action, ...]:
        """The program with all moves where they begin: of one place those that leave first, each in turn."""
        return tuple(
            step
            for at in range(len(self.program) + 1)
            for step in (*(move for _, _, move in sorted(self.before.get(at, ()))), *self.program[at : at + 1])
        )
