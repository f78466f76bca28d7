"""A profile as sums over its cuts: what any stage of it computes, holds and sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..profile import Profile
from ..solver.antichains import Cuts, Floats, all_cuts

MAX_COARSE = 256  # cuts that the dynamic program looks at


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSums:
    """[S] of each stage: F, B and optimizer step [s]; held, kept, sent and needed for a while [bytes]."""

    forward: Floats
    backward: Floats
    update: Floats
    weights: Floats
    buffers: Floats
    stash: Floats
    before: Floats  # cross the cut in front of it
    behind: Floats
    workspace: Floats

    @property
    def work(self) -> Floats:
        """[S] F + B [s]."""
        return self.forward + self.backward


class Model:
    """One profile for the planner.

    Arguments:
        optimizer_ratio: bytes of optimizer state a byte of parameters.
    """

    def __init__(self, profile: Profile, *, optimizer_ratio: float, max_cuts: int) -> None:
        self.profile = profile
        self.optimizer_ratio = optimizer_ratio
        self.cuts: Cuts = all_cuts(profile, limit=max_cuts)
        self.update = self._column("update_seconds")
        self.seconds = float(self.cuts.seconds[-1])
        self.max_stages = min(len(set(self.cuts.members.sum(axis=1).tolist())), MAX_COARSE) - 1

    def _column(self, figure: str) -> Floats:
        weights = np.array([getattr(node, figure) for node in self.profile.nodes])
        return np.asarray(np.where(self.cuts.members, weights, 0.0).sum(axis=1), dtype=np.float64)

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

    def stages(self, ends: Sequence[int]) -> StageSums:
        """Between neighbours among these cuts, S + 1 of them from 0 to the last."""
        at, cuts = np.asarray(ends), self.cuts

        def between(column: Floats) -> Floats:
            return np.asarray(np.maximum(np.diff(column[at]), 0.0), dtype=np.float64)

        own = cuts.members[at[1:]] & ~cuts.members[at[:-1]]
        return StageSums(
            forward=between(cuts.forward),
            backward=between(cuts.backward),
            update=between(self.update),
            weights=between(cuts.parameters),
            buffers=between(cuts.buffers),
            stash=between(cuts.stash),
            before=cuts.crossing[at[:-1]],
            behind=cuts.crossing[at[1:]],
            workspace=np.where(own, self._workspaces, 0.0).max(axis=1),
        )

    @cached_property
    def _workspaces(self) -> Floats:
        return np.asarray([node.workspace_bytes for node in self.profile.nodes], dtype=np.float64)

    @cached_property
    def largest_workspace(self) -> float:
        """Of any node [bytes]."""
        return float(self._workspaces.max())

    def names(self, first: int, last: int) -> tuple[str, ...]:
        """Of the nodes between two cuts, each behind what it needs."""
        own = self.cuts.members[last] & ~self.cuts.members[first]
        return tuple(self.profile.nodes[at].name for at in self.profile.order() if own[at])

    def parameter_bytes(self, first: int, last: int) -> float:
        """Of the nodes between two cuts, as the profile adds them up [bytes]."""
        own = self.cuts.members[last] & ~self.cuts.members[first]
        return sum(node.parameter_bytes for at, node in enumerate(self.profile.nodes) if own[at])
