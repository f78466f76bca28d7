"""Inputs of a simulation one by one: what the costs and links say of each, what measured steps say of it, and costs and
links in which some of them are replaced.

    action of a stage        F, B, I, W                                median of its spans
    overhead of a stage      between F, B or I and the next action     median where nothing was waited for
    message from r to q      made on r until its user begins on q      median where q waited for it, less r's overhead
    sum, gather of a stage   begun on the last rank until through      median
    sum on the processor     seconds of it that keep ranks from        by how much longer actions beside it took, a
                             computing                                 second beside it, times its own seconds
    update of a stage, norm  the optimizer's step, and before it       median
    around a step            in front of its actions and behind them   median

Each is measured in the sense in which the simulator takes it: a step that is simulated from costs gives these back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from operator import add
from statistics import fmean
from typing import NamedTuple

from ..ir import COMPUTE_OPS, Op, Schedule
from .costs import Costs
from .links import Links, Way
from .wiring import Passage, Wiring


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


_OP_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Input(NamedTuple):
    """One number that a step is simulated from.

    kind: "F", "B", "I", "W", "overhead", "message", "sum", "held", "gather", "update", "norm" or "around".
    at: its stage, of an action of a stage on several ranks (stage, rank); of a message (sending rank, receiving rank);
        of a sum all stages whose gradients it adds up.
    """

    cause: Cause
    kind: str
    at: tuple[int, ...]

    def __str__(self) -> str:
        stages = f"stage {self.at[0]}" if len(self.at) == 1 else f"stages {', '.join(map(str, self.at))}"
        match self.kind:
            case "message":
                return f"messages of link {self.at[0]}-{self.at[1]}"
            case "norm":
                return "norm of all gradients"
            case "around":
                return "runtime around a step"
            case "overhead":
                return f"{stages} around an action"
            case "sum":
                return f"sum of {stages}"
            case "held":
                return f"sum of {stages} on the processor"
            case "gather":
                return f"gather of {stages}"
            case "update":
                return f"update of {stages}"
        on = f" on rank {self.at[1]}" if len(self.at) > 1 else ""
        return f"{_OP_WORDS[self.kind]} of stage {self.at[0]}{on}"


Values = Mapping[Input, float]


class Passages:
    """Ways of messages between ranks in a schedule, as its costs and links have them."""

    def __init__(self, schedule: Schedule, costs: Costs, links: Links | None) -> None:
        self._latency = costs.table_for(schedule).latency
        wiring = Wiring(schedule, costs.table_for(schedule), links)
        self.by_pair: dict[tuple[int, int], list[Passage]] = {}
        for each in wiring.passages:
            self.by_pair.setdefault((each.sender, each.receiver), []).append(each)
        self.sums = {each.stages: each.seconds for each in wiring.meetings if each.op is Op.REDUCE_GRAD}
        self.gathers = {each.stages: each.seconds for each in wiring.meetings if each.op is Op.UNSHARD}

    def seconds(self, pair: tuple[int, int]) -> float:
        """Seconds of a message between two ranks on free links: of the slowest stage that sends there [s]."""
        return max(
            self._latency[each.stage] + each.way.latency + each.num_bytes * each.way.seconds_per_byte
            for each in self.by_pair[pair]
        )

    def delay(self, pair: tuple[int, int]) -> float:
        """The part of it that stages, not ways, say [s]."""
        return max(self._latency[each.stage] for each in self.by_pair[pair])


def predicted_inputs(schedule: Schedule, costs: Costs, links: Links | None) -> dict[Input, float]:
    """All inputs of a simulation [s]; of actions that differ by microbatch the mean of a rank's own, of
    messages on free links."""
    table = costs.free_of_overhead.table_for(schedule)
    overhead = around_actions(costs, schedule.num_stages)
    ways = Passages(schedule, costs, links)
    found: dict[Input, float] = {}
    for rank, program in enumerate(schedule.compute_programs):
        own: dict[tuple[Op, int], list[float]] = defaultdict(list)
        for stage, op, index in program:
            if op in COMPUTE_OPS:
                own[op, stage].append(table.of(op, stage, index))
        for op, stage in sorted(own, key=_in_order):
            found[action_input(schedule, op, stage, rank)] = fmean(own[op, stage])
    found |= {Input(Cause.OVERHEAD, "overhead", (stage,)): seconds for stage, seconds in enumerate(overhead)}
    found |= {Input(Cause.MESSAGES, "message", pair): ways.seconds(pair) for pair in sorted(ways.by_pair)}
    found |= {Input(Cause.SUMS, "sum", stages): seconds for stages, seconds in ways.sums.items()}
    found |= {
        Input(Cause.SUMS, "held", stages): table.sum_busy[stages[0]] * seconds
        for stages, seconds in ways.sums.items()
        if len(stages) == 1
    }
    found |= {Input(Cause.SUMS, "gather", stages): seconds for stages, seconds in ways.gathers.items()}
    trained = [stage for stage in range(schedule.num_stages) if schedule.has_backward and schedule.trains(stage)]
    found |= {Input(Cause.UPDATE, "update", (stage,)): table.update[stage] for stage in trained}
    found[Input(Cause.UPDATE, "norm", ())] = table.norm or 0.0
    found[Input(Cause.OUTSIDE, "around", ())] = table.around
    return found


def replaced(schedule: Schedule, costs: Costs, links: Links | None, values: Values) -> tuple[Costs, Links | None]:
    """Costs and links with these inputs in place of their own; messages and sums that are replaced do not queue, since
    what was measured has that in it."""
    return _with_costs(schedule, costs, links, values), _with_links(schedule, costs, links, values)


# --- costs and links in which some are replaced ---


def _with_costs(schedule: Schedule, costs: Costs, links: Links | None, values: Values) -> Costs:
    table = costs.free_of_overhead.table_for(schedule)
    columns = {op: [row if len(row) > 1 else row[0] for row in table.rows[op]] for op in (Op.F, Op.B, Op.I, Op.W)}
    overhead = list(by_stage(costs.overhead, schedule.num_stages))
    of_messages = list(by_stage(costs.message_overhead, schedule.num_stages))
    sums, update, norm, tied = list(table.reduce_grad), list(table.update), table.norm, dict(table.tied)
    around, shares = table.around, list(table.sum_busy)
    linked = {} if links is None else {each.stage: each.seconds for each in links.sums}
    latency = table.latency
    for each, seconds in values.items():
        match each.kind:
            case "overhead":
                overhead[each.at[0]] = max(0.0, seconds - of_messages[each.at[0]])
                of_messages[each.at[0]] = min(seconds, of_messages[each.at[0]])
            case "message":
                latency = (0.0,) * schedule.num_stages  # it stands in the ways
            case "sum" if len(each.at) > 1:
                tied[each.at] = seconds
            case "sum" if each.at[0] not in linked:
                sums[each.at[0]] = seconds
            case "held":
                (stage,) = each.at
                own = values.get(each._replace(kind="sum"), linked.get(stage, table.reduce_grad[stage]))
                shares[stage] = min(1.0, seconds / own) if own > 0 else 0.0
            case "update":
                update[each.at[0]] = seconds
            case "norm":
                norm = seconds
            case "around":
                around = seconds
            case "F" | "B" | "I" | "W":
                column = columns[Op(each.kind)]
                column[each.at[0]] = _on_rank(schedule, column[each.at[0]], each.at, seconds)
    return replace(
        costs,
        forward=columns[Op.F],
        backward=columns[Op.B],
        input_grad=columns[Op.I],
        weight_grad=columns[Op.W],
        index_factors=None,
        overhead=overhead,
        message_overhead=of_messages,
        latency=latency,
        reduce_grad=sums,
        sum_busy=shares,
        tied=tuple(tied.items()),
        update=update,
        norm=norm,
        around=around,
    )


def _with_links(schedule: Schedule, costs: Costs, links: Links | None, values: Values) -> Links | None:
    messages = {each.at: seconds for each, seconds in values.items() if each.kind == "message"}
    summed = {(each.kind, each.at): seconds for each, seconds in values.items() if each.kind in ("sum", "gather")}
    if messages:
        passages = Passages(schedule, costs, links)
        ways: dict[tuple[int, int], Way] = {}
        for pair in passages.by_pair:
            if pair in messages:
                ways[pair] = Way(latency=messages[pair])
            else:
                way = Way() if links is None else links.way(*pair)
                ways[pair] = replace(way, latency=way.latency + passages.delay(pair))
        if links is None:
            return Links(network=ways)
        around = {pair for each in links.sums for pair in each.ways} - ways.keys()
        links = replace(links, network=ways | {pair: links.way(*pair) for pair in around})
    if links is None or not summed:
        return links
    sums = []
    for each in links.sums:
        own, gather = summed.get(("sum", (each.stage,))), summed.get(("gather", (each.stage,)))
        if own is not None or gather is not None:
            each = replace(
                each,
                seconds=each.seconds if own is None else own,
                gather=each.gather if gather is None or not each.gather else gather,
                ways=(),
            )
        sums.append(each)
    return replace(links, sums=tuple(sums))


def action_input(schedule: Schedule, op: Op, stage: int, rank: int) -> Input:
    """The input of an op of a stage, as this rank runs it."""
    at = (stage,) if len(schedule.owners[stage]) == 1 else (stage, rank)
    return Input(Cause.COMPUTE, op.value, at)


def _on_rank(
    schedule: Schedule, usual: float | tuple[float, ...], at: tuple[int, ...], seconds: float
) -> float | tuple[float, ...]:
    """Seconds of a stage's actions, by index where those of one of its ranks are replaced."""
    if len(at) == 1:
        return seconds
    stage, rank = at
    row = (usual,) if isinstance(usual, float) else usual
    size = max(len(row), schedule.batch_indices)
    return tuple(seconds if schedule.owner(stage, k) == rank else row[k % len(row)] for k in range(size))


def _in_order(pair: tuple[Op, int]) -> tuple[int, int]:
    return pair[1], "FBIW".index(pair[0].value)


def around_actions(costs: Costs, num_stages: int) -> tuple[float, ...]:
    """[S] seconds around each F, B and I of a stage, messages included."""
    return tuple(map(add, by_stage(costs.overhead, num_stages), by_stage(costs.message_overhead, num_stages)))


def by_stage(value: float | Sequence[float], num_stages: int) -> tuple[float, ...]:
    """One number each for all stages."""
    return (value,) * num_stages if isinstance(value, float | int) else tuple(value)
