"""A chain of layers as stages on ranks, in an order: what such a state takes.

cut      [S + 1]  the first layer of each stage, and the number of layers
ranks    [S]      the rank of each stage
orders   [P]      F and I of each rank as codes (op * S + stage) * M + microbatch; W fill its gaps
over     [P]      how many times its gap a W may last; 0: each I and its W run as one B

loads             by rank, head + M * work + update: no order is faster                          O(S)
play              when each F and I ends, and where each W runs                                  O(S M)
listed            an order: each rank takes what has arrived, the least key first                O(S M log M)
carried           keys from another state: when the first layer of each F and I ran there        O(S M)
even              keys as if microbatches came at equal intervals, and waited for nothing        O(S M)
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from itertools import accumulate, pairwise, permutations
from operator import add
from typing import NamedTuple, cast

import numpy as np

from ..orders.evaluate import Orders
from ..orders.problem import with_rounding
from ..timing.costs import Costs
from ..timing.links import Links

Stages = tuple[list[int], list[int]]  # cut and ranks

_SIDE = 0.3  # weight of the average rank relative to the one that determines the value


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of a chain, which is not cut further. Memory is in the unit of the memory limit.

    Arguments:
        forward, input_grad, weight_grad: F, I and W of one microbatch [s].
        backward: an I and its W run as one [s]; None: as long as both.
        activation: memory from its forward until the end of its W.
        update: of the optimizer's step, once a batch [s].
        weights: memory that its rank holds all the time.
        output: of the message to the next layer, and of the gradient back [bytes]; its rank holds it, too.

    Raises ValueError for anything but finite numbers of at least 0, and for a forward of 0.
    """

    forward: float
    input_grad: float
    weight_grad: float
    backward: float | None = None
    activation: float = 1.0
    update: float = 0.0
    weights: float = 0.0
    output: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None and each.name == "backward":
                continue
            if not (isinstance(value, int | float | np.number) and 0 <= value < math.inf):
                raise ValueError(f"{each.name}={value!r} of a layer: expected a finite number, at least 0")
        if self.forward == 0:
            raise ValueError("forward=0 of a layer: expected more than 0 seconds")

    @property
    def both(self) -> float:
        """I and W, or B where that is less [s]."""
        apart = self.input_grad + self.weight_grad
        return apart if self.backward is None else min(apart, self.backward)


class StageTables(NamedTuple):
    """Tables of stages on ranks: by code seconds of F and I (or B), and delay and code of their input; by stage the
    seconds of W and the memory of a microbatch; by rank the memory that is left for these, seconds after its last
    action, and its work with these."""

    seconds: list[float]
    delay: list[float]
    need: list[int]
    weights: list[float]
    held: list[float]
    rooms: list[float]
    after: list[float]
    work: list[float]


class Arranged(NamedTuple):
    """A state as played. `written`: orders with W; `ends`, `last`: seconds by code and by rank."""

    cut: list[int]
    ranks: list[int]
    orders: Orders
    over: list[float]
    tables: StageTables
    written: Orders
    ends: list[float]
    last: list[float]
    value: float
    cost: float


class LayerChain:
    """Layers, M microbatches and P ranks, with limits of their memory. Of `runtime` the latency, the overhead (of each
    action, and of either end of a message) and the norm count."""

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        num_microbatches: int,
        limits: Sequence[float],
        runtime: Costs,
        links: Links | None,
    ) -> None:
        names = ("forward", "input_grad", "weight_grad", "both", "activation", "weights", "update")
        columns = ((getattr(each, name) for each in layers) for name in names)
        self.sums: list[list[float]] = [[*accumulate(column, initial=0.0)] for column in columns]
        self.F, self.I, _, _, held, weights, _ = self.sums
        self.P, self.M, self.L = len(limits), num_microbatches, len(layers)
        self.limits = [with_rounding(limit) for limit in limits]
        self.output = [0.0, *(each.output for each in layers)]
        self.output[-1] = 0.0
        self.overhead, self.message = cast(float, runtime.overhead), cast(float, runtime.message_overhead)
        self.norm, late = runtime.norm, cast(float, runtime.latency)
        ways = [[links.way(a, b) if links and a != b else None for b in range(self.P)] for a in range(self.P)]
        self.latency = [[late + (way.latency if way else 0.0) for way in own] for own in ways]
        for rank, own in enumerate(self.latency):
            own[rank] = 0.0
        self.rate = [[way.seconds_per_byte if way else 0.0 for way in own] for own in ways]
        self.need = list(map(add, held, weights))
        self.least = [self.M * (each.forward + each.both) + each.update for each in layers]
        self.whole = [*accumulate(self.least, initial=0.0)]
        self.each = 2 * self.M * self.overhead  # of a stage, at least
        hops = (self.latency[a][b] for a, b in permutations(range(self.P), 2))
        self.step = self.overhead + min(hops, default=0.0)  # from a stage to the next, at least
        self.ideal = self.whole[-1] / self.P

    def loads(self, stages: Stages) -> list[float]:
        """By rank, its work after its earliest start; far more if one microbatch does not fit."""
        cut, ranks = stages
        work, need, head = [self.norm or 0.0] * self.P, [0.0] * self.P, [-1.0] * self.P
        for rank, start, end in zip(ranks, cut, cut[1:]):  # noqa: B905 - the last boundary is an end
            if head[rank] < 0.0:
                head[rank] = self.F[start] + self.step * (start > 0)
            work[rank] += self.whole[end] - self.whole[start] + self.each
            need[rank] += self.need[end] - self.need[start] + self.output[end]
        parts = zip(work, head, need, self.limits, strict=True)
        return [w + h + 10 * self.ideal * n / limit * (n > limit) for w, h, n, limit in parts]

    def least_seconds(self) -> float:
        """Seconds that nothing can beat: the r-th rank to start has the forwards of r layers before it, and the rank
        of a layer all its work after those before it. Each rank has an F and a B a microbatch, at least."""
        heads = math.fsum(self.F[r] + r * self.step for r in range(self.P))
        alone = [own + head for own, head in zip(self.least, self.F[:-1], strict=True)]
        mean = (math.fsum(self.least) + heads) / self.P
        return max(mean, *alone) + 2 * self.M * self.overhead + (self.norm or 0.0)

    def tables(self, stages: Stages, over: Sequence[float]) -> StageTables:
        cut, ranks = stages
        M, S = self.M, len(ranks)
        columns = ([b - a for a, b in pairwise(sums[at] for at in cut)] for sums in self.sums)
        F, I, W, both, held, weights, update = columns
        output = [self.output[at] for at in cut[1:]]
        held = list(map(add, held, output))
        hops = [0, *(int(a != b) for a, b in pairwise(ranks)), 0]
        around = [self.overhead + self.message * sum(both) for both in pairwise(hops)]
        F, W, work = list(map(add, F, around)), [w + self.overhead for w in W], [0.0] * self.P
        rooms, after = list(self.limits), [0.0] * self.P
        for s, rank in enumerate(ranks):
            is_one = over[rank] <= 0.0
            I[s] = (both[s] if is_one else I[s]) + around[s]
            work[rank] += M * (F[s] + I[s] + (0.0 if is_one else W[s]))
            rooms[rank] -= weights[s]
            after[rank] += update[s]
        if self.norm is not None:
            after = [self.norm + max(after)] * self.P
        ways = [*zip(ranks, ranks[1:], output)]  # noqa: B905 - nothing leaves the last stage
        there = [self.latency[a][b] + size * self.rate[a][b] for a, b, size in ways]
        back = [self.latency[b][a] + size * self.rate[b][a] for a, b, size in ways]
        delay = [n for each in (0.0, *there, *back, 0.0) for n in [each] * M]
        SM = M * S
        need = [-1] * M + [*range(SM - M)] + [*range(SM + M, 2 * SM)] + [*range(SM - M, SM)]
        seconds = [n for each in (*F, *I) for n in [each] * M]
        return StageTables(seconds, delay, need, W, held, rooms, after, list(map(add, work, after)))

    def play(
        self,
        stages: Stages,
        orders: Orders,
        over: list[float],
        given: StageTables | None = None,
        most: float = math.inf,
    ) -> Arranged | None:
        """Evaluates orders of F and I, with W in gaps (the longest that fits, else the shortest up to `over` gaps) and
        where an F needs room. None for a deadlock, too much memory, or a value of at least `most`."""
        M, SM = self.M, len(stages[1]) * self.M
        seconds, delay, need, weights, held, rooms, after, work = tables = given or self.tables(stages, over)
        idle = [most * (1.0 + 1e-12) - each for each in work]  # still allowed
        ends, blocked = [-1.0] * (2 * SM) + [0.0], [-1] * (2 * SM)
        owed: list[list[tuple[float, int]]] = [[] for _ in orders]  # seconds and code of W that may run
        log: list[list[int]] = [[] for _ in orders]
        at, free, room = [0] * self.P, [0.0] * self.P, list(rooms)
        ready = [*range(self.P)]
        while ready:
            rank = ready.pop()
            now, mine, own, note, is_one = free[rank], owed[rank], orders[rank], log[rank].append, over[rank] <= 0.0
            for n in range(at[rank], len(own)):
                code = own[n]
                there = ends[need[code]]
                if there < 0.0:
                    blocked[need[code]] = rank
                    break
                there += delay[code]
                wanted = held[code // M] if code < SM else 0.0
                while mine and (there > now or room[rank] < wanted):
                    fitting = bisect_right(mine, (there - now, 3 * SM)) - 1
                    if fitting < 0 and room[rank] >= wanted and mine[0][0] > (there - now) * over[rank]:
                        break
                    weight, done = mine.pop(max(0, fitting))
                    now += weight
                    note(done)
                    room[rank] += held[(done - 2 * SM) // M]
                start = there if there > now else now
                idle[rank] -= start - now
                ends[code] = now = start + seconds[code]
                room[rank] -= wanted
                if code < SM:
                    note(code)
                elif is_one:
                    note(code + 2 * SM)
                    room[rank] += held[(code - SM) // M]
                else:
                    note(code)
                    insort(mine, (weights[(code - SM) // M], code + SM))
                if room[rank] < 0.0 or idle[rank] < 0.0:
                    return None
                if blocked[code] >= 0:
                    ready.append(blocked[code])
                at[rank] += 1
            free[rank] = now
        if sum(at) < 2 * SM:  # a deadlock
            return None
        written = [[*each, *(code for _, code in waiting)] for each, waiting in zip(log, owed, strict=True)]
        left_over = (sum(weight for weight, _ in waiting) for waiting in owed)
        last = [now + weight + more for now, weight, more in zip(free, left_over, after, strict=True)]
        cost = max(last) + _SIDE * (sum(last) / self.P - self.ideal)
        return Arranged(*stages, orders, over, tables, written, ends, last, max(last), cost)

    def carried(self, parent: Arranged, cut: Sequence[int]) -> list[float]:
        """By code, the time in the parent of the first layer of each F and I."""
        M, ends, old = self.M, parent.ends, parent.cut
        before, first, last = len(parent.ranks) * M, 0, 0
        keys: tuple[list[float], list[float]] = [], []  # of F, of I
        for start, end in pairwise(cut):
            while old[first + 1] <= start:
                first += 1
            while old[last + 1] < end:
                last += 1
            shift = self.F[start] - self.F[old[first + 1]]
            keys[0].extend(ends[first * M + k] + shift for k in range(M))
            shift = self.I[old[last]] - self.I[end]
            keys[1].extend(ends[before + last * M + k] + shift for k in range(M))
        return keys[0] + keys[1]

    def even(self, tables: StageTables, lag: float) -> list[float]:
        """By code, when each F and I would begin if nothing waited; the way back takes `lag` times as long."""
        M, SM = self.M, len(tables.weights) * self.M
        forward = [f + d for f, d in zip(tables.seconds[:SM:M], tables.delay[:SM:M], strict=True)]
        back = [i + d for i, d in zip(tables.seconds[SM::M], tables.delay[SM::M], strict=True)]
        ends = [*accumulate(forward)]
        later = [ends[-1] + lag * end for end in accumulate(reversed(back))][::-1]
        return [end + k * self.ideal / M for end in (*ends, *later) for k in range(M)]

    def listed(  # noqa: PLR0912, PLR0915 - one loop: calls inside take half as long again
        self, ranks: list[int], tables: StageTables, keys: Sequence[float], over: list[float], most: float = math.inf
    ) -> Orders | None:
        """List scheduling by `keys`; W fill gaps. An F that leaves no room for a whole microbatch must be of the oldest
        one. None as soon as one rank has idled too long."""
        M, S, SM = self.M, len(ranks), len(ranks) * self.M
        seconds, delay, _, weights, held, rooms, _, work = tables
        idle = [most - each for each in work]  # that a rank may
        coming: list[list[tuple[float, int]]] = [[] for _ in range(self.P)]  # when, code
        there: list[list[tuple[float, int]]] = [[] for _ in range(self.P)]  # key, code
        owed: list[list[tuple[float, float]]] = [[] for _ in range(self.P)]  # seconds and room of W
        orders: Orders = [[] for _ in range(self.P)]
        wake, busy, room, oldest = [0.0] * self.P, [0.0] * self.P, list(rooms), [0] * self.P
        whole = [sum(h for h, own in zip(held, ranks, strict=True) if own == rank) for rank in range(self.P)]
        coming[ranks[0]] = [(0.0, k) for k in range(M)]
        events = [(0.0, rank) for rank in range(self.P)]
        while events:
            now, rank = heappop(events)
            if now != wake[rank]:
                continue
            arrivals, mine = coming[rank], there[rank]
            while arrivals and arrivals[0][0] <= now:
                code = heappop(arrivals)[1]
                insort(mine, (keys[code], code))
            gap = arrivals[0][0] - now if arrivals else math.inf
            has_room = room[rank] >= whole[rank]
            may = (e for e in mine if has_room or e[1] >= SM or e[1] % M == oldest[rank])
            if (chosen := next(may, None)) is not None:
                mine.remove(chosen)
                code = chosen[1]
                orders[rank].append(code)
                end, user, stage = now + seconds[code], code + M, code // M % S
                if code < SM:
                    room[rank] -= held[stage]
                    user = user if user < SM else code + SM
                else:
                    if over[rank] > 0.0:
                        insort(owed[rank], (weights[stage], held[stage]))
                    else:
                        room[rank] += held[stage]
                    oldest[rank] += stage == ranks.index(rank)
                    user = code - M if stage else -1
                if user >= 0:
                    other = ranks[user // M % S]
                    heappush(coming[other], (end + delay[user], user))
                    if wake[other] > end + delay[user] and busy[other] < wake[other]:
                        wake[other] = max(end + delay[user], busy[other])
                        heappush(events, (wake[other], other))
            elif owed[rank] and (mine or owed[rank][0][0] <= gap * over[rank]):
                weight, freed = owed[rank].pop(max(0, bisect_right(owed[rank], (gap, math.inf)) - 1))
                end, room[rank] = now + weight, room[rank] + freed
            else:
                wake[rank] = now + gap
                if gap < math.inf:
                    heappush(events, (wake[rank], rank))
                continue
            idle[rank] -= now - busy[rank]
            if idle[rank] < 0.0:
                return None
            busy[rank] = wake[rank] = end
            heappush(events, (end, rank))
        return orders if sum(map(len, orders)) == 2 * SM else None
