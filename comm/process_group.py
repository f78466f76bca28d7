"""Messages over torch.distributed process groups: gloo for the CPU, NCCL for CUDA.

gloo: one group for all links; each tensor has a tag of its own (a counter per directed link), and waiting
blocks the thread. A work that is dropped before it is through breaks its pair, and one that timed out closes
the pair for good: so a time-out is fatal.

NCCL: a communicator for each directed link, so that no order between links can deadlock: on one link both
sides issue the same messages in the same order (`check_lowered`). Waiting orders the current stream.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ..schedules import Message
from .errors import PeerLost, PipelineTimeout, short_reason
from .transport import TensorSpec

Link = tuple[int, int]  # (sender, receiver), ranks along the pipeline
_Start = Callable[[list[torch.Tensor], int, int], dist.Work]

_TAGS = 1 << 30


class ProcessGroupTransport:
    """One rank's end over real processes.

    Arguments:
        rank: this rank.
        groups: directed link -> (process group, index of the peer in it), for the links of this rank.
        device: where received tensors are made.
        timeout: for sends whose receipt is known, which should be through at once [s].
    """

    def __init__(
        self,
        rank: int,
        groups: Mapping[Link, tuple[dist.ProcessGroup, int]],
        *,
        device: torch.device,
        timeout: float,
    ) -> None:
        self._rank = rank
        self._groups = groups
        self._device = device
        self._timeout = timeout
        self._blocking = device.type != "cuda"
        self._tags: dict[Link, int] = dict.fromkeys(groups, 0)
        self._posted: dict[Message, tuple[int, list[torch.Tensor], list[dist.Work]]] = {}
        self._sent: dict[Message, tuple[int, list[torch.Tensor], list[dist.Work]]] = {}
        self._leftover: deque[tuple[Message, int, list[torch.Tensor], list[dist.Work]]] = deque()

    @property
    def unconsumed_bytes(self) -> int:
        """Bytes of receives posted and not yet waited for."""
        return sum(t.numel() * t.element_size() for _, tensors, _ in self._posted.values() for t in tensors)

    def post(self, message: Message, peer: int, specs: Sequence[TensorSpec]) -> None:
        """Make buffers and post the receives, one a tensor."""
        group, index = self._groups[peer, self._rank]
        buffers, works = [], []
        for spec in specs:
            buffer = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=self._device)
            buffers.append(buffer)
            tag = self._next_tag((peer, self._rank))
            if buffer.numel():
                works.append(self._start(group.recv, buffer, index, tag, message))
        self._posted[message] = (peer, buffers, works)

    def send(self, message: Message, peer: int, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
        """Start the sends; what they read is kept until their receipt is known."""
        group, index = self._groups[self._rank, peer]
        kept, works = [], []
        for tensor, spec in zip(tensors, specs, strict=True):
            whole = tensor
            if tensor.stride() != spec.stride:
                whole = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=tensor.device)
                whole.copy_(tensor)
            kept.append(whole)
            tag = self._next_tag((self._rank, peer))
            if whole.numel():
                works.append(self._start(group.send, whole, index, tag, message))
        self._sent[message] = (peer, kept, works)

    def ready(self, message: Message) -> bool:
        """Waiting blocks (gloo cannot be polled), so always."""
        return True

    def wait(self, message: Message, timeout: float) -> tuple[torch.Tensor, ...]:
        """Block until the tensors are here (CUDA: until the stream will have them)."""
        peer, buffers, works = self._posted.pop(message)
        for work in works:
            self._finish(work, message, peer, timeout)
        return tuple(buffers)

    def acknowledged(self, messages: Sequence[Message]) -> None:
        """Free these sends; gloo wants each work waited for, which returns at once."""
        for message in messages:
            sent = self._sent.pop(message, None)
            if sent is not None and self._blocking:
                for work in sent[2]:
                    self._finish(work, message, sent[0], self._timeout)

    def end_of_program(self) -> None:
        """Sends without an answer wait here for one more program: by then they are through."""
        self._free_leftover(self._timeout)
        for message, (peer, tensors, works) in self._sent.items():
            self._leftover.append((message, peer, tensors, works))
        self._sent.clear()

    def drain(self, timeout: float) -> None:
        """Wait for every send."""
        self.end_of_program()
        self._free_leftover(timeout)

    def abort(self) -> None:
        """After an error: close this rank's links, so that nobody waits for it any longer."""
        for group in {id(group): group for group, _ in self._groups.values()}.values():
            try:
                group.abort()
            except RuntimeError:
                continue  # it is broken already, which is what we want

    def _free_leftover(self, timeout: float) -> None:
        while self._leftover:
            message, peer, _, works = self._leftover.popleft()
            for work in works:
                self._finish(work, message, peer, timeout)

    def _next_tag(self, link: Link) -> int:
        self._tags[link] = (self._tags[link] + 1) % _TAGS
        return self._tags[link]

    def _start(self, operation: _Start, tensor: torch.Tensor, index: int, tag: int, message: Message) -> dist.Work:
        try:
            return operation([_wire(tensor)], index, tag)
        except RuntimeError as error:
            raise PeerLost(_lost(index, message, error), peer=index) from error

    def _finish(self, work: dist.Work, message: Message, peer: int, timeout: float) -> None:
        started = time.monotonic()
        try:
            if self._blocking:
                work.wait(timedelta(seconds=timeout))
            else:
                work.wait()
        except RuntimeError as error:
            waited = time.monotonic() - started
            if "timed out" in str(error).lower() or "timeout" in str(error).lower() or waited >= timeout:
                raise PipelineTimeout(f"waited {waited:.1f} s for rank {peer}: {message}", peer=peer) from error
            raise PeerLost(_lost(peer, message, error), peer=peer) from error


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor without gaps, in order; as bytes where its type is none that every backend knows."""
    flat = tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
    return flat.reshape(-1).view(torch.uint8) if tensor.dtype in (torch.bool, torch.bfloat16) else flat


def _lost(peer: int, message: Message, error: Exception) -> str:
    return f"lost the connection to rank {peer} while waiting for the {message} ({short_reason(error)})"
