"""Cut units of traced models: where they begin, what they are called, and stages made of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import models
from support.inside import GPT, Arguments, GPTConfig, ModelUnits, StageModule, TracedUnits, first_run, take, unit_paths
from torch import Tensor, nn

TOKENS = torch.zeros(2, 16, dtype=torch.int64)


def trace(model: nn.Module, *inputs: Tensor) -> TracedUnits:
    return TracedUnits(model, Arguments.of(inputs), enter_unit=None)


def names(units: ModelUnits) -> list[str]:
    return [unit.name for unit in units.units]


def run_in_stages(units: ModelUnits, stage_of: dict[str, int], *inputs: Tensor) -> Any:
    """The output of the model, cut as given; each stage runs a first time and a second time."""
    cut = units.by_unit(stage_of)
    results: list[tuple[Tensor, ...]] = []
    stage: StageModule | None = None
    for index, piece in enumerate(cut.pieces):
        linked = piece.link(stage, index=index, inputs=Arguments.of(inputs).form)
        stage, found, _ = first_run(piece, linked, take(linked.inputs, inputs, results))
        again = stage.run(take(stage.inputs, inputs, results))
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
        results.append(found)
    assert stage is not None
    return cut.form_of_output(stage).assemble(results[-1])


class Residual(nn.Module):
    """As ResNet's basic block."""

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
    """Two towers, layer by layer in turn, joined by a head."""

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
    """One layer three times, another one between."""

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


def test_a_block_of_a_gpt_makes_two_units() -> None:
    found = names(trace(GPT(GPTConfig(layers=2, width=16, heads=2, length=16)), TOKENS))
    blocks = [f"blocks.{i}.norm{j}" for i in range(2) for j in (1, 2)]
    assert found == ["embedding.tokens", "embedding", *blocks, "head.norm", "head.linear"]


def test_a_resnet_is_cut_between_its_blocks() -> None:
    """Inside a block the skip crosses as well; its downsampling is a part of it."""
    found = names(trace(ResNet(), torch.randn(2, 3, 8, 8)))
    blocks = [f"layer{i}.{j}.conv1" for i in (1, 2) for j in (0, 1)]
    assert found == ["conv1", *blocks, "fc"]


def test_two_towers_are_cut_layer_by_layer() -> None:
    found = names(trace(Towers(), torch.randn(2, 4), torch.randn(2, 4)))
    assert found == ["left.0", "right.first", "left.1", "right.second", "head"]


def test_long_skips_do_not_forbid_cuts_between_modules() -> None:
    with_skips = names(trace(models.UNet(), torch.randn(2, 8, 16)))
    assert {"stem", "down.1.first", "middle.first", "up.1.first", "head"} < set(with_skips)


def test_a_module_that_runs_again_gets_a_number() -> None:
    assert names(trace(Shared(), torch.randn(2, 4))) == ["again", "again#2", "once", "again#3"]


def test_work_without_parameters_joins_its_neighbour() -> None:
    traced = trace(Bare(), torch.randn(2, 4))
    (unit,) = traced.units
    assert (unit.name, unit.first, unit.size) == ("flatten", 0, len(traced.graph.nodes))


def test_a_model_without_modules_is_one_unit() -> None:
    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu() + 1

    assert names(trace(Alone(), torch.randn(2, 4))) == ["model"]


def test_what_only_holds_modules_counts_as_them() -> None:
    inner = nn.Module()
    inner.layers = nn.ModuleList([nn.Linear(2, 2)])
    inner.norm = nn.LayerNorm(2)
    model = nn.Module()
    model.body = inner  # a list among its children: a stack of layers
    model.wrapped = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    model.head = nn.Linear(2, 2)
    model.nothing = None
    assert unit_paths(model) == {"body.layers.0", "body.norm", "wrapped.0.0", "wrapped.1", "head"}


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (GPT(GPTConfig(layers=2, width=16, heads=2, length=16)), (TOKENS,)),
        (ResNet(), (torch.randn(2, 3, 8, 8),)),
        (Towers(), (torch.randn(2, 4), torch.randn(2, 4))),
        (models.UNet(), (torch.randn(2, 8, 16),)),
        (Shared(), (torch.randn(2, 4),)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_units_cover_the_graph_and_run_as_stages(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    model.eval()
    traced = trace(model, *inputs)
    assert traced.units == trace(model, *inputs).units
    covered = [i for unit in traced.units for i in range(unit.first, unit.last + 1)]
    assert covered == list(range(len(traced.graph.nodes)))
    found = run_in_stages(traced, {unit.name: i for i, unit in enumerate(traced.units)}, *inputs)
    assert torch.equal(found, model(*inputs))


def test_stages_need_not_be_contiguous() -> None:
    """A tower a stage, though the graph runs them in turn."""
    model, inputs = Towers(), (torch.randn(2, 4), torch.randn(2, 4))
    stages = {"left.0": 0, "left.1": 0, "right.first": 1, "right.second": 1, "head": 2}
    found = run_in_stages(trace(model, *inputs), stages, *inputs)
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
        trace(Towers(), torch.randn(2, 4), torch.randn(2, 4)).by_unit(given)


class Chosen(nn.Module):
    """Blocks, and a mean over as many rows as the values say."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x[x.sum(dim=1) > 0].mean()


def test_sizes_that_follow_from_values_are_refused_by_name() -> None:
    """A bug: a TypeError from inside, for models such as ELECTRA's pretraining."""
    units = trace(Chosen(), torch.randn(4, 3))
    with pytest.raises(
        ValueError, match=r"'index\w*' \(in the model's own forward\) makes a tensor whose size follows"
    ):
        units.evenly(2)
