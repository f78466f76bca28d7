"""Who has which part of a parameter that several ranks hold, and a rank's own part: what its optimizer holds instead.

a weight [6, 4] over 2 ranks     rows 0..2 | rows 3..5        for optimizers that treat each element by itself
weights a, b over 2 ranks        a | b                        for those that need a whole parameter (Muon)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSplit:
    """A parameter's parts, each one piece of memory.

    Arguments:
        ranks: that hold the same stage, ascending.
        shards: by rank, of these; once all ranks that hold the parameter have agreed, of all of them.
    """

    ranks: tuple[int, ...]
    shards: Mapping[int, Shard]


def split_parameters(
    parameters: Mapping[str, torch.Tensor], *, ranks: Sequence[int], count: int, whole: Collection[str]
) -> dict[str, ParameterSplit]:
    """Splits of a stage's parameters by name; the same on all of its ranks.

    A parameter is cut along its first dimension above 1, into parts as torch.chunk makes them.

    Arguments:
        count: how many of the ranks get a part.
        whole: names of those that must stay whole; the largest first, each goes to the rank that has least.
    """
    shards: dict[str, list[Shard]] = {}
    held = [0] * count
    dims = {
        name: None
        if name in whole or not tensor.is_contiguous()
        else next((dim for dim, size in enumerate(tensor.shape) if size > 1), None)
        for name, tensor in parameters.items()
    }
    for name, dim in dims.items():
        if dim is not None:
            full = Shard.whole(tuple(parameters[name].shape))
            shards[name] = [full.divided(dim, index=place, count=count) for place in range(count)]
            for place, shard in enumerate(shards[name]):
                held[place] += shard.numel * parameters[name].element_size()
    for name in sorted((name for name, dim in dims.items() if dim is None), key=lambda n: -parameters[n].nbytes):
        shape, owner = tuple(parameters[name].shape), held.index(min(held))
        held[owner] += parameters[name].nbytes
        shards[name] = [Shard.whole(shape) if place == owner else Shard.nothing(shape) for place in range(count)]
    rest = len(ranks) - count
    return {
        name: ParameterSplit(
            ranks=tuple(ranks),
            shards=dict(zip(ranks, shards[name] + [Shard.nothing(tuple(tensor.shape))] * rest, strict=True)),
        )
        for name, tensor in parameters.items()
    }


class ShardedParameter:
    """A parameter of which this rank has a part.

    Arguments:
        apart: whether the part has memory of its own, and the whole parameter may be let go.

    Attributes:
        whole: the model's own Parameter.
        parameter: what the optimizer holds in its place: a view of it, unless `apart`.
    """

    def __init__(self, name: str, whole: nn.Parameter, split: ParameterSplit, rank: int, *, apart: bool) -> None:
        self.name = name
        self.whole = whole
        self.split = split
        self.rank = rank
        self._apart = apart
        self._stride = whole.stride()
        self._nothing: torch.Tensor | None = None  # what stands for all elements while the whole is let go
        self._version = 0
        own = self.of(whole.data)
        self.parameter = nn.Parameter(own.clone() if apart else own, requires_grad=whole.requires_grad)

    def follow(self) -> None:
        """Be a view of the whole parameter, wherever that is now."""
        if not self._apart:
            self.parameter.data = self.of(self.whole.data)

    def settle(self) -> None:
        """Behind a step: the whole parameter has the part, also of an optimizer that put it into other memory."""
        if self._apart or self.is_empty:
            return
        own = self.of(self.whole.data)
        if own.data_ptr() != self.parameter.data_ptr():
            own.copy_(self.parameter.data)
            self.follow()

    # Of a part that stands apart

    def make_room(self) -> None:
        """The whole parameter has memory again, and this part of its values."""
        if self._apart:
            self._refuse_edits()
            shape, own = self.whole.shape, self.parameter.data
            self.whole.data = torch.empty_strided(shape, self._stride, dtype=own.dtype, device=own.device)
            if not self.is_empty:
                self.of(self.whole.data).copy_(own)

    def take(self) -> None:
        if self._apart and not self.is_empty:
            self.parameter.data.copy_(self.of(self.whole.data))

    def let_go(self) -> None:
        """The whole parameter keeps its shape alone: one NaN stands for all elements, and none can be written."""
        if self._apart:
            own = self.parameter.data
            nothing = float("nan") if own.is_floating_point() or own.is_complex() else 0
            self._nothing = torch.full((), nothing, dtype=own.dtype, device=own.device)
            self.whole.data = self._nothing.expand(self.whole.shape)
            self._version = self.whole._version

    def _refuse_edits(self) -> None:
        """ValueError for a parameter that was written while it was let go: the next gathering would undo that."""
        if self._nothing is None:
            return
        is_moved = self.whole.numel() > 0 and self.whole.data_ptr() != self._nothing.data_ptr()  # 0 without elements
        is_other = is_moved or self.whole._version != self._version
        # A CUDA device would have to be waited for: there, only writes through `.data` pass unseen.
        readable = self._nothing.device.type == "cpu" and self._nothing.is_floating_point()
        if is_other or (readable and not bool(self._nothing.isnan())):
            raise ValueError(
                f"parameter {self.name!r} was changed between two batches, while fsdp keeps parts of it alone, and the "
                f"change would be lost: expected pipe.load_state_dict(...) with the new values, or "
                f"data_parallel='zero1', under which weights stay whole"
            )
        self._nothing = None

    @property
    def is_empty(self) -> bool:
        return self.parameter.numel() == 0

    def of(self, tensor: torch.Tensor, *, rank: int | None = None) -> torch.Tensor:
        return self.split.shards[self.rank if rank is None else rank].view(tensor)

    def shard(self, of: Shard) -> Shard:
        """The part, of what this rank would hold alone."""
        return of.part(self.split.shards[self.rank])

    def state_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: self.of(value).clone()
            if isinstance(value, torch.Tensor) and value.shape == self.whole.shape
            else value
            for key, value in state.items()
        }
