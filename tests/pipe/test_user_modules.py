"""Forwards of people's modules in a chain's stages: equal to plain PyTorch, state in Python included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parts import GIVEN, Parts
from support.plain import MICROBATCHES, STEPS, WIDTH, agree, batch, between_layers, linear, piped
from support.small import make
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stagewright.pipe import PipelineModule


class Calls(Parts, linear=linear, function=GIVEN):
    """A module from a function of its linear layer and its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def checkpointed(module: Any, x: Tensor) -> Tensor:
    value: Tensor = checkpoint(lambda h: torch.tanh(module.linear(h)).sin(), x, use_reentrant=True)
    return value


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
    """Buffers that are assigned anew; counts its forwards."""

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


@pytest.mark.thorough(but=["buffers-recompute", "grouped products-1f1b"])
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


@pytest.mark.thorough(but=["1f1b"])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_verify_leaves_no_trace_in_python(schedule: str) -> None:
    calls: list[int] = []

    def make() -> nn.Sequential:
        model = between_layers(Ema)()
        model[2].register_forward_hook(lambda *_: calls.append(1))
        return model

    model, _ = piped(make, verify=True, schedule=schedule)
    assert model[1][0].calls == len(calls) == STEPS * MICROBATCHES


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


# --- sparse ---


class Sparse(nn.Module):
    """Returns a sparse tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).to_sparse()


def test_a_sparse_tensor_within_a_stage_is_none_of_its_business_and_cannot_travel() -> None:
    within = between_layers(Sparse, lambda: Calls(lambda m, x: m.linear(x.to_dense())))
    agree(within)
    with pytest.raises(ValueError, match=r"Sparse returns a sparse tensor .* at the end of a stage: expected"):
        piped(lambda: nn.Sequential(linear(), Sparse(), Calls(lambda m, x: m.linear(x.to_dense()))))


# --- outputs without a tensor ---


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
