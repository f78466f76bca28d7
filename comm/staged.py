"""Messages of a CUDA device through the host's memory, where NCCL can't be used: gloo carries pinned copies.

    send   compute ── event ──> copy to the host, on its own stream ── event ──> a thread: the transport's send
    wait   the transport's wait ──> copy to the device, on its own stream ── event ──> compute

Neither direction delays compute, nor the thread that launches it. Messages leave in the order in which they were sent.
Pinned memory is that of torch's allocator, which reuses a buffer once the copies from and to it are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..schedules import Message
from .groups import Groups
from .process_group import ProcessGroupTransport
from .transport import TensorSpec, Transport, TransportAround, in_layout, memory_of


def staged(transport: ProcessGroupTransport, groups: Groups) -> Transport:
    return StagedTransport(transport, CudaSide(groups.device)) if groups.is_staged else transport


class CudaSide:
    """Copies between a CUDA device and pinned memory, each direction on its own stream.

    pins: whether buffers on the host are to be pinned.
    """

    pins = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def to_host(
        self, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]
    ) -> tuple[list[torch.Tensor], Callable[[], object]]:
        """Copies with these layouts, and a function that blocks until they are complete."""
        whole = [in_layout(x, spec) for x, spec in zip(tensors, specs, strict=True)]
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        hosts = [torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, pin_memory=self.pins) for spec in specs]
        with torch.cuda.stream(self._out):
            for host, x in zip(hosts, whole, strict=True):
                memory_of(host).copy_(memory_of(x.detach()), non_blocking=True)
                x.record_stream(self._out)  # its memory is reused only after the copy
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record(self._out)
        return hosts, copied.synchronize

    def to_device(self, hosts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Copies on the device, for what is launched on the current stream after this call."""
        compute, found = torch.cuda.current_stream(self._device), []
        with torch.cuda.stream(self._back):  # memory of this stream, which compute does not read any more
            for host in hosts:
                x = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self._device)
                memory_of(x).copy_(memory_of(host), non_blocking=True)
                x.record_stream(compute)
                found.append(x)
        compute.wait_stream(self._back)
        return tuple(found)


class StagedTransport(TransportAround):
    def __init__(self, inner: ProcessGroupTransport, side: CudaSide) -> None:
        super().__init__(inner)
        inner.pins = side.pins
        self._side = side
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stagewright-staged")
        self._leaving: dict[Message, Future[None]] = {}

    def send(self, message: Message, peer: int, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
        hosts, wait = self._side.to_host(tensors, specs)

        def leave() -> None:
            wait()
            self.inner.send(message, peer, hosts, specs)

        self._leaving[message] = self._thread.submit(leave)

    def wait(self, message: Message, timeout: float) -> tuple[torch.Tensor, ...]:
        return self._side.to_device(super().wait(message, timeout))

    def acknowledged(self, messages: Sequence[Message]) -> None:
        self._have_left(messages)
        super().acknowledged(messages)

    def end_of_program(self) -> None:
        self._have_left([*self._leaving])
        super().end_of_program()

    def drain(self, timeout: float) -> None:
        self._have_left([*self._leaving])
        super().drain(timeout)

    def abort(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._leaving.clear()
        super().abort()

    def close(self) -> None:
        self._thread.shutdown()
        super().close()

    def _have_left(self, messages: Sequence[Message]) -> None:
        """Wait until the inner transport has these messages. Raises the error of its send."""
        for message in messages:
            if (leaving := self._leaving.pop(message, None)) is not None:
                leaving.result()
