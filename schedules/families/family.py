"""The record of a schedule family, defined next to its builder and found by the registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

from ..ir import Schedule
from ..placement import FAMILY_PLACEMENTS, family_placement
from ..weight_rules import RULES, WeightRule
from .warmup import ChunkOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A schedule by name. Adding one = a file in `families` with a builder and this record.

    Arguments:
        name: canonical, lower case.
        build: builder; takes `num_ranks`, `num_microbatches` and the options, by name.
        aliases: other names, lower case with hyphens.
        weight_rules: names of the rules that it may follow, the default first.
        num_chunks: stages per rank, V, unless it is an option.
        placement: of its stages, each on one rank: "cyclic" or "snake" (see `placement`); "two-way" where a rank
            shares its stages with another.
        splits_backward: whether its programs hold I and W.
        full_after: rounds of P microbatches after which no rank holds more at once; None: memory grows with M.
        chunk_order: the order for P, M and V by default, without replicas, in which planners count activations a
            hundred times faster than in programs. None: the programs are made in another way.
        weight_copies: ranks that hold each stage, without replicas.
    """

    name: str
    build: Callable[..., Schedule]
    aliases: tuple[str, ...] = ()
    weight_rules: tuple[str, ...] = ("flush",)
    num_chunks: int = 1
    placement: str = "cyclic"
    splits_backward: bool = False
    full_after: int | None = None
    chunk_order: Callable[[int, int, int], ChunkOrder] | None = None
    weight_copies: int = 1
    options: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = inspect.signature(self.build).parameters.keys() - {"num_ranks", "num_microbatches"}
        object.__setattr__(self, "options", tuple(sorted(names)))

    @property
    def takes_chunks(self) -> bool:
        """Whether the number of stages per rank may be chosen."""
        return "num_chunks" in self.options

    @property
    def takes_slices(self) -> bool:
        """Whether its microbatches are cut along the sequence."""
        return "num_slices" in self.options

    @property
    def is_planned(self) -> bool:
        """Whether plans may use it: each stage is on one rank, and microbatches are whole."""
        return self.placement in FAMILY_PLACEMENTS and not self.takes_slices

    def rank_of_stages(self, *, num_ranks: int, num_chunks: int) -> tuple[int, ...]:
        """[S] the rank of each stage; stage s is chunk s // P there. KeyError for a two-way placement."""
        return family_placement(self.placement, num_ranks=num_ranks, num_chunks=num_chunks).rank_of

    @property
    def takes_replicas(self) -> bool:
        """Whether stages may have different numbers of replicas."""
        return "replicas" in self.options

    @property
    def rule(self) -> WeightRule:
        return RULES[self.weight_rules[0]]
