"""Which cases run on which layouts: a grid for one model, pairwise covers for the rest."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from .cases import Case, Layout
from .models import TASKS
from .pairwise import Row, pairwise

INTERLEAVING = ("interleaved", "looped-bfs")
SCHEDULES = ("gpipe", "1f1b", "zb-h1", *INTERLEAVING)
CHUNKS = (1, 2, 3)
# With the tasks' batch sizes: fewer than the ranks, no multiple of the ranks, no divisor of the samples.
MICROBATCHES = (1, 2, 5, 8)


def make_layout(schedule: str, num_ranks: int, num_chunks: int, *, recompute: str = "none") -> Layout:
    """Names the number of chunks only to the schedules that take one."""
    return Layout(
        schedule=schedule,
        num_ranks=num_ranks,
        num_chunks=num_chunks if schedule in INTERLEAVING else None,
        recompute=recompute,
    )


def make_case(task: str, layout: Layout, num_microbatches: int, **options: Any) -> Case:
    num_stages = layout.num_stages if TASKS[task].kind == "stages" else None
    return Case(task=task, num_microbatches=num_microbatches, num_stages=num_stages, **options)


def all_layouts(*, ranks: Sequence[int]) -> list[Layout]:
    return [
        make_layout(schedule, num_ranks, num_chunks)
        for schedule in SCHEDULES
        for num_ranks in ranks
        for num_chunks in CHUNKS
        if num_chunks == 1 or schedule in INTERLEAVING
    ]


def cover(*, ranks: Sequence[int]) -> list[Any]:
    """pytest parameters (case, layout) in which every two of task, schedule, P, V, M and recompute meet, where
    microbatches of a batch differ in size."""
    rows = _rows(ranks, task=list(TASKS))
    return [_parameter(row["task"], row, sizes=(TASKS[row["task"]].batch_size,) * 4) for row in rows]


def sample(*, ranks: Sequence[int], times: int = 2) -> list[Any]:
    """pytest parameters (case, layout): each task `times`, on layouts that together are those in which every
    two of schedule, P, V, M and recompute meet, as many of them as there are tasks.
    """
    rows = _rows(ranks)
    random.Random(0).shuffle(rows)  # sorted by ranks: the first ones would have the fewest
    tasks = times * list(TASKS)
    return [_parameter(task, rows[k % len(rows)]) for k, task in enumerate(tasks)]


def _rows(ranks: Sequence[int], **more: Sequence[Any]) -> list[Row]:
    factors = {"ranks": ranks, **more, "schedule": SCHEDULES, "chunks": CHUNKS, "microbatches": MICROBATCHES}
    return pairwise(
        {**factors, "recompute": ("none", "full", "layer", "selective")},
        allowed=lambda row: row["chunks"] == 1 or row["schedule"] in INTERLEAVING,
        cost=lambda row: row["ranks"],
    )


def _parameter(task: str, row: Row, **options: Any) -> Any:
    layout = make_layout(row["schedule"], row["ranks"], row["chunks"], recompute=row["recompute"])
    case = make_case(task, layout, row["microbatches"], **options)
    return pytest.param(case, layout, id=f"{task}-{layout}-M{row['microbatches']}")
