"""Codecs: a tensor packed into fewer bytes for a slow link. None of them is exact: a run with them trains differently.

int8      a whole number of 8 bits for each element, a scale for each row (its last dimension):
          |x - unpacked| <= max |row| / 254
topk      the largest elements, a share of all, with their indices. What was left out is added to the next tensor on
          the same link (error feedback, arXiv 1809.07599):
              sent 1 + ... + sent n + memory n = x 1 + ... + x n
lowrank   a matrix M (rows of the last dimension) as P Q^T of rank r, by one step of power iteration from the Q of the
          tensor before, as in PowerSGD (arXiv 1905.13727); exact for matrices of rank r. Nothing is added to the next.

    worker ─ tensors ─> packing ─ fewer bytes ─> transport ~~~~> transport ─> unpacking ─ tensors ─> worker

The sender keeps its memory for the next tensor by link, position and shape, not by microbatch. A tensor that would not
become smaller is sent unpacked. Which tensors are packed follows from their layouts, so that receives can be posted.
Values that are not finite stay so, and leave no trace in the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from math import prod
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from ..schedules import Link, Message
from ..schedules.kinds import above_zero, at_least
from .transport import TensorSpec, Transport, TransportAround, in_layout

LinkName = tuple[int, int] | str  # two stages, the producer's first; "pipe", all of these; "data"
Packed = tuple[torch.Tensor, ...]
_LARGEST = 127


class Codec(NamedTuple):
    """kind: "int8", "topk" or "lowrank". level: of topk the share of elements that are sent, of lowrank the rank."""

    kind: str
    level: float = 0

    def __str__(self) -> str:
        return repr(self.kind) if self.kind == "int8" else f"{{{self.kind!r}: {self.level}}}"


Compress = Mapping[Any, Any] | str  # codecs by link; "auto", or a network under that name
_DEFAULTS = {"int8": 0, "topk": 0.01, "lowrank": 4}


def read_codec(given: object) -> Codec | None:
    """The codec that was given by its name, or by name and level; None for any other value."""
    if isinstance(given, str) and given in _DEFAULTS:
        return Codec(given, _DEFAULTS[given])
    if not isinstance(given, Mapping) or len(given) != 1:
        return None
    ((kind, level),) = given.items()
    share = above_zero().read(level)
    if kind == "topk" and share is not None and share < 1:
        return Codec(kind, float(share))
    rank = at_least(1).read(level)
    return Codec(kind, rank) if kind == "lowrank" and rank is not None else None


def read_compress(given: object) -> Compress | None:
    """Mesh(compress=) by link, "auto", or None; ValueError for anything else."""
    if given is None or (isinstance(given, str) and given == "auto"):
        return given
    if isinstance(given, Mapping) and [*given] == ["auto"] and isinstance(given["auto"], Link | Mapping):
        return given
    if (codec := read_codec(given)) is not None:
        return {"pipe": codec}
    found: dict[LinkName, Codec] = {}
    for link, value in given.items() if isinstance(given, Mapping) else ():
        is_boundary = isinstance(link, tuple) and len(link) == 2 and all(type(stage) is int for stage in link)
        codec = read_codec(value)
        if codec is None or not (is_boundary or link in ("pipe", "data")):
            break
        found[link] = codec
    else:
        if found:
            return found
    raise ValueError(
        f"compress={given!r}: expected 'int8', 'topk' or {{'topk': 0.01}}, a share below 1, 'lowrank' or {{'lowrank': "
        f"4}}, a rank; one of these by link, as in {{(0, 1): 'int8', 'data': {{'lowrank': 4}}}}, with stages, 'pipe' "
        f"(all boundaries between stages) or 'data'; 'auto', or {{'auto': Link(...)}} where links need not be measured"
    )


@cache
def wire_specs(codec: Codec, spec: TensorSpec) -> Sequence[TensorSpec]:
    """Layouts of a packed tensor; its own where it is sent unpacked: without a gradient, or if it would not be smaller.

    >>> spec = TensorSpec((2, 100), (100, 1), torch.float32, True)
    >>> [num_bytes(wire_specs(Codec(*codec), spec)) for codec in (("int8",), ("topk", 0.05), ("lowrank", 1))]
    [208, 80, 408]
    """
    whole: list[TensorSpec] = [spec]
    shape: Sequence[int] = spec.shape
    if not (spec.dtype.is_floating_point and spec.requires_grad and shape and prod(shape)):
        return whole
    rows, width = prod(shape[:-1]), shape[-1]
    if codec.kind == "int8":
        packed = [_flat(rows * width, torch.int8), _flat(rows, exact_type(spec.dtype))]
    elif codec.kind == "topk":
        count = _count(codec, rows * width)
        packed = [_flat(count, spec.dtype), _flat(count, torch.int32)]
    else:
        rank = min(int(codec.level), rows, width)
        packed = [_flat(rows * rank, spec.dtype), _flat(width * rank, spec.dtype)]
    return packed if num_bytes(packed) < num_bytes(whole) else whole


class LinkCodecs:
    """Codecs of this process's links, and what was sent over them."""

    def __init__(self) -> None:
        self.boundaries: dict[tuple[object, ...], Codec] = {}  # by kind and stages of a message
        self.data: Codec | None = None  # of sums of gradients over data groups; None: unpacked
        # By (sending stage, receiving stage), or "data": bytes that this process sent, and those without a codec.
        self.sent: dict[LinkName, tuple[int, int]] = {}
        self.memory: dict[object, torch.Tensor] = {}  # what each sender keeps, by what it sends
        self.is_paused = False

    @property
    def remember(self) -> bool:
        """Whether a codec keeps something for the next tensor."""
        return any(each is not None and each.kind != "int8" for each in (self.data, *self.boundaries.values()))

    def paused(self) -> AbstractContextManager[object]:
        """Context in which everything is sent unpacked and uncounted; nothing may be in flight at either end."""
        return patch.object(self, "is_paused", True)

    def of(self, message: Message) -> Codec | None:
        return None if self.is_paused else self.boundaries.get(message[:3])

    def count(self, link: LinkName, sent: int, whole: int) -> None:
        before = self.sent.get(link, (0, 0))
        self.sent[link] = before[0] + sent, before[1] + whole

    def pack(self, codec: Codec, x: torch.Tensor, key: object) -> Packed:
        packed, kept = pack(codec, x, self.memory.get(key))
        if kept is not None:
            self.memory[key] = kept
        return packed

    def layouts(self, message: Message, specs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        codec = self.of(message)
        return specs if codec is None else [each for spec in specs for each in wire_specs(codec, spec)]

    def packed(self, message: Message, tensors: Packed, specs: Sequence[TensorSpec], *, rank: int) -> Packed:
        """The message as this rank sends it; changes this rank's memory."""
        codec, found = self.of(message), list[torch.Tensor]()
        if codec is None:
            return tensors
        for position, (tensor, spec) in enumerate(zip(tensors, specs, strict=True)):
            is_packed, key = len(wire_specs(codec, spec)) > 1, (rank, message[:3], position, spec.shape)
            found += self.pack(codec, tensor.detach(), key) if is_packed else [tensor]
        self.count((message.src, message.dst), num_bytes(self.layouts(message, specs)), num_bytes(specs))
        return tuple(found)

    def unpacked(self, message: Message, tensors: Packed, specs: Sequence[TensorSpec]) -> Packed:
        codec, rest, found = self.of(message), iter(tensors), list[torch.Tensor]()
        if codec is None:
            return tensors
        for spec in specs:
            packed = tuple(next(rest) for _ in wire_specs(codec, spec))
            found.append(packed[0] if len(packed) == 1 else unpack(codec, packed, spec))
        return tuple(found)


class PackingTransport(TransportAround):
    def __init__(self, inner: Transport, codecs: LinkCodecs) -> None:
        super().__init__(inner)
        self._codecs = codecs
        self._posted: dict[Message, Sequence[TensorSpec]] = {}

    def layouts(self, message: Message, specs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        return super().layouts(message, self._codecs.layouts(message, specs))

    def post(self, message: Message, peer: int, specs: Sequence[TensorSpec]) -> None:
        self._posted[message] = specs
        super().post(message, peer, self._codecs.layouts(message, specs))

    def send(self, message: Message, peer: int, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
        packed = self._codecs.packed(message, tuple(tensors), specs, rank=self.rank)
        super().send(message, peer, packed, self._codecs.layouts(message, specs))

    def wait(self, message: Message, timeout: float) -> tuple[torch.Tensor, ...]:
        return self._codecs.unpacked(message, super().wait(message, timeout), self._posted.pop(message))

    def abort(self) -> None:
        self._posted.clear()
        super().abort()


def num_bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(prod(spec.shape) * spec.dtype.itemsize for spec in specs)


@torch.no_grad()
def pack(codec: Codec, x: torch.Tensor, memory: torch.Tensor | None) -> tuple[Packed, torch.Tensor | None]:
    """The tensors that `wire_specs` describes, and the sender's memory for the next tensor (`memory`: of the last)."""
    values = x.to(exact_type(x.dtype)).reshape(-1, x.shape[-1])
    if codec.kind == "int8":
        scale = values.abs().amax(1) / _LARGEST
        steps = values / torch.where(scale > 0, scale, 1.0).unsqueeze(1)
        whole = steps.round_().clamp_(-_LARGEST, _LARGEST).nan_to_num_(0.0)
        return (whole.to(torch.int8).reshape(-1), scale), None
    if codec.kind == "topk":
        flat = values.reshape(-1) if memory is None else values.reshape(-1) + memory
        indices = flat.abs().topk(_count(codec, flat.numel()), sorted=False).indices
        sent = flat[indices].to(x.dtype)
        left = flat.index_put((indices,), flat[indices] - sent)
        return (sent, indices.to(torch.int32)), left.masked_fill_(~left.isfinite(), 0.0)
    columns = torch.linalg.qr(product(values, start_matrix(values, int(codec.level)) if memory is None else memory)).Q
    right = product(values.T, columns)
    return (columns.to(x.dtype).reshape(-1), right.to(x.dtype).reshape(-1)), orthonormal(right)


@torch.no_grad()
def unpack(codec: Codec, packed: Packed, spec: TensorSpec) -> torch.Tensor:
    rows, width = prod(spec.shape[:-1]), spec.shape[-1]
    first, second = packed
    if codec.kind == "int8":
        found = first.view(rows, width) * second.unsqueeze(1)
    elif codec.kind == "topk":
        found = first.new_zeros(rows * width).index_put_((second.to(torch.int64),), first)
    else:
        columns, right = (x.view(size, -1).to(exact_type(x.dtype)) for x, size in ((first, rows), (second, width)))
        found = product(columns, right.T)
    return in_layout(found.to(spec.dtype).view(spec.shape), spec)


def start_matrix(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    """[n, r] orthonormal columns for the first step of a matrix of [m, n]: the same in every process."""
    rows, width = matrix.shape
    drawn = torch.randn(width, min(rank, rows, width), generator=torch.Generator().manual_seed(width))
    return orthonormal(drawn.to(matrix.device, matrix.dtype))


def product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    with torch.autocast(one.device.type, enabled=False):
        return one @ other


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns that span these; arbitrary ones in place of zeros and of non-finite values."""
    found: torch.Tensor = torch.linalg.qr(columns.nan_to_num(0.0, 0.0, 0.0)).Q
    return found


def _count(codec: Codec, numel: int) -> int:
    return max(1, round(codec.level * numel))


def exact_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _flat(numel: int, dtype: torch.dtype) -> TensorSpec:
    return TensorSpec((numel,), (1,), dtype, False)
