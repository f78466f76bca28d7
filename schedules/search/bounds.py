"""Lower bounds that know memory: what no order of a problem's actions can beat.

Symbols: the stages of a rank are its chunks, in the order of the chain; h is what a forward takes, L a rank's limit.

**Order.** Where all microbatches are alike, some best schedule runs the F of each stage in the order of the
microbatches, and so its I and its W: give the j-th F, I and W in time to microbatch j. Everything that waits is kept,
since the j-th smallest of numbers x_k >= y_k is at least the j-th smallest y; memory counts how many there were. Where
they differ, "the j-th in time" is meant below wherever a microbatch j is named, with the least seconds and the least
memory of any; and the ways of each microbatch's own costs are tried, too.

**Heads**: the least time before an action, the largest of

- its chain: F(s-1, j), or F(s, j) and I(s+1, j), and the action of its own kind before it;
- memory: when F(s, j) of chunk c starts, the chunks up to c have begun j + 1 forwards each, since the chain comes
  through them first; so h (j+1) each, less L, must be free by then. I and W free no sooner than their heads allow;
- work: what must have run on its rank before it, behind the rank's first start; and of that, all I and W and those
  forwards that cannot come sooner, behind the rank's first possible I.

**Tails**: the least time behind an action, the same read backwards. There W takes memory and F gives it back: at the
end of I(s, j) the chunks up to c have still to end M - j of them (I(c', i) waits for I(s, i)), so h (M-j) each, less L,
are of forwards that have not begun; at the end of a W likewise, with what is kept behind an I.

**Bound**: heads and tails, and the one-machine bound of each rank over all its actions (`machine_bound`): the least
head of a set, all its work, and its least tail. Known bounds are cases of it, for one chunk and equal stages (q ranks
behind, k activations fit):

    head    a round trip of q stages must pass before the first I, and k forwards at most fill it
    tail    behind the last F its round trip must pass, and only what is kept till then fills it
    last    before the last F of the last rank M - k weight gradients have run there: (P-1)(F+I+2c) - (k-1) W of bubble
    window  F(0, j+k) waits for W(0, j): a whole round trip for every k microbatches

**Turns**, beside it: in front of a chunk's first I none of what it and the chunks before it hold is free, so that L
bounds the work there; behind a chunk's last F likewise. The rest of the rank's work lies between (for equal costs, V
and k activations the 6P - 1 - 3k of bubble of Qi et al., 2024).

**Area**, beside it: an activation is held from the start of its F to the end of its W, over a round trip at least; L
times the time between a rank's first start and last end is more than all of these together (Little's law). Behind
the first start memory fills no faster than forwards run, in front of the last end it empties no faster than weight
gradients do, which takes from that area.

A span is measured from a rank's first start. Where each rank's first chunk stands behind first chunks alone (plain,
cyclic and V) and microbatches are alike, every action before that start is the first of its rank, and the start is
known.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import accumulate

from ..ir import Op
from ..orders.problem import SPLIT_OPS, Problem, Table
from ..timing.bounds import Job, machine_bound

_NEVER = -math.inf
_MOST_TARGETS = 64  # pairs of ranks: beyond, spans of the first and of the busiest rank alone


def problem_bound(problem: Problem) -> float:
    """Seconds of the problem's objective that no order can beat.

    Raises MemoryLimitError where no order fits the memory at all. O(T S M log(S M)), where the spans of T ranks are
    looked at.
    """
    problem.check_memory()
    reach = _Reach(problem)
    own_update = [math.fsum(problem.update[s] for s in stages) for stages in problem.placement]
    together = problem.norm if problem.norm is not None and (problem.norm > 0 or any(problem.update)) else None
    first = problem.rank_of[0]
    if together is not None:  # all ranks come together: the last of all, the norm, then the own update
        last = reach.bound([0.0] * problem.num_ranks)
        more = own_update[first] if problem.objective == "span" else max(own_update)
        return max(last + together + more, max(least_work(problem)) + together)
    if problem.objective == "makespan":
        return max(reach.bound(own_update), *reach.areas(own_update))
    found = [work + update for work, update in zip(least_work(problem), own_update, strict=True)]
    found += reach.areas(own_update)
    for rank, start in reach.starts().items():
        ends = [own_update[rank] if each == rank else _NEVER for each in range(problem.num_ranks)]
        found.append(reach.bound(ends) - start)
    return max(found)


def least_work(problem: Problem) -> list[float]:
    """[P] the least seconds that each rank computes."""
    least = _least_tables(problem)
    return [math.fsum(n for s in own for table in least.values() for n in table[s]) for own in problem.placement]


def _least_tables(problem: Problem) -> dict[Op, Table]:
    """F, I and W, no longer than a whole backward allows.

    A schedule with B in place of I and W is no better than one in which an I and the rest of the B run.
    """
    whole = problem.seconds[Op.B]
    input_grad = tuple(tuple(map(min, i, b)) for i, b in zip(problem.seconds[Op.I], whole, strict=True))
    weight_grad = tuple(
        tuple(min(w, b - i) for i, w, b in zip(*rows, strict=True))
        for rows in zip(input_grad, problem.seconds[Op.W], whole, strict=True)
    )
    return {Op.F: problem.seconds[Op.F], Op.I: input_grad, Op.W: weight_grad}


class _Freed:
    """Memory given back on a rank so far, by time: the first time by which some amount is."""

    def __init__(self) -> None:
        self.events: list[tuple[float, float]] = []
        self._at = 0  # events before it are those of the last answer
        self._amount = 0.0

    def add(self, time: float, amount: float) -> None:
        if amount > 0:
            event = (time, amount)
            if self._at and event < self.events[self._at - 1]:
                self._at += 1
                self._amount += amount
            insort(self.events, event)

    def time_of(self, needed: float) -> float:
        """Infinite where it never is."""
        if needed <= 0:
            return _NEVER
        events = self.events
        while self._at and self._amount - events[self._at - 1][1] >= needed:
            self._at -= 1
            self._amount -= events[self._at][1]
        while self._amount < needed:
            if self._at == len(events):
                return math.inf
            self._amount += events[self._at][1]
            self._at += 1
        return events[self._at - 1][0]


def _least_forwards(chunks: Sequence[_Stage], amount: float) -> float:
    """The least work of forwards that take some memory [s]."""
    if amount <= 0:
        return 0.0
    if len(chunks) == 1:
        return math.ceil(amount / chunks[0].held) * chunks[0].forward
    return amount * min(c.forward / c.held for c in chunks if c.held > 0)


class _Stage:
    """Least seconds and memory of a stage's actions; `chunks`: stages of the same rank up to this one."""

    def __init__(self, problem: Problem, tables: Mapping[Op, Table], s: int) -> None:
        self.rank = problem.rank_of[s]
        self.forward, self.input_grad, self.weight_grad = (min(tables[op][s]) for op in SPLIT_OPS)
        self.held, self.kept = min(problem.held[s]), min(problem.kept[s])
        self.chunks = tuple(c for c in sorted(problem.placement[self.rank]) if c <= s)


class _Reach:
    """Heads and tails of all actions of a problem, [S][M] of each op; tails with the ends that count."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tables = _least_tables(problem)
        self.limits = problem.limits
        self.stages = [_Stage(problem, self.tables, s) for s in range(problem.num_stages)]
        self.alike = problem.same_microbatches
        self.heads = self._find_heads()

    # --- before an action ---

    def _excess(self, stage: _Stage, count: int) -> float:
        """Memory beyond the limit if each chunk up to this one had so many activations."""
        return sum(self.stages[c].held for c in stage.chunks) * count - self.limits[stage.rank]

    def _find_heads(self) -> dict[Op, list[list[float]]]:
        S, M = len(self.stages), self.problem.num_microbatches
        heads: dict[Op, list[list[float]]] = {op: [[0.0] * M for _ in range(S)] for op in self.tables}
        F, I, W = heads[Op.F], heads[Op.I], heads[Op.W]
        freed = [_Freed() for _ in range(S)]  # of the chunks up to that stage
        later = [[c for c in self.problem.placement[each.rank] if c >= s] for s, each in enumerate(self.stages)]
        all_of = [[self.stages[c] for c in own] for own in self.problem.placement]
        begun = [0.0] * self.problem.num_ranks
        for j in range(M):
            for s, each in enumerate(self.stages):
                head = 0.0 if s == 0 else F[s - 1][j] + self.stages[s - 1].forward + self.problem.forward_delay[s - 1]
                if j == 0 and each.chunks[0] == s:
                    begun[each.rank] = head
                excess = self._excess(each, j + 1)
                freeing = self._least_freeing(each, excess)
                work = sum(self.stages[c].forward for c in each.chunks) * (j + 1) - each.forward
                head = max(head, freed[s].time_of(excess), begun[each.rank] + work + freeing)
                if freeing > 0:  # none of that, nor forwards that cannot come sooner, before the rank's first I
                    opening = I[max(self.problem.placement[each.rank])][0]
                    work = sum(
                        self.stages[c].forward * (j + (c < s) - bisect_left(F[c], opening, 0, j + (c < s)))
                        for c in each.chunks
                    )
                    head = max(head, opening + work + freeing)
                F[s][j] = max(head, F[s][j - 1] + each.forward) if j else head
            for s in reversed(range(S)):
                each = self.stages[s]
                head = F[s][j] + each.forward
                if s < S - 1:
                    head = max(head, I[s + 1][j] + self.stages[s + 1].input_grad + self.problem.gradient_delay[s + 1])
                own = all_of[each.rank]
                work = sum(c.forward for c in own) * (j + 1) + each.input_grad * j
                work += sum(self.stages[c].input_grad for c in later[s][1:]) * (j + 1)
                work += self._least_weight_grads(own, each.rank, j)
                head = max(head, begun[each.rank] + work)
                I[s][j] = max(head, I[s][j - 1] + each.input_grad) if j else head
                head = I[s][j] + each.input_grad
                W[s][j] = max(head, W[s][j - 1] + each.weight_grad) if j else head
                for c in later[s]:
                    freed[c].add(I[s][j] + each.input_grad, each.held - each.kept)
                    freed[c].add(W[s][j] + each.weight_grad, each.kept)
        return heads

    def _least_freeing(self, stage: _Stage, amount: float) -> float:
        """The least work on a rank that gives back some memory of the chunks up to a stage [s]."""
        if amount <= 0:
            return 0.0
        if len(stage.chunks) == 1 and stage.held == stage.kept:
            return math.ceil(amount / stage.held) * (stage.input_grad + stage.weight_grad)
        rates = []
        for c in (self.stages[c] for c in stage.chunks):
            rates += [(c.input_grad + c.weight_grad) / c.held] if c.held > 0 else []
            rates += [c.input_grad / (c.held - c.kept)] if c.held > c.kept else []
        return amount * min(rates)

    def _least_weight_grads(self, own: Sequence[_Stage], rank: int, number: int) -> float:
        """The least seconds of weight gradients on a rank before I(s, number) of any of its stages."""
        excess = sum(c.held for c in own) * (number + 1) - self.limits[rank]
        excess -= sum(c.held - c.kept for c in own) * number
        if excess <= 0:
            return 0.0
        if len(own) == 1:
            return math.ceil(excess / own[0].kept) * own[0].weight_grad if own[0].kept > 0 else 0.0
        return excess * min((c.weight_grad / c.kept for c in own if c.kept > 0), default=0.0)

    # --- behind an action ---

    def tails(self, ends: Sequence[float]) -> dict[Op, list[list[float]]]:
        """Least seconds behind each action, until the end that counts, `ends` seconds behind a rank's last action: -inf
        where that does not count."""
        S, M = len(self.stages), self.problem.num_microbatches
        tails: dict[Op, list[list[float]]] = {op: [[_NEVER] * M for _ in range(S)] for op in self.tables}
        F, I, W = tails[Op.F], tails[Op.I], tails[Op.W]
        freed = [_Freed() for _ in range(S)]  # of the chunks up to that stage, by forwards
        alone = [_Freed() for _ in range(S)]  # of that stage
        for j in reversed(range(M)):
            left = M - j
            for s, each in enumerate(self.stages):
                end = ends[each.rank]
                excess = each.kept * left - self.limits[each.rank]
                number = math.ceil(excess / each.kept) if excess > 0 else 0
                work = (left - 1) * each.weight_grad + number * (each.forward + each.input_grad)
                tail = max(end + work, alone[s].time_of(excess))
                W[s][j] = max(tail, W[s][j + 1] + each.weight_grad) if left > 1 else tail

                tail = W[s][j] + each.weight_grad
                if s:
                    tail = max(tail, I[s - 1][j] + self.stages[s - 1].input_grad + self.problem.gradient_delay[s])
                excess = self._excess(each, left)
                chunks = [self.stages[c] for c in each.chunks]
                work = sum(c.input_grad + c.weight_grad for c in chunks) * left - each.input_grad
                work += _least_forwards(chunks, excess)
                tail = max(tail, end + work, freed[s].time_of(excess))
                I[s][j] = max(tail, I[s][j + 1] + each.input_grad) if left > 1 else tail
            for s in reversed(range(S)):
                each = self.stages[s]
                tail = I[s][j] + each.input_grad
                if s < S - 1:
                    tail = max(tail, F[s + 1][j] + self.stages[s + 1].forward + self.problem.forward_delay[s])
                own = self.problem.placement[each.rank]
                work = sum(self.stages[c].input_grad + self.stages[c].weight_grad for c in own) * left
                work += sum(self.stages[c].forward for c in own if c >= s) * left - each.forward
                tail = max(tail, ends[each.rank] + work)
                F[s][j] = max(tail, F[s][j + 1] + each.forward) if left > 1 else tail
                for c in (c for c in own if c >= s):
                    freed[c].add(F[s][j] + each.forward, each.held)
                alone[s].add(F[s][j] + each.forward, each.kept)
        return tails

    # --- what follows ---

    def bound(self, ends: Sequence[float]) -> float:
        """Seconds from the first start of all to the last end that counts."""
        tails = self.tails(ends)
        found = [0.0]
        for stages in self.problem.placement:
            if self.alike:
                found.append(machine_bound(self._jobs(stages, tails, largest_first=True)))
                found.append(self._turns(sorted(stages), tails))
                continue
            # Of some j-th and later ones, no less than the smallest ones; of the j-th and earlier ones likewise.
            heads_only = {op: [[min(row)] * len(row) for row in rows] for op, rows in tails.items()}
            found.append(machine_bound(self._jobs(stages, heads_only, largest_first=True)))
            found.append(machine_bound(self._jobs(stages, tails, largest_first=False)))
        if not self.alike:
            found += self._by_microbatch(ends)
        return max(found)

    def _by_microbatch(self, ends: Sequence[float]) -> list[float]:
        """The bound of each rank with the ways of each microbatch's own costs, whatever the order and the memory."""
        problem, stages = self.problem, range(len(self.stages))
        jobs: list[list[Job]] = [[] for _ in problem.placement]
        for k in range(problem.num_microbatches):
            F, I, W = ([rows[s][k] for s in stages] for rows in self.tables.values())
            to_forward = [0.0, *accumulate(f + delay for f, delay in zip(F, problem.forward_delay, strict=True))]
            head = to_forward[-2] + F[-1]
            heads = []
            for s in reversed(stages):
                heads.append(head)
                head += I[s] + problem.gradient_delay[s]
            tail = _NEVER
            behind = []
            for s in stages:
                tail = max(tail, W[s] + ends[self.stages[s].rank])
                behind.append(tail)
                tail += I[s] + problem.gradient_delay[s + 1] if s < stages[-1] else I[s]
            for s in reversed(stages):
                own = jobs[self.stages[s].rank]
                own.append(Job(to_forward[s], F[s], tail))
                own.append(Job(heads[-1 - s], I[s], behind[s]))
                own.append(Job(heads[-1 - s] + I[s], W[s], ends[self.stages[s].rank]))
                tail += F[s] + (problem.forward_delay[s - 1] if s else 0.0)
        return [machine_bound(job for job in own if job.tail > _NEVER) for own in jobs]

    def _jobs(self, stages: Sequence[int], tails: dict[Op, list[list[float]]], *, largest_first: bool) -> list[Job]:
        jobs = []
        for op, table in self.tables.items():
            for s in stages:
                heads = self.heads[op][s] if largest_first else [min(self.heads[op][s])] * len(table[s])
                rows = zip(heads, sorted(table[s], reverse=largest_first), tails[op][s], strict=True)
                jobs += [Job(head, work, tail) for head, work, tail in rows if tail > _NEVER]
        return jobs

    def _turns(self, own: Sequence[int], tails: dict[Op, list[list[float]]]) -> float:
        """Seconds by what memory lets a rank work in front of a chunk's first I, and behind a chunk's last F."""
        M, chunks = self.problem.num_microbatches, [self.stages[s] for s in own]
        forwards, gradients = [c.forward for c in chunks], [c.input_grad + c.weight_grad for c in chunks]
        last = [0.0 if c.weight_grad == 0 else c.weight_grad / c.kept if c.kept else math.inf for c in chunks]
        total = M * sum(forwards + gradients)
        fronts = [(self.heads[Op.F][own[0]][0], 0.0)]
        fronts += [(self.heads[Op.I][s][0], self._most_work(chunks, at, forwards, 0.0)) for at, s in enumerate(own)]
        behind = [(tails[Op.F][s][-1], self._most_work(chunks, at, gradients, max(last))) for at, s in enumerate(own)]
        pairs = [(head + tail, work + more) for head, work in fronts for tail, more in behind]
        return max((seconds + total - work for seconds, work in pairs if work < total), default=0.0)

    def _most_work(self, chunks: Sequence[_Stage], at: int, parts: Sequence[float], rate: float) -> float:
        """The most seconds of work while nothing that the chunks up to one hold is free: of these their part, of later
        chunks all, each no more often than the chunk before; or as many seconds for each unit of memory as `rate`."""
        limit, work, held = self.limits[chunks[0].rank], 0.0, 0.0
        if len(amounts := {n for c in chunks for n in (c.held, c.kept)}) == 1 and (amount := amounts.pop()) > 0:
            limit = amount * (limit // amount) if limit < math.inf else limit
        for c, (stage, part) in enumerate(zip(chunks, parts, strict=True)):
            work += part if c <= at else stage.forward + stage.input_grad + stage.weight_grad
            held += stage.held if c <= at else 0.0
            rate = max(rate, work / held if held else math.inf)
        return limit * rate

    def starts(self) -> dict[int, float]:
        """The first start of ranks, as far as it is known [s]: those whose spans are worth a look."""
        problem = self.problem
        first_of = [min(stages) for stages in problem.placement]
        found: dict[int, float] = {}
        start = 0.0
        for s, rank in enumerate(problem.rank_of):
            if first_of[rank] != s:
                break
            found[rank] = start
            start += self.stages[s].forward + problem.forward_delay[s]
            if not self.alike:
                break
        if problem.num_ranks**2 > _MOST_TARGETS:
            work = problem.work
            keep = {problem.rank_of[0], max(found, key=lambda rank: work[rank])}
            found = {rank: start for rank, start in found.items() if rank in keep}
        return found

    def areas(self, ends: Sequence[float]) -> list[float]:
        """By rank, seconds from its first start to its end, by the area that its activations need in its memory."""
        return [self._area(rank) + end for rank, end in enumerate(ends)]

    def _area(self, rank: int) -> float:
        problem = self.problem
        if problem.memory_limit is None:
            return 0.0
        limit = problem.memory_limit[rank]
        own = [self.stages[s] for s in problem.placement[rank]]
        area = math.fsum(self._lifetimes(s) for s in problem.placement[rank])
        most = max(each.held for each in own)
        if most <= 0 or any(len({*problem.held[s], *problem.kept[s]}) > 1 for s in problem.placement[rank]):
            return area / limit
        # In the first forwards memory is not yet full, nor is it in the last weight gradients.
        number = min(int(limit / most), problem.num_microbatches * len(own))
        filling = min(each.forward for each in own)
        emptying = min(each.weight_grad for each in own)
        ramp = sum(limit - step * most for step in range(1, number + 1))
        return (area + ramp * (filling + emptying)) / limit

    def _lifetimes(self, stage: int) -> float:
        """Memory of a stage's activations, times how long they do at least."""
        problem, tables = self.problem, self.tables
        behind = range(stage + 1, problem.num_stages)
        travel = math.fsum(problem.forward_delay[s - 1] + problem.gradient_delay[s] for s in behind)
        area = 0.0
        for k in range(problem.num_microbatches):
            trip = travel + math.fsum(tables[Op.F][s][k] + tables[Op.I][s][k] for s in (stage, *behind))
            area += problem.held[stage][k] * trip + problem.kept[stage][k] * tables[Op.W][stage][k]
        return area
