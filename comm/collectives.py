"""Collectives between the processes of a run, each with a time-out that says what was waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from .errors import PeerLost, PipelineTimeout, short_reason
from .groups import World, backend_for

T = TypeVar("T")


class Collectives:
    """All-reduce, broadcast and gather over all processes, or over some of them. Alone, they do nothing.

    Making it is collective: it makes a group of its own, so that its time-out is the run's. So is `subgroup`.
    """

    def __init__(self, world: World, *, device: torch.device, timeout: float) -> None:
        self._world = world
        self._device = device
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._everyone = tuple(range(world.size))
        self.subgroup(self._everyone)

    def subgroup(self, ranks: Sequence[int]) -> None:
        """Make a group of these ranks, if there is none yet."""
        key = tuple(ranks)
        if self._world.distributed and key not in self._groups:
            limit = timedelta(seconds=self._timeout)
            self._groups[key] = dist.new_group(list(key), backend=backend_for(self._device), timeout=limit)

    def all_reduce(self, tensor: torch.Tensor, *, what: str, ranks: Sequence[int] | None = None) -> None:
        """Sum `tensor` over the ranks, in place."""
        if self._world.distributed:
            group = self._groups[tuple(ranks or self._everyone)]
            self._guard(lambda: dist.all_reduce(tensor, group=group), what)

    def broadcast(self, tensor: torch.Tensor, source: int, *, what: str) -> torch.Tensor:
        """`tensor` of rank `source` on every rank; elsewhere it gives shape and type."""
        if not self._world.distributed:
            return tensor
        mine = self._world.rank == source
        buffer = (
            tensor.to(self._device).contiguous()
            if mine
            else torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        )
        group = self._groups[self._everyone]
        self._guard(lambda: dist.broadcast(buffer, src=source, group=group), what)
        return buffer

    def gather(self, mine: T, *, what: str) -> list[T]:
        """[size] what every rank gives, on every rank."""
        if not self._world.distributed:
            return [mine]
        everyone: list[T] = [mine] * self._world.size
        group = self._groups[self._everyone]
        self._guard(lambda: dist.all_gather_object(everyone, mine, group=group), what)
        return everyone

    def _guard(self, run: Callable[[], object], what: str) -> None:
        started = time.monotonic()
        try:
            run()
        except RuntimeError as error:
            waited = time.monotonic() - started
            story = (
                f"rank {self._world.rank}: {what}, together with all {self._world.size} ranks, failed after "
                f"{waited:.1f} s ({short_reason(error)}): did every rank make this call?"
            )
            raise (PipelineTimeout if waited >= self._timeout else PeerLost)(story) from error
