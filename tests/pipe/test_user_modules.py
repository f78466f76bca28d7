"""Forwards of people's modules, in a chain's stages or run by their own code: equal to plain PyTorch."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import eager_models as models
from support import eager_objects as objects
from support.alone import near, train_alone
from support.inside import Arguments, RecordedUnits
from support.parts import GIVEN, Parts
from support.pipeline import assembled
from support.plain import MICROBATCHES, STEPS, WIDTH, agree, batch, between_layers, linear, piped
from support.small import make
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stagewright.pipe import PipelineModule


class Calls(Parts, linear=linear, function=GIVEN):
    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def checkpointed(module: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda h: torch.tanh(module.linear(h)).sin(), x, use_reentrant=True)


def cast(module: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = nn.functional.linear(x.float(), module.linear.weight.float())
    assert h.dtype == torch.bfloat16
    return x + h.double()


def grouped(module: Any, x: Tensor) -> Tensor:
    """As experts of transformers multiply: torch's fake tensors (2.13) refuse all but bfloat16."""
    weight, rows = (nn.functional.pad(each.float(), (0, 2)) for each in (module.linear.weight, x))  # to 16 bytes
    weight = nn.functional.pad(weight, (0, 0, 0, 2))
    ends = torch.tensor([1, len(x)], dtype=torch.int32)
    h = nn.functional.grouped_mm(rows, torch.stack([weight, 2 * weight]).transpose(1, 2), offs=ends)
    return x + (h * h).double()[:, :WIDTH]


class Ema(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.history = linear(), 0, []
        self.register_buffer("ema", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("last", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.ema = 0.9 * self.ema + 0.1 * h.detach().mean(0)
        self.scale = self.scale * 0.99
        self.calls += 1
        self.history.append(len(x))
        self.last = h.detach()
        return (h - self.ema) * self.scale


MODULES: dict[str, Callable[[], nn.Module]] = {
    "reentrant checkpoint": lambda: Calls(checkpointed),
    "autocast": lambda: Calls(cast),
    "grouped products": lambda: Calls(grouped),
    "buffers": Ema,
}
CUTS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "recompute": {"recompute": "full"},
    "interleaved": {"schedule": "interleaved", "num_chunks": 2, "cut": ["1", "2", "3"]},
}


@pytest.mark.thorough(but=["grouped products-1f1b", "buffers-1f1b"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # so it is, in a first run of two
@pytest.mark.parametrize("options", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("middle", MODULES.values(), ids=MODULES)
def test_modules_do_what_they_do_in_one_process(middle: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    agree(between_layers(middle), **options)
    if middle is Ema:
        return
    # Alone on a stage: its input is a leaf there, and on the first stage it wants no gradient.
    agree(lambda: nn.Sequential(linear(), nn.Tanh(), middle(), linear()), **options)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_a_reentrant_checkpoint_at_the_front_gives_no_gradients_in_either() -> None:
    """Plain PyTorch's own behaviour, with its warning."""
    one, other = agree(lambda: nn.Sequential(Calls(checkpointed), linear(), nn.Tanh(), linear()))
    assert one[0].linear.weight.grad is None
    assert other[0].linear.weight.grad is None


@pytest.mark.parametrize(("options", "runs"), [({}, 1), ({"recompute": "full"}, 2)])
def test_state_in_python_counts_each_run_of_a_microbatch_once(options: dict[str, Any], runs: int) -> None:
    """As torch.utils.checkpoint does, recomputation runs a forward twice; the shapes of the build count for nothing."""
    model, _ = piped(between_layers(Ema), **options)
    ema = model[1][0]
    assert ema.calls == STEPS * MICROBATCHES * runs
    assert ema.history == [2] * ema.calls
    assert ema.last.shape == (2, WIDTH)
    assert type(ema.last) is Tensor


def test_a_buffer_of_the_state_that_a_forward_brings_is_refused_by_name() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", None)

        def forward(self, x: Tensor) -> Tensor:
            self.last = x.detach()
            return x

    pipe = PipelineModule(
        nn.Sequential(linear(), Late(), linear()).double(),
        mesh={"pipe": 2},
        num_microbatches=2,
        loss_fn=nn.functional.mse_loss,
        example_inputs=batch(0)[:1],
    )
    pipe.state_dict()
    pipe.forward_backward(*batch(0))
    with pytest.raises(ValueError, match=r"'1.last' is in the model's state and was not when the stages were built"):
        pipe.state_dict()


class Listed(Parts, blocks=lambda: nn.ModuleList(linear() for _ in range(3))):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_module_deleted_or_replaced_between_steps_is_refused_by_what_reads_the_state(
    schedule: str, tmp_path: Path
) -> None:
    """`save` wrote a checkpoint without it, and under 2BW `load_state_dict` ended in a KeyError; of one that took its
    place, `save` wrote weights that no stage had trained."""
    model, (x, y) = Listed().double(), batch(0)
    pipe = make(model=model, schedule=schedule, example_inputs=(x,))
    pipe.train_step(x, y)
    pipe.flush()
    state = pipe.full_state_dict()
    pipe.save(tmp_path / "run")
    last = model.blocks[2]
    calls: list[Callable[[], Any]] = [
        pipe.state_dict,
        pipe.full_state_dict,
        lambda: pipe.load_state_dict(state),
        lambda: pipe.save(tmp_path / "run"),
        lambda: pipe.load(tmp_path / "run"),
    ]
    for change in (lambda: model.blocks.pop(2), lambda: model.blocks.append(linear())):
        change()
        for call in calls:
            with pytest.raises(ValueError, match=r"'blocks\.2' is another object than when the stages were built: exp"):
                call()
    model.blocks[2] = last
    for call in calls:  # and all goes on as before
        call()
    pipe.train_step(x, y)


class Sparse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).to_sparse()


def test_a_sparse_tensor_within_a_stage_is_none_of_its_business_and_cannot_travel() -> None:
    within = between_layers(Sparse, lambda: Calls(lambda m, x: m.linear(x.to_dense())))
    agree(within)
    with pytest.raises(ValueError, match=r"Sparse returns a sparse tensor .* at the end of a stage: expected"):
        piped(lambda: nn.Sequential(linear(), Sparse(), Calls(lambda m, x: m.linear(x.to_dense()))))


class Returns(Parts, layers=lambda: nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), tell=GIVEN):
    """Returns something else than what it computes; in a list, so that its code is recorded."""

    def forward(self, x: Tensor) -> object:
        for layer in self.layers:
            x = layer(x)
        return self.tell(x)


def test_an_output_may_be_a_constant_and_not_an_object() -> None:
    def predicted(model: nn.Module) -> object:
        return PipelineModule(model, mesh={"pipe": 2}, num_microbatches=2).predict(torch.ones(4, 4))

    assert predicted(Returns(lambda x: "done")) == "done"
    assert predicted(Returns(lambda x: None)) is None
    distribution = Returns(lambda x: torch.distributions.Normal(x, 1.0))
    with pytest.raises(ValueError, match="the model returns a Normal, which no message carries"):
        predicted(distribution)


X, Y = batch(0, models.WIDTH)
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
    "objects in a cache": objects.WithNestedObjects,
    "counts in an object": objects.CountsInAnObject,
    "makes a tensor once": models.MakesOnce,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"{name} in units": (lambda block=block: models.Stack(block)) for name, block in IN_UNITS.items()},
    **{f"{name} between units": make for name, make in BETWEEN.items()},
}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make().double()


OPTIONS: dict[str, Any] = {"num_microbatches": 4, "mesh": {"pipe": 2}, "loss_fn": F.mse_loss, "example_inputs": (X,)}
pipeline = partial(assembled, optimizer=sgd, **OPTIONS)


def equal(model: nn.Module, twin: nn.Module) -> None:
    for tensors in (nn.Module.parameters, nn.Module.buffers):
        near([*tensors(model)], [*tensors(twin)])  # type: ignore[operator]
    for (name, mine), other in zip(model.named_modules(), twin.modules(), strict=True):
        plain = {key: value for key, value in vars(mine).items() if isinstance(value, int | float | str | list)}
        assert plain == {key: vars(other)[key] for key in plain}, name


@pytest.mark.thorough(
    but=[
        "reentrant checkpoint between units",
        "hooks between units",
        "autocast between units",
        "objects in a cache between units",
        "counts in an object between units",
    ]
)
@pytest.mark.filterwarnings("ignore:.*changes attribute 'last' of the model.* once, while the model is recorded")
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


class Headless(models.Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) if self.training else x


def test_an_evaluation_may_run_fewer_modules() -> None:
    model = made(Headless)
    pipe = pipeline(model)
    pipe.train_step(X, Y)
    with torch.no_grad():
        expected = torch.cat([model.eval()(x) for x in X.split(2)])
    near(pipe.predict(X), expected)
