"""A lower bound of the makespan: what no order of the same work can beat."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from ..ir import Op, Schedule
from .costs import Costs, CostTable


def lower_bound(schedule: Schedule, costs: Costs) -> float:
    """The largest (earliest possible start + work + shortest possible tail) of any set of actions of one rank [s].

        head              work          tail
        - - - - - - - - - F F F B B B - - - -     all actions of a rank: the first microbatch must come through the
                                                  stages before, the last gradient through them again
        F - - - - - - - - B B B                   the backwards of the first rank: one microbatch's whole way and back

    It holds for every order of the same actions on the same placement, since one of the set starts first and one
    ends last. Tried are the sets of all actions with a head of at least h and a tail of at least q.
    The one-machine bound of Carlier (1982). O(actions + P * V^2 + S + edges * log(edges)).
    """
    table = costs.table(num_stages=schedule.num_stages)
    if table.norm is not None and schedule.has_epilogue:  # all ranks come together in front of their updates
        own_update = max(sum(table.update[s] for s in stages) for stages in schedule.placement)
        return lower_bound(schedule, replace(costs, update=0.0, norm=None)) + table.norm + own_update
    ways = _Ways(schedule, table)
    return max(_rank_bound(ways.jobs(rank)) for rank in range(schedule.num_ranks))


class _Job(NamedTuple):
    """All actions of one op and stage on a rank: `head` must pass before each starts, `tail` comes behind [s]."""

    head: float
    work: float
    tail: float


def _rank_bound(jobs: list[_Job]) -> float:
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

    def __init__(self, schedule: Schedule, table: CostTable) -> None:
        self.schedule = schedule
        self.table = table
        self.counts = [Counter((a.op, a.stage) for a in program) for program in schedule.programs]
        # The op that makes the gradient: the cheaper one where a stage has both.
        self.present = set().union(*self.counts)
        self.gradient = [
            min((table.of(op, s) for op in (Op.B, Op.I) if (op, s) in self.present), default=0.0)
            for s in range(schedule.num_stages)
        ]
        self.update = [self._update(s) for s in range(schedule.num_stages)]
        self._walk()

    def _update(self, stage: int) -> float:
        """Seconds of optimizer steps that come behind any gradient of `stage`."""
        if self.schedule.has_epilogue:
            placement, update = self.schedule.placement, self.table.update
            return min(sum(update[s] for s in placement[rank]) for rank in self.schedule.owners[stage])
        has_update = any((Op.U, stage) in counts for counts in self.counts)
        return self.table.update[stage] if has_update else 0.0

    def _walk(self) -> None:
        forward, gradient, weight_grad = self.table.forward, self.gradient, self.table.weight_grad
        upwards = sorted(self.schedule.stage_edges, key=lambda edge: edge.dst)
        downwards = sorted(self.schedule.stage_edges, key=lambda edge: -edge.src)
        has_backward = self.schedule.has_backward

        self.to_forward = [0.0] * self.schedule.num_stages
        for src, dst, _ in upwards:
            way = self.to_forward[src] + forward[src] + self._latency(src, dst)
            self.to_forward[dst] = max(self.to_forward[dst], way)

        self.to_gradient = [way + cost for way, cost in zip(self.to_forward, forward, strict=True)]
        for src, dst, grad in downwards:
            if grad and has_backward:
                way = self.to_gradient[dst] + gradient[dst] + self._latency(dst, src)
                self.to_gradient[src] = max(self.to_gradient[src], way)

        # The weight gradient comes behind, too, unless a whole backward may have made the gradient.
        split = [(Op.W, s) in self.present and (Op.B, s) not in self.present for s in range(self.schedule.num_stages)]
        self.behind_gradient = [u + w * s for u, w, s in zip(self.update, weight_grad, split, strict=True)]
        for src, dst, grad in upwards:
            if grad and has_backward:
                way = self._latency(dst, src) + gradient[src] + self.behind_gradient[src]
                self.behind_gradient[dst] = max(self.behind_gradient[dst], way)

        self.behind_forward = [g + way for g, way in zip(gradient, self.behind_gradient, strict=True)]
        for src, dst, _ in downwards:
            way = self._latency(src, dst) + forward[dst] + self.behind_forward[dst]
            self.behind_forward[src] = max(self.behind_forward[src], way)

    def _latency(self, src: int, dst: int) -> float:
        """The least latency from stage to stage: none where some rank holds both."""
        shared = set(self.schedule.owners[src]) & set(self.schedule.owners[dst])
        return 0.0 if shared else self.table.latency[src]

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
                    head = self.to_gradient[stage] + self.gradient[stage]
                    jobs += [_Job(head, (count - 1) * cost, cost), _Job(head, cost, 0.0)]
        return jobs
