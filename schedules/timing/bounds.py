"""A lower bound of the makespan: no order of the same work can be faster."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

from ..dependencies import Dependencies, Wire
from ..ir import Op, Schedule
from ..messages import MessageKind
from .costs import Costs, CostTable
from .links import Links, wire_bytes
from .simulate import ideal_makespan


def lower_bound(schedule: Schedule, costs: Costs, links: Links | None = None) -> float:
    """The largest (earliest possible start + work + shortest possible tail) of any set of actions of one rank [s].

        head              work          tail
        - - - - - - - - - F F F B B B - - - -     all actions of a rank: the first microbatch passes the stages before,
                                                  the last gradient passes them again
        F - - - - - - - - B B B                   the backwards of the first rank: the round trip of one microbatch

    It holds for every order of the same actions on the same placement, since one of the set starts first and one ends
    last. All sets are evaluated, each action with the head and tail of its own microbatch (`machine_bound`). With
    links, the messages of one link or network card are such a set, too. Moves of activations are ignored, and where
    actions run together exchanges in all sets but that of a rank's whole work. O(actions + U
    * (S + edges * log(edges)) + P * U * V * log(U * V)), of U microbatches of unequal costs.
    """
    table = costs.table_for(schedule)
    if table.norm is not None and schedule.has_epilogue:  # all ranks synchronise before their updates
        own_update = max(
            sum(table.of(Op.U, s, 0) for s in stages if schedule.trains(s)) for stages in schedule.placement
        )
        return lower_bound(schedule, replace(costs, update=0.0, norm=None), links) + table.norm + own_update
    paths = _PathBounds(schedule, table.without_exchanges if schedule.overlapped else table, links)
    sets = [paths.jobs(rank) for rank in range(schedule.num_ranks)]
    found = max(machine_bound(jobs) for jobs in (*sets, *paths.loads))
    return max(found, ideal_makespan(schedule, costs)) if schedule.overlapped else found


def schedule_bound(schedule: Schedule, costs: Costs, links: Links | None = None) -> float:
    """Seconds per batch that no order of this work on this placement can beat: for a flush batch `lower_bound`, for a
    stream the largest own work of any rank."""
    if schedule.is_asynchronous or schedule.num_batches > 1:
        return ideal_makespan(schedule, costs) / schedule.num_batches
    return lower_bound(schedule, costs, links)


class Job(NamedTuple):
    """Work for one machine: actions of one op and stage on a rank, or messages of one wire over a link. It starts no
    earlier than `head`, and `tail` follows it [s]."""

    head: float
    work: float
    tail: float


def machine_bound(jobs: Iterable[Job]) -> float:
    """The largest (least head + all work + least tail) of any set of jobs of one machine [s].

    This is the time of the machine if it may interrupt a job for one with a longer tail: Jackson's preemptive schedule
    reaches that bound (Carlier, 1982). O(n log n).

    >>> machine_bound([Job(0, 2, 5), Job(1, 4, 6), Job(3, 1, 0)])
    11
    """
    bound = now = 0.0
    waiting: list[tuple[float, float]] = []  # (-tail, work that is left)
    for head, work, tail in (*sorted(jobs), Job(math.inf, 0.0, 0.0)):
        while waiting and now < head:
            less, left = waiting[0]
            if now + left <= head:
                heappop(waiting)
                now += left
                bound = max(bound, now - less)
            else:
                heapreplace(waiting, (less, left - (head - now)))
                now = head
        if head < math.inf:
            now = max(now, head)
            heappush(waiting, (-tail, work))
    return bound


class _LongestPaths:
    """The longest paths of one microbatch to and from the forward and the gradient of each stage.

    Arguments:
        index: of the microbatch.
        activations, gradients: (maker, user, delay) each; from lower stages to higher ones, and back.
        present: ops and stages of which the schedule has actions.
        update: by stage, seconds that follow any gradient of it.
    """

    def __init__(
        self,
        table: CostTable,
        index: int,
        *,
        activations: Sequence[tuple[int, int, float]],
        gradients: Sequence[tuple[int, int, float]],
        present: set[tuple[Op, int]],
        update: Sequence[float],
    ) -> None:
        stages = range(len(update))
        self.forward = forward = [table.of(Op.F, s, index) for s in stages]
        # The op that computes the gradient: the cheaper one if a stage has both.
        self.gradient = gradient = [
            min((table.of(op, s, index) for op in (Op.B, Op.I) if (op, s) in present), default=0.0) for s in stages
        ]
        self.to_forward = [0.0 for _ in stages]
        for src, dst, delay in sorted(activations, key=lambda way: way[1]):
            self.to_forward[dst] = max(self.to_forward[dst], self.to_forward[src] + forward[src] + delay)

        self.to_gradient = [way + cost for way, cost in zip(self.to_forward, forward, strict=True)]
        for src, dst, delay in sorted(gradients, key=lambda way: -way[1]):
            self.to_gradient[dst] = max(self.to_gradient[dst], self.to_gradient[src] + gradient[src] + delay)

        # The weight gradient follows, too, unless a whole backward may have computed the gradient.
        self.after_gradient = list(update)
        for s in stages:
            if (Op.W, s) in present and (Op.B, s) not in present:
                self.after_gradient[s] += table.of(Op.W, s, index)
        for src, dst, delay in sorted(gradients, key=lambda way: way[0]):
            way = delay + gradient[dst] + self.after_gradient[dst]
            self.after_gradient[src] = max(self.after_gradient[src], way)

        self.after_forward = [g + way for g, way in zip(gradient, self.after_gradient, strict=True)]
        for src, dst, delay in sorted(activations, key=lambda way: -way[0]):
            way = delay + forward[dst] + self.after_forward[dst]
            self.after_forward[src] = max(self.after_forward[src], way)

    def made(self, stage: int) -> float:
        """The earliest time of the gradient of a stage [s]."""
        return self.to_gradient[stage] + self.gradient[stage]


class _PathBounds:
    """Paths of all microbatches, one for those of equal costs, and the work of ranks and links."""

    def __init__(self, schedule: Schedule, table: CostTable, links: Links | None) -> None:
        self.schedule, self.table, self.links = schedule, table, links
        wires = Dependencies(schedule).wires
        self.kinds, self.kind_of = _kinds(table, schedule.total_indices)
        self.counts = [
            Counter((op, s, 0 if op is Op.U else self.kind_of[k]) for s, op, k in program)
            for program in schedule.compute_programs
        ]
        self.present = {(op, stage) for counts in self.counts for op, stage, _ in counts}
        self.sums = {each.stage: each for each in links.sums} if links is not None else {}
        self.update = [self._update(s) for s in range(schedule.num_stages)]
        least = 1.0 if links is None else min(links.index_factors or (1.0,))
        self.sizes = (
            {} if links is None else {w: each * least for w, each in wire_bytes(schedule, links, wires).items()}
        )
        delay = {wire: self._delay(wire) for wire in wires}
        activations = [(w.src, user, delay[w]) for w in wires if w.kind is MessageKind.ACT for user in w.users]
        gradients = [(m, w.dst, delay[w]) for w in wires if w.kind is MessageKind.GRAD for m in w.makers]
        self.paths = [
            _LongestPaths(
                table, index, activations=activations, gradients=gradients, present=self.present, update=self.update
            )
            for index in self.kinds
        ]
        self.loads = [] if links is None else self._loads(links, wires)

    def _update(self, stage: int) -> float:
        """Seconds of sums and optimizer steps that follow any gradient of `stage`."""
        update = [seconds * self.schedule.trains(s) for s, seconds in enumerate(self.table.update)]
        own = update[stage] + self._summing(stage)
        if self.schedule.has_epilogue:
            placement = self.schedule.placement
            return max(own, min(sum(update[s] for s in placement[rank]) for rank in self.schedule.owners[stage]))
        return own if (Op.U, stage) in self.present else 0.0

    def _summing(self, stage: int) -> float:
        if stage in self.sums:
            return self.sums[stage].seconds
        is_summed = len(self.schedule.owners[stage]) > 1 and self.schedule.trains(stage)
        return self.table.reduce_grad[stage] if is_summed else 0.0

    def _pairs(self, wire: Wire) -> Counter[tuple[int, int, int]]:
        """Numbers of messages between each pair of ranks over a wire, by kind of microbatch."""
        owner = self.schedule.owner
        indices = range(self.schedule.total_indices)
        pairs = Counter((owner(wire.src, k), owner(wire.dst, k), self.kind_of[k]) for k in indices)
        return Counter({key: count for key, count in pairs.items() if key[0] != key[1]})

    def _delay(self, wire: Wire) -> float:
        """The least seconds from stage to stage; 0 if some rank holds both."""
        if set(self.schedule.owners[wire.src]) & set(self.schedule.owners[wire.dst]):
            return 0.0
        delay = self.table.latency[wire.src]
        if self.links is None:
            return delay
        ways = [self.links.way(src, dst) for src, dst, _ in self._pairs(wire)]
        return delay + min(way.latency + self.sizes[wire] * way.seconds_per_byte for way in ways)

    def _loads(self, links: Links, wires: Sequence[Wire]) -> list[list[Job]]:
        """Messages and sums on each link and network card."""
        loads: dict[object, list[Job]] = {}
        for wire in wires:
            for (src, dst, kind), count in self._pairs(wire).items():
                way, each = links.way(src, dst), self.paths[kind]
                if wire.kind is MessageKind.ACT:
                    head = each.to_forward[wire.src] + each.forward[wire.src]
                    tail = max(each.forward[user] + each.after_forward[user] for user in wire.users)
                else:
                    head = max(each.made(maker) for maker in wire.makers)
                    tail = each.gradient[wire.dst] + each.after_gradient[wire.dst]
                seconds = count * self.sizes[wire] * way.seconds_per_byte
                job = Job(head, seconds, self.table.latency[wire.src] + way.latency + tail)
                for name in links.channels(src, dst):
                    loads.setdefault(name, []).append(job)
        for summed in self.sums.values():
            if self.schedule.has_epilogue or (Op.U, summed.stage) in self.present:
                updates = self.schedule.num_batches * self.schedule.groups_per_batch
                seconds = summed.seconds * (1 if self.schedule.has_epilogue else updates)
                job = Job(self._first_made(summed.stage), seconds, self.table.of(Op.U, summed.stage, 0))
                for name in links.channels_of_sum(summed, self.schedule.owners[summed.stage]):
                    loads.setdefault(name, []).append(job)
        return list(loads.values())

    def _first_made(self, stage: int) -> float:
        return min(way.made(stage) for way in self.paths)

    def jobs(self, rank: int) -> list[Job]:
        jobs = []
        for (op, stage, kind), count in self.counts[rank].items():
            cost, way = self.table.of(op, stage, self.kinds[kind]), self.paths[kind]
            match op:
                case Op.F:
                    jobs.append(Job(way.to_forward[stage], count * cost, way.after_forward[stage]))
                case Op.B | Op.I:
                    jobs.append(Job(way.to_gradient[stage], count * cost, way.after_gradient[stage]))
                case Op.W:
                    head = way.to_gradient[stage] + self.table.of(Op.I, stage, self.kinds[kind])
                    jobs.append(Job(head, count * cost, self.update[stage]))
                case Op.U:  # the last one follows all others
                    head = self._first_made(stage) + self._summing(stage)
                    jobs += [Job(head, (count - 1) * cost, cost), Job(head, cost, 0.0)]
        return jobs


def _kinds(table: CostTable, num_indices: int) -> tuple[list[int], list[int]]:
    """One index for each group of indices with equal costs; and by index, its group."""
    if not table.varies:
        return [0], [0] * num_indices
    numbers: dict[Hashable, int] = {}
    kinds: list[int] = []
    kind_of: list[int] = []
    rows = [row for op_rows in table.rows.values() for row in op_rows if len(row) > 1]
    for k in range(num_indices):
        number = numbers.setdefault(tuple(row[k % len(row)] for row in rows), len(numbers))
        if number == len(kinds):
            kinds.append(k)
        kind_of.append(number)
    return kinds, kind_of
