"""Records of one program whose independent calls came in another order have one canonical order, which is right."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from support.inside import (
    Arguments,
    RecordedUnits,
    StageModule,
    Tensors,
    Words,
    first_run,
    in_canonical_order,
    model_units,
    take,
)
from support.inside import words_digest as digest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4
X = torch.randn(6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Branch = Callable[["Branches", str, Tensor], Tensor]


class Branches(nn.Module):
    """Branches made in a given order, joined by their names."""

    def __init__(self, branch: Branch, order: tuple[str, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleDict({kind: nn.Linear(WIDTH, WIDTH) for kind in "abc"})
        self.shared, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(1))
        self.branch, self.order = branch, order
        self.leaves = Leaves()
        self.reads = Reads([self.leaves])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        made = {kind: self.branch(self, kind, x) for kind in self.order}
        change = x.add_(1.0) if self.branch is before_a_change else 0.0
        return self.last(change + made["a"] + 2 * made["b"] + 3 * made["c"])


def plain(self: Branches, kind: str, x: Tensor) -> Tensor:
    return self.parts[kind](x)


def same_module(self: Branches, kind: str, x: Tensor) -> Tensor:
    return self.shared(x * ord(kind))


def in_place(self: Branches, kind: str, x: Tensor) -> Tensor:
    y = self.parts[kind](x)
    half = y[:, :2]
    product = half * 3
    y.mul_(2)
    return y + F.pad(half, (0, 2)) + F.pad(product, (0, 2))


def again(self: Branches, kind: str, x: Tensor) -> Tensor:
    return checkpoint(lambda x: torch.relu(self.parts[kind](x * 2)) * 3, x, use_reentrant=False)


def without_gradient(self: Branches, kind: str, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = self.parts[kind](x).abs().mean()
    return x * scale


def with_hook(self: Branches, kind: str, x: Tensor) -> Tensor:
    y = self.parts[kind](x)
    y.register_hook(torch.neg)
    return y * 2


def dropped_out(self: Branches, kind: str, x: Tensor) -> Tensor:
    return F.dropout(self.parts[kind](x), 0.5)


def before_a_change(self: Branches, kind: str, x: Tensor) -> Tensor:
    """The same view in each branch, which must be there before x changes (fuzz 710000378)."""
    return self.parts[kind]((x.detach() > 0).to(x) * ord(kind))


def in_turn(self: Branches, kind: str, x: Tensor) -> Tensor:
    """Running statistics keep the order."""
    return self.norm(x * ord(kind))


class Leaves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return x


class Reads(nn.Module):
    def __init__(self, leaves: list[Leaves]) -> None:
        super().__init__()
        self.leaves = leaves

    def forward(self, x: Tensor) -> Tensor:
        return x * self.leaves[0].last


def handed_on(self: Branches, kind: str, x: Tensor) -> Tensor:
    """So do units that hand tensors on past their arguments."""
    self.leaves(self.parts[kind](x))
    return self.reads(x)


def writes(self: Branches, kind: str, x: Tensor) -> Tensor:
    """So does a buffer that each branch changes and reads."""
    self.seen.add_(ord(kind))
    return self.parts[kind](x) * self.seen.clone()


def units_of(model: nn.Module, *, canonical: bool, x: Tensor = X) -> RecordedUnits:
    def agree(*arguments: object, **options: object) -> bool:
        return canonical

    units = model_units(model, Arguments.of((x,)), enter_unit=None, agree=agree)
    assert isinstance(units, RecordedUnits)
    return units


def run(units: RecordedUnits, num_stages: int) -> Tensor:
    cut = units.evenly(num_stages)
    stage: StageModule | None = None
    results: list[Tensors] = []
    for index, piece in enumerate(cut.pieces):
        linked = piece.link(stage, index=index, inputs=Arguments.of((X,)).form)
        stage, outputs, _ = first_run(piece, linked, take(linked[1], (X,), results))
        results.append(outputs)
    return results[-1][0]


FREE = [plain, same_module, in_place, again, without_gradient, with_hook, before_a_change, dropped_out]


@pytest.mark.thorough(but=["plain"])
@pytest.mark.parametrize("branch", FREE, ids=lambda branch: branch.__name__)
def test_orders_that_do_not_count_have_one_canonical_order(branch: Branch) -> None:
    models = [Branches(branch, order).double() for order in permutations("abc")]
    records = [(model, units_of(model, canonical=False).flow.record) for model in models]
    assert len({digest(Words(model).record(record)) for model, record in records}) == 6
    found = [in_canonical_order(record, model) for model, record in records]
    assert len({digest(Words(model).record(record)) for model, record in zip(models, found, strict=True)}) == 1
    twice = in_canonical_order(found[0], models[0])
    assert digest(Words(models[0]).record(twice)) == digest(Words(models[0]).record(found[0]))


@pytest.mark.thorough
def test_other_shapes_have_the_same_order() -> None:
    def shaped(self: Branches, kind: str, x: Tensor) -> Tensor:
        return self.parts[kind](x.reshape(x.shape[0], WIDTH) * ord(kind)) + torch.ones(x.shape[0], 1)

    model = Branches(shaped, ("c", "a", "b"))
    found = {units_of(model, canonical=True, x=torch.ones(size, WIDTH)).flow.record.as_run for size in range(2, 9)}
    assert len(found) == 1


@pytest.mark.thorough(but=["writes"])
@pytest.mark.parametrize("branch", [in_turn, handed_on, writes], ids=lambda branch: branch.__name__)
def test_orders_that_count_stay_apart(branch: Branch) -> None:
    models = [Branches(branch, order).double() for order in permutations("abc")]
    records = [(model, in_canonical_order(units_of(model, canonical=False).flow.record, model)) for model in models]
    assert len({digest(Words(model).record(record)) for model, record in records}) == 6


@pytest.mark.thorough(but=["plain-1", "in_place-1", "again-1", "with_hook-1", "handed_on-1"])
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("branch", [*FREE[:-1], in_turn, handed_on, writes], ids=lambda branch: branch.__name__)
def test_stages_in_canonical_order_compute_the_same(branch: Branch, num_stages: int) -> None:
    expected, model = Branches(branch, ("b", "c", "a")).double(), Branches(branch, ("b", "c", "a")).double()
    wanted = expected(X)
    wanted.square().sum().backward()
    units = units_of(model, canonical=True)
    found = run(units, num_stages)
    found.square().sum().backward()
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    for (name, p), (_, own) in zip(expected.named_parameters(), model.named_parameters(), strict=True):
        assert (p.grad is None) == (own.grad is None), name
        if p.grad is not None and num_stages == 1:  # across stages the gradients travel, which nobody does here
            torch.testing.assert_close(own.grad, p.grad, rtol=1e-12, atol=1e-14, msg=name)
    torch.testing.assert_close(dict(model.named_buffers()), dict(expected.named_buffers()))
