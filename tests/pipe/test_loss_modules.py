"""A loss with parameters and buffers of its own: they are the last stage's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import near, train_alone, train_piped
from support.parts import GIVEN, Parts
from support.plain import linear
from support.pool import Pool
from support.small import WIDTH, X, Y, layers, make, sgd, stream
from torch import Tensor, nn

from stagewright.comm import PipelineError
from stagewright.pipe import PipelineModule


class Scaled(Parts, scale=lambda: nn.Parameter(torch.full((WIDTH,), 0.7)), seen=lambda: torch.zeros(())):
    """Learns a scale, and counts what it sees."""

    def forward(self, output: Tensor) -> Tensor:
        if self.training:
            self.seen += len(output)
        return output * self.scale


class ScaledLoss(Scaled):
    """The same in front of a loss."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.mse_loss(super().forward(output), target)


class Net(Parts, one=linear, two=linear):
    """No chain: traced."""

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu()) + x


def pair(options: dict[str, Any]) -> tuple[PipelineModule, PipelineModule]:
    """The scale in the loss, and the same scale in front of the loss."""
    torch.manual_seed(0)
    one = layers()
    other = nn.Sequential(*copy.deepcopy(one), Scaled())
    settings = options if options.get("mesh") == {"pipe": 1} else options | {"cut": ["3"]}
    return make(model=one, loss_fn=ScaledLoss(), **settings), make(model=other, loss_fn=F.mse_loss, **settings)


OPTIONS: dict[str, dict[str, Any]] = {
    "1f1b": {"max_grad_norm": 0.05},
    "2bw": {"schedule": "2bw", "max_grad_norm": 0.05},
    "pipedream": {"schedule": "pipedream"},
    "recompute": {"recompute": "full"},
    "2bw, recompute": {"schedule": "2bw", "recompute": "full"},
    "one rank": {"mesh": {"pipe": 1}},
    "replicas": {"mesh": {"pipe": 2, "data": 2}},
}


@pytest.mark.thorough(but=["one rank"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_loss_learns_as_a_layer_in_front_of_it_would(options: dict[str, Any]) -> None:
    one, other = pair(options)
    for _ in range(4):
        one.train_step(X, Y)
        other.train_step(X, Y)
    one.eval_step(X, Y)
    found, expected = one.full_state_dict(), other.full_state_dict()
    assert not torch.equal(found["loss_fn.scale"], torch.full((WIDTH,), 0.7))
    near({name.replace("loss_fn", "6"): value for name, value in found.items()}, expected, atol=0.0)


def test_the_loss_of_a_traced_model_and_of_given_stages() -> None:
    for options in ({"model": Net()}, {"stages": [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]}):
        loss = ScaledLoss()
        pipe = make(loss_fn=loss, **options)
        pipe.train_step(X, Y)
        assert not torch.equal(loss.scale, torch.full((WIDTH,), 0.7))
        assert {name for name, _ in pipe.named_parameters()} >= {"loss_fn.scale"}
        assert float(pipe.state_dict()["loss_fn.seen"]) == len(X)


def test_a_loss_stands_in_checkpoints_and_state_dicts(tmp_path: Path) -> None:
    one = make(loss_fn=ScaledLoss(), optimizer=torch.optim.AdamW)
    one.train_step(X, Y)
    one.save(tmp_path)
    again = make(loss_fn=ScaledLoss(), optimizer=torch.optim.AdamW, mesh={"pipe": 3})
    again.load(tmp_path)
    third = make(loss_fn=ScaledLoss())
    third.load_state_dict(one.full_state_dict())
    assert torch.equal(third.full_state_dict()["loss_fn.scale"], one.full_state_dict()["loss_fn.scale"])
    for pipe in (one, again):
        pipe.train_step(X, Y)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"missing \['loss_fn.scale', 'loss_fn.seen'\]"):
        third.load_state_dict({k: v for k, v in one.full_state_dict().items() if not k.startswith("loss_fn")})


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_verify_runs_a_loss_of_its_own(schedule: str) -> None:
    loss = ScaledLoss()
    pipe = make(schedule=schedule, loss_fn=loss)
    found = pipe.verify(X, Y)
    assert found.num_gradients == 13
    assert loss.scale.grad is None
    assert float(loss.seen) == 0


def test_a_loss_that_the_model_has_keeps_its_name() -> None:
    model = Net()
    model.loss_fn = ScaledLoss()
    pipe = make(model=model, loss_fn=model.loss_fn)
    pipe.train_step(X, Y)
    assert pipe.full_state_dict().keys() == model.state_dict().keys()
    assert not torch.equal(model.loss_fn.scale, torch.full((WIDTH,), 0.7))
    with pytest.raises(ValueError, match=r"the model has 'loss_fn.scale', .* or loss_fn=model.loss_fn"):
        make(model=model, loss_fn=ScaledLoss())


@pytest.mark.parametrize("begin", [make, stream])
def test_a_parameter_that_no_optimizer_holds_is_refused(begin: Any) -> None:
    loss = ScaledLoss()
    pipe = begin(loss_fn=lambda output, target: 2 * loss(output, target))
    message = r"loss_fn computes with a tensor of shape \(6,\) .*module that owns it as loss"
    with pytest.raises(ValueError, match=message):
        pipe.train_step(X, Y)
    loss.requires_grad_(False)
    begin(loss_fn=lambda output, target: 2 * loss(output, target)).train_step(X, Y)


@pytest.mark.parametrize("make_model", [layers, Net])
def test_other_stages_parameters_in_a_stream_are_refused(make_model: Any) -> None:
    model = make_model()
    squares = lambda output, _: sum((p.square().sum() for p in model.parameters()), output.mean())  # noqa: E731
    pipe = stream(model=model, loss_fn=squares)
    with pytest.raises(ValueError, match="asynchronous schedule: any but the last stage's own"):
        pipe.train_step(X, Y)


def test_a_parameter_of_the_users_own_optimizer_is_not_refused() -> None:
    scale = nn.Parameter(torch.ones(()))
    scaled = lambda output, target: scale * F.mse_loss(output, target)  # noqa: E731
    make(loss_fn=scaled, optimizer=None).forward_backward(X, Y)
    assert scale.grad is not None
    make(loss_fn=scaled, optimizer=lambda parameters: sgd([*parameters, scale])).train_step(X, Y)


class WithWeights(Parts, held=GIVEN):
    """A loss that reads weights of the first stage."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + sum(p.square().mean() for p in self.held.parameters())


def train_with_weights() -> tuple[list[float | None], list[float]]:
    """Losses beside those of one process; a function that reads the weights is refused where they are elsewhere."""
    torch.manual_seed(0)
    twin = layers()
    model = copy.deepcopy(twin)
    function = WithWeights(model[0]).forward
    message = r"requires a gradient, and that no optimizer|as a child of the loss module"
    with pytest.raises((ValueError, PipelineError), match=message):
        make(model=model, optimizer=sgd, loss_fn=function).train_step(X, Y)
    model = copy.deepcopy(twin)
    found = train_piped(make(model=model, optimizer=sgd, loss_fn=WithWeights(model[0])), [(X, Y)] * 2)
    return found.losses, train_alone(twin, [(X, Y)] * 2, sgd, loss_fn=WithWeights(twin[0])).losses


@pytest.mark.thorough
def test_a_loss_that_reads_weights_of_another_stage_has_their_module(gloo: Pool) -> None:
    for losses, expected in gloo.run(train_with_weights, ranks=2):
        assert losses == pytest.approx(expected, rel=1e-6)
