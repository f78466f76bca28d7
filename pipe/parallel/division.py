"""Division of a stage's parameters among the ranks that hold it: which part of which parameter is whose.

a weight [6, 4] over 2 ranks     rows 0..2 | rows 3..5        for optimizers that treat each element by itself
weights a, b over 2 ranks        a | b                        for those that need a whole parameter (Muon)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from .share import Share, chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A parameter's parts, one for each of some ranks.

    Arguments:
        ranks: that hold the parameter's stage, ascending.
        count: of the parts; ranks behind have none.
        dim: along which it is cut, into parts as torch.chunk makes them; dimensions in front of it have size 1, so that
            a part is one piece of memory. None: it stays whole.
        owner: place of the rank that has all of it, where it stays whole.
    """

    ranks: tuple[int, ...]
    count: int
    dim: int | None
    owner: int = 0

    def view(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of a rank, as a view; without elements where it has none."""
        place = self.ranks.index(rank)
        if self.dim is None:
            return tensor if place == self.owner else tensor.new_empty(0)
        begin, end = chunk(tensor.shape[self.dim], index=place, count=self.count)
        return tensor.narrow(self.dim, begin, end - begin)

    def share(self, rank: int, of: Share) -> Share:
        """The part of a rank that holds the share `of` of the full parameter."""
        place = self.ranks.index(rank)
        if self.dim is not None and place < self.count:
            return of.divided(self.dim, index=place, count=self.count)
        if self.dim is None and place == self.owner:
            return of
        return Share(full=of.full, local=(0,), boxes=())


def divide(
    parameters: Mapping[str, torch.Tensor], *, ranks: Sequence[int], count: int, whole: Collection[str]
) -> dict[str, Division]:
    """Division of a stage's parameters by name; the same on all of its ranks.

    Arguments:
        count: how many of the ranks get a part.
        whole: names of those that must stay whole; the largest first, each goes to the rank that has least.
    """
    dims = {
        name: None if name in whole or not tensor.is_contiguous() else _first_long(tensor)
        for name, tensor in parameters.items()
    }
    found = {name: Division(ranks=tuple(ranks), count=count, dim=dim) for name, dim in dims.items() if dim is not None}
    held = [0] * count
    for name, division in found.items():
        for place in range(count):
            held[place] += division.view(parameters[name], ranks[place]).nbytes
    for name in sorted((name for name, dim in dims.items() if dim is None), key=lambda n: -parameters[n].nbytes):
        owner = held.index(min(held))
        held[owner] += parameters[name].nbytes
        found[name] = Division(ranks=tuple(ranks), count=count, dim=None, owner=owner)
    return {name: found[name] for name in parameters}


def _first_long(tensor: torch.Tensor) -> int | None:
    """The first dimension that can be cut."""
    return next((dim for dim, size in enumerate(tensor.shape) if size > 1), None)
