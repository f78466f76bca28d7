"""A schedule of a built-in family with other numbers of microbatches, all else being as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ...schedules import FAMILIES, Family, Schedule, build
from ...schedules.transform import defer_updates, replicate

Build = Callable[[int], Schedule]  # of M


def builder_of(schedule: Schedule) -> Build | None:
    """How to build `schedule` with any number of microbatches; None where no family and options give just this one.

    What it returns raises ValueError for numbers that do not fit.
    """
    family = FAMILIES.get(schedule.name)
    if family is None:
        return None
    for attempt in _attempts(schedule, family):
        try:
            if attempt(schedule.num_microbatches) == schedule:
                return attempt
        except ValueError:
            continue  # not with these options
    return None


def _attempts(schedule: Schedule, family: Family) -> Iterator[Build]:
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
    forms: list[dict[str, Any]] = [{}]
    if "warmup" in family.options:
        forms = [{"warmup": "plain"}, {"warmup": "eager"}]
    for form in forms:
        for late in (False, True):
            given = partial(_build, schedule, family, {**options, **form}, late)
            if copies > 1:
                yield partial(given, copies=copies, replicas=None)
            if family.takes_replicas or copies == 1:
                yield partial(given, copies=1, replicas=counts if max(counts) > 1 else None)


def _build(
    schedule: Schedule,
    family: Family,
    options: dict[str, Any],
    late: bool,
    num_microbatches: int,
    *,
    copies: int,
    replicas: list[int] | None,
) -> Schedule:
    if num_microbatches % copies:
        raise ValueError(f"{num_microbatches} microbatches for {copies} replicas: expected a multiple of {copies}")
    if replicas is not None:
        options = {**options, "replicas": replicas}
    if "update_every" in family.options:
        every_batch = schedule.group_size == schedule.num_microbatches
        group = num_microbatches if every_batch else schedule.group_size
        options = {**options, "update_every": group // copies}
    num_ranks = schedule.num_ranks // copies
    built = build(family.name, num_ranks=num_ranks, num_microbatches=num_microbatches // copies, **options)
    if late:
        built = defer_updates(built)
    return replicate(built, copies).with_edges(schedule.stage_edges)
