"""Data of the "what if" panel: a simulation's wiring as JSON. `replay.js` plays it with other costs: change both
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ...schedules import Costs, Links, Op, Schedule
from ...schedules.ir import MOVE_OPS
from ...schedules.timing.costs import CostTable
from ...schedules.timing.wiring import LANE_OPS, JointStep, Output, ScheduleWiring
from ...schedules.versions import derive_versions
from ..exhibit import Exhibit

_MAX_ACTIONS = 200_000  # of the simulation: about 3 MB of page, and half a second a change
_STAYS = -1

Columns = dict[str, Any]
Number = TypeVar("Number", int, float)


def whatif_data(exhibit: Exhibit) -> dict[str, Any] | None:
    """The wiring, or the reason why there is none (`refused`), for people; None without a simulation or its costs."""
    if exhibit.simulated is None or exhibit.costs is None:
        return None
    schedule = exhibit.simulated.schedule
    if (actions := sum(map(len, schedule.programs))) > _MAX_ACTIONS:
        return {"refused": f"{actions:,} actions: costs can be varied up to {_MAX_ACTIONS:,}."}
    if schedule.overlapped:
        return {"refused": "Forwards and backwards run together: this page cannot replay such pairs."}
    wiring = replay_data(schedule, exhibit.costs, exhibit.links)
    if wiring["waits"]:
        return {
            "refused": "Messages wait for their receives, or ranks for messages: this page cannot replay such waits."
        }
    return {"wiring": wiring}


def replay_data(schedule: Schedule, costs: Costs, links: Links | None) -> Columns:
    """The inputs of `simulate(schedule, costs, links)`, as numbers and lists.

    Values that are equal for all microbatches (or slices) are stored once, else by index.
    """
    table = costs.table_for(schedule)
    wiring = ScheduleWiring(schedule, table, links)
    outputs: dict[int, Output] = {}  # by base
    for output in (each for of_code in wiring.outputs for each in of_code):
        outputs.setdefault(output.base, output)
    numbers = {base: number for number, base in enumerate(outputs)}
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
        "wires": [_wire(output) for output in outputs.values()],
        "routes": [
            {
                "sender": each.sender,
                "receiver": each.receiver,
                "stage": each.stage,
                "bytes": each.num_bytes,
                "seconds_per_byte": each.way.seconds_per_byte,
                "latency": each.way.latency,
                "channels": list(each.channels),
            }
            for each in wiring.routes
        ],
        "joint_steps": [_joint_step(each, table) for each in wiring.joint_steps],
        "begins": [
            [[position, *begun] for position, several in of_rank.items() for begun in several]
            for of_rank in wiring.begins
        ],
        "returns": sorted({each.fills[0][0] for each in wiring.joint_steps if each.after is not None}),
        "gather_after_update": list(wiring.gather_after_update.items()),
        "filled": wiring.filled,
        "versions": _versions(schedule),
        "slots": wiring.num_slots,
        "waits": bool(wiring.waits) or any(each.way.blocks for each in wiring.routes),
        "channels": wiring.num_channels,
    }


def _wire(output: Output) -> Columns:
    return {
        "base": output.base,
        "kind": output.wire.kind.value,
        "src": output.wire.src,
        "dst": output.wire.dst,
        "routes": _folded([_STAYS if number is None else number for number in output.routes]),
        "last": None if output.last is None else _folded(output.last),
    }


def _joint_step(step: JointStep, table: CostTable) -> Columns:
    return {
        "stages": list(step.stages),
        "op": step.op.value,
        "ranks": len(step.ranks),
        "seconds": step.seconds,
        "share": 0.0 if step.op in MOVE_OPS else max(table.sum_busy[stage] for stage in step.stages),
        "channels": list(step.channels),
        "fills": [[group, list(slots)] for group, slots in step.fills.items()],
        "after": step.after,
    }


def _versions(schedule: Schedule) -> list[list[int]]:
    """By rank and action, the weight version that it uses (an update: makes); empty if there is only one."""
    if not schedule.is_asynchronous:
        return []
    read_by = derive_versions(schedule).read_by
    return [[each.index + 1 if each.op is Op.U else read_by(each) for each in own] for own in schedule.programs]


def _costs(table: CostTable) -> Columns:
    """By the letter of the op, and the latency: by stage, and if they differ, by index [s]."""
    stages = range(len(table.latency))
    rows = {op.value: [_folded(table.row(op, stage)) for stage in stages] for op in LANE_OPS}
    return {**rows, "latency": list(table.latency)}


def _folded(numbers: Sequence[Number]) -> Number | list[Number]:
    return numbers[0] if numbers and len(set(numbers)) == 1 else list(numbers)
