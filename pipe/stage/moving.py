"""Activations of one microbatch that leave the rank while they wait for their backward.

    forward   autograd packs each tensor that it saves into a handle, and keeps its storage once
    leave     the storages as bytes, to the host; they are not held here any longer
    come      the bytes again: unpacking a handle makes a tensor of them

They are the tensors saved for the backward and the stage's inputs. Parameters, buffers, targets and inputs that are
parts of the batch stay, since they are held anyway. A storage that others hold, too (outputs being sent) is freed when
they release it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(slots=True)
class _Handle:
    """A saved tensor. tensor: None once it has left; number: of its storage, None where it stays."""

    tensor: torch.Tensor | None
    version: int
    number: int | None
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """A saved tensor that consists of others, such as a DTensor: handles of its tensors, other parts, and how to
    rebuild it."""

    kind: type
    parts: dict[str, object]
    context: object
    size: torch.Size
    stride: tuple[int, ...]


class Activations:
    """Tensors that one stage keeps of one microbatch from its forward to its backward. `staying`: tensors that are held
    in any case: parameters, buffers, the target."""

    def __init__(
        self, name: str, *, leaves: Sequence[torch.Tensor], staying: Iterable[torch.Tensor], device: torch.device
    ) -> None:
        self._name = name
        self._device = device
        self._staying = {x.untyped_storage()._cdata for x in staying if _has_storage(x)}
        self._kept = list(staying)  # so that their addresses are not reused
        self._storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}
        self._handles: list[_Handle] = []
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._parts: Sequence[torch.Tensor] = ()
        self._is_away = False
        self._arrival: torch.cuda.Event | None = None
        # An input that is a part of a larger storage (of the batch) can't leave alone.
        for x in filter(_has_storage, leaves):
            if x.untyped_storage().nbytes() > x.numel() * x.element_size():
                self._staying.add(x.untyped_storage()._cdata)
        self._leaves = [(x, self._handle(x)) for x in leaves if _has_storage(x)]

    def saving(self) -> AbstractContextManager[object]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def made(self, outputs: Sequence[torch.Tensor]) -> None:
        self._outputs = tuple(outputs)

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes() for each in self._storages)

    def leave(self) -> list[torch.Tensor]:
        """Free the tensors; returns the bytes of each storage, which are not held here any longer. Raises RuntimeError
        where a saved tensor was changed in place."""
        for handle in self._handles:
            self._check(handle)
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        parts = [empty.new_empty(0).set_(storage) for storage in self._storages]
        self._is_away = True
        for handle in self._handles:
            if handle.number is not None:
                handle.tensor = None
        self._handles.clear()
        for leaf, handle in self._leaves:
            if handle.number is not None:
                leaf.data = leaf.data.new_empty(0)
        own_leaves = {id(leaf) for leaf, _ in self._leaves}
        for output in self._outputs:
            if id(output) not in own_leaves and _has_storage(output):
                output.data = output.data.new_empty(()).expand(output.shape)  # its shape, without memory
        self._outputs = ()
        self._storages.clear()
        self._kept.clear()
        return parts

    def come(self, parts: Sequence[torch.Tensor], arrival: torch.cuda.Event | None = None) -> None:
        self._parts, self._arrival, self._is_away = parts, arrival, False
        for leaf, handle in self._leaves:
            if handle.number is not None:
                leaf.data = self._view(handle)

    def settle(self) -> None:
        """Wait, before a backward, until all tensors are complete. RuntimeError where they are away."""
        if self._is_away:
            raise RuntimeError(self._absent())
        if self._arrival is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrival)
            self._arrival = None

    def _absent(self) -> str:
        return f"activations of {self._name} are away and needed: expected RELOAD before the action that needs them"

    def _pack(self, tensor: torch.Tensor) -> object:
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            own = {name: getattr(tensor, name) for name in names}
            parts = {name: self._pack(part) if isinstance(part, torch.Tensor) else part for name, part in own.items()}
            return _Wrapped(type(tensor), parts, context, tensor.size(), tensor.stride())
        return self._handle(tensor)

    def _handle(self, tensor: torch.Tensor) -> _Handle:
        number = None
        if self._may_go(tensor):
            storage = tensor.untyped_storage()
            number = self._numbers.setdefault(storage._cdata, len(self._storages))
            if number == len(self._storages):
                self._storages.append(storage)
        is_strided = tensor.layout is torch.strided
        strides, offset = (tensor.stride(), int(tensor.storage_offset())) if is_strided else ((), 0)
        handle = _Handle(tensor, tensor._version, number, tensor.dtype, offset, tensor.size(), strides)
        self._handles.append(handle)
        return handle

    def _may_go(self, tensor: torch.Tensor) -> bool:
        is_plain = _has_storage(tensor) and tensor.device == self._device and not (tensor.is_conj() or tensor.is_neg())
        return is_plain and tensor.untyped_storage()._cdata not in self._staying

    def _unpack(self, packed: object) -> torch.Tensor:
        if isinstance(packed, _Wrapped):
            packs = _Handle | _Wrapped
            parts = {n: self._unpack(part) if isinstance(part, packs) else part for n, part in packed.parts.items()}
            return packed.kind.__tensor_unflatten__(parts, packed.context, packed.size, packed.stride)  # type: ignore[attr-defined, no-any-return]
        assert isinstance(packed, _Handle)
        if packed.tensor is not None:
            self._check(packed)
            return packed.tensor
        if self._is_away:
            raise RuntimeError(self._absent())
        return self._view(packed)

    def _view(self, handle: _Handle) -> torch.Tensor:
        assert handle.number is not None
        part = self._parts[handle.number]
        empty = torch.empty(0, dtype=handle.dtype, device=self._device)
        return empty.set_(part.untyped_storage(), handle.offset, handle.size, handle.stride)

    def _check(self, handle: _Handle) -> None:
        if handle.tensor is not None and handle.tensor._version != handle.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(handle.size)}, saved by the forward of {self._name}, is at version "
                f"{handle.tensor._version}; expected version {handle.version}"
            )


def _has_storage(tensor: torch.Tensor) -> bool:
    plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
    return plain and tensor.device.type != "meta" and tensor.untyped_storage().nbytes() > 0


class Host:
    """Activations in the host's memory: on CUDA pinned, with a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[Activations, tuple[list[torch.Tensor], torch.cuda.Event | None]] = {}
        is_cuda = device.type == "cuda"
        self._to_host = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._from_host = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def num_bytes(self) -> int:
        return sum(each.numel() for own, _ in self._rows.values() for each in own)

    def take(self, activations: Activations) -> None:
        parts, own = activations.leave()[::-1], []
        if self._to_host is None:
            while parts:  # each is freed as soon as it is copied
                part = parts.pop()
                own.append(_apart(part.numel()).copy_(part))
            self._rows[activations] = own, None
            return
        self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        while parts:
            part = parts.pop()
            copy = torch.empty(part.numel(), dtype=torch.uint8, pin_memory=True)
            with torch.cuda.stream(self._to_host):
                own.append(copy.copy_(part, non_blocking=True))
            part.record_stream(self._to_host)  # its memory is reused only after the copy
        self._rows[activations] = own, self._to_host.record_event()

    def give_back(self, activations: Activations) -> None:
        own, has_left = self._rows.pop(activations)
        parts = [torch.empty(each.numel(), dtype=torch.uint8, device=self._device) for each in own]
        if self._from_host is None or has_left is None:
            activations.come([part.copy_(each) for part, each in zip(parts, own, strict=True)])
            return
        back = self._from_host
        back.wait_stream(torch.cuda.current_stream(self._device))  # earlier users of this memory are done
        back.wait_event(has_left)
        with torch.cuda.stream(back):
            for part, each in zip(parts, own, strict=True):
                part.copy_(each, non_blocking=True)
                part.record_stream(back)
        activations.come(parts, back.record_event())

    def drop(self) -> None:
        self._rows.clear()


def _apart(size: int) -> torch.Tensor:
    """Bytes outside torch's allocator: separate pages, returned to the system when they are freed."""
    return torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)[:size]
