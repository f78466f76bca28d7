"""The first phase of a checkpoint: copies in host memory, made while the next step's forwards and backwards run.

    between two steps   what a forward may change (buffers) is copied at once
    during the step     what only updates change (weights, optimizer state): on the CPU by a thread, on CUDA by a side
                        stream into pinned memory
    the update          waits until these copies are made: on CUDA its stream does, not the process

Nothing else should write these tensors meanwhile. If something did, as a version counter shows, the copy is discarded,
and the tensor is copied at once from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

import torch


class _CopiedTensor(NamedTuple):
    """A tensor, its copy, and the tensors that hold the same memory, with their versions when it was copied.

    The tensor itself may be a view made by `.data`, which has no versions.
    """

    tensor: torch.Tensor
    host: torch.Tensor
    holders: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]

    @property
    def has_changed(self) -> bool:
        return _versions(self.holders) != self.versions


class HostCopy:
    """Copies of one process's tensors, whose memory is used again for the next checkpoint.

    begin -> copy(tensor)... -> start; then `finish` in a thread, and `wait` before an update writes.
    """

    def __init__(self, device: torch.device) -> None:
        self.problem = ""  # why the newest copies cannot be used; empty if no reason is known
        self.is_checked_late = device.type == "cuda"  # whether that is known only after `wait`
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._memory: list[torch.Tensor] = []
        self._used = 0
        self._at_rest: dict[int, tuple[torch.Tensor, ...]] = {}  # by storage
        self._changing: set[int] = set()  # storages that something else than an update has changed
        self._pairs: list[_CopiedTensor] = []
        self._made = threading.Event()
        self._copied: torch.cuda.Event | None = None

    def begin(self, at_rest: Iterable[torch.Tensor]) -> None:
        """Starts new copies; `at_rest` are the tensors that only updates change."""
        self._at_rest = {}
        for tensor in at_rest:
            storage = _storage(tensor)
            if storage not in self._changing:
                self._at_rest[storage] = (*self._at_rest.get(storage, ()), tensor)
        self._pairs, self._used, self.problem = [], 0, ""
        self._made = threading.Event()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor's copy, which may be filled later."""
        host = self._take(tensor)
        is_late = _storage(tensor) in self._at_rest
        if self._stream is not None and tensor.is_cuda:
            stream = self._stream if is_late else torch.cuda.current_stream(self._stream.device)
            with torch.cuda.stream(stream):
                host.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
        elif not is_late:
            host.copy_(tensor)
        if is_late:
            holders = self._at_rest[_storage(tensor)]
            self._pairs.append(_CopiedTensor(tensor, host, holders, _versions(holders)))
        return host

    def start(self) -> None:
        """Call it once all tensors are known."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))  # what was copied at once
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(self._stream)

    def finish(self) -> None:
        """Fills the copies that are not filled yet, in a thread; afterwards they can be read."""
        try:
            for pair in self._pairs:
                if not pair.tensor.is_cuda:
                    pair.host.copy_(pair.tensor)
            if self._copied is not None:
                self._copied.synchronize()
            else:
                self._note_changes()
        finally:
            self._made.set()

    def wait(self) -> None:
        """Waits until updates may write again."""
        if self._stream is None or any(not pair.tensor.is_cuda for pair in self._pairs):
            self._made.wait()
        if self._stream is not None and self._copied is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)
        self._note_changes()

    def _note_changes(self) -> None:
        """Before an update writes, notes which tensors something else has changed."""
        found = [pair.tensor for pair in self._pairs if pair.has_changed]
        self._changing |= {_storage(tensor) for tensor in found}
        if found:
            self.problem = (
                f"a tensor of shape {tuple(found[0].shape)} was changed while it was copied, not by an update (by a "
                f"forward, as nn.Embedding(max_norm=) does, or from outside); it is copied before the step from now on"
            )

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._used < len(self._memory):
            known = self._memory[self._used]
            if known.shape == tensor.shape and known.dtype == tensor.dtype:
                self._used += 1
                return known
            del self._memory[self._used :]
        made = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._is_cuda and tensor.is_cuda)
        self._memory.append(made)
        self._used += 1
        return made


def _versions(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
