"""Two pipelines in opposite directions over the same ranks: where their stages stand."""

from __future__ import annotations

from typing import NamedTuple


class TwoWay(NamedTuple):
    """Placement and owners of a schedule whose even microbatches go down the ranks and whose odd ones go up.

    Stage s stands on rank s for those that go down and on rank P-1-s for those that go up.
    """

    placement: tuple[tuple[int, ...], ...]
    owners: tuple[tuple[int, int], ...]


def two_way(num_ranks: int, name: str) -> TwoWay:
    """Each rank holds two stages, r and P-1-r. ValueError that names the schedule for an odd number of ranks.

    >>> two_way(4, "chimera")
    TwoWay(placement=((0, 3), (1, 2), (1, 2), (0, 3)), owners=((0, 3), (1, 2), (2, 1), (3, 0)))
    """
    if num_ranks % 2:
        raise ValueError(
            f"num_ranks={num_ranks} for schedule {name!r}: its two pipelines run in opposite directions, and would "
            f"have the same stage on the middle rank; expected an even number of ranks"
        )
    stages = [(rank, num_ranks - 1 - rank) for rank in range(num_ranks)]
    return TwoWay(tuple((min(pair), max(pair)) for pair in stages), tuple(stages))
