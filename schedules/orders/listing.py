"""List scheduling with look-ahead: an order built by walking through time, each rank deciding when it is free.

    a free rank runs     an I that has arrived, or an F if its stage may run further ahead and memory allows;
                         a W in the gap before the next input; a W at once where memory or the backlog requires it

A `Policy` is a vector of numbers that steers these decisions, so that a search over policies searches over whole
orders: first a spread of them, then small changes of the better ones.

Invariant (no deadlock): an F runs only if the microbatches in flight on its rank can still end one after the other.
With L the limit, g_k the memory that microbatch k holds and l_k what its remaining forwards here need: processed from
the oldest, l_k <= L - sum of g_j over those not yet ended (`Lister.safe`). O(actions * log P + actions * V) per order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import accumulate, cycle, product
from random import Random

from ..ir import Op
from .evaluate import OrderEvaluator, Orders
from .problem import SPLIT_OPS, Problem

_NOT_YET = -1.0
_NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Numbers that steer the building of an order."""

    ahead: tuple[int, ...]  # [S] forwards of a stage that may be without their I at once, at least 1
    backlog: tuple[int, ...]  # [P] W that a rank may delay
    fill: tuple[float, ...]  # by rank, a W fills a gap of at least this part of its seconds
    # a rank leaves an F for an I, or an F of a later stage, that arrives within this part of the F's seconds
    patience: float = 0.0
    forward_first: bool = False  # whether an F that may run precedes an I that may
    # if given, the F or I that is due first runs first, instead of the two rules above: a microbatch is due each round
    # of the busiest rank's work, counted from this part of its path's seconds
    due: float | None = None
    sequence: tuple[int, ...] | None = None  # the order in which microbatches enter


class Lister:
    """Builds orders of one problem."""

    def __init__(self, evaluator: OrderEvaluator) -> None:
        self.evaluator = evaluator
        problem = self.problem = evaluator.problem
        self.limits = problem.limits
        self.held = [n for row in problem.held for n in row]
        self.path_seconds = self._path_seconds()
        # Below this a forward leaves enough for the other forwards of any microbatch, and is always safe.
        largest = [max(row) for row in problem.held]
        self.roomy = [
            limit - sum(sorted(largest[s] for s in own)[1:])
            for limit, own in zip(self.limits, problem.placement, strict=True)
        ]

    def _path_seconds(self) -> list[float]:
        """[2 S] seconds from the start to F of the first microbatch on each stage, then to its I, without any waits."""
        problem, S = self.problem, self.problem.num_stages
        seconds, now = [0.0] * (2 * S), 0.0
        for s in range(S):
            seconds[s] = now
            now += problem.seconds[Op.F][s][0] + problem.forward_delay[s]
        for s in reversed(range(S)):
            seconds[S + s] = now
            now += problem.seconds[Op.I][s][0] + problem.gradient_delay[s]
        return seconds

    def build(self, policy: Policy) -> Orders:
        return _List(self, policy).run()

    def safe(self, rank: int, stage: int, nf: list[int], sequence: tuple[int, ...]) -> bool:
        """Whether the microbatches in flight can still end one after the other once `stage` has run its next forward.

        Those whose forwards here have all run return their memory; then the oldest of the others must find enough for
        its remaining forwards here, returns all of it, and so on. All ranks agree on which one is oldest.
        """
        own = self.problem.placement[rank]
        M, held = self.problem.num_microbatches, self.held
        done = [(s, nf[s] + (s == stage)) for s in own]
        parts = []
        free = self.limits[rank]
        for at in range(min(n for _, n in done), max(n for _, n in done)):
            k = sequence[at]
            given = sum(held[s * M + k] for s, n in done if at < n)
            lacking = sum(held[s * M + k] for s, n in done if at >= n)
            free -= given
            parts.append((lacking, given))
        for lacking, given in parts:
            if lacking > free:
                return False
            free += given
        return True


class _List:
    """One order as it grows; `_choose` and `_take` are single functions, since calls take time."""

    def __init__(self, lister: Lister, policy: Policy) -> None:
        problem, ev = lister.problem, lister.evaluator
        S, M, P = problem.num_stages, problem.num_microbatches, problem.num_ranks
        self.lister, self.policy, self.ev, self.rank_of = lister, policy, ev, problem.rank_of
        self.S, self.M, self.SM = S, M, S * M
        self.sequence = policy.sequence or tuple(range(M))
        self.period = max(problem.work) / M
        self.due = None if policy.due is None else [seconds * policy.due for seconds in lister.path_seconds]
        # by code, when the input of a forward, and then of an input gradient, arrives
        self.there = [0.0] * M + [_NOT_YET] * (2 * S * M - M)
        self.done = [0] * (2 * S)  # by stage, forwards that have run, then input gradients
        self.deepest_first = [tuple(sorted(own, reverse=True)) for own in problem.placement]
        self.orders: Orders = [[] for _ in range(P)]
        # waiting, begun: by rank, codes of W that may run, and how many of them have run
        self.waiting: list[list[int]] = [[] for _ in range(P)]
        self.begun = [0] * P
        # memory, left: by rank, what it holds, and how many of its actions have not run
        self.memory = [0.0] * P
        self.left = [3 * M * len(own) for own in problem.placement]
        # free, wake: by rank, when its last action ends, and when it decides next: then, or when an input arrives
        self.free, self.wake = [0.0] * P, [0.0] * P
        self.events = [(0.0, rank) for rank in range(P)]

    def run(self) -> Orders:
        events, wake = self.events, self.wake
        heapify(events)
        while events:
            now, rank = heappop(events)
            if now != wake[rank]:
                continue
            code = self._choose(rank, now)
            if code >= 0:
                self._take(rank, code, now)
            elif wake[rank] < _NEVER:
                heappush(events, (wake[rank], rank))
        assert not any(self.left), self.left
        return self.orders

    def _choose(self, rank: int, now: float) -> int:  # noqa: PLR0912 - one loop: calls inside take half as long again
        """The code of the action that a free rank runs; -1: it waits, until `wake`."""
        there, done, sequence, due, period = self.there, self.done, self.sequence, self.due, self.period
        S, M, SM, policy, lister = self.S, self.M, self.SM, self.policy, self.lister
        held, memory = lister.held, self.memory[rank]
        next_input = gradient_due = forward_due = _NEVER
        gradient = forward = -1
        for s in self.deepest_first[rank]:
            at = done[S + s]
            if at < done[s]:
                arrival = there[SM + s * M + sequence[at]]
                if 0.0 <= arrival <= now:
                    if due is None:
                        gradient = s
                        break
                    if (key := due[S + s] + at * period) < gradient_due:
                        gradient, gradient_due = s, key
                elif now < arrival < next_input:
                    next_input = arrival
        starved = False
        for s in self.deepest_first[rank]:
            at = done[s]
            if at < M and at - done[S + s] < policy.ahead[s]:
                k = s * M + sequence[at]
                arrival = there[k]
                if arrival < 0.0:
                    continue
                after = memory + held[k]
                if after > lister.limits[rank] or (
                    after > lister.roomy[rank] and not lister.safe(rank, s, done, sequence)
                ):
                    starved = True
                elif arrival <= now:
                    if due is None:
                        forward = s
                        break
                    if (key := due[s] + at * period) < forward_due:
                        forward, forward_due = s, key
                elif arrival < next_input:
                    next_input = arrival
        waiting, begun = self.waiting[rank], self.begun[rank]
        pending = len(waiting) - begun
        if pending > policy.backlog[rank] or (starved and pending and gradient < 0 and forward < 0):
            return waiting[begun]
        if gradient >= 0:
            is_first = gradient_due <= forward_due if due is not None else not policy.forward_first
            if forward < 0 or is_first:
                return SM + gradient * M + sequence[done[S + gradient]]
        if forward >= 0:
            is_patient = policy.patience and gradient < 0
            if not is_patient or next_input >= now + policy.patience * self.ev.seconds[forward * M]:
                return forward * M + sequence[done[forward]]
        if pending and next_input - now >= policy.fill[rank] * self.ev.seconds[waiting[begun]]:
            return waiting[begun]
        self.wake[rank] = next_input
        return -1

    def _take(self, rank: int, code: int, now: float) -> None:
        ev, M, SM, wake = self.ev, self.M, self.SM, self.wake
        end = now + ev.seconds[code]
        if code >= 2 * SM:
            self.begun[rank] += 1
        else:
            stage = code // M  # and S more for an input gradient
            self.done[stage] += 1
            if code >= SM:
                self.waiting[rank].append(code + SM)
                user = code - M if stage > self.S else -1
            else:
                user = code + M if stage < self.S - 1 else SM + code
            if user >= 0:
                self.there[user] = arrival = end + ev.delay[code]
                other = self.rank_of[user // M % self.S]
                if other != rank and arrival < wake[other] and self.free[other] < wake[other]:  # it idles
                    wake[other] = max(arrival, self.free[other])
                    heappush(self.events, (wake[other], other))
        self.orders[rank].append(code)
        self.memory[rank] += ev.change[code]
        self.left[rank] -= 1
        self.free[rank] = end
        wake[rank] = _NEVER
        if self.left[rank]:
            wake[rank] = end
            heappush(self.events, (end, rank))


def refill(
    evaluator: OrderEvaluator, orders: Orders, *, fill: Sequence[float], backlog: Sequence[int]
) -> Orders | None:
    """The order with its W placed anew and the order of F and I unchanged; None if that exceeds the memory.

        F0 F1 I0 .  I1 .  I2          F0 F1 I0 W0 I1 W1 I2 W2        a W precedes an F or I that would wait for most of
                                                                     its seconds, or that lacks memory

    Arguments:
        orders: without B.
        fill: by rank, a W fills a gap of at least this part of its seconds.
        backlog: by rank, W that may be delayed.
    """
    problem = evaluator.problem
    SM = problem.num_stages * problem.num_microbatches
    seconds, delay, slot, need = evaluator.seconds, evaluator.delay, evaluator.slot, evaluator.need
    change, limits = evaluator.change, evaluator.limits
    fixed = [[code for code in order if code < 2 * SM] for order in orders]
    waiting: list[list[int]] = [[] for _ in orders]
    arrived = [_NOT_YET] * evaluator.num_slots
    blocked = [-1] * evaluator.num_slots
    at, done = [0] * len(orders), [0] * len(orders)
    free, memory = [0.0] * len(orders), [0.0] * len(orders)
    new: Orders = [[] for _ in orders]
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        now, own, begun = free[rank], waiting[rank], done[rank]
        for code in fixed[rank][at[rank] :]:
            waits = need[code]
            arrival = 0.0 if waits < 0 else arrived[waits]
            if arrival < 0.0:
                blocked[waits] = rank
                break
            while begun < len(own):
                weight = own[begun]
                is_short = code < SM and memory[rank] + change[code] > limits[rank]
                if not is_short and len(own) - begun <= backlog[rank] and arrival - now < fill[rank] * seconds[weight]:
                    break
                now += seconds[weight]
                memory[rank] += change[weight]
                new[rank].append(weight)
                begun += 1
            now = (arrival if arrival > now else now) + seconds[code]
            memory[rank] += change[code]
            if code >= SM:
                own.append(code + SM)
            elif memory[rank] > limits[rank]:
                return None
            new[rank].append(code)
            at[rank] += 1
            arrived[slot[code]] = now + delay[code]
            if blocked[slot[code]] >= 0:
                ready.append(blocked[slot[code]])
        free[rank], done[rank] = now, begun
    return [[*order, *own[begun:]] for order, own, begun in zip(new, waiting, done, strict=True)]


def advance(evaluator: OrderEvaluator, orders: Orders) -> Orders:
    """The order with forwards moved ahead, into idle time before them; no action ends later.

        F0 F1 .  .  I0 W0 F2 I1          F0 F1 F2 .  I0 W0 I1        F2 could have run in the gap, and memory allows it

    The forwards of a stage stay in the order of their microbatches, which they must have.
    """
    played = evaluator.play(orders)
    assert played is not None, "an order that deadlocks has no idle time"
    ends, rows, change = played[1], [list(order) for order in orders], evaluator.change
    held = [list(accumulate(change[code] for code in order)) for order in orders]
    arrived = [0.0] * evaluator.num_slots
    for order, own in zip(orders, ends, strict=True):
        for code, end in zip(order, own, strict=True):
            if evaluator.slot[code] >= 0:
                arrived[evaluator.slot[code]] = end + evaluator.delay[code]
    M = evaluator.num_microbatches
    for stage, rank in enumerate(evaluator.problem.rank_of):
        row, own, memory, limit, first = rows[rank], ends[rank], held[rank], evaluator.limits[rank], 0
        for code in range(stage * M, (stage + 1) * M):
            at = to = row.index(code, first)
            ready = arrived[evaluator.need[code]] if stage else 0.0
            seconds, more = evaluator.seconds[code], change[code]
            moved = own[at]
            for place in range(at - 1, first - 1, -1):  # before the action there
                if memory[place] + more > limit or own[place] <= ready:
                    break
                before, free = (memory[place - 1], own[place - 1]) if place else (0.0, 0.0)
                end = max(free, ready) + seconds
                if end <= own[place] - evaluator.seconds[row[place]] and before + more <= limit:
                    to, moved = place, end
            if to < at:
                row.insert(to, row.pop(at))
                own.insert(to, moved)
                del own[at + 1]
                before = memory[to - 1] if to else 0.0
                memory[to : at + 1] = [before + more, *(each + more for each in memory[to:at])]
                arrived[evaluator.slot[code]] = moved + evaluator.delay[code]
            first = to + 1
    return rows


# --- policies to try ---

_AHEAD = (1.0, 2.0, 1.5, 2.25, 3.0)  # forwards ahead of their I, in stages until the end
_BACKLOG = (1.0, None, 0.0, 2.0, 3.0)  # delayed W per rank before this one; None: any number
_FILL = (1.0, 0.7, 0.4, 0.0)
_SHIFT = (0, -1)  # additional forwards
_DUE = (None, 0.0)
_FEW = 12  # policies that are tried first


def first_policies(problem: Problem, random: Random) -> Iterator[Policy]:
    """A spread of policies that suit equal stages, the most common ones first."""
    has_chunks = problem.num_stages > problem.num_ranks
    shifts, dues = (_SHIFT, _DUE) if has_chunks else (_SHIFT[:1], _DUE[:1])
    grid = list(product(_AHEAD, _BACKLOG, _FILL, shifts, dues, (False, True), (0.0, 0.5)))
    few = [each for each in grid if each[2] == 1.0 and not each[5] and not each[6]][:_FEW]
    rest = [each for each in grid if each not in few]
    random.shuffle(rest)
    P, S, M = problem.num_ranks, problem.num_stages, problem.num_microbatches
    sequences = cycle(_sequences(problem))
    for ahead, backlog, fill, shift, due, forward_first, patience in [*few, *rest]:
        most = [max(1, min(M, int(ahead * (S - 1 - s) * P / S + 1) + shift)) for s in range(S)]
        put_off = [M * S // P if backlog is None else int(backlog * rank) for rank in range(P)]
        yield Policy(
            ahead=tuple(most),
            backlog=tuple(put_off),
            fill=(fill,) * P,
            patience=patience,
            forward_first=forward_first,
            due=due,
            sequence=next(sequences),
        )


def _sequences(problem: Problem) -> list[tuple[int, ...] | None]:
    """Orders in which unequal microbatches may enter: as they are, the shortest first, the longest first."""
    if problem.same_microbatches:
        return [None]
    M = problem.num_microbatches
    work = [sum(problem.seconds[op][s][k] for op in SPLIT_OPS for s in range(problem.num_stages)) for k in range(M)]
    rising = sorted(range(M), key=work.__getitem__)
    return [tuple(range(M)), tuple(rising), tuple(reversed(rising))]


def changed(policy: Policy, problem: Problem, random: Random) -> Policy:
    for _ in range(1 + int(random.random() * 2)):
        policy = _change(policy, problem, random)
    return policy


def _change(policy: Policy, problem: Problem, random: Random) -> Policy:
    M = problem.num_microbatches
    if policy.sequence is not None and random.random() < 0.5:
        sequence = list(policy.sequence)
        sequence.insert(random.randrange(M), sequence.pop(random.randrange(M)))
        return replace(policy, sequence=tuple(sequence))
    kind = random.random()
    if kind < 0.5:  # how far the stages of one chunk run ahead
        chunk = random.randrange(max(map(len, problem.placement)))
        stages = [own[chunk] for own in problem.placement if chunk < len(own)]
        change = _line(len(stages), random)
        ahead = list(policy.ahead)
        for stage, more in zip(stages, change, strict=True):
            ahead[stage] = max(1, min(M, ahead[stage] + more))
        return replace(policy, ahead=tuple(ahead))
    if kind < 0.9:
        fill, backlog = changed_weights(policy.fill, policy.backlog, problem, random)
        return replace(policy, fill=fill, backlog=backlog)
    if kind < 0.94:
        return replace(policy, patience=random.choice((0.0, 0.25, 0.5, 0.75)))
    if kind < 0.97:
        return replace(policy, forward_first=not policy.forward_first)
    return replace(policy, due=random.choice((None, -0.2, 0.0, 0.2, 0.5, 1.0)))


def changed_weights(
    fill: tuple[float, ...], backlog: tuple[int, ...], problem: Problem, random: Random
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    P = problem.num_ranks
    if random.random() < 0.5:
        most = problem.num_microbatches * problem.num_stages // P
        change = _line(P, random)
        return fill, tuple(max(0, min(most, old + more)) for old, more in zip(backlog, change, strict=True))
    part = random.choice((0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
    if random.random() < 0.3:
        return (part,) * P, backlog
    low, high = sorted(random.randrange(P) for _ in range(2))
    return (*fill[:low], *(part,) * (high + 1 - low), *fill[high + 1 :]), backlog


def _line(number: int, random: Random) -> list[int]:
    """[number] random whole changes along ranks or stages: of one, of a range alike, or rising or falling along all."""
    step = random.choice((-1, 1)) * (1 if random.random() < 0.6 else 1 + int(random.random() * 4))
    kind = random.random()
    if kind < 0.4:
        low = high = random.randrange(number)
    else:
        low, high = sorted(random.randrange(number) for _ in range(2))
    if kind < 0.7:
        return [step if low <= at <= high else 0 for at in range(number)]
    last = max(1, number - 1)
    rising = random.random() < 0.5
    return [round(step * (at if rising else last - at) / last) for at in range(number)]
