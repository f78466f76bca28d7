"""Lower bounds that account for memory: no order of a problem's actions can be faster.

Symbols: the stages of a rank are its chunks, in the order of the chain; h is the memory of a forward, L a rank's limit,
c the latency, P, V, S, M as always.

**Order.** If all microbatches are equal, some best schedule runs the F of each stage in the order of the microbatches,
and so its I and its W: assign the j-th F, I and W in time to microbatch j. All dependencies still hold, since the j-th
smallest of numbers x_k >= y_k is at least the j-th smallest y; memory depends on counts only. If microbatches differ,
"microbatch j" below means "the j-th in time", with the least seconds and the least memory of any; in addition the
critical paths of each microbatch's own costs are evaluated (`_by_microbatch`).

**Heads**: the least time before an action, the largest of

- its chain: F(s-1, j), or F(s, j) and I(s+1, j), and the previous action of its own kind; - memory: when F(s, j) of a
chunk starts, the chunks up to it have begun j + 1 forwards each, since the chain visits them
  first; so h (j+1) per chunk, less L, must be free by then. I and W free memory no sooner than their heads allow;
- work: the work that must precede it on its rank, after the rank's first start; and, after the rank's first possible I,
  all of that work but forwards that can come sooner.

**Tails**: the least time after an action, by the same argument in reverse time. There W takes memory and F returns it:
at the end of I(s, j) the chunks up to it have M - j microbatches left (I(c', i) waits for I(s, i)), so h (M-j) each,
less L, belongs to forwards that have not begun; at the end of a W likewise, with `kept` instead of h.

**Bound**: with these heads and tails, the one-machine bound of each rank over all its actions (`machine_bound`): the
least head of a set + all its work + its least tail. Known bounds are special cases for one chunk and equal stages (q
ranks after this one, k activations fit):

    head    a round trip of q stages precedes the first I, and at most k forwards fill it
    tail    a round trip follows the last F, and only the W that are still held fill it
    last    before the last F of the last rank M - k weight gradients have run there: (P-1)(F+I+2c) - (k-1) W of bubble
    window  F(0, j+k) waits for W(0, j): a round trip for every k microbatches

**Phases** (`_bound_by_phases`): before a chunk's first I nothing is free of what it and earlier chunks hold, so L
bounds the work until then; likewise after a chunk's last F. The rank's other work lies in between (for equal costs, V
and k activations this is the bubble 6P - 1 - 3k of Qi et al., 2024).

**Area** (`_area`): an activation is held from the start of its F to the end of its W, at least a round trip; L times
the time between a rank's first start and last end is at least the sum (Little's law). Memory fills no faster than
forwards run after the first start, and empties no faster than weight gradients run before the last end, which reduces
that area.

A span is measured from a rank's first start. It is known where all earlier stages of the chain are first chunks too
(plain, cyclic and V) and microbatches are equal: then every earlier action is the first of its rank.

Complexity: O(T S M log(S M)) for the spans of T ranks.
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

    Raises MemoryLimitError if no order fits the memory. O(T S M log(S M)), for the spans of T ranks.
    """
    problem.check_memory()
    reach = _Reach(problem)
    own_update = [math.fsum(problem.update[s] for s in stages) for stages in problem.placement]
    together = problem.norm if problem.norm is not None and (problem.norm > 0 or any(problem.update)) else None
    first = problem.rank_of[0]
    if together is not None:  # all ranks synchronise: the last end of all, the norm, then the own update
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
    least = _least_tables(problem)
    return [math.fsum(n for s in own for table in least.values() for n in table[s]) for own in problem.placement]


def _least_tables(problem: Problem) -> dict[Op, Table]:
    """F, I and W, no longer than a whole backward allows: B is no better than that I and the rest of B as W."""
    whole = problem.seconds[Op.B]
    input_grad = tuple(tuple(map(min, i, b)) for i, b in zip(problem.seconds[Op.I], whole, strict=True))
    weight_grad = tuple(
        tuple(min(w, b - i) for i, w, b in zip(*rows, strict=True))
        for rows in zip(input_grad, problem.seconds[Op.W], whole, strict=True)
    )
    return {Op.F: problem.seconds[Op.F], Op.I: input_grad, Op.W: weight_grad}


class _Freed:
    """Memory freed on a rank, by time; returns the first time by which some amount is free."""

    def __init__(self) -> None:
        self.events: list[tuple[float, float]] = []
        self._at = 0  # the last answer counted the events before it
        self._amount = 0.0

    def add(self, time: float, amount: float) -> None:
        if amount > 0:
            event = (time, amount)
            if self._at and event < self.events[self._at - 1]:
                self._at += 1
                self._amount += amount
            insort(self.events, event)

    def time_of(self, needed: float) -> float:
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
    """The least work of forwards that take this much memory [s]."""
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
    """Heads and tails of all actions of a problem, [S][M] of each op."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tables = _least_tables(problem)
        self.limits = problem.limits
        self.stages = [_Stage(problem, self.tables, s) for s in range(problem.num_stages)]
        self.alike = problem.same_microbatches
        self.heads = self._find_heads()

    # --- before an action ---

    def _excess(self, stage: _Stage, count: int) -> float:
        """Memory beyond the limit if each chunk up to this one has `count` activations."""
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
                if freeing > 0:  # it follows the rank's first I, as do forwards that cannot come sooner
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
        """The least work on a rank that frees this much memory of the chunks up to a stage [s]."""
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

    # --- after an action ---

    def tails(self, ends: Sequence[float]) -> dict[Op, list[list[float]]]:
        """Least seconds from the end of each action to the end that counts. `ends`: [P] seconds from a rank's last
        action to the end that counts; -inf: this rank does not count."""
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

    # --- bounds ---

    def bound(self, ends: Sequence[float]) -> float:
        tails = self.tails(ends)
        found = [0.0]
        for stages in self.problem.placement:
            if self.alike:
                found.append(machine_bound(self._jobs(stages, tails, largest_first=True)))
                found.append(self._bound_by_phases(sorted(stages), tails))
                continue
            # The j-th and all later ones take at least as long as the smallest ones; likewise the earlier ones.
            heads_only = {op: [[min(row)] * len(row) for row in rows] for op, rows in tails.items()}
            found.append(machine_bound(self._jobs(stages, heads_only, largest_first=True)))
            found.append(machine_bound(self._jobs(stages, tails, largest_first=False)))
        if not self.alike:
            found += self._by_microbatch(ends)
        return max(found)

    def _by_microbatch(self, ends: Sequence[float]) -> list[float]:
        """The bound of each rank from the paths of each microbatch's own costs, for any order and memory."""
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
            after = []
            for s in stages:
                tail = max(tail, W[s] + ends[self.stages[s].rank])
                after.append(tail)
                tail += I[s] + problem.gradient_delay[s + 1] if s < stages[-1] else I[s]
            for s in reversed(stages):
                own = jobs[self.stages[s].rank]
                own.append(Job(to_forward[s], F[s], tail))
                own.append(Job(heads[-1 - s], I[s], after[s]))
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

    def _bound_by_phases(self, own: Sequence[int], tails: dict[Op, list[list[float]]]) -> float:
        """Seconds by the work that memory allows before a chunk's first I, and after a chunk's last F."""
        M, chunks = self.problem.num_microbatches, [self.stages[s] for s in own]
        forwards, gradients = [c.forward for c in chunks], [c.input_grad + c.weight_grad for c in chunks]
        last = [0.0 if c.weight_grad == 0 else c.weight_grad / c.kept if c.kept else math.inf for c in chunks]
        total = M * sum(forwards + gradients)
        fronts = [(self.heads[Op.F][own[0]][0], 0.0)]
        fronts += [(self.heads[Op.I][s][0], self._most_work(chunks, at, forwards, 0.0)) for at, s in enumerate(own)]
        ends = [(tails[Op.F][s][-1], self._most_work(chunks, at, gradients, max(last))) for at, s in enumerate(own)]
        pairs = [(head + tail, work + more) for head, work in fronts for tail, more in ends]
        return max((seconds + total - work for seconds, work in pairs if work < total), default=0.0)

    def _most_work(self, chunks: Sequence[_Stage], at: int, parts: Sequence[float], rate: float) -> float:
        """The most work while nothing that the chunks up to `at` hold is free [s].

        Per unit of memory, `parts` of the chunks up to `at` and all work of later ones, each chunk no more often than
        the one before; at least `rate` seconds.
        """
        limit, work, held = self.limits[chunks[0].rank], 0.0, 0.0
        if len(amounts := {n for c in chunks for n in (c.held, c.kept)}) == 1 and (amount := amounts.pop()) > 0:
            limit = amount * (limit // amount) if limit < math.inf else limit
        for c, (stage, part) in enumerate(zip(chunks, parts, strict=True)):
            work += part if c <= at else stage.forward + stage.input_grad + stage.weight_grad
            held += stage.held if c <= at else 0.0
            rate = max(rate, work / held if held else math.inf)
        return limit * rate

    def starts(self) -> dict[int, float]:
        """The first start of ranks, where it is known and their spans are worth evaluating [s]."""
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
        """By rank, seconds from its first start to its end, by the area of its activations in memory and time."""
        return [self._area(rank) + end for rank, end in enumerate(ends)]

    def _area(self, rank: int) -> float:
        problem = self.problem
        if problem.memory_limit is None or not (limit := problem.memory_limit[rank]):
            return 0.0
        own = [self.stages[s] for s in problem.placement[rank]]
        area = math.fsum(self._lifetimes(s) for s in problem.placement[rank])
        most = max(each.held for each in own)
        if most <= 0 or any(len({*problem.held[s], *problem.kept[s]}) > 1 for s in problem.placement[rank]):
            return area / limit
        # Memory is not full during the first forwards, nor during the last weight gradients.
        number = min(int(limit / most), problem.num_microbatches * len(own))
        filling = min(each.forward for each in own)
        emptying = min(each.weight_grad for each in own)
        ramp = sum(limit - step * most for step in range(1, number + 1))
        return (area + ramp * (filling + emptying)) / limit

    def _lifetimes(self, stage: int) -> float:
        """Memory of a stage's activations times their least lifetimes."""
        problem, tables = self.problem, self.tables
        later = range(stage + 1, problem.num_stages)
        travel = math.fsum(problem.forward_delay[s - 1] + problem.gradient_delay[s] for s in later)
        area = 0.0
        for k in range(problem.num_microbatches):
            trip = travel + math.fsum(tables[Op.F][s][k] + tables[Op.I][s][k] for s in (stage, *later))
            area += problem.held[stage][k] * trip + problem.kept[stage][k] * tables[Op.W][stage][k]
        return area
