"""Messages between ranks: the contract of a transport, and the transport within one process.

A message is a tuple of tensors under a `Message` key. A receive is posted ahead with the shapes expected; `wait`
returns its tensors. On each directed link the receives are posted in the order of the sends (`check_lowered` checks
it), so a transport may match them by order alone. Sends never block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..schedules import Message


class TensorSpec(NamedTuple):
    """Layout of a tensor in a message."""

    shape: tuple[int, ...]
    # Without gaps or overlaps. The receiver's is the same, since random masks are drawn in memory order.
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool  # whether its gradient is sent back
    in_parts: bool = False  # whether all members of a tensor group hold the same values, so that each may send a part

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The layout that `torch.empty_like` gives: the tensor's own, with gaps and overlaps closed."""
        dense = tensor if tensor.is_contiguous() else torch.empty_like(tensor)
        return cls(tuple(map(int, dense.shape)), tuple(map(int, dense.stride())), tensor.dtype, tensor.requires_grad)


def in_layout(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if tensor.stride() == spec.stride:
        return tensor
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=tensor.device).copy_(tensor)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor without gaps, in order. One element may have any stride, and bytes need this one."""
    return tensor.as_strided((tensor.numel(),), (1,))


class Transport(ABC):
    """One rank's end of its links. By default nothing is held or in flight, so there is nothing to free or wait for."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.is_watched = False  # whether `is_here` is called for messages posted from now on

    def layouts(self, message: Message, specs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        """Layouts in which tensors with these layouts are sent."""
        return specs

    def post(self, message: Message, peer: int, specs: Sequence[TensorSpec]) -> None:
        """Post the receive of `message` from rank `peer`."""
        return

    @abstractmethod
    def send(self, message: Message, peer: int, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
        """Send `message` to rank `peer`, with the layouts `specs`; returns at once."""

    def ready(self, message: Message) -> bool:
        """Whether `wait` may be called: always where waiting blocks."""
        return True

    def is_here(self, message: Message) -> bool:
        """Whether `wait` is known to return at once; it may also do so otherwise."""
        return False

    @abstractmethod
    def wait(self, message: Message, timeout: float) -> tuple[torch.Tensor, ...]:
        """The tensors of a posted message; blocks for at most `timeout` [s], then raises PipelineTimeout."""

    def acknowledged(self, messages: Sequence[Message]) -> None:
        """Free these sends, which are known to be received."""
        return

    def end_of_program(self) -> None:
        """Called after the last send of a program: all sends of the previous program must be complete by now."""
        return

    def drain(self, timeout: float) -> None:
        """Wait until all sends are complete."""
        return

    @abstractmethod
    def abort(self) -> None:
        """After an error: fail the waits of other ranks for this one."""

    def close(self) -> None:
        """Release the links: nothing can be sent or received any more."""
        return


class TransportAround(Transport):
    """A transport that delegates to another, but where a subclass overrides it."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.rank)
        self.inner = inner

    def layouts(self, message: Message, specs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        return self.inner.layouts(message, specs)

    def post(self, message: Message, peer: int, specs: Sequence[TensorSpec]) -> None:
        self.inner.post(message, peer, specs)

    def send(self, message: Message, peer: int, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
        self.inner.send(message, peer, tensors, specs)

    def ready(self, message: Message) -> bool:
        return self.inner.ready(message)

    def is_here(self, message: Message) -> bool:
        return self.inner.is_here(message)

    def wait(self, message: Message, timeout: float) -> tuple[torch.Tensor, ...]:
        return self.inner.wait(message, timeout)

    def acknowledged(self, messages: Sequence[Message]) -> None:
        self.inner.acknowledged(messages)

    def end_of_program(self) -> None:
        self.inner.end_of_program()

    def drain(self, timeout: float) -> None:
        self.inner.drain(timeout)

    def abort(self) -> None:
        self.inner.abort()

    def close(self) -> None:
        self.inner.close()


Mailbox = dict[tuple[int, Message], tuple[torch.Tensor, ...]]  # in flight in one process, by receiver and message


class InProcessTransport(Transport):
    """One rank's end of a `Mailbox`: sending is putting, no copy is made. A receiver gets detached aliases of the
    sender's tensors."""

    def __init__(self, rank: int, mailbox: Mailbox) -> None:
        super().__init__(rank)
        self._mailbox = mailbox

    def send(self, message: Message, peer: int, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
        self._mailbox[peer, message] = tuple(tensors)

    def ready(self, message: Message) -> bool:
        return (self.rank, message) in self._mailbox

    is_here = ready

    def wait(self, message: Message, timeout: float) -> tuple[torch.Tensor, ...]:
        return self._mailbox.pop((self.rank, message))

    def abort(self) -> None:
        """Drop what is in flight: the next batch has messages of the same names."""
        self._mailbox.clear()
