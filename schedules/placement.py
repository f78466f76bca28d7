"""Placements: the stages of each rank, by name. Nobody else says where a stage stands.

plain     stage r on rank r                                    (0) (1) (2)
cyclic    V stages a rank, in turn: stage s on rank s mod P    (0, 3) (1, 4) (2, 5)
snake     down the ranks and up again, and so on; of two       (0, 5) (1, 4) (2, 3)
          stages a rank: a V
two-way   each stage on two ranks, for those microbatches      (0, 3) (1, 2) (1, 2) (0, 3)
          that go down the ranks and for those that go up
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache

from .kinds import at_least, option

Placement = tuple[tuple[int, ...], ...]

PLACEMENTS = ("plain", "cyclic", "v")  # that users choose from


def cyclic_placement(*, num_ranks: int, num_chunks: int) -> Placement:
    """Stage s stands on rank s mod P: rank r holds r, P+r, 2P+r, ...

    >>> cyclic_placement(num_ranks=2, num_chunks=3)
    ((0, 2, 4), (1, 3, 5))
    """
    return tuple(tuple(range(rank, num_ranks * num_chunks, num_ranks)) for rank in range(num_ranks))


def snake_placement(*, num_ranks: int, num_chunks: int) -> Placement:
    """Stages go down the ranks and up again: with two chunks a V, whose first and last stage share rank 0.

    Where the way turns, two stages that follow each other stand on one rank, and no message passes between them.

    >>> snake_placement(num_ranks=3, num_chunks=2)
    ((0, 5), (1, 4), (2, 3))
    """
    return tuple(
        tuple(chunk * num_ranks + (num_ranks - 1 - rank if chunk % 2 else rank) for chunk in range(num_chunks))
        for rank in range(num_ranks)
    )


# How stages of one owner each may stand, by the name that a family gives.
FAMILY_PLACEMENTS = {"cyclic": cyclic_placement, "snake": snake_placement}


@lru_cache(maxsize=1024)
def rank_of_stages(name: str, *, num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """[S] rank of each stage under one of FAMILY_PLACEMENTS. Under each of them stage s is chunk s // P of its rank.

    >>> rank_of_stages("snake", num_ranks=3, num_chunks=2)
    (0, 1, 2, 2, 1, 0)
    """
    placement = FAMILY_PLACEMENTS[name](num_ranks=num_ranks, num_chunks=num_chunks)
    rank_of = {stage: rank for rank, own in enumerate(placement) for stage in own}
    return tuple(rank_of[stage] for stage in range(num_ranks * num_chunks))


def two_way(num_ranks: int, name: str) -> tuple[Placement, Placement]:
    """Placement and owners where even microbatches go down the ranks and odd ones up: each rank holds r and P-1-r.

    ValueError that names the schedule for an odd number of ranks.

    >>> two_way(4, "chimera")
    (((0, 3), (1, 2), (1, 2), (0, 3)), ((0, 3), (1, 2), (2, 1), (3, 0)))
    """
    if num_ranks % 2:
        raise ValueError(
            f"num_ranks={num_ranks} for schedule {name!r}: its two pipelines run in opposite directions, and would "
            f"have the same stage on the middle rank; expected an even number of ranks"
        )
    stages = [(rank, num_ranks - 1 - rank) for rank in range(num_ranks)]
    return tuple((min(pair), max(pair)) for pair in stages), tuple(stages)


def place(name: str, *, num_ranks: int, num_chunks: int | None = None) -> Placement:
    """One of PLACEMENTS; "cyclic" has V chunks a rank, 2 by default.

    >>> place("v", num_ranks=3)
    ((0, 5), (1, 4), (2, 3))
    """
    chunks = {"plain": 1, "v": 2}.get(name, 2 if num_chunks is None else num_chunks)
    if name not in PLACEMENTS:
        raise ValueError(f"placement={name!r}: expected one of {', '.join(PLACEMENTS)}, or the stages of each rank")
    if num_chunks not in (None, chunks) or chunks < 1:
        raise ValueError(f"num_chunks={num_chunks} for placement {name!r}: expected {max(1, chunks)}")
    return (snake_placement if name == "v" else cyclic_placement)(num_ranks=num_ranks, num_chunks=chunks)


def read_placement(
    placement: str | Sequence[Sequence[int]], num_ranks: int | None, num_chunks: int | None
) -> Placement:
    """The placement that a user gives: a name with sizes, or the stages of each rank; ValueError for anything else."""
    if isinstance(placement, str):
        return place(placement, num_ranks=option("num_ranks", num_ranks, at_least(1)), num_chunks=num_chunks)
    if not isinstance(placement, list | tuple) or not all(isinstance(own, list | tuple) for own in placement):
        raise ValueError(
            f"placement={placement!r:.60}: expected one of {', '.join(PLACEMENTS)}, or the stages of each rank"
        )
    try:
        placed = tuple(tuple(map(operator.index, own)) for own in placement)
    except TypeError:
        raise ValueError(
            f"placement={placement!r:.60}: expected the stages of each rank, as [[0, 3], [1, 2]]"
        ) from None
    if num_ranks not in (None, len(placed)):
        raise ValueError(f"num_ranks={num_ranks!r} for a placement of {len(placed)} ranks: expected {len(placed)}")
    return placed
