"""Shares of tensors: the boxes of a full tensor that one process holds, and where they lie in its local tensor.

Tensor parallelism divides a weight along one of its dimensions (a fused one block by block, as [q | k | v]), sharding
over replicas divides what is left once more. Whoever asks what part of which tensor is here (norms, gathering,
checkpoints, optimizer shards) asks its share.

    [q | k | v] of 6 rows, member 1 of 2, blocks=3:     full rows 1, 3, 5  ->  local rows 0, 1, 2
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangular part: where it begins in the full tensor and in the local one, and its sizes; [dimensions] each."""

    start: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]

    def of_full(self) -> tuple[slice, ...]:
        """Index of the full tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.start, self.sizes, strict=True))

    def of_local(self) -> tuple[slice, ...]:
        """Index of the local tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.local, self.sizes, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A process's part of a tensor of shape `full`: boxes that tile a local tensor of shape `local`.

    A share may be empty: then it has no boxes, and `local` has a 0 in it.

    >>> Share.whole((6, 4)).divided(0, index=1, count=2, blocks=3).boxes[1]
    Box(start=(3, 0), local=(1, 0), sizes=(1, 4))
    >>> Share.whole((6, 4)).divided(1, index=0, count=2).divided(0, index=2, count=4).local
    (2, 2)
    """

    full: tuple[int, ...]
    local: tuple[int, ...]
    boxes: tuple[Box, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Share:
        """All of it."""
        start = (0,) * len(shape)
        boxes = (Box(start=start, local=start, sizes=tuple(shape)),) if prod(shape) else ()
        return cls(full=tuple(shape), local=tuple(shape), boxes=boxes)

    @property
    def is_whole(self) -> bool:
        """Whether the process holds the full tensor."""
        return self == Share.whole(self.full)

    @property
    def numel(self) -> int:
        """Elements held."""
        return prod(self.local)

    def divided(self, dim: int, *, index: int, count: int, blocks: int = 1) -> Share:
        """Part `index` of `count` along dimension `dim` of the local tensor, which consists of `blocks` equal ones.

        Parts are those of torch.chunk, as DTensor's Shard(dim): ceil(size / count) each, the last smaller or empty.
        With `blocks` above 1 each block is divided by itself.

        Raises ValueError for a dimension or index that is not there, and for blocks that do not divide it.
        """
        if not -len(self.local) <= dim < len(self.local):
            raise ValueError(f"dim={dim} of a tensor of shape {self.local}: expected one of its dimensions")
        if not 0 <= index < count:
            raise ValueError(f"part {index} of {count}: expected 0 to {count - 1}")
        dim %= len(self.local)
        size = self.local[dim]
        if blocks < 1 or size % blocks:
            raise ValueError(f"dimension {dim} of size {size} in {blocks} equal blocks: expected a divisor of {size}")
        block = size // blocks
        first, last = chunk(block, index=index, count=count)
        ranges = [(number * block + first, number * block + last) for number in range(blocks)]
        boxes = []
        for number, (begin, end) in enumerate(ranges):
            for box in self.boxes:
                cut = _cut(box, dim, begin, end, local=number * (last - first))
                if cut is not None:
                    boxes.append(cut)
        local = (*self.local[:dim], blocks * (last - first), *self.local[dim + 1 :])
        return Share(full=self.full, local=local, boxes=_joined(boxes, dim) if prod(local) else ())

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """The local tensor, copied out of the full one."""
        self._check(full, self.full, "full")
        local = full.new_empty(self.local)
        for box in self.boxes:
            local[box.of_local()] = full[box.of_full()]
        return local

    def put(self, local: torch.Tensor, full: torch.Tensor) -> None:
        """Copy the local tensor to its place in the full one."""
        self._check(local, self.local, "local")
        self._check(full, self.full, "full")
        for box in self.boxes:
            full[box.of_full()] = local[box.of_local()]

    @staticmethod
    def _check(tensor: torch.Tensor, shape: tuple[int, ...], which: str) -> None:
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{which} tensor of shape {tuple(tensor.shape)}: expected {shape}")


def chunk(size: int, *, index: int, count: int) -> tuple[int, int]:
    """Begin and end of part `index` of a dimension in `count` parts, as torch.chunk makes them."""
    step = -(-size // count)
    return min(index * step, size), min((index + 1) * step, size)


def _cut(box: Box, dim: int, begin: int, end: int, *, local: int) -> Box | None:
    """The part that lies in begin..end of the local dimension, which moves to `local` there."""
    low = max(box.local[dim], begin)
    high = min(box.local[dim] + box.sizes[dim], end)
    if low >= high:
        return None
    return Box(
        start=_replaced(box.start, dim, box.start[dim] + low - box.local[dim]),
        local=_replaced(box.local, dim, local + low - begin),
        sizes=_replaced(box.sizes, dim, high - low),
    )


def _joined(boxes: list[Box], dim: int) -> tuple[Box, ...]:
    """Neighbours along `dim`, in the full tensor and in the local one, made one."""
    found: list[Box] = []
    for box in boxes:
        last = found[-1] if found else None
        if (
            last is not None
            and all(
                _replaced(before, dim, before[dim] + last.sizes[dim]) == after
                for before, after in ((last.start, box.start), (last.local, box.local))
            )
            and _replaced(last.sizes, dim, 0) == _replaced(box.sizes, dim, 0)
        ):
            found[-1] = Box(
                start=last.start,
                local=last.local,
                sizes=_replaced(last.sizes, dim, last.sizes[dim] + box.sizes[dim]),
            )
            continue
        found.append(box)
    return tuple(found)


def _replaced(numbers: tuple[int, ...], position: int, number: int) -> tuple[int, ...]:
    return (*numbers[:position], number, *numbers[position + 1 :])
