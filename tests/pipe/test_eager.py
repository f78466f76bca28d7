"""Models run by their own modules: what their Python does beside computing tensors is what one process does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import eager_models as models
from support import eager_objects as objects
from support.alone import near, train_alone
from support.inside import Arguments, RecordedUnits
from support.plain import batch
from support.records import records
from torch import Tensor, nn

from stagewright.pipe import PipelineModule

X, Y = batch(0, models.WIDTH)
STEPS = 3
sgd = partial(torch.optim.SGD, lr=0.05)

# Modules of all other kinds, and code around them: test_fuzz.py.
IN_UNITS = {"checkpoint": models.CheckpointedBlock, "reentrant checkpoint": models.ReentrantBlock}
BETWEEN = {
    "functions": models.FunctionsBetween,
    "checkpoint": models.CheckpointedBetween,
    "reentrant checkpoint": models.ReentrantBetween,
    "one checkpoint over two blocks": models.CheckpointedTogether,
    "hooks": models.HooksBetween,
    "autocast": models.AutocastBetween,
    "encoder and decoder": models.EncoderDecoder,
    "cache": objects.WithACache,
    "objects in a cache": objects.WithNestedObjects,
    "counts in an object": objects.CountsInAnObject,
    "makes a tensor once": models.MakesOnce,
    "buffers": models.Averaging,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"{name} in units": (lambda block=block: models.Stack(block)) for name, block in IN_UNITS.items()},
    **{f"{name} between units": make for name, make in BETWEEN.items()},
}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make().double()


def pipeline(model: nn.Module, **options: Any) -> PipelineModule:
    settings: dict[str, Any] = {"num_microbatches": 4, "mesh": {"pipe": 2}, "loss_fn": F.mse_loss, "optimizer": sgd}
    return PipelineModule(model, **records(**(settings | {"example_inputs": (X,)} | options)))


def equal(model: nn.Module, twin: nn.Module) -> None:
    """Parameters, buffers and plain attributes of every module."""
    for tensors in (nn.Module.parameters, nn.Module.buffers):
        near([*tensors(model)], [*tensors(twin)])  # type: ignore[operator]
    for (name, mine), other in zip(model.named_modules(), twin.modules(), strict=True):
        plain = {key: value for key, value in vars(mine).items() if isinstance(value, int | float | str | list)}
        assert plain == {key: vars(other)[key] for key in plain}, name


@pytest.mark.filterwarnings("ignore:.*changes attribute 'last' of the model.* once, while the model is recorded")
@pytest.mark.thorough(
    but=[
        "reentrant checkpoint between units",
        "autocast between units",
        "counts in an object between units",
        "objects in a cache between units",
    ]
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # checkpoint says so in evaluation
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_training_is_that_of_one_process(make: Callable[[], nn.Module]) -> None:
    model, twin = made(make), made(make)
    pipe = pipeline(model, mesh={"pipe": 3})
    losses = [pipe.train_step(X, Y).loss for _ in range(STEPS)]
    near(losses, train_alone(twin, [(X, Y)] * STEPS, sgd, parts=4).losses)
    equal(model, twin)
    with torch.no_grad():
        expected = torch.cat([twin.eval()(x.clone()) for x in X.split(2)])
    near(pipe.predict(X), expected)


# --- schedules, processes, what changes between steps ---


class Scaled(models.Stack):
    """Attributes that the code between the units reads."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.skips = 1.0, [0, 2]

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x) if i in self.skips else block(x) * self.alpha
        return self.head(x) if self.training else x


def test_a_change_after_which_other_modules_run_is_refused_by_name() -> None:
    model = made(Scaled)
    pipe = pipeline(model)
    pipe.train_step(X, Y)
    model.eval()
    message = r"module 'head' does not run now and did when the stages were built: .* Expected the same"
    with pytest.raises(ValueError, match=message):
        pipe.train_step(X, Y)
    model.train()
    pipe.train_step(X, Y)
    with torch.no_grad():
        expected = torch.cat([model.eval()(x) for x in X.split(2)])
    near(pipe.predict(X), expected)


@pytest.mark.thorough(but=["checkpoint in units", "reentrant checkpoint in units"])
@pytest.mark.parametrize("name", ["checkpoint in units", "reentrant checkpoint in units", "checkpoint between units"])
def test_checkpointing_keeps_as_little_as_in_one_process(name: str) -> None:
    def kept(model: Callable[[Tensor], Any]) -> int:
        sizes: list[int] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x)
        with hooks:
            model(X)
        return sum(sizes)

    model, plain = made(MODELS[name]), made(models.Stack)
    pipe = pipeline(model, mesh={"pipe": 1}, num_microbatches=1)
    pipe.build(X, Y)
    assert pipe._building.pipeline is not None
    (stage,) = pipe._building.pipeline.parts.train.stages
    assert kept(stage.module) == kept(model) < 0.5 * kept(plain)


# --- over processes ---


class Losing(models.Stack):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        y = super().forward(x)
        return (y,) if labels is None else (F.mse_loss(y, labels), y)


def test_a_stage_of_the_loss_alone_has_nothing_to_do_without_labels() -> None:
    example = Arguments.of((X[:2],), {"labels": Y[:2]})
    units = RecordedUnits(made(Losing), example, device=X.device, enter_unit=None)
    cut = units._contiguous([0, len(units.flow.order) - 1])
    assert cut.evaluation(Arguments.of((X[:2],))).pieces[1].name == "nothing"


class Seen:
    def __init__(self) -> None:
        self.inputs: list[Tensor] = []


class SparseBlock(models.Block):
    def forward(self, x: Tensor, seen: Seen, index: int) -> Tensor:  # type: ignore[override]
        assert len(seen.inputs) <= index, "what the first try has left is still there"
        seen.inputs.append(x)
        chosen = (x.sum(-1) > 0).nonzero().flatten()
        return x.index_add(0, chosen, super().forward(x[chosen]))


class SparseWithACache(models.Stack):
    def forward(self, x: Tensor) -> Tensor:
        seen = Seen()
        for index, block in enumerate(self.blocks):
            x = block(x, seen, index)
        return self.head(x)


def test_a_module_that_reads_values_runs_again_with_the_cache_as_it_was() -> None:
    model = made(lambda: SparseWithACache(SparseBlock))
    units = RecordedUnits(model, Arguments.of((X[:2],)), device=X.device, enter_unit=None)
    assert [unit.name for unit in units.units] == [*(f"blocks.{i}" for i in range(4)), "head"]


class AveragesWeights(models.Stack):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.stem.weight.mul_(0.9).add_(self.head.weight, alpha=0.1)
        return super().forward(x)


SET = r"attribute '(number|depth)' of a .* at .*eager_objects.py:\d+, in forward.* into a module of "


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (objects.CountsBetween, SET),  # a stage would read what stood there when the stages were built
        (objects.SetsBetween, SET),
        (models.Carries, "attribute 'before' of the model brings a tensor from one forward to the next"),
        (AveragesWeights, "writes to a parameter or buffer of one of them"),
    ],
)
def test_what_code_between_modules_leaves_for_them_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline(made(make))
