"""Cut units of recorded models: where they begin, what they are called, and stages made of them.

Records of one program whose independent calls came in another order have one canonical order, which is right.
"""

import functools
import re
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import models
from support.inside import (
    GPT,
    Arguments,
    GPTConfig,
    ModelUnits,
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

TOKENS = torch.zeros(2, 16, dtype=torch.int64)


def record(model: nn.Module, *inputs: Tensor) -> RecordedUnits:
    return RecordedUnits(model, Arguments.of(inputs), device=torch.device("cpu"), enter_unit=None)


def names(units: ModelUnits) -> list[str]:
    return [unit.name for unit in units.units]


def run_in_stages(units: ModelUnits, stage_of: dict[str, int], *inputs: Tensor) -> Any:
    """The output of the model, cut as given; each stage runs a first time and a second time."""
    cut = units.by_unit(stage_of)
    results: list[tuple[Tensor, ...]] = []
    stage: StageModule | None = None
    for index, piece in enumerate(cut.pieces):
        linked = piece.link(stage, index=index, inputs=Arguments.of(inputs).form)
        stage, found, _ = first_run(piece, linked, take(linked[1], inputs, results))
        again = stage.run(take(stage.inputs, inputs, results))
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
        results.append(found)
    assert stage is not None
    return cut.form_of_output(stage).assemble(results[-1])


class Residual(nn.Module):
    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = nn.Sequential(nn.Conv2d(width_in, width, 1), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(h + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.layer2 = nn.Sequential(Residual(4, 8), Residual(8, 8))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv1(x))
        return self.fc(self.pool(self.layer2(self.layer1(h))).flatten(1))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.right = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for one, other in zip(self.left, self.right.values(), strict=True):
            x, y = one(x).relu(), other(y).relu()
        return self.head(torch.cat((x, y), dim=1))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(4, 4)
        self.once = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.once(self.again(self.again(x).tanh())))


class Bare(nn.Module):
    """Work without a parameter in front, behind, and in the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.linear = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(self.flatten(x) * 2)) + 1


def test_work_without_parameters_or_modules_makes_no_unit_of_its_own() -> None:
    recorded = record(Bare(), torch.randn(2, 4))
    (unit,) = recorded.units
    assert (unit.name, unit.first, unit.size) == ("flatten", 0, len(recorded.flow.order))

    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu() + 1

    assert names(record(Alone(), torch.randn(2, 4))) == ["model"]


@pytest.mark.thorough(but=["Shared-tuple-again again#2 once again#3"])
@pytest.mark.parametrize(
    ("model", "inputs", "units"),
    [
        (GPT(GPTConfig(layers=2, width=16, heads=2, length=16)), (TOKENS,), "embedding blocks.0 blocks.1 head"),
        (ResNet(), (torch.randn(2, 3, 8, 8),), "conv1 layer1.0 layer1.1 layer2.0 layer2.1 fc"),
        (Towers(), (torch.randn(2, 4), torch.randn(2, 4)), "left.0 right.first left.1 right.second head"),
        (models.UNet(), (torch.randn(2, 8, 16),), "stem down.0 down.1 down.2 middle up.0 up.1 up.2 head"),
        (Shared(), (torch.randn(2, 4),), "again again#2 once again#3"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_units_cover_the_graph_and_run_as_stages(model: nn.Module, inputs: tuple[Tensor, ...], units: str) -> None:
    """Elements of lists and other modules; long skips do not forbid cuts, and a module that runs again has a number."""
    model.eval()
    recorded = record(model, *inputs)
    assert names(recorded) == units.split()
    assert recorded.units == record(model, *inputs).units
    covered = [i for unit in recorded.units for i in range(unit.first, unit.last + 1)]
    assert covered == list(range(len(recorded.flow.order)))
    found = run_in_stages(recorded, {unit.name: i for i, unit in enumerate(recorded.units)}, *inputs)
    assert torch.equal(found, model(*inputs))


def scaled(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor, float], Tensor]:
    @functools.wraps(forward)
    def wrapped(self: Any, x: Tensor, scale: float = 1.0) -> Tensor:
        return forward(self, x) * scale

    return wrapped


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @scaled
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_arguments_are_refused_where_a_forward_does_not_take_them() -> None:
    """And not where a decorator does, whose signature is said to be the forward's own."""
    x = torch.randn(2, 4)
    assert names(model_units(Decorated(), Arguments.of((x,), {"scale": 2.0}), enter_unit=None)) == ["linear"]
    with pytest.raises(ValueError, match=r"Shared.forward\(x: .* does not take .*: expected all that it needs"):
        model_units(Shared(), Arguments.of((x, x)), enter_unit=None)


def test_stages_need_not_be_contiguous() -> None:
    model, inputs = Towers(), (torch.randn(2, 4), torch.randn(2, 4))
    stages = {"left.0": 0, "left.1": 0, "right.first": 1, "right.second": 1, "head": 2}
    found = run_in_stages(record(model, *inputs), stages, *inputs)
    assert torch.equal(found, model(*inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"left.7": 0}, "unit 'left.7' is not in the model: expected its units, left.0, right.first, "),
        ({"head": None}, "no stage for unit 'head': expected one for each of left.0, "),
        ({"left.0": 1, "left.1": 0}, "unit 'left.1' on stage 0 needs 'left.0' of the later stage 1: "),
        ({"head": 3}, "stage 2 has no unit: expected at least one on each stage 0 to 3"),
        ({"left.0": -1}, "unit 'left.0' on stage -1: expected a whole number of at least 0"),
        ({"left.0": True}, "unit 'left.0' on stage True: expected a whole number"),
    ],
)
def test_stages_that_cannot_be(change: dict[str, int | None], message: str) -> None:
    stages = {"left.0": 0, "left.1": 0, "right.first": 1, "right.second": 1, "head": 1, **change}
    given = {name: stage for name, stage in stages.items() if stage is not None}
    with pytest.raises(ValueError, match=re.escape(message)):
        record(Towers(), torch.randn(2, 4), torch.randn(2, 4)).by_unit(given)


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


@pytest.mark.thorough(but=["dropped_out"])
@pytest.mark.parametrize("branch", FREE, ids=lambda branch: branch.__name__)
def test_orders_that_do_not_count_have_one_canonical_order(branch: Branch) -> None:
    models = [Branches(branch, order).double() for order in permutations("abc")]
    records = [(model, units_of(model, canonical=False).flow.record) for model in models]
    assert len({digest(Words(model).record(record)) for model, record in records}) == 6
    found = [in_canonical_order(record, model) for model, record in records]
    assert len({digest(Words(model).record(record)) for model, record in zip(models, found, strict=True)}) == 1
    twice = in_canonical_order(found[0], models[0])
    assert digest(Words(models[0]).record(twice)) == digest(Words(models[0]).record(found[0]))


def test_other_shapes_have_the_same_order() -> None:
    def shaped(self: Branches, kind: str, x: Tensor) -> Tensor:
        return self.parts[kind](x.reshape(x.shape[0], WIDTH) * ord(kind)) + torch.ones(x.shape[0], 1)

    model = Branches(shaped, ("c", "a", "b"))
    found = {units_of(model, canonical=True, x=torch.ones(size, WIDTH)).flow.record.as_run for size in range(2, 9)}
    assert len(found) == 1


@pytest.mark.thorough(but=["in_turn"])
@pytest.mark.parametrize("branch", [in_turn, handed_on, writes], ids=lambda branch: branch.__name__)
def test_orders_that_count_stay_apart(branch: Branch) -> None:
    models = [Branches(branch, order).double() for order in permutations("abc")]
    records = [(model, in_canonical_order(units_of(model, canonical=False).flow.record, model)) for model in models]
    assert len({digest(Words(model).record(record)) for model, record in records}) == 6


@pytest.mark.thorough(but=["plain-1", "in_place-1", "again-1"])
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
