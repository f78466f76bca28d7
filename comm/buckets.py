"""Tensors that travel together: in flat buckets, and their sums over ranks.

tensors -> flat bucket -> all-reduce -> views of it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..schedules.messages import ALONE_BYTES, BUCKET_BYTES
from .collectives import Collectives
from .transport import TensorSpec


def buckets_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Positions by bucket, those of each type in order, without empty ones; large ones have a bucket each."""
    by_type: dict[torch.dtype, list[int]] = {}
    for position, tensor in enumerate(tensors):
        if tensor.numel():
            by_type.setdefault(tensor.dtype, []).append(position)
    found: list[tuple[int, ...]] = []
    for positions in by_type.values():
        bucket: list[int] = []
        held = 0
        for position in positions:
            size = tensors[position].numel() * tensors[position].element_size()
            if size >= ALONE_BYTES:
                found.append((position,))
                continue
            if bucket and held + size > BUCKET_BYTES:
                found.append(tuple(bucket))
                bucket, held = [], 0
            bucket.append(position)
            held += size
        if bucket:
            found.append(tuple(bucket))
    return found


def flatten(tensors: Sequence[torch.Tensor], *, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors], out=out)


def unflatten(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of `flat` with the shapes of the tensors that it was made of."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


class Flat:
    """How tensors travel to other ranks: in flat buckets.

    A bucket holds tensors of one type, together at most BUCKET_BYTES; one of ALONE_BYTES or more is alone in its
    own, an empty one in none. `like`: shapes and types, in the same order on both sides."""

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self.like = tuple(like)
        self.buckets = tuple(buckets_of(self.like))  # positions of the tensors in each

    def specs(self) -> list[TensorSpec]:
        numels = [sum(self.like[i].numel() for i in bucket) for bucket in self.buckets]
        types = [self.like[bucket[0]].dtype for bucket in self.buckets]
        return [TensorSpec((numel,), (1,), dtype, False) for numel, dtype in zip(numels, types, strict=True)]

    def pack(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(flatten([tensors[i] for i in bucket]) for bucket in self.buckets)

    def unpack(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = list(self.like)  # empty ones stay
        for bucket, flat in zip(self.buckets, flats, strict=True):
            for i, part in zip(bucket, unflatten(flat, [self.like[i] for i in bucket]), strict=True):
                found[i] = part
        return found


class BucketSum(Flat):
    """Tensors that are summed over ranks, each bucket by an all-reduce that overlaps with compute. `ranks`: that
    make the same sum, with buckets that leave in the same order; None: all processes."""

    def __init__(
        self, like: Sequence[torch.Tensor], collectives: Collectives, *, what: str, ranks: Sequence[int] | None = None
    ) -> None:
        super().__init__(like)
        self.left: dict[int, torch.Tensor] = {}  # the buckets that have left, by number
        self._collectives = collectives
        self._what, self._ranks = what, ranks
        self._waits: list[Callable[[], None]] = []
        self._memory: dict[int, torch.Tensor] = {}  # by bucket

    def leave(self, at: int, tensors: Sequence[torch.Tensor]) -> None:
        """Begin the sum of a bucket. A single tensor is summed in place and may not be touched until then; several are
        copied into memory that is kept from sum to sum (on a CPU fresh memory costs more than the copy)."""
        if len(tensors) == 1 and tensors[0].is_contiguous():
            total = tensors[0].view(-1)
        else:
            total = self._memory[at] = flatten(tensors, out=self._memory.get(at))
        self.left[at] = total
        self._waits.append(self._collectives.begin_all_reduce(total, what=self._what, ranks=self._ranks))

    def leave_all(self, tensors: Sequence[torch.Tensor]) -> None:
        for at, bucket in enumerate(self.buckets):
            self.leave(at, [tensors[i] for i in bucket])

    @property
    def num_bytes(self) -> int:
        return sum(total.nbytes for total in self.left.values())

    def wait(self) -> list[torch.Tensor]:
        """All sums, views of the buckets. Raises PipelineTimeout or PeerLost."""
        while self._waits:
            self._waits.pop(0)()
        return self.unpack([self.left[at] for at in range(len(self.buckets))])

    def drop(self) -> None:
        self._waits, self.left = [], {}
