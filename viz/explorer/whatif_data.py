"""Data of the "what if" panel: a prediction's wiring as JSON, for several numbers of microbatches where its family has
them. `replay.js` plays it with other costs: change both together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ...schedules import FAMILIES, Costs, Family, Links, Op, Schedule, build
from ...schedules.ir import MOVE_OPS
from ...schedules.rules.versions import derive_versions
from ...schedules.timing.costs import CostTable
from ...schedules.timing.wiring import OPS, Meeting, Output, ScheduleWiring
from ...schedules.transform import defer_updates, replicate
from ..exhibit import Exhibit

_QUARTERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of the number of microbatches: other numbers
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
    if any(wiring["waits"] for wiring in wirings):
        return {
            "refused": "Messages wait for their receives, or ranks for messages, and this page knows no such waits."
        }
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
    numbers = {schedule.num_microbatches * step // 4 for step in _QUARTERS if schedule.num_microbatches * step % 4 == 0}
    for number in sorted(numbers - {schedule.num_microbatches}):
        try:
            other = build(number)
        except ValueError:
            continue  # the family does not take it
        if (left := left - _size(other)) < 0:
            break
        found.append(other)
    return found, "" if found else "M is fixed: schedules of other numbers of microbatches are too large for this page."


def _size(schedule: Schedule) -> int:
    return sum(map(len, schedule.programs))


def replay_data(schedule: Schedule, costs: Costs, links: Links | None) -> Columns:
    """Everything that `simulate(schedule, costs, links)` needs, as numbers and lists.

    What is the same for all microbatches (or slices) stands there once, else by index.
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
        "meetings": [_meeting(each, table) for each in wiring.meetings],
        "begins": [
            [[position, *begun] for position, several in of_rank.items() for begun in several]
            for of_rank in wiring.begins
        ],
        "returns": sorted({each.fills[0][0] for each in wiring.meetings if each.after is not None}),
        "behind": list(wiring.behind.items()),
        "filled": wiring.filled,
        "versions": _versions(schedule),
        "slots": wiring.num_slots,
        "waits": bool(wiring.waits) or any(each.way.blocks for each in wiring.passages),
        "channels": wiring.num_channels,
    }


def _wire(output: Output) -> Columns:
    return {
        "base": output.base,
        "kind": output.wire.kind.value,
        "src": output.wire.src,
        "dst": output.wire.dst,
        "passages": _folded([_STAYS if number is None else number for number in output.passages]),
        "last": None if output.last is None else _folded(output.last),
    }


def _meeting(meeting: Meeting, table: CostTable) -> Columns:
    return {
        "stages": list(meeting.stages),
        "op": meeting.op.value,
        "ranks": len(meeting.ranks),
        "seconds": meeting.seconds,
        "share": 0.0 if meeting.op in MOVE_OPS else max(table.sum_busy[stage] for stage in meeting.stages),
        "channels": list(meeting.channels),
        "fills": [[group, list(slots)] for group, slots in meeting.fills.items()],
        "after": meeting.after,
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


# --- other numbers of microbatches ---


def builder_of(schedule: Schedule) -> Callable[[int], Schedule] | None:
    """How to build `schedule` with any number of microbatches, all else being as it was; None where no family and
    options give just this one.

    What it returns raises ValueError for numbers that do not fit.
    """
    family = FAMILIES.get(schedule.name)
    for attempt in () if family is None else _attempts(schedule, family):
        with suppress(ValueError):  # not with these options
            if attempt(schedule.num_microbatches) == schedule:
                return attempt
    return None


def _attempts(schedule: Schedule, family: Family) -> Iterator[Callable[[int], Schedule]]:
    own = family.weight_copies
    counts = [len(ranks) // own for ranks in schedule.owners]
    copies = counts[0] if len(set(counts)) == 1 and counts[0] else 1
    options: dict[str, Any] = {}
    if family.takes_chunks:
        options["num_chunks"] = schedule.num_stages * copies * own // schedule.num_ranks
    if family.takes_slices:
        options["num_slices"] = schedule.num_slices
    if "num_batches" in family.options:
        options["num_batches"] = schedule.num_batches
    if "vertical_sync" in family.options:
        options["vertical_sync"] = schedule.weight_rule == "vertical-sync"
    for form in ({"warmup": "plain"}, {"warmup": "eager"}) if "warmup" in family.options else ({},):
        given = {**options, **form}
        for is_late in (False, True):
            if copies > 1:
                yield partial(_build, schedule, family, given, copies, is_late=is_late)
            if family.takes_replicas or copies == 1:
                replicas = {"replicas": counts} if max(counts) > 1 else {}
                yield partial(_build, schedule, family, given | replicas, 1, is_late=is_late)


def _build(
    schedule: Schedule, family: Family, options: dict[str, Any], copies: int, num_microbatches: int, *, is_late: bool
) -> Schedule:
    if num_microbatches % copies:
        raise ValueError(f"{num_microbatches} microbatches for {copies} replicas: expected a multiple of {copies}")
    if "update_every" in family.options:
        every_batch = schedule.group_size == schedule.num_microbatches
        group = num_microbatches if every_batch else schedule.group_size
        options = {**options, "update_every": group // copies}
    num_ranks = schedule.num_ranks // copies
    built = build(family.name, num_ranks=num_ranks, num_microbatches=num_microbatches // copies, **options)
    if is_late:
        built = defer_updates(built)
    return replicate(built, copies).with_edges(schedule.stage_edges)
