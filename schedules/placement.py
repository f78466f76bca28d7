"""Placements: the stages of each rank, by name.

plain     stage r on rank r                                    (0) (1) (2)
cyclic    V stages per rank: stage s on rank s mod P           (0, 3) (1, 4) (2, 5)
snake     down the ranks and up again, and so on; with two     (0, 5) (1, 4) (2, 3)
          stages per rank: a V
two-way   each stage on two ranks, for the microbatches that   (0, 3) (1, 2) (1, 2) (0, 3)
          go down the ranks and for those that go up
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from .actions import ScheduleError
from .kinds import at_least, option

PLACEMENTS = ("plain", "cyclic", "v")  # that users choose from


def chunk_of_stages(rank_of: Sequence[int]) -> tuple[int, ...]:
    """[S] which of its rank's stages each is.

    >>> chunk_of_stages([0, 1, 0, 2, 0])
    (0, 0, 1, 0, 2)
    """
    found, seen = [], Counter[int]()
    for rank in rank_of:
        found.append(seen[rank])
        seen[rank] += 1
    return tuple(found)


class StagePlacement(tuple[tuple[int, ...], ...]):
    """[P] tuples: the stages of each rank, each stage on one."""

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """[S] the rank of each stage; ScheduleError if a stage is missing or on several ranks, or some rank has none.

        >>> StagePlacement.snake(num_ranks=3, num_chunks=2).rank_of
        (0, 1, 2, 2, 1, 0)
        """
        rank_of = {stage: rank for rank, own in enumerate(self) for stage in own}
        stages = sorted(stage for own in self for stage in own)
        if not self or not all(self) or stages != list(range(len(stages))):
            raise ScheduleError(
                f"placement={self!r:.80}: expected stages from 0 without a gap, each on one rank, at least one per rank"
            )
        return tuple(rank_of[stage] for stage in stages)

    @classmethod
    def cyclic(cls, *, num_ranks: int, num_chunks: int = 1) -> StagePlacement:
        """Stage s on rank s mod P: rank r holds r, P+r, 2P+r, ...

        >>> StagePlacement.cyclic(num_ranks=2, num_chunks=3)
        ((0, 2, 4), (1, 3, 5))
        """
        return cls(tuple(range(rank, num_ranks * num_chunks, num_ranks)) for rank in range(num_ranks))

    @classmethod
    def snake(cls, *, num_ranks: int, num_chunks: int = 2) -> StagePlacement:
        """Stages go down the ranks and up again: with two chunks a V, whose first and last stage share rank 0.

        At each turn, two consecutive stages are on one rank, and no message passes between them.

        >>> StagePlacement.snake(num_ranks=3)
        ((0, 5), (1, 4), (2, 3))
        """
        return cls(
            tuple(chunk * num_ranks + (num_ranks - 1 - rank if chunk % 2 else rank) for chunk in range(num_chunks))
            for rank in range(num_ranks)
        )


# Placements of stages with one owner each, by the name that a family gives: stage s is chunk s // P of its rank.
FAMILY_PLACEMENTS = {"cyclic": StagePlacement.cyclic, "snake": StagePlacement.snake}


@lru_cache(maxsize=1024)
def family_placement(name: str, *, num_ranks: int, num_chunks: int) -> StagePlacement:
    """One of FAMILY_PLACEMENTS; KeyError for another."""
    return FAMILY_PLACEMENTS[name](num_ranks=num_ranks, num_chunks=num_chunks)


def two_way(num_ranks: int, name: str) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Stages of each rank, and owners, where even microbatches go down the ranks and odd ones up: rank r holds r and
    P-1-r.

    Raises ValueError, with the name of the schedule, for an odd number of ranks.

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


def place(name: str, *, num_ranks: int, num_chunks: int | None = None) -> StagePlacement:
    """One of PLACEMENTS; "cyclic" has V chunks per rank, 2 by default.

    >>> place("v", num_ranks=3)
    ((0, 5), (1, 4), (2, 3))
    """
    chunks = {"plain": 1, "v": 2}.get(name, 2 if num_chunks is None else num_chunks)
    if name not in PLACEMENTS:
        raise ValueError(f"placement={name!r}: expected one of {', '.join(PLACEMENTS)}, or the stages of each rank")
    if num_chunks not in (None, chunks) or chunks < 1:
        raise ValueError(f"num_chunks={num_chunks} for placement {name!r}: expected {max(1, chunks)}")
    return (StagePlacement.snake if name == "v" else StagePlacement.cyclic)(num_ranks=num_ranks, num_chunks=chunks)


def read_placement(
    placement: str | Sequence[Sequence[int]], num_ranks: int | None, num_chunks: int | None
) -> StagePlacement:
    """The placement that a user gives: a name, or the stages of each rank; ValueError for anything else."""
    if isinstance(placement, str):
        return place(placement, num_ranks=option("num_ranks", num_ranks, at_least(1)), num_chunks=num_chunks)
    if not isinstance(placement, list | tuple) or not all(isinstance(own, list | tuple) for own in placement):
        raise ValueError(
            f"placement={placement!r:.60}: expected one of {', '.join(PLACEMENTS)}, or the stages of each rank"
        )
    placed = StagePlacement(read_placed(list(placement)))
    if num_ranks not in (None, len(placed)):
        raise ValueError(f"num_ranks={num_ranks!r} for a placement of {len(placed)} ranks: expected {len(placed)}")
    return placed


def ascending_owners(placement: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """[S] the ranks that hold each stage, ascending. Raises ScheduleError for an invalid placement."""
    placed = {stage for stages in placement for stage in stages}
    if not placed:
        raise ScheduleError("the ranks hold no stage: expected at least one")
    if min(placed) != 0 or max(placed) != len(placed) - 1:
        lacking = next(stage for stage in range(len(placed) + 1) if stage not in placed)
        raise ScheduleError(
            f"the ranks hold {len(placed)} stages, numbered {min(placed)} to {max(placed)}, and none holds "
            f"stage {lacking}: expected stages numbered from 0 without a gap"
        )
    owners: list[list[int]] = [[] for _ in placed]
    for rank, stages in enumerate(placement):
        for stage in stages:
            if rank in owners[stage]:
                raise ScheduleError(f"stage {stage} is twice on rank {rank}: expected each stage once")
            owners[stage].append(rank)
    return tuple(tuple(ranks) for ranks in owners)


def read_placed(placement: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(placement, tuple) and all(isinstance(stages, tuple) for stages in placement):
        return placement
    try:
        return tuple(tuple(map(operator.index, stages)) for stages in placement)
    except TypeError:
        raise ScheduleError(
            f"placement={placement!r:.60}: expected the stages of each rank, such as [[0], [1]]"
        ) from None


def read_owners(declared: Sequence[Sequence[int]], placed: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """The declared owners, or by default the ranks of each stage, ascending."""
    if not declared:
        return placed
    if len(declared) != len(placed):
        raise ScheduleError(f"owners of {len(declared)} stages for {len(placed)}: expected the ranks of each stage")
    for stage, (said, ranks) in enumerate(zip(declared, placed, strict=True)):
        if tuple(sorted({*said})) != ranks:
            raise ScheduleError(
                f"the owners of stage {stage} are said to be the ranks {tuple(said)}, and it is placed on {ranks}: "
                f"expected each of these, in the order in which microbatches go round"
            )
    return tuple(tuple(ranks) for ranks in declared)
