"""Tensor groups: the processes that hold one weight together, and their collectives, with gradients.

    enter    the same tensor everywhere -> the same                  backward: the sum of all gradients
    leave    one summand each           -> their sum everywhere      backward: the gradient, unchanged
    gather   one part each along `dim`  -> all parts, everywhere     backward: the own part of the gradient
    split    the same tensor everywhere -> the own part along `dim`  backward: all parts of the gradient

A cut module begins with `enter` or `split` and ends with `leave` or `gather`: Megatron's f and g (Shoeybi et al. 2019,
section 3) are `enter` and `leave`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from .exchanges import Exchanges

T = TypeVar("T", bound=torch.Tensor | None)


class TensorGroup:
    """Member `index` of `count` processes. Fake and meta tensors are never sent."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        *,
        index: int,
        count: int,
        on_bytes: Callable[[str, int], None] | None = None,
        on_region: Callable[[bool, int | None], None] | None = None,
        exchanges: Exchanges | None = None,
    ) -> None:
        self.index = index
        self.count = count
        self._group = process_group  # None: there are no other processes (the profiler measures one member alone)
        self._on_bytes = on_bytes  # called with "sum" or "gather" and the size of each tensor that is sent [bytes]
        self._on_region = on_region  # called when a forward enters (True) or leaves a region of divided tensors
        self._exchanges = exchanges  # those of the process: all-to-alls go through them, and what is `noted`
        self.module: torch.nn.Module | None = None  # whose exchanges these are

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> TensorGroup:
        """The group of a mesh with one axis. Raises ValueError for more axes."""
        if mesh.ndim != 1:
            raise ValueError(f"a mesh of {mesh.ndim} axes: expected the one of the tensor groups, as in mesh['tensor']")
        return cls(mesh.get_group(), index=mesh.get_local_rank(), count=mesh.size())

    def inside(self, module: torch.nn.Module) -> TensorGroup:
        """The same group, whose errors in a backward name `module`, too; not in compiled code."""
        if torch.compiler.is_compiling():
            return self
        own = copy(self)
        own.module = module
        return own

    def region(self, is_own: bool, module: int | None = None) -> None:
        """Begin a region in which each member draws its own numbers (True), or all the same. `module`: see
        `Seeder.region`."""
        if self._on_region is not None:
            self._on_region(is_own, module)

    def noted(self) -> AbstractContextManager[None]:
        """Context of a collective that timelines show."""
        return nullcontext() if self._exchanges is None else self._exchanges.noted()

    def note_rows(self, by_member: Sequence[int]) -> None:
        """Note how many rows of tokens each member's experts compute."""
        if self._exchanges is not None:
            self._exchanges.rows(by_member, self.index)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if self._on_bytes is not None:
            self._on_bytes("sum", x.numel() * x.element_size())
        if not self._travels(x):
            return x.clone()
        return _wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", self._name))

    def all(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if self._on_bytes is not None:
            self._on_bytes("gather", x.numel() * x.element_size() * self.count)
        if not self._travels(x):
            return torch.cat([x] * self.count, dim)
        parts = _wait(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), self.count, self._name))
        return torch.cat(parts.chunk(self.count), dim)

    def send(self, x: torch.Tensor, gives: list[int], takes: list[int]) -> torch.Tensor:
        """Rows [sum(takes), ...] from the members, for those [sum(gives), ...] sent to them (all-to-all)."""
        if self._group is None:
            return x.clone()
        received = x.new_empty(sum(takes), *x.shape[1:])
        into, wire = received.view(-1).view(torch.uint8), x.contiguous().view(-1).view(torch.uint8)
        width = x.element_size() * prod(x.shape[1:])
        sizes = [width * n for n in takes], [width * n for n in gives]
        if self._exchanges is None:
            dist.all_to_all_single(into, wire, *sizes, group=self._group)
        else:
            self._exchanges.through(
                lambda: dist.all_to_all_single(into, wire, *sizes, group=self._group, async_op=True)
            )
        return received

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This member's part along `dim`. Raises ValueError for a size that the members do not divide."""
        if x.shape[dim] % self.count:
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} over {self.count} tensor ranks: expected dimension {dim} to be a "
                f"multiple of {self.count}"
            )
        part = x.chunk(self.count, dim)[self.index]
        return part.clone(memory_format=torch.contiguous_format)  # no view: it may change in place, and x may go

    @property
    def _name(self) -> str:
        assert self._group is not None
        return self._group.group_name

    def _travels(self, x: torch.Tensor) -> bool:
        return self._group is not None and self.count > 1 and not (x.is_meta or isinstance(x, FakeTensor))


def _wait(x: torch.Tensor) -> torch.Tensor:
    done: torch.Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return done


_Change = Callable[[torch.Tensor], torch.Tensor]


class _TensorExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, change: _Change, change_back: _Change) -> torch.Tensor:
        ctx.change_back = change_back
        return change(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.change_back(gradients[0]), None, None


def exchanged(x: torch.Tensor, change: _Change, change_back: _Change) -> torch.Tensor:
    found: torch.Tensor = _TensorExchange.apply(x, change, change_back)  # type: ignore[no-untyped-call]
    return found


def settled(x: T) -> T:
    """A tensor without a graph, complete: torch's styles return some that are still being sent."""
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x  # type: ignore[return-value]


def enter(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """`x`, which each member holds; in the backward the sum of all members' gradients."""
    group.region(True)
    return exchanged(x, lambda x: x.view_as(x), group.sum)


def leave(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    group.region(False)
    return exchanged(x, group.sum, lambda gradient: gradient)


def gather(x: torch.Tensor, group: TensorGroup, *, dim: int) -> torch.Tensor:
    group.region(False)
    return exchanged(x, partial(group.all, dim=dim), partial(group.own, dim=dim))


def split(x: torch.Tensor, group: TensorGroup, *, dim: int) -> torch.Tensor:
    group.region(True)
    return exchanged(x, partial(group.own, dim=dim), partial(group.all, dim=dim))
