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
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from ..ir import BACKWARD_OPS, COMING_OPS, LEAVING_OPS, Action, Op, Schedule
from ..timing.costs import Costs, CostTable
from ..timing.links import Links, lent_bytes
from ..timing.timeline import Timeline, in_time
from .problem import Problem, Table, fits

MoveKind = Literal["offload", "lend"]
MOVE_KINDS: tuple[MoveKind, ...] = ("offload", "lend")

_HOST = -1
_What = tuple[int, int]  # stage and microbatch of activations


class _Way(NamedTuple):
    """A way out and back of one microbatch of a stage: when each half begins, and where in the programs."""

    stage: int
    index: int  # type: ignore[assignment]  # hides tuple.index
    partner: int  # _HOST: none
    out: float
    back: float
    out_at: int
    back_at: int
    hold_at: int = 0
    return_at: int = 0


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

    Attributes: `turns`, T[q] when the action before q has ended; `load`, what the rank holds during each action;
    `backward`, where the backward of each microbatch stands, `here`, where the forward of those that wait and have not
    left; `comes`, by position, what comes back in front of it.
    """

    program: Sequence[Action]
    starts: list[float]
    turns: list[float]
    load: list[float] = field(default_factory=list)
    backward: dict[_What, int] = field(default_factory=dict)
    here: dict[_What, int] = field(default_factory=dict)
    comes: dict[int, list[_What]] = field(default_factory=dict)

    def turn_before(self, time: float) -> int:
        """The last position in front of which a move begins by this time."""
        return bisect_right(self.turns, time) - 1


def with_moves(
    timeline: Timeline, problem: Problem, moves: Collection[MoveKind], costs: Costs, links: Links | None = None
) -> Schedule:
    """The schedule of a timeline without moves, with those that keep it within the memory, as far as they can.

    Arguments:
        moves: "offload" to the host of a rank, "lend" to other ranks that have room.
        costs, links: seconds of ways.
    """
    return _Spill(timeline, problem, moves, costs.table_for(timeline.schedule), links).run()


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
            if op is Op.F or op in COMING_OPS:
                now += part
            elif op in LEAVING_OPS:
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
    def __init__(
        self, timeline: Timeline, problem: Problem, moves: Collection[MoveKind], table: CostTable, links: Links | None
    ) -> None:
        self.schedule, self.problem, self.table, self.network = timeline.schedule, problem, table, links
        self.moves = moves
        self.lent = (0.0,) * problem.num_stages if links is None else lent_bytes(timeline.schedule, links)
        self.peaks = peaks_in_time(timeline, problem)
        self.limits = problem.memory_limit or (math.inf,) * problem.num_ranks
        self.ranks = []
        for trace, program in zip(timeline.ranks, timeline.schedule.programs, strict=True):
            spans = trace.compute[: len(program)]  # updates stand behind
            turns = [0.0, *(span.end for span in spans)]
            self.ranks.append(_Rank(program=program, starts=[span.start for span in spans], turns=turns))
        self.links: dict[tuple[int, int, str], _Link] = {}
        self.ways: list[list[_Way]] = [[] for _ in self.ranks]

    def run(self) -> Schedule:
        planned: list[int] = []
        for rank in sorted(range(len(self.ranks)), key=lambda r: self.peaks[r] - self.limits[r]):
            self._plan(rank, planned)
            planned.append(rank)
        return replace(self.schedule, programs=self._programs())

    def _plan(self, rank: int, partners: Collection[int]) -> None:
        """Walk along a rank's program; what does not fit makes others leave in time."""
        own, held, kept = self.ranks[rank], self.problem.held, self.problem.kept
        own.backward = {(s, k): at for at, (s, op, k) in enumerate(own.program) if op in BACKWARD_OPS}
        now = 0.0
        for at, (stage, op, k) in enumerate(own.program):
            for back in own.comes.get(at, ()):
                now += held[back[0]][back[1]]
                now -= self._evict(rank, at, own.turns[at], now, partners)
            if op is Op.F:
                now += held[stage][k]
                now -= self._evict(rank, at, own.starts[at], now, partners)
                own.here[stage, k] = at
            own.here.pop((stage, k) if op in BACKWARD_OPS else (-1, -1), None)
            own.load.append(now)
            if op is Op.I:
                now -= held[stage][k] - kept[stage][k]
            elif op is not Op.F:
                now -= (held if op is Op.B else kept)[stage][k]

    def _evict(self, rank: int, at: int, deadline: float, now: float, partners: Collection[int]) -> float:
        """Let leave by the deadline what is needed last, until the rest fits; returns how much has left."""
        own, gone = self.ranks[rank], 0.0
        while not fits(now - gone, self.limits[rank]):
            best: _Way | None = None
            for what in own.here:
                if best is not None and own.backward[what] <= best.back_at:
                    continue
                for where in self._places(partners):
                    way = self._way(rank, where, what, at, deadline)
                    if way is not None and (best is None or way.back_at > best.back_at):
                        best = way
            if best is None:
                break
            what = best.stage, best.index
            del own.here[what]
            gone += self.problem.held[best.stage][best.index]
            self._take(rank, best)
            own.comes.setdefault(best.back_at, []).append(what)
        return gone

    def _way(self, rank: int, where: int, what: _What, at: int, deadline: float) -> _Way | None:
        """A way out that is through by the deadline, and back behind position `at`; None where there is none."""
        own, (stage, k) = self.ranks[rank], what
        needed = own.backward[what]
        to, back_seconds = self._seconds(rank, where, stage), self._seconds(where, rank, stage)
        earliest, hold_at = own.turns[own.here[what] + 1], 0
        if where != _HOST:  # the partner stands before HOLD until it knows the size: in time that it has
            hold_at = bisect_left(self.ranks[where].starts, earliest)
            if hold_at >= len(self.ranks[where].program):
                return None
            earliest = max(earliest, self.ranks[where].turns[hold_at])
        out = self._link(rank, where).first(earliest, to, deadline)
        if out is None:
            return None
        from_then = max(out + to, own.turns[at + 1])
        back = self._link(where, rank).last(from_then, back_seconds, own.starts[needed])
        if back is None:
            return None
        way = _Way(stage, k, where, out, back, own.turn_before(out), min(own.turn_before(back), needed), hold_at)
        if where == _HOST:
            return way
        other = self.ranks[where]
        way = way._replace(return_at=other.turn_before(back))
        there = range(hold_at, min(bisect_left(other.starts, back + back_seconds), len(other.program)))
        amount = self.problem.held[stage][k]
        is_room = all(fits(other.load[q] + amount, self.limits[where]) for q in there)
        return way if is_room and way.return_at > hold_at else None

    def _places(self, partners: Iterable[int]) -> list[int]:
        return [_HOST] * ("offload" in self.moves) + [*partners] * ("lend" in self.moves)

    def _seconds(self, src: int, dst: int, stage: int) -> float:
        """Seconds of a way."""
        if dst == _HOST:
            return self.table.offload[stage]
        if src == _HOST:
            return self.table.reload[stage]
        if self.network is None:
            return self.table.latency[stage]
        way = self.network.way(src, dst)
        return self.table.latency[stage] + way.latency + self.lent[stage] * way.seconds_per_byte

    def _link(self, src: int, dst: int) -> _Link:
        """One direction between two ranks, or between a rank and its host."""
        where = (dst, src, "back") if src == _HOST else (src, dst, "")
        return self.links.setdefault(where, _Link())

    def _take(self, rank: int, way: _Way) -> None:
        to, back = self._seconds(rank, way.partner, way.stage), self._seconds(way.partner, rank, way.stage)
        self._link(rank, way.partner).take(way.out, to)
        self._link(way.partner, rank).take(way.back, back)
        self.ways[rank].append(way)
        if way.partner != _HOST:
            other = self.ranks[way.partner]
            for q in range(way.hold_at, min(bisect_left(other.starts, way.back + back), len(other.program))):
                other.load[q] += self.problem.held[way.stage][way.index]

    def _programs(self) -> tuple[tuple[Action, ...], ...]:
        """The programs with all moves where they begin: of one place those that leave first, each in turn."""
        before: list[dict[int, list[tuple[bool, float, Action]]]] = [{} for _ in self.ranks]
        for rank, ways in enumerate(self.ways):
            for way in ways:
                is_host = way.partner == _HOST
                move = Action(way.stage, Op.OFFLOAD if is_host else Op.LEND, way.index)
                before[rank].setdefault(way.out_at, []).append((False, way.out, move))
                before[rank].setdefault(way.back_at, []).append((True, way.back, move._replace(op=Op.RELOAD)))
                if not is_host:
                    there = before[way.partner]
                    there.setdefault(way.hold_at, []).append((True, way.out, move._replace(op=Op.HOLD)))
                    there.setdefault(way.return_at, []).append((False, way.back, move._replace(op=Op.RETURN)))
        return tuple(
            tuple(
                step
                for at in range(len(own.program) + 1)
                for step in (*(move for _, _, move in sorted(moves.get(at, ()))), *own.program[at : at + 1])
            )
            for own, moves in zip(self.ranks, before, strict=True)
        )
