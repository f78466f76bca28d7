"""Buffers under recomputation: a forward that runs twice changes them once, and sees the same values both times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

SMALL = 1 << 16  # [bytes]


@dataclass(frozen=True, slots=True)
class _BufferBefore:
    """A buffer of a module, as it was before a forward."""

    module: nn.Module
    name: str
    buffer: torch.Tensor
    version: int
    copy: torch.Tensor

    def has_changed(self) -> bool:
        """Whether a forward changed it; batch_norm does so without counting a version."""
        now = self.module._buffers[self.name]
        if now is not self.buffer or now._version != self.version:
            return True
        return self.copy is not now and not torch.equal(now, self.copy)


Snapshot = Sequence[_BufferBefore]


class MovingBuffers:
    """Buffers of the modules that a forward runs, copied for each microbatch. Small ones are copied each time, whether
    they move or not: a running mean may stay where it is for a while. Of large ones, such as masks, the first forward
    shows which move, and only those are copied from then on."""

    def __init__(self, *roots: nn.Module) -> None:
        self._modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        self._large: dict[tuple[nn.Module, str], bool] = {}  # whether they move

    def before_forward(self) -> Snapshot:
        copies: dict[int, torch.Tensor] = {}  # a buffer with two names stays one
        places = []
        for module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                copy = copies.get(id(buffer))
                if copy is None:
                    is_still = buffer.nbytes > SMALL and self._large.get((module, name)) is False
                    copy = copies[id(buffer)] = buffer if is_still else buffer.detach().clone()
                places.append(_BufferBefore(module, name, buffer, buffer._version, copy))
        return places

    def after_forward(self, before: Snapshot) -> Snapshot:
        """The values to put back for the second run.

        Raises ValueError for a large buffer that moves, and did not in the first forward.
        """
        moving = []
        for place in before:
            if place.buffer.nbytes <= SMALL:
                moving.append(place)
                continue
            known = self._large.get((place.module, place.name))
            if known is None:
                known = self._large[place.module, place.name] = place.has_changed()
            elif not known and place.has_changed():
                raise ValueError(
                    f"buffer {place.name!r} of {type(place.module).__name__} ({place.buffer.nbytes:,} bytes) changes "
                    f"here and did not in the first forward: under recompute= its value from before is gone. Expected "
                    f"a large buffer that changes in each forward, or a recompute= that leaves it out"
                )
            if known:
                moving.append(place)
        return moving

    @contextmanager
    def put_back(self, snapshot: Snapshot) -> Iterator[None]:
        """Within: the copies stand in for the buffers (the graph may keep them; the real ones are not touched)."""
        real = [place.module._buffers[place.name] for place in snapshot]
        for place in snapshot:
            place.module._buffers[place.name] = place.copy
        try:
            yield
        finally:
            for place, buffer in zip(snapshot, real, strict=True):
                place.module._buffers[place.name] = buffer
