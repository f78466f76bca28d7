"""List scheduling with look-ahead: an order built by walking through time, each rank deciding when it is free.

    what a free rank does      an I that is there, or an F if its stage may run further ahead and memory allows,
                               in the gap before the next input a W; a W at once where memory or the backlog asks for it

Numbers in a `Policy` steer it, so that searching among policies searches among whole orders. It never ends in a
deadlock: the oldest microbatch always finds the memory for the rest of its way.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from .evaluate import Evaluator, Orders

_NOT_YET = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Numbers that steer the building of an order.

    Arguments:
        ahead: [S] forwards of a stage that may be without their I at once, at least 1.
        backlog: [P] W that a rank may put off.
        fill: a W goes into a gap of at least this part of its seconds, by rank.
        patience: a rank leaves an F for an I, or an F of a later stage, that comes within this part of the F's seconds.
        forward_first: whether an F that may run goes before an I that may.
        due: if given, the F or I goes first that is due first: a microbatch each round of the busiest rank's work, from
            this part of its way's seconds on. It takes the place of the two rules before.
        sequence: the order in which microbatches enter.
    """

    ahead: tuple[int, ...]
    backlog: tuple[int, ...]
    fill: tuple[float, ...]
    patience: float = 0.0
    forward_first: bool = False
    due: float | None = None
    sequence: tuple[int, ...] | None = None


class Lister:
    """Builds orders of one problem."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        problem = self.problem = evaluator.problem
        self.limits = problem.limits
        self.held = [n for row in problem.held for n in row]
        self.ways = self._ways()
        # Up to here a forward leaves enough for the other forwards of any one microbatch, so that it is always safe.
        largest = [max(row) for row in problem.held]
        self.roomy = [
            limit - sum(sorted(largest[s] for s in own)[1:])
            for limit, own in zip(self.limits, problem.placement, strict=True)
        ]

    def _ways(self) -> list[float]:
        """Seconds of the first microbatch's way up to each F, then up to each I."""
        problem, S = self.problem, self.problem.num_stages
        ways, now = [0.0] * (2 * S), 0.0
        for s in range(S):
            ways[s] = now
            now += problem.forward[s][0] + problem.forward_delay[s]
        for s in reversed(range(S)):
            ways[S + s] = now
            now += problem.input_grad[s][0] + problem.gradient_delay[s]
        return ways

    def build(self, policy: Policy) -> Orders:  # noqa: PLR0912, PLR0915 - one loop: calls inside take half as long again
        """The order that a policy leads to."""
        problem, ev = self.problem, self.evaluator
        S, M, P = problem.num_stages, problem.num_microbatches, problem.num_ranks
        SM = S * M
        seconds, delay, rank_of = ev.seconds, ev.delay, problem.rank_of
        sequence = policy.sequence or tuple(range(M))
        held, change, limits, roomy = self.held, ev.change, self.limits, self.roomy
        ahead, backlog, fill = policy.ahead, policy.backlog, policy.fill
        forward_first, patience = policy.forward_first, policy.patience
        period = max(problem.work) / M
        due = None if policy.due is None else [way * policy.due for way in self.ways]
        there_f = [_NOT_YET] * SM  # when the input of a forward is there
        there_i = [_NOT_YET] * SM
        there_f[:M] = [0.0] * M
        nf, ni = [0] * S, [0] * S  # how many forwards and input gradients of a stage have run
        deepest_first = [tuple(sorted(own, reverse=True)) for own in problem.placement]
        orders: Orders = [[] for _ in range(P)]
        waiting: list[list[int]] = [[] for _ in range(P)]  # W that may run, as codes
        begun = [0] * P  # first of them that has not run
        memory = [0.0] * P
        left = [3 * M * len(own) for own in problem.placement]
        free = [0.0] * P  # when its last action ends
        wake = [0.0] * P  # when it decides next: then, or when an input comes
        events = [(0.0, rank) for rank in range(P)]
        heapify(events)
        infinity = float("inf")
        while events:
            now, rank = heappop(events)
            if now != wake[rank]:
                continue
            pending = len(waiting[rank]) - begun[rank]
            chosen = -1
            next_input = infinity
            gradient = -1
            gradient_due = forward_due = infinity
            for s in deepest_first[rank]:
                at = ni[s]
                if at < nf[s]:
                    arrival = there_i[s * M + sequence[at]]
                    if arrival >= 0.0:
                        if arrival <= now:
                            if due is None:
                                gradient = s
                                break
                            if (key := due[S + s] + at * period) < gradient_due:
                                gradient, gradient_due = s, key
                        elif arrival < next_input:
                            next_input = arrival
            forward = -1
            starved = False
            for s in deepest_first[rank]:
                at = nf[s]
                if at < M and at - ni[s] < ahead[s]:
                    k = s * M + sequence[at]
                    arrival = there_f[k]
                    if arrival >= 0.0:
                        if memory[rank] + held[k] > limits[rank] or (
                            memory[rank] + held[k] > roomy[rank] and not self._safe(rank, s, nf, sequence)
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
            if pending > backlog[rank] or (starved and pending and gradient < 0 and forward < 0):
                chosen = 2
            elif gradient >= 0 and (
                forward < 0 or (gradient_due <= forward_due if due is not None else not forward_first)
            ):
                chosen = 1
            elif forward >= 0:
                chosen = 0
                if patience and gradient < 0 and next_input < now + patience * seconds[forward * M]:
                    chosen = -1
            if chosen < 0 and pending:
                code = waiting[rank][begun[rank]]
                if next_input - now >= fill[rank] * seconds[code]:
                    chosen = 2
            if chosen < 0:
                wake[rank] = next_input
                if next_input < infinity:
                    heappush(events, (next_input, rank))
                continue
            if chosen == 2:
                code = waiting[rank][begun[rank]]
                begun[rank] += 1
                end = now + seconds[code]
            else:
                if chosen:
                    s = gradient
                    at = s * M + sequence[ni[s]]
                    ni[s] += 1
                    code = SM + at
                    waiting[rank].append(at + 2 * SM)
                    user, table = (at - M, there_i) if s else (-1, there_i)
                else:
                    s = forward
                    at = s * M + sequence[nf[s]]
                    nf[s] += 1
                    code = at
                    user, table = (at + M, there_f) if s < S - 1 else (at, there_i)
                end = now + seconds[code]
                if user >= 0:
                    arrival = end + delay[code]
                    table[user] = arrival
                    other = rank_of[user // M]
                    if other != rank and arrival < wake[other] and free[other] < wake[other]:  # it idles
                        wake[other] = max(arrival, free[other])
                        heappush(events, (wake[other], other))
            orders[rank].append(code)
            memory[rank] += change[code]
            left[rank] -= 1
            free[rank] = end
            wake[rank] = end if left[rank] else infinity
            if left[rank]:
                heappush(events, (end, rank))
        assert not any(left), left
        return orders

    def _safe(self, rank: int, stage: int, nf: list[int], sequence: tuple[int, ...]) -> bool:
        """Whether, once `stage` has run its next forward, the microbatches under way can still end one after the other.

        Those whose forwards here have all run give back what they hold; then the oldest of the others finds the memory
        for the forwards that it has yet to run here, gives all back, and so on. All ranks take the same one for oldest.
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
