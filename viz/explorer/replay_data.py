"""A schedule's wiring as JSON for `replay.js`, which plays it with other costs. Change both together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ...schedules import Costs, Links, Op, Schedule
from ...schedules.ir import MOVE_OPS
from ...schedules.timing.costs import CostTable
from ...schedules.timing.wiring import OPS, Output, Wiring
from ...schedules.versions import derive_versions

Columns = dict[str, Any]
Number = TypeVar("Number", int, float)
_STAYS = -1


def replay_data(schedule: Schedule, costs: Costs, links: Links | None) -> Columns:
    """Everything that `simulate(schedule, costs, links)` needs, as numbers and lists.

    What is the same for all microbatches (or slices) stands there once, else by index.
    """
    table = costs.table_for(schedule)
    wiring = Wiring(schedule, table, links)
    numbers: dict[int, int] = {}  # by base, of an output
    outputs: list[Output] = []
    for output in (each for of_code in wiring.outputs for each in of_code):
        if output.base not in numbers:
            numbers[output.base] = len(outputs)
            outputs.append(output)
    return {
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "slices": schedule.num_slices,
        "batches": schedule.num_batches,
        "groups": schedule.groups_per_batch,
        "epilogue": schedule.has_epilogue,
        "asynchronous": schedule.is_asynchronous,
        "links": links is not None,
        "placement": [list(stages) for stages in schedule.placement],
        "costs": _costs(table),
        "norm": table.norm,
        "around": table.around,
        "programs": [{"codes": codes, "indices": indices} for codes, indices in wiring.programs],
        "inputs": wiring.inputs,
        "outputs": [[numbers[each.base] for each in of_code] for of_code in wiring.outputs],
        "wires": [
            {
                "base": each.base,
                "kind": each.wire.kind.value,
                "src": each.wire.src,
                "dst": each.wire.dst,
                "passages": _folded([_STAYS if number is None else number for number in each.passages]),
                "last": None if each.last is None else _folded(each.last),
            }
            for each in outputs
        ],
        "passages": [
            {
                "sender": each.sender,
                "receiver": each.receiver,
                "stage": each.stage,
                "bytes": each.num_bytes,
                "seconds_per_byte": each.way.seconds_per_byte,
                "latency": each.way.latency,
                "channels": list(each.channels),
            }
            for each in wiring.passages
        ],
        "meetings": [
            {
                "stages": list(each.stages),
                "op": each.op.value,
                "ranks": len(each.ranks),
                "seconds": each.seconds,
                "share": 0.0 if each.op in MOVE_OPS else max(table.sum_busy[stage] for stage in each.stages),
                "channels": list(each.channels),
                "fills": [[group, list(slots)] for group, slots in each.fills.items()],
                "after": each.after,
            }
            for each in wiring.meetings
        ],
        "begins": [
            [[position, *begun] for position, several in of_rank.items() for begun in several]
            for of_rank in wiring.begins
        ],
        "returns": sorted({each.fills[0][0] for each in wiring.meetings if each.after is not None}),
        "behind": list(wiring.behind.items()),
        "filled": wiring.filled,
        "versions": _versions(schedule),
        "slots": wiring.num_slots,
        "channels": wiring.num_channels,
    }


def _versions(schedule: Schedule) -> list[list[int]]:
    """By rank and action, the weight version that it uses (an update: makes); empty where there is one alone."""
    if not schedule.is_asynchronous:
        return []
    read_by = derive_versions(schedule).read_by
    return [[each.index + 1 if each.op is Op.U else read_by(each) for each in own] for own in schedule.programs]


def _costs(table: CostTable) -> Columns:
    """By the letter of the op, and the latency: by stage, and where they differ by index, by index [s]."""
    stages = range(len(table.latency))
    rows = {op.value: [_folded(table.row(op, stage)) for stage in stages] for op in OPS}
    return {**rows, "latency": list(table.latency)}


def _folded(numbers: Sequence[Number]) -> Number | list[Number]:
    """One number where all are equal."""
    return numbers[0] if numbers and len(set(numbers)) == 1 else list(numbers)
