"""Collectives between the processes of a run, each with a time-out that says what was waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from .groups import Groups, as_one
from .mesh import MeshPlace
from .process_group import break_group

T = TypeVar("T")


class Collectives:
    """All-reduce, broadcast and gather over all processes, or over some of them. Alone, they do nothing.

    Ranks are those of the schedule. Making it is collective: it makes a group of its own, so that its time-out is
    the run's. So is `subgroup`. `groups` makes those of the links, too.
    """

    def __init__(self, place: MeshPlace, *, device: torch.device, timeout: float) -> None:
        self._place = place
        self._world = place.world
        self._device = device
        self._timeout = timeout
        self.groups = Groups(self._world, device=device, timeout=timeout)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._everyone = tuple(range(self._world.size))
        self._make(self._everyone)

    @property
    def rank(self) -> int:
        """Number of this process."""
        return self._world.rank

    def subgroup(self, ranks: Sequence[int]) -> None:
        """Make a group of these ranks, if there is none yet."""
        self._make(self._processes(ranks))

    def all_reduce(
        self, tensor: torch.Tensor, *, what: str, ranks: Sequence[int] | None = None, largest: bool = False
    ) -> None:
        """Sum `tensor` over the ranks, in place; or take the largest value of each element, which no NaN may be."""
        if self._world.distributed:
            processes = self._everyone if ranks is None else self._processes(ranks)
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            self._run(lambda group: dist.all_reduce(tensor, op, group=group), processes, what)

    def broadcast(self, tensor: torch.Tensor, source: int, *, what: str) -> torch.Tensor:
        """`tensor` of rank `source` on every rank; elsewhere it gives shape and type."""
        if not self._world.distributed:
            return tensor
        owner = self._place.process_of(source)
        mine = self._world.rank == owner
        buffer = (
            tensor.to(self._device).contiguous()
            if mine
            else torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        )
        wire = buffer.reshape(-1).view(torch.uint8)  # backends know few types
        self._run(lambda group: dist.broadcast(wire, src=owner, group=group), self._everyone, what)
        return buffer

    def gather(self, mine: T, *, what: str) -> list[T]:
        """[size] what every process gives, on every process."""
        if not self._world.distributed:
            return [mine]
        everyone: list[T] = [mine] * self._world.size
        self._run(lambda group: dist.all_gather_object(everyone, mine, group=group), self._everyone, what)
        return everyone

    def abort(self) -> None:
        """After an error: let nobody wait for this rank any longer."""
        for processes, group in self._groups.items():
            if self._world.rank in processes:
                break_group(group, self._device)

    def close(self) -> None:
        """Destroy all groups, those of the links too. No process may wait for another in them any more."""
        self._groups.clear()
        self.groups.close()

    def _processes(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._place.process_of(rank) for rank in ranks)

    def _make(self, processes: tuple[int, ...]) -> None:
        if self._world.distributed and processes not in self._groups:
            (self._groups[processes],) = self.groups.make(processes)

    def _run(self, collective: Callable[[dist.ProcessGroup], object], processes: tuple[int, ...], what: str) -> None:
        group = self._groups[processes]
        as_one(lambda: collective(group), what=what, world=self._world, ranks=processes, timeout=self._timeout)
