"""Greedy list scheduling over stages of one owner each: ranks take what can start first, and W fill the gaps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product, takewhile
from numbers import Real
from typing import NamedTuple

from ..ir import BACKWARD_OPS, Action, Op, Schedule, ScheduleError
from ..liveness import activations
from ..placement import Placement
from ..timing.costs import UNIT_COSTS, Costs, CostTable
from ..timing.simulate import run_once
from ..timing.wiring import ScheduleWiring
from ..wording import count

_NEVER = float("inf")
_LOOK = 1000  # actions between looks at the clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How ranks choose.

    Arguments:
        caps: [S] most microbatches of a stage between their F and the end of their I or B; a forward waits for less.
        memory_limit: most activations of a rank at once; a forward waits for a W, and a W is made for it.
        kept: part of an activation that stays from the end of its I until the end of its W.
        fills_small_gaps: whether a W goes into any gap, though what comes next is late by the rest of it. Otherwise
            only on the rank that would have idled most.
        order: [P] programs whose F and I or B are to be kept in their order; None: what starts first comes first, of
            what starts at once a backward, and what is nearest to the end of its way.
        split: I and W, rather than whole backwards.
    """

    caps: Sequence[int]
    memory_limit: float
    kept: float = 1.0
    fills_small_gaps: bool = False
    order: Sequence[Sequence[Action]] | None = None
    split: bool = True


Choice = tuple[float, Op, int]  # start, op, stage
_NOTHING: Choice = (_NEVER, Op.F, -1)


def either_fill(rules: Rules) -> Iterator[Rules]:
    """Rules under which W fill gaps that are long enough, then any."""
    yield rules
    yield replace(rules, fills_small_gaps=True)


class _RankProgram:
    """Actions placed on a rank so far.

    Attributes: `first` and `free`, when its first one starts and its last one ends [s]; `idle`, in between [s]; `held`,
    stage activations.
    """

    def __init__(self) -> None:
        self.program: list[Action] = []
        self.first = self.free = self.idle = self.held = 0.0

    def run(self, action: Action, start: float, seconds: float) -> float:
        """An action is placed; returns its end."""
        if self.program:
            self.idle += start - self.free
        else:
            self.first = start
        self.program.append(action)
        self.free = start + seconds
        return self.free


class Listed(NamedTuple):
    """Programs of all ranks, and what they take [s]: the longest span of a rank, and until the last end."""

    programs: tuple[tuple[Action, ...], ...]
    span: float
    makespan: float


def _listed(ranks: Sequence[_RankProgram]) -> Listed:
    programs = tuple(tuple(rank.program) for rank in ranks)
    return Listed(programs, max(rank.free - rank.first for rank in ranks), max(rank.free for rank in ranks))


def as_named(schedules: Iterable[Schedule], table: CostTable, memory_limit: float) -> Iterator[Listed]:
    """Those that are in the limit, as they are."""
    for each in schedules:
        held = max(sum(alive.values()) for program in each.programs for _, alive in activations(program))
        if held <= memory_limit + 1e-9:
            timeline = run_once(ScheduleWiring(each, table, None), table, messages=False)
            yield Listed(each.compute_programs, timeline.span, timeline.makespan)


def list_order(
    placement: Placement, num_microbatches: int, costs: CostTable, rules: Rules, *, until: float = _NEVER
) -> Listed:
    """Orders by list scheduling.

    Actions are placed in the order of their starts, so that a rank that chooses knows all that arrives before
    anything which is not yet placed could: a gap is known when it is filled. O(actions * (P + V)).

    Raises ScheduleError where caps, memory or the given order keep all ranks waiting, and once it is `until`.
    """
    ranks = [_RankList(number, own, costs, rules) for number, own in enumerate(placement)]
    rank_of = {stage: rank for rank in ranks for stage in rank.stages}
    last = len(rank_of) - 1
    backward = Op.I if rules.split else Op.B
    rank_of[0].arrived[Op.F, 0] += [0.0] * num_microbatches
    choices = [rank.choose(0.0) for rank in ranks]
    starts = [choice[0] for choice in choices]
    most_idle = 0.0
    for step in range(num_microbatches * len(rank_of) * (3 if rules.split else 2)):
        if step % _LOOK == 0 and time.monotonic() >= until:
            raise ScheduleError("the time is over")
        start = min(starts)
        number = starts.index(start)
        _, op, stage = choices[number]
        if start == _NEVER:
            raise ScheduleError(f"all ranks wait for each other under {rules!r:.200}")
        rank = other = ranks[number]
        end = rank.take(start, op, stage)
        user = {Op.F: min(stage + 1, last), backward: stage - 1}.get(op, -1)
        if user >= 0:
            other = rank_of[user]
            key = (backward if op is backward or stage == last else Op.F, user)
            other.arrived[key].append(end if other is rank else end + costs.latency[stage])
        most_idle = max(most_idle, rank.idle)
        for each in (rank,) if other is rank else (rank, other):
            choices[each.number] = each.choose(most_idle)
            starts[each.number] = choices[each.number][0]
    return _listed(ranks)


class _RankList(_RankProgram):
    """A rank's past, and its next choices."""

    def __init__(self, number: int, own: Sequence[int], costs: CostTable, rules: Rules) -> None:
        super().__init__()
        self.number, self.rules, self.stages = number, rules, tuple(sorted(own))
        self.backward = Op.I if rules.split else Op.B
        # Of each stage, when what its next forwards and backwards need is there.
        self.arrived: dict[tuple[Op, int], list[float]] = {(op, s): [] for s in own for op in (Op.F, self.backward)}
        self.done = {(op, s): 0 for s in own for op in (Op.F, self.backward, Op.W)}
        self.rows = {(op, s): costs.row(op, s) for op, s in self.done}
        self.owed: deque[int] = deque()  # stages of the W that are due, in the order of their I
        self.order = None if rules.order is None else deque(a for a in rules.order[number] if a.op is not Op.W)

    def choose(self, most_idle: float) -> Choice:
        """The next action; its start is infinite where none may run."""
        best, without_room = self._next()
        if self.owed:
            gap = best[0] - self.free
            seconds = self._seconds(Op.W, self.owed[0])
            makes_room = gap > 0 and without_room <= self.free + seconds
            in_a_small_gap = gap > 0 and (self.rules.fills_small_gaps or self.idle + gap > most_idle)
            if gap >= seconds or makes_room or in_a_small_gap:
                return self.free, Op.W, self.owed[0]
        return best

    def _next(self) -> tuple[Choice, float]:
        """The forward or backward that starts first; and when one could start that there is no room for."""
        best, without_room = _NOTHING, _NEVER
        full = self.held + 1.0 > self.rules.memory_limit + 1e-9
        if self.order is None:
            candidates = [(self.backward, stage) for stage in self.stages]
            candidates += [(Op.F, stage) for stage in reversed(self.stages)]
        else:
            candidates = [(self.order[0].op, self.order[0].stage)] if self.order else []
        for op, stage in candidates:
            number, arrivals = self.done[op, stage], self.arrived[op, stage]
            if number >= len(arrivals):
                continue
            start = max(self.free, arrivals[number])
            if op is Op.F:
                if number - self.done[self.backward, stage] >= self.rules.caps[stage]:
                    continue
                if full:
                    without_room = min(without_room, start)
                    continue
            if start < best[0]:
                best = start, op, stage
        return best, without_room

    def take(self, start: float, op: Op, stage: int) -> float:
        end = self.run(Action(stage, op, self.done[op, stage]), start, self._seconds(op, stage))
        self.done[op, stage] += 1
        if op is Op.W:
            self.held -= self.rules.kept
            self.owed.popleft()
            return end
        if self.order is not None:
            self.order.popleft()
        if op in BACKWARD_OPS:
            self.held -= 1.0 - self.rules.kept if op is Op.I else 1.0
            self.owed += [stage] if op is Op.I else []
        else:
            self.held += 1.0
        return end

    def _seconds(self, op: Op, stage: int) -> float:
        row = self.rows[op, stage]
        return row[self.done[op, stage] % len(row)]


def read_costs(costs: Costs | None, *, num_stages: int) -> CostTable:
    """Costs by stage; all 1 where there are none. ValueError for what is no Costs, and for actions without time."""
    if not isinstance(costs, Costs | None):
        raise ValueError(
            f"costs={costs!r:.60}: expected Costs(forward=..., input_grad=..., weight_grad=..., latency=...)"
        )
    table = (costs or UNIT_COSTS).table(num_stages=num_stages)
    for name, op in (("forward", Op.F), ("input_grad", Op.I), ("weight_grad", Op.W)):
        if min(table.column(op)) <= 0:
            raise ValueError(
                f"costs with {name}={min(table.column(op)):g}: expected more than 0 seconds for each stage"
            )
    return table


def read_memory(limit: float | None, kept: float, *, default: int, least: int) -> float:
    """The memory limit of a rank; ValueError where no order meets it, or `kept` is no part of an activation."""
    for name, number in (("memory_limit", default if limit is None else limit), ("kept", kept)):
        if not isinstance(number, Real) or isinstance(number, bool):
            raise ValueError(f"{name}={number!r}: expected a number")
    if not 0 <= kept <= 1:
        raise ValueError(f"kept={kept!r}: expected the part of an activation that stays from I to W, from 0 to 1")
    if limit is None:
        return default
    if not limit >= least:
        raise ValueError(
            f"memory_limit={limit!r}: no order can meet it, since one microbatch alone is "
            f"{count(least, 'stage activation')} on a rank; expected at least {least}"
        )
    return limit


def best_order(
    name: str,
    placement: Placement,
    num_microbatches: int,
    table: CostTable,
    candidates: Iterable[Rules | Listed],
    *,
    named: Iterable[Listed],
    seconds: float = _NEVER,
) -> Schedule:
    """The schedule with the least span, of these the least makespan, of these the first; of those that are listed in
    so many seconds (wall clock), one at least, the named ones last."""
    until = time.monotonic() + seconds
    best: Listed | None = None
    passes = [(op, k) for op in (Op.F, Op.I, Op.W) for k in range(num_microbatches)]
    work = max(sum(table.of(op, s, k) for s in own for op, k in passes) for own in placement)
    for each in candidates:
        try:
            if isinstance(each, Listed):
                found = each
            else:
                end = until if best else _NEVER
                found = list_order(placement, num_microbatches, table, each, until=end)
        except ScheduleError:
            if best is None or time.monotonic() < until:
                continue
            break
        if best is None or (found.span, found.makespan) < (best.span, best.makespan):
            best = found
        if best.span <= work * (1 + 1e-12):
            break  # no bubble
        if time.monotonic() >= until:
            break
    assert best is not None, "the first candidate holds one microbatch at a time, at least"
    for each in takewhile(lambda _: time.monotonic() < until, chain([best], named)):
        best = min(best, each, key=lambda one: one[1:])
    return Schedule(name=name, placement=placement, programs=best.programs, num_microbatches=num_microbatches)


def with_weights(
    order: Sequence[Action], placement: Placement, table: CostTable, *, memory_limit: float, kept: float
) -> Iterator[Listed]:
    """Orders that the rules for W of ZB's authors lead to, from F and I of all ranks in the order of their placing.

    A W goes into each gap that is long enough, for memory, and into a short gap in which its rank would become the one
    that has idled most so far: before the I of a rank's first stage in any case, before its other I and before F in one
    try each with and without. A try is made again with the idle time that it led to, as long as that helps: then a rank
    may idle until it is as far below the most as it was at the end. Nothing comes where memory does not suffice.
    """
    for before_i, before_f in product((True, False) if len(placement[0]) > 1 else (True,), (True, False)):
        allowed, least = [0.0] * len(placement), _NEVER
        while True:
            weights = _Weights(placement, table, memory_limit, kept, allowed)
            if not weights.place(order, before_i=before_i, before_f=before_f) or weights.most_idle() >= least:
                break
            yield _listed(weights.ranks)
            least = weights.most_idle()
            allowed = [least - rank.idle for rank in weights.ranks]


class _Weights:
    """Programs that take the F and I in a given order, and W by the rules above.

    Arguments:
        allowed: [P] seconds that a rank may idle without a W in a short gap, though no other rank did so yet.
    """

    def __init__(
        self, placement: Placement, table: CostTable, memory_limit: float, kept: float, allowed: list[float]
    ) -> None:
        self.table, self.kept, self.allowed = table, kept, allowed
        self.limit = memory_limit + 1e-9
        self.rank_of = {stage: rank for rank, own in enumerate(placement) for stage in own}
        self.first_stages = {min(own) for own in placement}
        self.ranks = [_RankProgram() for _ in placement]
        self.owed: list[deque[Action]] = [deque() for _ in placement]
        self.arrived: dict[Action, float] = {}

    def most_idle(self) -> float:
        return max(rank.idle for rank in self.ranks)

    def place(self, order: Sequence[Action], *, before_i: bool, before_f: bool) -> bool:
        """Whether memory lets all be placed."""
        rank_of, last = self.rank_of, len(self.rank_of) - 1
        for action in order:
            stage, op, k = action
            number = rank_of[stage]
            rank, owed = self.ranks[number], self.owed[number]
            more = 1.0 if op is Op.F else self.kept - 1.0
            while rank.held + more > self.limit:
                if not owed:
                    return False
                self.weight(number)
            arrival = self.arrived.get(action, 0.0)
            while owed and arrival >= rank.free + self.seconds(owed[0]):
                self.weight(number)
            gap = arrival - rank.free
            short = before_f if op is Op.F else before_i or stage in self.first_stages
            if owed and short and gap > 0 and rank.idle + gap > max(self.most_idle(), self.allowed[number]):
                self.weight(number)
            rank.held += more
            end = rank.run(action, max(rank.free, arrival), self.seconds(action))
            if op is Op.I:
                owed.append(Action(stage, Op.W, k))
            if op is Op.F and stage < last:
                user = Action(stage + 1, Op.F, k)
            else:
                user = Action(stage if op is Op.F else stage - 1, Op.I, k)
            to_self = rank_of.get(user.stage, number) == number
            self.arrived[user] = end if to_self else end + self.table.latency[stage]
        for number, owed in enumerate(self.owed):
            while owed:
                self.weight(number)
        return True

    def weight(self, number: int) -> None:
        rank, action = self.ranks[number], self.owed[number].popleft()
        rank.run(action, rank.free, self.seconds(action))
        rank.held -= self.kept

    def seconds(self, action: Action) -> float:
        return self.table.of(action.op, action.stage, action.index)
