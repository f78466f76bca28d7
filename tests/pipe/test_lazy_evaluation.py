"""In one process the stages are made for evaluation when the first one comes, and `build()` asks for them at once."""

import copy
import re
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.inside import InferredStages
from support.parts import Parts
from support.pipeline import assembled
from support.small import sgd
from torch import Tensor, nn

from stagewright.pipe import VerificationError

X, Y = torch.randn(4, 3), torch.randn(4, 3)


class Model(nn.Module):
    """Blocks, and code between them, which may be other code in evaluation."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.between(self, block(x))
        return x


pipe_of = partial(assembled, mesh={"pipe": 2}, num_microbatches=2, loss_fn=F.mse_loss, verify="first", optimizer=sgd)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Shape inferences of whole models, in order: whether in training."""
    made: list[bool] = []
    walk = InferredStages._walk

    def counted(self: InferredStages, *args: Any) -> Any:
        made.append(self._training)
        return walk(self, *args)

    monkeypatch.setattr(InferredStages, "_walk", counted)
    return made


def test_a_process_that_never_evaluates_records_and_walks_once(walks: list[bool]) -> None:
    pipe = pipe_of(Model())
    pipe.train_step(X, Y)
    pipe.train_step(X, Y)
    assert walks == [True]
    pipe.eval_step(X, Y)
    assert walks[:2] == [True, False]


@pytest.mark.parametrize("evaluated_first", [True, False])
def test_verification_joins_no_outputs(walks: list[bool], evaluated_first: bool) -> None:
    """Which would need a second record, for another size of the batch."""
    pipe = pipe_of(Model())
    if evaluated_first:
        pipe.build(X, Y)
    pipe.verify(X, Y)
    assert walks == [True, False]


@pytest.mark.thorough(but=["code"])
@pytest.mark.parametrize(
    ("between", "told"),
    [
        (lambda model, x: x if model.training or float(x.sum()) > 0 else -x, "evaluation mode"),
        (lambda model, x: x if model.training else x[:, :2], "same reduction dim"),
    ],
    ids=["code", "shape"],
)
def test_a_model_that_cannot_be_evaluated_trains_and_says_so_at_the_first_evaluation(between: Any, told: str) -> None:
    model = Model(between)
    with pytest.raises(ValueError, match=told) as at_once:
        pipe_of(Model(between)).build(X, Y)
    pipe, beside = pipe_of(model), pipe_of(Model())
    losses = [(pipe.train_step(X, Y).loss, beside.train_step(X, Y).loss) for _ in range(3)]
    assert all(mine == other for mine, other in losses)
    weights = [p.detach().clone() for p in model.parameters()]
    for evaluate in (lambda: pipe.eval_step(X, Y), lambda: pipe.predict(X), lambda: pipe.build(X, Y)):
        with pytest.raises(ValueError, match=re.escape(str(at_once.value))):
            evaluate()
    assert all(map(torch.equal, weights, model.parameters()))
    assert model.training
    assert pipe.train_step(X, Y).loss == beside.train_step(X, Y).loss


@pytest.mark.thorough(but=["1f1b"])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_what_the_first_evaluation_returns_is_what_it_would_have_been(schedule: str) -> None:
    results = []
    for is_built in (True, False):
        model = Model(lambda model, x: F.dropout(x.relu() if model.training else x.tanh(), 0.1, model.training))
        pipe = pipe_of(model, schedule=schedule)
        if is_built:
            pipe.build(X, Y)
        losses = [pipe.train_step(X, Y).loss for _ in range(2)]
        found = pipe.eval_step(X[:3], Y[:3])
        more = [pipe.train_step(X, Y).loss for _ in range(2)]
        results.append((losses, found.loss, found.output.tolist(), more, pipe.predict(X).tolist()))
    assert results[0] == results[1]


class Late(Parts, inner=lambda: nn.Linear(3, 3)):
    """Evaluates otherwise in a stage, as where a cut has lost something."""

    def forward(self, x: Tensor) -> Tensor:
        frame: FrameType | None = sys._getframe()
        in_stage = False
        while frame is not None:
            in_stage |= "stagewright stage" in frame.f_code.co_filename
            frame = frame.f_back
        return self.inner(x) + (1.0 if in_stage and not self.training else 0.0)


def test_the_first_evaluation_is_compared_with_the_plain_model() -> None:
    model = Model()
    model.blocks[2] = Late()
    pipe = pipe_of(model)
    pipe.train_step(X, Y)
    for evaluate in (lambda: pipe.eval_step(X[:3], Y[:3]), lambda: pipe.predict(X)):
        with pytest.raises(VerificationError, match="output 0 of an evaluation differs"):
            evaluate()
    pipe = pipe_of(model)
    pipe.build(X, Y)  # evaluates with the first step
    with pytest.raises(VerificationError, match="output 0 of an evaluation differs"):
        pipe.train_step(X, Y)
    unverified = pipe_of(model, verify=False)
    unverified.train_step(X, Y)
    unverified.eval_step(X, Y)


def test_it_is_compared_once() -> None:
    pipe = pipe_of(Model())
    pipe.train_step(X, Y)
    verifier = pipe._building.pipeline.verifier  # type: ignore[union-attr]
    assert verifier.owes_evaluation
    pipe.predict(X)
    assert not verifier.owes_evaluation


class Keeping(nn.Linear):
    """Keeps what it has computed, with its graph, which no copy can be made of."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.training and torch.is_grad_enabled():
            self.kept = out
        return out


def test_a_model_that_cannot_be_copied_since_it_was_trained_is_evaluated_without() -> None:
    model = Model()
    model.blocks[1] = Keeping(3, 3)
    pipe = pipe_of(model)
    pipe.train_step(X, Y)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    found = pipe.eval_step(X, Y).output
    with torch.no_grad():
        assert torch.allclose(found, model.eval()(X))


def test_a_tensor_that_evaluation_alone_uses_has_its_stage_at_once(walks: list[bool]) -> None:
    model = Model(lambda model, x: x)
    model.register_buffer("scale", torch.full((3,), 2.0))
    model.between = lambda model, x: x if model.training else x * model.scale
    pipe_of(model).train_step(X, Y)
    assert walks == [True, False]


def test_an_output_of_small_values_is_compared_by_the_size_of_all_microbatches() -> None:
    """Compared with the size of one microbatch alone, rounding would be a difference."""
    model = Model(lambda model, x: x)
    pipe = pipe_of(model, num_microbatches=4)
    with torch.no_grad():
        model.blocks[3].bias.zero_()
    pipe.verify(torch.cat([X[:3] * 1e3, torch.zeros(1, 3)]), Y)
