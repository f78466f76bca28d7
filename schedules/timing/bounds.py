"""A lower bound of the makespan: what no order of the same work can beat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..ir import Op, Schedule
from ..messages import MessageKind
from ..needs import Needs, Wire
from .costs import Costs, CostTable
from .links import Links, wire_bytes


def lower_bound(schedule: Schedule, costs: Costs, links: Links | None = None) -> float:
    """The largest (earliest possible start + work + shortest possible tail) of any set of actions of one rank [s].

        head              work          tail
        - - - - - - - - - F F F B B B - - - -     all actions of a rank: the first microbatch must come through the
                                                  stages before, the last gradient through them again
        F - - - - - - - - B B B                   the backwards of the first rank: one microbatch's whole way and back

    It holds for every order of the same actions on the same placement, since one of the set starts first and one
    ends last. Tried are the sets of all actions with a head of at least h and a tail of at least q.
    With links, the messages of one link or network card are such a set, too. The one-machine bound of Carlier (1982).
    O(actions + P * V^2 + S + edges * (log(edges) + M)).
    """
    table = costs.table(num_stages=schedule.num_stages)
    if table.norm is not None and schedule.has_epilogue:  # all ranks come together in front of their updates
        own_update = max(sum(table.update[s] for s in stages) for stages in schedule.placement)
        return lower_bound(schedule, replace(costs, update=0.0, norm=None), links) + table.norm + own_update
    ways = _Ways(schedule, table, links)
    sets = [ways.jobs(rank) for rank in range(schedule.num_ranks)]
    return max(_machine_bound(jobs) for jobs in (*sets, *ways.loads))


class _Job(NamedTuple):
    """All actions of one op and stage on a rank, or messages of one wire over a link: `head` must pass before each
    starts, `tail` comes after [s]."""

    head: float
    work: float
    tail: float


def _machine_bound(jobs: list[_Job]) -> float:
    bound = 0.0
    by_tail = sorted(jobs, key=lambda job: job.tail, reverse=True)
    for first in jobs:
        work = 0.0
        for job in by_tail:
            if job.head >= first.head:
                work += job.work
                bound = max(bound, first.head + work + job.tail)
    return bound


class _Ways:
    """The longest way of one microbatch up to and behind the forward and the gradient of each stage."""

    def __init__(self, schedule: Schedule, table: CostTable, links: Links | None) -> None:
        self.schedule, self.table, self.links = schedule, table, links
        wires = Needs(schedule).wires
        self.counts = [Counter((a.op, a.stage) for a in program) for program in schedule.programs]
        # The op that makes the gradient: the cheaper one where a stage has both.
        self.present = set().union(*self.counts)
        self.gradient = [
            min((table.of(op, s) for op in (Op.B, Op.I) if (op, s) in self.present), default=0.0)
            for s in range(schedule.num_stages)
        ]
        self.sums = {each.stage: each for each in links.sums} if links is not None else {}
        self.update = [self._update(s) for s in range(schedule.num_stages)]
        self.sizes = {} if links is None else wire_bytes(schedule, links, wires)
        self.delay = {wire: self._delay(wire) for wire in wires}
        self._walk(
            activations=[(w.src, user, self.delay[w]) for w in wires if w.kind is MessageKind.ACT for user in w.users],
            gradients=[(m, w.dst, self.delay[w]) for w in wires if w.kind is MessageKind.GRAD for m in w.makers],
        )
        self.loads = [] if links is None else self._loads(links, wires)

    def _update(self, stage: int) -> float:
        """Seconds of sums and optimizer steps that come after any gradient of `stage`."""
        update = self.table.update
        own = update[stage] + self._summing(stage)
        if self.schedule.has_epilogue:
            placement = self.schedule.placement
            return max(own, min(sum(update[s] for s in placement[rank]) for rank in self.schedule.owners[stage]))
        return own if self._has_update(stage) else 0.0

    def _summing(self, stage: int) -> float:
        if stage in self.sums:
            return self.sums[stage].seconds
        return self.table.reduce_grad[stage] if len(self.schedule.owners[stage]) > 1 else 0.0

    def _has_update(self, stage: int) -> bool:
        return any((Op.U, stage) in counts for counts in self.counts)

    def _pairs(self, wire: Wire) -> Counter[tuple[int, int]]:
        """How many messages each pair of ranks sends over a wire."""
        owner = self.schedule.owner
        indices = range(self.schedule.total_microbatches)
        pairs = Counter((owner(wire.src, k), owner(wire.dst, k)) for k in indices)
        return Counter({(src, dst): count for (src, dst), count in pairs.items() if src != dst})

    def _delay(self, wire: Wire) -> float:
        """The least seconds from stage to stage: none where some rank holds both."""
        if set(self.schedule.owners[wire.src]) & set(self.schedule.owners[wire.dst]):
            return 0.0
        delay = self.table.latency[wire.src]
        if self.links is None:
            return delay
        ways = [self.links.way(src, dst) for src, dst in self._pairs(wire)]
        return delay + min(way.latency + self.sizes[wire] * way.seconds_per_byte for way in ways)

    def _walk(self, activations: list[tuple[int, int, float]], gradients: list[tuple[int, int, float]]) -> None:
        """Activations lead from lower stages to higher ones, gradients back: (maker, user, delay) each."""
        forward, gradient, weight_grad = self.table.forward, self.gradient, self.table.weight_grad
        num_stages = self.schedule.num_stages

        self.to_forward = [0.0] * num_stages
        for src, dst, delay in sorted(activations, key=lambda way: way[1]):
            self.to_forward[dst] = max(self.to_forward[dst], self.to_forward[src] + forward[src] + delay)

        self.to_gradient = [way + cost for way, cost in zip(self.to_forward, forward, strict=True)]
        for src, dst, delay in sorted(gradients, key=lambda way: -way[1]):
            self.to_gradient[dst] = max(self.to_gradient[dst], self.to_gradient[src] + gradient[src] + delay)

        # The weight gradient comes after, too, unless a whole backward may have made the gradient.
        split = [(Op.W, s) in self.present and (Op.B, s) not in self.present for s in range(num_stages)]
        self.behind_gradient = [u + w * s for u, w, s in zip(self.update, weight_grad, split, strict=True)]
        for src, dst, delay in sorted(gradients, key=lambda way: way[0]):
            way = delay + gradient[dst] + self.behind_gradient[dst]
            self.behind_gradient[src] = max(self.behind_gradient[src], way)

        self.behind_forward = [g + way for g, way in zip(gradient, self.behind_gradient, strict=True)]
        for src, dst, delay in sorted(activations, key=lambda way: -way[0]):
            way = delay + forward[dst] + self.behind_forward[dst]
            self.behind_forward[src] = max(self.behind_forward[src], way)

    def _loads(self, links: Links, wires: Sequence[Wire]) -> list[list[_Job]]:
        """Messages and sums that each link and network card carries."""
        loads: dict[object, list[_Job]] = {}
        for wire in wires:
            if wire.kind is MessageKind.ACT:
                head = self.to_forward[wire.src] + self.table.forward[wire.src]
                tail = max(self.table.forward[user] + self.behind_forward[user] for user in wire.users)
            else:
                head = max(self.to_gradient[maker] + self.gradient[maker] for maker in wire.makers)
                tail = self.gradient[wire.dst] + self.behind_gradient[wire.dst]
            for (src, dst), count in self._pairs(wire).items():
                way = links.way(src, dst)
                seconds = count * self.sizes[wire] * way.seconds_per_byte
                job = _Job(head, seconds, self.table.latency[wire.src] + way.latency + tail)
                for name in links.channels(src, dst):
                    loads.setdefault(name, []).append(job)
        for each in self.sums.values():
            if self.schedule.has_epilogue or self._has_update(each.stage):
                updates = self.schedule.num_batches * self.schedule.groups_per_batch
                seconds = each.seconds * (1 if self.schedule.has_epilogue else updates)
                head = self.to_gradient[each.stage] + self.gradient[each.stage]
                for name in links.channels_of_sum(each):
                    loads.setdefault(name, []).append(_Job(head, seconds, self.table.update[each.stage]))
        return list(loads.values())

    def jobs(self, rank: int) -> list[_Job]:
        jobs = []
        for (op, stage), count in self.counts[rank].items():
            cost = self.table.of(op, stage)
            match op:
                case Op.F:
                    jobs.append(_Job(self.to_forward[stage], count * cost, self.behind_forward[stage]))
                case Op.B | Op.I:
                    jobs.append(_Job(self.to_gradient[stage], count * cost, self.behind_gradient[stage]))
                case Op.W:
                    head = self.to_gradient[stage] + self.table.input_grad[stage]
                    jobs.append(_Job(head, count * cost, self.update[stage]))
                case Op.U:  # all but the last have the last behind them
                    head = self.to_gradient[stage] + self.gradient[stage] + self._summing(stage)
                    jobs += [_Job(head, (count - 1) * cost, cost), _Job(head, cost, 0.0)]
        return jobs
