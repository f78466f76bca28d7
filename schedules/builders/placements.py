"""Where stages stand when a rank has V of them: in turn, or back and forth."""

from __future__ import annotations

from functools import lru_cache

Placement = tuple[tuple[int, ...], ...]


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
PLACEMENTS = {"cyclic": cyclic_placement, "snake": snake_placement}


@lru_cache(maxsize=1024)
def rank_of_stages(name: str, *, num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """[S] rank of each stage under one of PLACEMENTS. Under each of them stage s is chunk s // P of its rank.

    >>> rank_of_stages("snake", num_ranks=3, num_chunks=2)
    (0, 1, 2, 2, 1, 0)
    """
    placement = PLACEMENTS[name](num_ranks=num_ranks, num_chunks=num_chunks)
    rank_of = {stage: rank for rank, own in enumerate(placement) for stage in own}
    return tuple(rank_of[stage] for stage in range(num_ranks * num_chunks))
