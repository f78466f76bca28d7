"""A profile as sums over its cuts: what any stage of it computes, holds and sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from ..profile import Profile
from ..solver.antichains import MAX_CUTS, all_cuts
from ..solver.cut_sums import Cuts, node_names
from ..stage_cost import StageSums

MAX_COARSE = 256  # cuts that the dynamic program looks at


class Model:
    """One profile for the planner.

    Arguments:
        optimizer_ratio: bytes of optimizer state a byte of parameters.
        compression: of activations, divides what crosses a cut.
    """

    def __init__(
        self, profile: Profile, *, optimizer_ratio: float, max_cuts: int = MAX_CUTS, compression: float = 1.0
    ) -> None:
        self.profile = profile
        self.optimizer_ratio = optimizer_ratio
        cuts = all_cuts(profile, limit=max_cuts)
        self.cuts: Cuts = replace(cuts, crossing=cuts.crossing / compression)
        self.seconds = float(self.cuts.seconds[-1])
        self._beyond: dict[int, float] = {}
        self._place = {node.name: at for at, node in enumerate(profile.nodes)}
        self.max_stages = min(len(set(self.cuts.members.sum(axis=1).tolist())), MAX_COARSE) - 1

    @cached_property
    def coarse(self) -> list[int]:
        """Cuts for the dynamic program: all, or, where they are many, one in each stretch of equal work.

        Of a stretch the one with the least bytes across.
        """
        cuts = self.cuts
        if len(cuts) <= MAX_COARSE:
            return list(range(len(cuts)))
        share = cuts.seconds / max(float(cuts.seconds[-1]), 1e-300)
        stretch = np.minimum((share * (MAX_COARSE - 2)).astype(int), MAX_COARSE - 3)
        best: dict[int, int] = {}
        for at in range(1, len(cuts) - 1):
            known = best.get(int(stretch[at]))
            if known is None or cuts.crossing[at] < cuts.crossing[known]:
                best[int(stretch[at])] = at
        return [0, *sorted(best.values()), len(cuts) - 1]

    def least_work_beyond(self, reach: int) -> float:
        """F + B of any stage that spans more of the coarse cuts, at least [s]; infinite where there is none."""
        if reach not in self._beyond:
            at = np.asarray(self.coarse)
            longer = self.cuts.inside[np.ix_(at, at)] & np.tri(len(at), k=-reach - 1, dtype=bool).T
            work = self.cuts.seconds[at] - self.cuts.seconds[at][:, None]
            self._beyond[reach] = float(work[longer].min(initial=np.inf))
        return self._beyond[reach]

    def stages(self, ends: Sequence[int]) -> StageSums:
        """[S] between neighbours among these cuts, S + 1 of them from 0 to the last."""
        at = np.asarray(ends)
        return self.cuts.stages(at[:-1], at[1:])

    def tied_stages(self, ends: Sequence[int]) -> list[tuple[tuple[int, int], float]]:
        """Stages between these cuts that share weights, and bytes of these: `Profile.tied`."""
        found = []
        for names, shared in self.profile.tied:
            inside = self.cuts.members[list(ends[1:])]
            one, other = sorted(int(np.argmax(inside[:, self._place[name]])) for name in names)
            found.append(((one, other), shared))
        return found

    def names(self, first: int, last: int) -> tuple[str, ...]:
        """Names of the nodes between two cuts, each behind what it needs."""
        return node_names(self.profile, self.cuts, first, last)

    def parameter_bytes(self, first: int, last: int) -> float:
        """Bytes of parameters between two cuts, as the profile adds them up."""
        own = self.cuts.members[last] & ~self.cuts.members[first]
        return sum(node.parameter_bytes for at, node in enumerate(self.profile.nodes) if own[at])
