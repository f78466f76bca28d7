"""Messages packed by codecs: right before the transport sends, and right behind the receive.

    worker ─ tensors ─> pack ─ fewer bytes ─> transport ~~~~> transport ─> unpack ─ tensors ─> worker

What a codec leaves for the next tensor stays with the sender: of each link, tensor and shape, whatever the microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ..schedules import Message, MessageKind
from .codecs import Codec, LinkName, num_bytes, pack, unpack, wire_specs
from .transport import TensorSpec, Transport


class LinkBytes(NamedTuple):
    """Bytes sent over a link, and those of the same tensors without a codec."""

    sent: int = 0
    whole: int = 0


class LinkCodecs:
    """Codecs of this process's links, and what was sent over them.

    Arguments:
        boundaries: by kind and stages of a message.
        data: of sums of gradients over data groups; None: as they are.

    Attributes:
        sent: by stages, or "data", of this process.
    """

    def __init__(self, boundaries: Mapping[tuple[MessageKind, int, int], Codec], data: Codec | None) -> None:
        self.boundaries, self.data = dict(boundaries), data
        self.sent: dict[LinkName, LinkBytes] = {}
        self.memory: dict[object, torch.Tensor | None] = {}
        self.is_paused = False

    @property
    def remember(self) -> bool:
        """Whether a codec keeps something for the next tensor."""
        return any(each is not None and each.kind != "int8" for each in (self.data, *self.boundaries.values()))

    def of(self, message: Message) -> Codec | None:
        return None if self.is_paused else self.boundaries.get(message[:3])

    def count(self, link: LinkName, sent: int, whole: int) -> None:
        known = self.sent.get(link, LinkBytes())
        self.sent[link] = LinkBytes(known.sent + sent, known.whole + whole)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Everything goes as it is, with nothing under way at either end, and is not counted."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False


class CompressingTransport(Transport):
    """One rank's end of a transport, whose messages are packed."""

    def __init__(self, transport: Transport, codecs: LinkCodecs) -> None:
        super().__init__(transport.rank)
        self._transport, self._codecs = transport, codecs
        self._posted: dict[Message, tuple[Codec, Sequence[TensorSpec]]] = {}

    def post(self, message: Message, peer: int, specs: Sequence[TensorSpec]) -> None:
        codec = self._codecs.of(message)
        self._posted.pop(message, None)  # of a batch that failed
        if codec is not None:
            self._posted[message] = codec, specs
            specs = [each for spec in specs for each in wire_specs(codec, spec)]
        self._transport.post(message, peer, specs)

    def send(self, message: Message, peer: int, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
        codec = self._codecs.of(message)
        if codec is not None:
            whole = num_bytes(specs)
            tensors, specs = self._packed(codec, message, tensors, specs)
            self._codecs.count((message.src, message.dst), num_bytes(specs), whole)
        self._transport.send(message, peer, tensors, specs)

    def ready(self, message: Message) -> bool:
        return self._transport.ready(message)

    def wait(self, message: Message, timeout: float) -> tuple[torch.Tensor, ...]:
        arrived = self._transport.wait(message, timeout)
        codec, specs = self._posted.pop(message, (None, ()))
        if codec is None:
            return arrived
        found, rest = [], iter(arrived)
        for spec in specs:
            packed = tuple(next(rest) for _ in wire_specs(codec, spec))
            found.append(packed[0] if len(packed) == 1 else unpack(codec, packed, spec))
        return tuple(found)

    def acknowledged(self, messages: Sequence[Message]) -> None:
        self._transport.acknowledged(messages)

    def end_of_program(self) -> None:
        self._transport.end_of_program()

    def drain(self, timeout: float) -> None:
        self._transport.drain(timeout)

    def abort(self) -> None:
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()

    def _packed(
        self, codec: Codec, message: Message, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]
    ) -> tuple[list[torch.Tensor], list[TensorSpec]]:
        found: list[torch.Tensor] = []
        layouts: list[TensorSpec] = []
        for position, (tensor, spec) in enumerate(zip(tensors, specs, strict=True)):
            wire = wire_specs(codec, spec)
            layouts += wire
            if len(wire) == 1:
                found.append(tensor)
                continue
            key = self.rank, message[:3], position, spec.shape
            packed, self._codecs.memory[key] = pack(codec, tensor.detach(), self._codecs.memory.get(key))
            found += packed
        return found, layouts
