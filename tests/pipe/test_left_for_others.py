"""What one unit sets in a module's attribute, or in one of a tensor, and another unit reads: both are on one stage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import Pool
from torch import Tensor, nn

from stagewright.pipe import PipelineModule

WIDTH = 4
BATCHES = [torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n)).double() for n in (4, 6)]


class Longest(nn.Module):
    """A number that the first call of a forward sets, and others read."""

    most = 0

    def forward(self, x: Tensor) -> float:
        if self.most < len(x):
            self.most = len(x)
        return float(self.most)


class Unit(nn.Linear):
    """`sets` is called with the unit and its result, `reads` with the unit and its argument; `others`: not its own."""

    def __init__(self, sets: Callable[..., Any], reads: Callable[..., float], shared: Longest) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.sets, self.reads, self.shared, self.factor, self.others = sets, reads, shared, 1.0, list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.reads(self, x)
        self.sets(self, y)
        return y


def nothing(unit: Unit, _: Tensor) -> float:
    return 1.0


class Model(nn.Module):
    """`first` sets and `last` reads, with another layer before and after, or between them."""

    def __init__(self, sets: Callable[..., Any], reads: Callable[..., float], *, between: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        shared = Longest()
        self.first, self.last = Unit(sets, nothing, shared), Unit(nothing, reads, shared)
        self.first.others.append(self.last)
        self.last.others.append(self.first)
        self.other, self.between = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), between

    def forward(self, x: Tensor) -> Tensor:
        if self.between:
            return self.last(self.other(self.first(x)))
        return self.last(self.first(self.other(x)))


def set_own(unit: Any, y: Tensor) -> None:
    unit.factor = float(len(y))


def set_others(unit: Any, y: Tensor) -> None:
    unit.others[0].factor = float(len(y))


def mark(unit: Any, y: Tensor) -> None:
    y.factor = float(len(y))  # type: ignore[attr-defined]


def own(unit: Any, x: Tensor) -> float:
    return float(unit.factor)


READ: dict[str, Any] = {
    "its own": (set_own, lambda unit, _: unit.others[0].factor, "attribute 'factor' of a Unit"),
    "the other's": (set_others, own, "attribute 'factor' of a Unit"),
    "a tensor's": (mark, lambda _, x: getattr(x, "factor", 1.0), "attribute 'factor' of a tensor"),
}


def losses(model: nn.Module, **options: Any) -> tuple[list[float | None], list[float]]:
    """Without verification, and those of the plain model, whose microbatches are the same size."""
    plain = copy.deepcopy(model)
    pipe = PipelineModule(model, mesh={"pipe": 2}, num_microbatches=1, loss_fn=F.mse_loss, verify=False, **options)
    expected = [F.mse_loss(plain(x), x).item() for x in BATCHES]
    return [pipe.forward_backward(x, x).loss for x in BATCHES], expected


@pytest.mark.parametrize("kind", READ)
def test_no_cut_parts_who_sets_it_from_who_reads_it(kind: str) -> None:
    """Silent without verification: over processes the reader found what was there before."""
    sets, reads, what = READ[kind]
    with pytest.raises(ValueError, match=rf"part 'first' and 'last' .* reads {what}, which the other one sets"):
        losses(Model(sets, reads, between=False), cut=["last"])


def _over_processes(kind: str, cut: list[str] | None, *, between: bool) -> tuple[list[float | None], list[float]]:
    sets, reads = {**READ, **NO_MATTER}[kind][:2]
    return losses(Model(sets, reads, between=between), **({} if cut is None else {"cut": cut}))


NO_MATTER: dict[str, Any] = {
    "set, not read": (set_own, own),
    "a mark that is not read": (mark, nothing),
    "read as its own cache": (lambda unit, y: unit.shared(y), lambda unit, x: unit.shared(x)),
    "set by the reader, too": (set_others, lambda unit, x: set_own(unit, x) or unit.factor),
    "always the same": (lambda unit, _: setattr(unit, "factor", 1.0), lambda unit, _: unit.others[0].factor),
}


@pytest.mark.thorough
def test_both_are_left_on_one_stage_over_processes(gloo: Pool) -> None:
    for kind in READ:
        for found, expected in gloo.run(_over_processes, ranks=2, args=(kind, None), kwargs={"between": False}):
            assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.thorough(but=["read as its own cache"])
@pytest.mark.parametrize("kind", NO_MATTER)
def test_what_no_other_unit_needs_parts_nothing(kind: str) -> None:
    found, expected = _over_processes(kind, ["last"], between=True)
    assert found == pytest.approx(expected, rel=1e-12)
