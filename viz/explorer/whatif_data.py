"""Data of the "what if" panel: a prediction's wiring as JSON, for several numbers of microbatches where its family has
them. `replay.js` plays it with other costs: change both together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

from ...schedules import Costs, Links, Op, Schedule
from ...schedules.ir import MOVE_OPS
from ...schedules.timing.costs import CostTable
from ...schedules.timing.wiring import OPS, Output, Wiring
from ...schedules.versions import derive_versions
from ..exhibit import Exhibit
from .other_sizes import builder_of

_STEPS = tuple(
    Fraction(*each) for each in ((1, 4), (1, 2), (3, 4), (1, 1), (3, 2), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1))
)
_MAX_ACTIONS = 200_000  # of the prediction: about 3 MB of page, and half a second a change
_MAX_MORE = 60_000  # of the other numbers of microbatches together


_STAYS = -1

Columns = dict[str, Any]
Number = TypeVar("Number", int, float)


def whatif_data(exhibit: Exhibit) -> dict[str, Any] | None:
    """Wirings by number of microbatches, ascending; None where nothing is simulated or under which costs is not known.

    `fixed` says to people why there is one number alone, `refused` why there is nothing at all.
    """
    if exhibit.predicted is None or exhibit.costs is None:
        return None
    schedule = exhibit.predicted.schedule
    if (actions := _size(schedule)) > _MAX_ACTIONS:
        return {"refused": f"{actions:,} actions: costs can be varied up to {_MAX_ACTIONS:,}."}
    others, fixed = _others(schedule, exhibit.costs)
    wirings = [replay_data(each, exhibit.costs, exhibit.links) for each in (*others, schedule)]
    wirings.sort(key=lambda wiring: int(wiring["microbatches"]))
    return {"wirings": wirings, "microbatches": schedule.num_microbatches, "fixed": fixed}


def _others(schedule: Schedule, costs: Costs) -> tuple[list[Schedule], str]:
    """The same with other numbers of microbatches, and why there are none."""
    if costs.table_for(schedule).varies:
        return [], "M is fixed: microbatches, or replicas, take different times, and nobody knows those of another M."
    build = builder_of(schedule)
    if build is None:
        return [], "M is fixed: this order is not one that a built-in schedule has, so nobody knows it for another M."
    found: list[Schedule] = []
    left = _MAX_MORE
    for number in _near(schedule.num_microbatches):
        try:
            other = build(number)
        except ValueError:
            continue  # the family does not take it
        if (left := left - _size(other)) < 0:
            break
        found.append(other)
    return found, "" if found else "M is fixed: schedules of other numbers of microbatches are too large for this page."


def _near(number: int) -> Iterable[int]:
    """Other numbers, the smallest first."""
    return sorted({int(number * step) for step in _STEPS if (number * step).denominator == 1} - {number})


def _size(schedule: Schedule) -> int:
    return sum(map(len, schedule.programs))


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
