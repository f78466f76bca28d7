"""The inputs of a simulation one by one: their predicted values, and costs and links in which some are replaced.

action of a stage        F, B, I, W                                  median of its spans
overhead of a stage      between F, B or I and the next action       median over actions that waited for nothing
message from r to q      made on r until its user begins on q        median over messages that q waited for, without
                                                                     the overhead of r
sum, gather of a stage   begun on the last rank until complete       median
sum on the processor     seconds of it during which its ranks        extra seconds of actions that ran alongside, per
                         do not compute                              second of overlap, times the seconds of the sum
update of a stage, norm  the optimizer step, and the norm before it  median
around a step            before its first and after its last action  median

Measured values (right column) have the meaning that the simulator gives them: measuring a simulated step returns the
inputs that it was simulated from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from operator import add, sub
from statistics import fmean
from typing import Any, NamedTuple

from ..ir import COMPUTE_OPS, Op, Schedule
from .costs import COST_OF_OP, NOT_APART, Costs, Row, by_stage, columns, together
from .links import Link, Links, PlaceNetwork
from .wiring import MessageRoute, ScheduleWiring


class Cause(StrEnum):
    """Cause of a difference between a predicted and a measured step, in the order in which inputs are replaced."""

    COMPUTE = "compute"
    OVERHEAD = "between actions"
    MESSAGES = "messages"
    SUMS = "sums"
    UPDATE = "update"
    SPREAD = "spread"
    UNEXPLAINED = "not explained"
    OUTSIDE = "around the step"


_WORDS = {
    "norm": "norm of all gradients",
    "around": "runtime around a step",
    "overhead": "{} around an action",
    "sum": "all-reduce of {}",
    "held": "all-reduce of {} on the processor",
    "gather": "gather of {}",
    "update": "update of {}",
}
_OP_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Input(NamedTuple):
    """One number that a step is simulated from."""

    cause: Cause
    kind: str  # "F", "B", "I", "W", "overhead", "message", "sum", "held", "gather", "update", "norm" or "around"
    # (stage,), or (stage, rank) for an action of a stage on several ranks; for a message (sending rank, receiving
    # rank); for a sum all stages whose gradients it adds up
    at: tuple[int, ...]

    def __str__(self) -> str:
        stages = f"stage {self.at[0]}" if len(self.at) == 1 else f"stages {', '.join(map(str, self.at))}"
        if self.kind == "message":
            return f"messages of link {self.at[0]}-{self.at[1]}"
        if self.kind in _WORDS:
            return _WORDS[self.kind].format(stages)
        on = f" on rank {self.at[1]}" if len(self.at) > 1 else ""
        return f"{_OP_WORDS[self.kind]} of stage {self.at[0]}{on}"


Values = Mapping[Input, float]


class PairRoutes:
    """The routes of messages between each pair of ranks in a schedule, under its costs and links."""

    def __init__(self, schedule: Schedule, costs: Costs, links: Links | None) -> None:
        self._latency = costs.table_for(schedule).latency
        wiring = ScheduleWiring(schedule, costs.table_for(schedule), links)
        self.by_pair: dict[tuple[int, int], list[MessageRoute]] = {}
        for each in wiring.routes:
            self.by_pair.setdefault((each.sender, each.receiver), []).append(each)
        self.sums = {each.stages: each.seconds for each in wiring.joint_steps if each.op is Op.REDUCE_GRAD}
        self.gathers = {each.stages: each.seconds for each in wiring.joint_steps if each.op is Op.UNSHARD}

    def seconds(self, pair: tuple[int, int]) -> float:
        """Seconds of a message between two ranks on free links: of the slowest stage that sends there [s]."""
        return max(
            self._latency[each.stage] + each.way.latency + each.num_bytes * each.way.seconds_per_byte
            for each in self.by_pair[pair]
        )

    def delay(self, pair: tuple[int, int]) -> float:
        """The part of `seconds` that depends on the stages and not on the links [s]."""
        return max(self._latency[each.stage] for each in self.by_pair[pair])


def predicted_inputs(schedule: Schedule, costs: Costs, links: Links | None) -> dict[Input, float]:
    """All inputs of a simulation [s]: for actions that differ by microbatch their mean on a rank, for messages the
    seconds on free links."""
    table = costs.free_of_overhead.table_for(schedule)
    overhead = around_actions(costs, schedule.num_stages)
    routes = PairRoutes(schedule, costs, links)
    found: dict[Input, float] = {}
    for rank, program in enumerate(schedule.compute_programs):
        own: dict[tuple[Op, int], list[float]] = defaultdict(list)
        for stage, op, index in program:
            if op in COMPUTE_OPS:
                own[op, stage].append(table.of(op, stage, index))
        for op, stage in sorted(own, key=lambda pair: (pair[1], "FBIW".index(pair[0].value))):
            found[action_input(schedule, op, stage, rank)] = fmean(own[op, stage])
    found |= {Input(Cause.OVERHEAD, "overhead", (stage,)): seconds for stage, seconds in enumerate(overhead)}
    found |= {Input(Cause.MESSAGES, "message", pair): routes.seconds(pair) for pair in sorted(routes.by_pair)}
    found |= {Input(Cause.SUMS, "sum", stages): seconds for stages, seconds in routes.sums.items()}
    found |= {
        Input(Cause.SUMS, "held", stages): table.sum_busy[stages[0]] * seconds
        for stages, seconds in routes.sums.items()
        if len(stages) == 1
    }
    found |= {Input(Cause.SUMS, "gather", stages): seconds for stages, seconds in routes.gathers.items()}
    trained = [stage for stage in range(schedule.num_stages) if schedule.has_backward and schedule.trains(stage)]
    found |= {Input(Cause.UPDATE, "update", (stage,)): table.of(Op.U, stage, 0) for stage in trained}
    found[Input(Cause.UPDATE, "norm", ())] = table.norm or 0.0
    found[Input(Cause.OUTSIDE, "around", ())] = table.around
    return found


def calibrate(
    schedule: Schedule, costs: Costs, links: Links | None, seen: Values, *, queueing: bool
) -> tuple[Costs, Links | None]:
    """Costs and links with these inputs in place of their own.

    Where I and W of a stage were measured, B becomes their sum. Where only B was measured and the schedule splits no
    backward of the stage, I and W keep their shares of it. `queueing`: whether messages and sums still queue on links
    and cards. Measured messages include the queueing of their own step: to reproduce that step nothing may queue. For
    other orders of the same work they do queue, and the routes of a `PlaceNetwork` become slower by the mean ratio over
    the messages between two places.
    """
    found = _with_costs(schedule, costs, links, seen)
    messages = {(each.at[0], each.at[1]): seconds for each, seconds in seen.items() if each.kind == "message"}
    pair_routes = PairRoutes(schedule, costs, links) if messages else None
    if pair_routes is not None and queueing:
        links = _with_slower_routes(pair_routes, links, messages)
    elif pair_routes is not None:
        found = replace(found, latency=0.0)  # part of the links
        links = _with_free_links(pair_routes, links, messages)
    return found, None if links is None else _with_sums(links, seen, queueing=queueing)


def _with_costs(schedule: Schedule, costs: Costs, links: Links | None, seen: Values) -> Costs:
    number, linked = schedule.num_stages, {} if links is None else {each.stage: each.seconds for each in links.sums}
    changed: dict[str, Any] = {}

    def column(name: str) -> list[float]:
        found: list[float] = changed.setdefault(name, list(by_stage(getattr(costs, name), number)))
        return found

    tied = dict(costs.tied)
    for each, seconds in seen.items():
        match each.kind:
            case "sum" if len(each.at) > 1:
                tied[each.at] = seconds
            case "sum" if each.at[0] not in linked:
                column("reduce_grad")[each.at[0]] = seconds
            case "held":
                (stage,) = each.at
                known = linked.get(stage, by_stage(costs.reduce_grad, number)[stage])
                own = seen.get(each._replace(kind="sum"), known)
                column("sum_busy")[stage] = min(1.0, seconds / own) if own > 0 else 0.0
            case "update":
                column("update")[each.at[0]] = seconds
            case "norm" | "around" as name:
                changed[name] = seconds
    changed |= _actions(schedule, costs, seen) | _overheads(costs, number, seen)
    return replace(costs, **changed, tied=tuple(tied.items()))


def _actions(schedule: Schedule, costs: Costs, seen: Values) -> dict[str, Any]:
    table = costs.free_of_overhead.table_for(schedule)
    rows = {op: list(table.rows[op]) for op in COST_OF_OP}
    ops: dict[int, set[Op]] = defaultdict(set)
    for each, seconds in seen.items():
        if each.kind in COST_OF_OP:
            op, stage = Op(each.kind), each.at[0]
            rows[op][stage] = _on_rank(schedule, rows[op][stage], each.at, seconds)
            ops[stage].add(op)
    for stage, own in ops.items():
        if Op.B not in own and {Op.I, Op.W} <= own:
            rows[Op.B][stage] = together(rows[Op.I][stage], rows[Op.W][stage], add)
        elif Op.B in own and not own & {Op.I, Op.W} and stage not in schedule.split_stages:
            share = fmean(table.rows[Op.I][stage]) / whole if (whole := fmean(table.rows[Op.B][stage])) > 0 else 0.5
            rows[Op.I][stage] = tuple(share * seconds for seconds in rows[Op.B][stage])
            rows[Op.W][stage] = together(rows[Op.B][stage], rows[Op.I][stage], sub)
    if not ops:
        return {}
    halves = costs.input_grad is not None or any(own & {Op.I, Op.W} for own in ops.values())
    found = {name: columns(rows[op]) for op, name in COST_OF_OP.items() if halves or op in (Op.F, Op.B)}
    return {**found, **NOT_APART, "index_factors": None}


def _overheads(costs: Costs, num_stages: int, seen: Values) -> dict[str, Any]:
    """Replaces the overhead per stage; the share for messages is kept, or reduced where it no longer fits."""
    whole, busy = list(around_actions(costs, num_stages)), by_stage(costs.message_overhead, num_stages)
    own = {each.at[0]: seconds for each, seconds in seen.items() if each.kind == "overhead"}
    if not own:
        return {}
    for stage, seconds in own.items():
        whole[stage] = seconds
    part = min([1.0, *(around / each for around, each in zip(whole, busy, strict=True) if each > 0)])
    return {
        "overhead": [max(0.0, around - part * each) for around, each in zip(whole, busy, strict=True)],
        "message_overhead": [part * each for each in busy],
    }


def _with_slower_routes(pairs: PairRoutes, links: Links | None, seen: Mapping[tuple[int, int], float]) -> Links | None:
    if links is None or not isinstance(network := links.network, PlaceNetwork):
        return links
    both: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for ranks, seconds in seen.items():
        if ranks in pairs.by_pair and (pair := network.pair(*ranks)) is not None:
            both[pair].append((pairs.seconds(ranks), seconds))
    routes = dict(network.routes)
    for pair, found in both.items():
        (was, now), link = map(fmean, zip(*found, strict=True)), routes[pair]
        routes[pair] = (
            replace(link, latency=link.latency * now / was, seconds_per_byte=link.seconds_per_byte * now / was)
            if was > 0
            else replace(link, latency=now)
        )
    return replace(links, network=replace(network, routes=routes))


def _with_free_links(routes: PairRoutes, links: Links | None, seen: Mapping[tuple[int, int], float]) -> Links:
    """Links that take the measured seconds and that no two messages share."""
    network: dict[tuple[int, int], Link] = {}
    for pair in routes.by_pair:
        link = Link() if links is None else links.way(*pair)
        delayed = replace(link, latency=link.latency + routes.delay(pair))
        network[pair] = Link(latency=seen[pair]) if pair in seen else delayed
    if links is None:
        return Links(network=network)
    of_sums = {pair for each in links.sums for pair in each.ways or ()} - network.keys()
    return replace(links, network=network | {pair: links.way(*pair) for pair in of_sums})


def _with_sums(links: Links, seen: Values, *, queueing: bool) -> Links:
    own = {(each.kind, each.at): seconds for each, seconds in seen.items() if each.kind in ("sum", "gather")}
    sums = []
    for each in links.sums:
        kinds = ("sum", (each.stage,)), ("gather", (each.stage,))
        if any(kind in own for kind in kinds):
            each = replace(
                each,
                seconds=own.get(kinds[0], each.seconds),
                gather=own.get(kinds[1], each.gather) if each.gather else 0.0,
                ways=each.ways if queueing else (),
            )
        sums.append(each)
    return replace(links, sums=tuple(sums))


def action_input(schedule: Schedule, op: Op, stage: int, rank: int) -> Input:
    at = (stage,) if len(schedule.owners[stage]) == 1 else (stage, rank)
    return Input(Cause.COMPUTE, op.value, at)


def _on_rank(schedule: Schedule, row: Row, at: tuple[int, ...], seconds: float) -> Row:
    if len(at) == 1:
        return (seconds,)
    stage, rank = at
    size = max(len(row), schedule.batch_indices)
    return tuple(seconds if schedule.owner(stage, k) == rank else row[k % len(row)] for k in range(size))


def around_actions(costs: Costs, num_stages: int) -> tuple[float, ...]:
    """[S] overhead per F, B and I of a stage, including that of messages [s]."""
    return tuple(map(add, by_stage(costs.overhead, num_stages), by_stage(costs.message_overhead, num_stages)))
