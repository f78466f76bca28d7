"""A configuration with its cuts, as it was found: what each stage costs and what each rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from ...schedules.timing.costs import Costs, Ties
from ...schedules.timing.links import Links
from ..memory import RankMemory
from ..stage_cost import StageSeconds, StageSums
from .model import Model
from .placement import Placement
from .space import Configuration

Ends = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluated:
    """A configuration with cuts that fits.

    Arguments:
        tied: (stages, seconds) of sums of gradients of weights that stages on different ranks share.
        bottleneck: pace of the slowest rank [s a microbatch].
        bound: no order of this work is faster [s]; 0 where the number of microbatches is open.
    """

    configuration: Configuration
    ends: Ends
    model: Model
    placement: Placement
    sums: StageSums
    seconds: StageSeconds
    tied: Ties
    memories: tuple[RankMemory, ...]
    bottleneck: float
    bound: float

    @property
    def memory_bytes(self) -> float:
        """Bytes on the fullest rank."""
        return max(memory.total for memory in self.memories)

    def costs(self, *, norm: float | None) -> Costs:
        """What its step is simulated from.

        Arguments:
            norm: of the global norm, for which all ranks wait [s]; None: there is none.
        """
        return self.seconds.costs(around=self.model.profile.around_seconds, norm=norm, tied=self.tied)

    @property
    def links(self) -> Links:
        """Likewise, with one rank a place."""
        c = self.configuration
        return self.seconds.links(self.sums.behind, self.placement.outward, tensor=c.tensor, positions=c.positions)
