"""Division of a parameter that several ranks hold, and a rank's part, which its optimizer holds instead.

a weight [6, 4] over 2 ranks     rows 0..2 | rows 3..5        for optimizers that update each element independently
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
    """A parameter's parts, each contiguous in memory.

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
        count: number of ranks that get a part.
        whole: names of parameters that stay whole; the largest first, each goes to the rank with the least bytes.
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
            shards[name] = [full.divided(dim, index=index, count=count) for index in range(count)]
            for index, shard in enumerate(shards[name]):
                held[index] += shard.numel * parameters[name].element_size()
    for name in sorted((name for name, dim in dims.items() if dim is None), key=lambda n: -parameters[n].nbytes):
        shape, owner = tuple(parameters[name].shape), held.index(min(held))
        held[owner] += parameters[name].nbytes
        shards[name] = [Shard.whole(shape) if index == owner else Shard.nothing(shape) for index in range(count)]
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
        apart: whether the part has separate memory, and the whole parameter may be freed.

    Attributes:
        whole: the model's own Parameter.
        parameter: held by the optimizer in its place: a view of it, unless `apart`.
    """

    def __init__(self, name: str, whole: nn.Parameter, split: ParameterSplit, rank: int, *, apart: bool) -> None:
        self.name = name
        self.whole = whole
        self.split = split
        self.rank = rank
        self._apart = apart
        self._stride = whole.stride()
        self._nothing: torch.Tensor | None = None  # in place of all elements while the whole is freed
        self._version = 0
        own = self.of(whole.data)
        self.parameter = nn.Parameter(own.clone() if apart else own, requires_grad=whole.requires_grad)

    def follow(self) -> None:
        """Make the part a view of the whole parameter's present memory."""
        if not self._apart:
            self.parameter.data = self.of(self.whole.data)

    def settle(self) -> None:
        """After a step, copy the part into the whole parameter if the optimizer put it into other memory."""
        if self._apart or self.is_empty:
            return
        own = self.of(self.whole.data)
        if own.data_ptr() != self.parameter.data_ptr():
            own.copy_(self.parameter.data)
            self.follow()

    # Of a part with separate memory

    def make_room(self) -> None:
        """Allocate the whole parameter, with this part of its values."""
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
        """Free the whole parameter, which keeps its shape: all elements are one NaN, and none can be written."""
        if self._apart:
            own = self.parameter.data
            nothing = float("nan") if own.is_floating_point() or own.is_complex() else 0
            self._nothing = torch.full((), nothing, dtype=own.dtype, device=own.device)
            self.whole.data = self._nothing.expand(self.whole.shape)
            self._version = self.whole._version

    def _refuse_edits(self) -> None:
        """ValueError for a parameter that was written while it was freed, which the next gathering would undo."""
        if self._nothing is None:
            return
        is_moved = self.whole.numel() > 0 and self.whole.data_ptr() != self._nothing.data_ptr()  # 0 without elements
        is_other = is_moved or self.whole._version != self._version
        # Reading would synchronize a CUDA device: there, writes through `.data` are not seen.
        readable = self._nothing.device.type == "cpu" and self._nothing.is_floating_point()
        if is_other or (readable and not bool(self._nothing.isnan())):
            raise ValueError(
                f"parameter {self.name!r} was changed between two batches, when fsdp keeps only parts of it, and the "
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
        """The part's shard, given that of the whole parameter."""
        return of.part(self.split.shards[self.rank])

    def state_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: self.of(value).clone()
            if isinstance(value, torch.Tensor) and value.shape == self.whole.shape
            else value
            for key, value in state.items()
        }
