"""A lower bound of the makespan: what no order of the same work can beat."""

from __future__ import annotations

from .costs import Costs, CostTable
from .ir import BACKWARD_OPS, Op, Schedule


def lower_bound(schedule: Schedule, costs: Costs) -> float:
    """max over ranks of (earliest possible first start + own work + shortest possible tail) [s].

    Earliest first start: the first microbatch must come through the stages before. Tail: when the rank's last
    action ends and was a gradient that others need, those must still run. One microbatch's whole way is a
    bound too. They hold for every order of the same actions on the same placement. O(actions + S * edges).
    """
    table = costs.table(num_stages=schedule.num_stages)
    heads = _heads(schedule, table)
    tails = _tails(schedule, table)
    flush = schedule.weight_rule == "flush" and schedule.has_backward
    bound = _longest_way(schedule, table, heads, tails)
    for rank, program in enumerate(schedule.programs):
        if not program:
            continue
        stages = {a.stage for a in program}
        work = sum(table.of(a.op, a.stage) for a in program)
        own_update = sum(table.update[s] for s in schedule.placement[rank]) if flush else 0.0
        last_ops = {(a.op, a.stage) for a in program}
        if any(op is Op.W for op, _ in last_ops) or not schedule.has_backward:
            tail = 0.0  # a weight gradient (or a forward of the last stage) may come last
        else:
            tail = min(tails[s] for op, s in last_ops if op in BACKWARD_OPS)
        bound = max(bound, min(heads[s] for s in stages) + work + max(tail, own_update))
    return bound


def _longest_way(schedule: Schedule, table: CostTable, heads: list[float], tails: list[float]) -> float:
    """One microbatch through a stage: what comes before it, its forward, its gradient, what comes behind."""
    if not schedule.has_backward:
        return max(head + forward for head, forward in zip(heads, table.forward, strict=True))
    return max(
        heads[s] + table.forward[s] + min(table.backward[s], table.input_grad[s]) + tails[s]
        for s in range(schedule.num_stages)
    )


def _latency(schedule: Schedule, table: CostTable, src: int, dst: int) -> float:
    """The least latency from stage to stage: none where some rank holds both."""
    shared = set(schedule.owners[src]) & set(schedule.owners[dst])
    return 0.0 if shared else table.latency[src]


def _heads(schedule: Schedule, table: CostTable) -> list[float]:
    """Longest path of forwards before each stage."""
    heads = [0.0] * schedule.num_stages
    for stage in range(schedule.num_stages):
        for edge in schedule.stage_edges:
            if edge.dst == stage:
                arrival = (
                    heads[edge.src] + table.forward[edge.src] + _latency(schedule, table, edge.src, stage)
                )
                heads[stage] = max(heads[stage], arrival)
    return heads


def _tails(schedule: Schedule, table: CostTable) -> list[float]:
    """Longest path of backwards behind the gradient that each stage sends."""
    split = any(a.op is Op.I for program in schedule.programs for a in program)
    tails = [0.0] * schedule.num_stages
    for stage in range(schedule.num_stages):
        for edge in schedule.stage_edges:
            if edge.dst == stage and edge.grad:
                one = (
                    min(table.input_grad[edge.src], table.backward[edge.src])
                    if split
                    else table.backward[edge.src]
                )
                tails[stage] = max(
                    tails[stage], _latency(schedule, table, stage, edge.src) + one + tails[edge.src]
                )
    return tails
