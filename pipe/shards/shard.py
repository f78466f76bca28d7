"""Shards of tensors: the boxes of a full tensor that one process holds, and their positions in its local tensor.

Tensor parallelism divides a weight along one of its dimensions (a fused one block by block, as [q | k | v]), sharding
over replicas divides the rest once more. Norms, gathering, checkpoints and optimizers use a tensor's shard.

    [q | k | v] of 6 rows, member 1 of 2, blocks=3:     full rows 1, 3, 5  ->  local rows 0, 1, 2

The data-parallel option decides what the ranks that hold a stage divide among themselves.

              gradients                optimizer's state      weights
"replicate"   summed                   on each of them        on each of them
"zero1"       summed to their owners   divided                gathered after each update
"fsdp"        summed to their owners   divided                divided; gathered for a batch, then freed

a weight [6, 4] over 2 ranks     rows 0..2 | rows 3..5        for optimizers that update each element independently
weights a, b over 2 ranks        a | b                        for those that need a whole parameter (Muon)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from ...comm import World
from ...schedules import Collective, Op, Schedule
from ...schedules.kinds import Kind, at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBox:
    """A rectangular part: its start in the full tensor and in the local one, and its sizes; [dimensions] each."""

    start: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]

    def of_full(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.start, self.sizes, strict=True))

    def of_local(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.local, self.sizes, strict=True))

    def part(self, part: TensorBox) -> TensorBox | None:
        """The part that a box of the local tensor, with its own local tensor, holds; None: nothing."""
        low = tuple(map(max, self.local, part.start))
        high = tuple(
            min(a + b, c + d) for a, b, c, d in zip(self.local, self.sizes, part.start, part.sizes, strict=True)
        )
        if any(begin >= end for begin, end in zip(low, high, strict=True)):
            return None
        return TensorBox(
            start=tuple(at + begin - here for at, begin, here in zip(self.start, low, self.local, strict=True)),
            local=tuple(at + begin - here for at, begin, here in zip(part.local, low, part.start, strict=True)),
            sizes=tuple(end - begin for begin, end in zip(low, high, strict=True)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A process's part of a tensor of shape `full`: boxes that tile a local tensor of shape `local`.

    A shard may be empty: then it has no boxes, and `local` has a 0 in it.

    >>> Shard.whole((6, 4)).divided(0, index=1, count=2, blocks=3).boxes[1]
    TensorBox(start=(3, 0), local=(1, 0), sizes=(1, 4))
    >>> Shard.whole((6, 4)).divided(1, index=0, count=2).divided(0, index=2, count=4).local
    (2, 2)
    """

    full: tuple[int, ...]
    local: tuple[int, ...]
    boxes: tuple[TensorBox, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Shard:
        start = (0,) * len(shape)
        boxes = (TensorBox(start=start, local=start, sizes=tuple(shape)),) if prod(shape) else ()
        return cls(full=tuple(shape), local=tuple(shape), boxes=boxes)

    @classmethod
    def nothing(cls, shape: tuple[int, ...]) -> Shard:
        return cls(full=tuple(shape), local=(0,), boxes=())

    @property
    def is_whole(self) -> bool:
        return self == Shard.whole(self.full)

    @property
    def numel(self) -> int:
        return prod(self.local)

    def divided(self, dim: int, *, index: int, count: int, blocks: int | Sequence[int] = 1) -> Shard:
        """Part `index` of `count` along dimension `dim` of the local tensor, which consists of `blocks` equal ones, or
        of blocks of these sizes.

        Parts are those of torch.chunk, as DTensor's Shard(dim): ceil(size / count) each, the last smaller or empty.
        Several blocks are divided separately.

        Raises ValueError for a dimension or index that is not there, and for blocks that do not divide it.
        """
        if not -len(self.local) <= dim < len(self.local):
            raise ValueError(f"dim={dim} of a tensor of shape {self.local}: expected one of its dimensions")
        if not 0 <= index < count:
            raise ValueError(f"part {index} of {count}: expected 0 to {count - 1}")
        dim %= len(self.local)
        size = self.local[dim]
        if isinstance(blocks, int) and (blocks < 1 or size % blocks):
            raise ValueError(f"dimension {dim} of size {size} in {blocks} equal blocks: expected a divisor of {size}")
        widths = (size // blocks,) * blocks if isinstance(blocks, int) else tuple(blocks)
        assert sum(widths) == size, (widths, size)
        spans = [chunk(width, index=index, count=count) for width in widths]
        if all(last - first == width for (first, last), width in zip(spans, widths, strict=True)):
            widths, spans = (size,), [(0, size)]
        local = (*self.local[:dim], sum(last - first for first, last in spans), *self.local[dim + 1 :])

        def along(at: int, other: Sequence[int] = (0,) * len(local)) -> tuple[int, ...]:
            return (*other[:dim], at, *other[dim + 1 :])

        boxes, begin, at = [], 0, 0
        for width, (first, last) in zip(widths, spans, strict=True):
            boxes.append(TensorBox(start=along(begin + first), local=along(at), sizes=along(last - first, local)))
            begin, at = begin + width, at + last - first
        return self.part(Shard(full=self.local, local=local, boxes=tuple(boxes) if prod(local) else ()))

    def part(self, part: Shard) -> Shard:
        pairs = ((box, inner) for inner in part.boxes for box in self.boxes)
        boxes = tuple(cut for box, inner in pairs if (cut := box.part(inner)) is not None)
        return Shard(full=self.full, local=part.local, boxes=boxes)

    def view(self, full: torch.Tensor) -> torch.Tensor:
        """The part of a full tensor, as a view of it; for a shard of one box."""
        if not self.boxes:
            return full.new_empty(self.local)
        (box,) = self.boxes
        return full[box.of_full()]

    def take(self, full: torch.Tensor) -> torch.Tensor:
        self._check(full, self.full, "full")
        local = full.new_empty(self.local)
        for box in self.boxes:
            local[box.of_local()] = full[box.of_full()]
        return local

    def put(self, local: torch.Tensor, full: torch.Tensor) -> None:
        self._check(local, self.local, "local")
        self._check(full, self.full, "full")
        for box in self.boxes:
            full[box.of_full()] = local[box.of_local()]

    @staticmethod
    def _check(tensor: torch.Tensor, shape: tuple[int, ...], which: str) -> None:
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{which} tensor of shape {tuple(tensor.shape)}: expected {shape}")


def chunk(size: int, *, index: int, count: int) -> tuple[int, int]:
    step = -(-size // count)
    return min(index * step, size), min((index + 1) * step, size)


DATA_PARALLEL = ("replicate", "zero1", "fsdp")
ADAPTIVE = "adaptive"
SYNC: Kind[int | str] = Kind(
    "a number of steps, at least 1, or 'adaptive'",
    lambda value: value if value == ADAPTIVE else at_least(1).read(value),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Division of a run's stages."""

    # [S] ranks over which the optimizer's state of each stage is divided; 1: each rank holds all of it.
    shards: tuple[int, ...]
    weights: bool = False  # whether the weights are divided, too, between two batches

    @property
    def is_any(self) -> bool:
        return any(count > 1 for count in self.shards)

    def collectives(self) -> tuple[Collective, ...]:
        stages = [stage for stage, count in enumerate(self.shards) if self.weights and count > 1]
        return tuple(Collective((stage,), op, 0) for stage in stages for op in (Op.UNSHARD, Op.RESHARD))


def sharding_of(data_parallel: str, schedule: Schedule, world: World) -> Sharding:
    counts = [1 if data_parallel == "replicate" else len(ranks) for ranks in schedule.owners]
    return sharding_over(counts, world, weights=data_parallel == "fsdp")


def sharding_over(shards: Sequence[int], world: World, *, weights: bool = False) -> Sharding:
    """Division by these counts; none in one process, whose ranks share their Parameters."""
    if not world.distributed:
        return Sharding(shards=(1,) * len(shards))
    return Sharding(shards=tuple(shards), weights=weights and any(count > 1 for count in shards))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSplit:
    """A parameter's parts, each contiguous in memory."""

    ranks: tuple[int, ...]  # that hold the same stage, ascending
    shards: Mapping[int, Shard]  # by rank, of these; once all ranks that hold the parameter have agreed, of all of them


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

    def dim_of(name: str, tensor: torch.Tensor) -> int | None:
        is_cut = name not in whole and tensor.is_contiguous()
        return next((dim for dim, size in enumerate(tensor.shape) if size > 1 and is_cut), None)

    dims = {name: dim_of(name, tensor) for name, tensor in parameters.items()}
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
    for name, tensor in parameters.items():
        shards[name] += [Shard.nothing(tuple(tensor.shape))] * (len(ranks) - count)
    pairs = {name: dict(zip(ranks, shards[name], strict=True)) for name in parameters}
    return {name: ParameterSplit(ranks=tuple(ranks), shards=by_rank) for name, by_rank in pairs.items()}


class ShardedParameter:
    """A parameter of which this rank has a part. `apart`: whether the part has separate memory, and the whole
    parameter may be freed."""

    def __init__(self, name: str, whole: nn.Parameter, split: ParameterSplit, rank: int, *, apart: bool) -> None:
        self.name = name
        self.whole = whole  # the model's own Parameter
        self.split = split
        self.rank = rank
        self._apart = apart
        self._stride = whole.stride()
        self._nothing: torch.Tensor | None = None  # in place of all elements while the whole is freed
        self._version = 0
        own = self.of(whole.data)
        # Held by the optimizer in its place: a view of it, unless `apart`.
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

    def refuse_other_type(self) -> None:
        now = (self.whole if self.whole.grad is None else self.whole.grad).dtype
        if now != self.parameter.dtype:
            raise ValueError(
                f"parameter {self.name!r} was {self.parameter.dtype} when the stages were built, and a forward turned "
                f"it into {now}, of which the optimizer's part here cannot be: expected the model with it in {now} "
                f"from the beginning, or data_parallel='replicate', under which weights stay whole"
            )

    # Of a part with separate memory

    def make_room(self) -> None:
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
        return of.part(self.split.shards[self.rank])

    def state_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        shape = self.whole.shape
        whole = {key for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == shape}
        return {key: self.of(value).clone() if key in whole else value for key, value in state.items()}
