"""Collectives between the processes of a run, each with a time-out that says what was waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from .groups import World, as_one, make_group
from .process_group import break_group

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
            self._groups[key] = make_group(key, self._world, device=self._device, timeout=self._timeout)

    def all_reduce(self, tensor: torch.Tensor, *, what: str, ranks: Sequence[int] | None = None) -> None:
        """Sum `tensor` over the ranks, in place."""
        if self._world.distributed:
            self._run(lambda group: dist.all_reduce(tensor, group=group), tuple(ranks or self._everyone), what)

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
        wire = buffer.reshape(-1).view(torch.uint8)  # backends know few types
        self._run(lambda group: dist.broadcast(wire, src=source, group=group), self._everyone, what)
        return buffer

    def gather(self, mine: T, *, what: str) -> list[T]:
        """[size] what every rank gives, on every rank."""
        if not self._world.distributed:
            return [mine]
        everyone: list[T] = [mine] * self._world.size
        self._run(lambda group: dist.all_gather_object(everyone, mine, group=group), self._everyone, what)
        return everyone

    def abort(self) -> None:
        """After an error: let nobody wait for this rank any longer."""
        for ranks, group in self._groups.items():
            if self._world.rank in ranks:
                break_group(group, self._device)

    def _run(self, collective: Callable[[dist.ProcessGroup], object], ranks: tuple[int, ...], what: str) -> None:
        group = self._groups[ranks]
        as_one(lambda: collective(group), what=what, world=self._world, ranks=ranks, timeout=self._timeout)
