"""Messages in parts: of a tensor that all members of a tensor group hold, each sends 1/T, and gathers what arrives.

    rank 0     member 0: x ─ first half ──>  member 0 ┐
               member 1: x ─ second half ─>  member 1 ┴ each gathers both halves       rank 1

Megatron's scatter/gather (Narayanan et al. 2021, section 4.1): for links between ranks that are slower than those in
a group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

import torch

from ..schedules import Message
from .collectives import Collectives
from .process_group import Lanes, Link, ProcessGroupTransport
from .transport import TensorSpec, in_layout


class PartsTransport(ProcessGroupTransport):
    """One rank's end, which sends tensors in parts where their layout allows it, to and from some peers."""

    def __init__(
        self,
        rank: int,
        lanes: Mapping[Link, Sequence[Lanes]],
        collectives: Collectives,
        *,
        peers: Collection[int],  # ranks that send and receive parts
        least_bytes: int,  # of a tensor that is sent in parts; smaller ones are sent whole
        timeout: float,
    ) -> None:
        super().__init__(rank, lanes, device=collectives.groups.wire, timeout=timeout)
        self._collectives = collectives
        self._peers = frozenset(peers)
        self._least_bytes = least_bytes
        self._count = len(collectives.tensor_members)
        self._index = collectives.tensor_members.index(collectives.rank)
        self._cut_messages: dict[Message, Sequence[TensorSpec]] = {}  # posted, with parts among them

    def post(self, message: Message, peer: int, specs: Sequence[TensorSpec]) -> None:
        if self._has_parts(peer, specs):
            self._cut_messages[message] = specs
            specs = [self._part_of(spec) for spec in specs]
        super().post(message, peer, specs)

    def send(self, message: Message, peer: int, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
        if self._has_parts(peer, specs):
            tensors = [self._cut(tensor, spec) for tensor, spec in zip(tensors, specs, strict=True)]
            specs = [self._part_of(spec) for spec in specs]
        super().send(message, peer, tensors, specs)

    def wait(self, message: Message, timeout: float) -> tuple[torch.Tensor, ...]:
        specs = self._cut_messages.pop(message, None)
        arrived = super().wait(message, timeout)
        if specs is None:
            return arrived
        pairs = zip(arrived, specs, strict=True)
        return tuple(self._join(part, spec, message) if self._is_cut(spec) else part for part, spec in pairs)

    def abort(self) -> None:
        self._cut_messages.clear()
        super().abort()

    def _has_parts(self, peer: int, specs: Sequence[TensorSpec]) -> bool:
        return peer in self._peers and any(map(self._is_cut, specs))

    def _is_cut(self, spec: TensorSpec) -> bool:
        return spec.in_parts and prod(spec.shape) * spec.dtype.itemsize >= max(self._least_bytes, 1)

    def _part_of(self, spec: TensorSpec) -> TensorSpec:
        return spec._replace(shape=(self._size(spec),), stride=(1,)) if self._is_cut(spec) else spec

    def _size(self, spec: TensorSpec) -> int:
        return -(-prod(spec.shape) // self._count)

    def _cut(self, tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        if not self._is_cut(spec):
            return tensor
        size, flat = self._size(spec), in_layout(tensor, spec).as_strided((prod(spec.shape),), (1,))
        part = flat[self._index * size : (self._index + 1) * size]
        return part if len(part) == size else torch.cat([part, part.new_zeros(size - len(part))])

    def _join(self, part: torch.Tensor, spec: TensorSpec, message: Message) -> torch.Tensor:
        together, what = self._collectives, f"gathering the parts of the {message}"
        parts = together.tensors_among(together.tensor_members, part, what=what)
        return torch.cat(parts)[: prod(spec.shape)].as_strided(spec.shape, spec.stride)
