"""Batches and losses that cannot be trained on, all ranks in one process, and the pipe after an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.failing import Trip, raise_key_error
from support.small import X, Y, layers, make
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stagewright.pipe import NonFiniteLossError

# --- batches ---

BATCHES: dict[str, tuple[tuple[Any, ...], str]] = {
    "nothing": ((), r"no input: expected at least one tensor with the batch in dimension 0, then the target"),
    "no target": ((X,), r"no input: Tensor as the only argument would be the target\. Expected inputs and the target"),
    "a loader": (
        (DataLoader(TensorDataset(X, Y)),),
        r"no input: DataLoader as the only argument would be the target\. Expected .* in loader: train_step\(\*batch\)",
    ),
    "a batch in a list": (([X, Y],), r"no input: list as the only argument would be the target"),
    "an input too many": (
        (X, X, Y),
        r"2 inputs and a target for a model that was built for 1: expected 1, then the target",
    ),
    "a sparse input": ((X.to_sparse(), Y), r"input 0 is a sparse tensor: expected a dense one, which can be cut"),
    "a nested input": (
        (torch.nested.as_nested_tensor([X, X], layout=torch.jagged), Y),
        r"input 0 is a nested tensor: expected a dense one",
    ),
    "a target of numpy's": (
        (X, Y.numpy()),
        r"a numpy array of shape \(8, 6\) in the target, of which only tensors are cut .*: expected torch\.from_numpy",
    ),
    "fewer samples than microbatches": (
        (X[:3], Y[:3]),
        r"a batch of 3 samples for 4 microbatches: expected at least one sample each; give larger .* or num_m.*=3",
    ),
    "inputs of other sizes": ((X, X[:4], Y), r"inputs have batch sizes \[8, 4\]: expected the same number of samples"),
    "target of another size": (
        (X, Y[:6]),
        r"a target of 6 samples for inputs of 8: expected the same number in dimension 0",
    ),
    "a list": (([1.0, 2.0], Y), r"input 0 is list: expected a tensor"),
    "a scalar": ((torch.tensor(1.0), Y), r"input 0 is a tensor without dimensions: expected a tensor with the batch"),
    "another type": (
        (X.double(), Y),
        r"input 0 is torch\.float64 and the stages were built for torch\.float32: type x\.to\(torch\.float32\)",
    ),
    "another width": (
        (torch.zeros(8, 7), Y),
        r"stage 0 cannot take \(\(2, 7\) torch\.float32\): .*\. Expected inputs like those that the model was built",
    ),
}


@pytest.mark.parametrize("step", ["train_step", "forward_backward", "eval_step"])
@pytest.mark.parametrize(("batch", "message"), BATCHES.values(), ids=BATCHES.keys())
def test_batches(step: str, batch: tuple[Any, ...], message: str) -> None:
    pipe = make()
    if step == "eval_step" and message.startswith("a batch of 3"):
        pipe.eval_step(*batch)  # makes fewer microbatches, see test_border
        return
    with pytest.raises(ValueError, match=message):
        getattr(pipe, step)(*batch)
    assert pipe.train_step(X, Y).loss_step == 0  # as if nothing had been


def test_inputs_made_in_inference_mode_are_trained_on() -> None:
    with torch.inference_mode():
        x, y = X.clone(), Y.clone()
    torch.manual_seed(0)
    expected = make().train_step(X, Y).loss
    torch.manual_seed(0)
    assert make().train_step(x, y).loss == expected


def test_training_needs_a_loss_and_an_optimizer() -> None:
    with pytest.raises(ValueError, match=r"train_step needs an optimizer: expected PipelineModule\(.*optimizer=lambda"):
        make(optimizer=None).train_step(X, Y)
    with pytest.raises(ValueError, match=r"training needs a loss: expected PipelineModule\(.*loss_fn=lambda"):
        make(loss_fn=None).train_step(X, Y)
    pipe = make()
    with pytest.raises(ValueError, match=r"max_norm=0: expected a number above 0"):
        pipe.clip_grad_norm_(0)
    with pytest.raises(ValueError, match=r"nothing was measured yet: expected at least one train_step"):
        pipe.measured_costs()


# --- losses ---

LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "no scalar": (
        lambda output, target: (output - target) ** 2,
        r"loss_fn returned a tensor of shape \(2, 6\): expected a scalar tensor; return loss\.mean\(\), or \(sum, c",
    ),
    "nothing": (lambda output, target: None, r"loss_fn returned NoneType: expected a scalar tensor"),
    "a float": (lambda output, target: 1.0, r"loss_fn returned float: expected a scalar tensor"),
    "three": (lambda output, target: (output.sum(), 1, 2), r"loss_fn returned 3 values: expected .*\(sum, count\)"),
    "detached": (
        lambda output, target: F.mse_loss(output.detach(), target),
        r"loss_fn returned a loss that does not depend on the model's output: expected .* without detach\(\)",
    ),
    "a word for a count": (lambda output, target: (output.sum(), "all"), r"returned the count str: expected a number"),
    "counts": (lambda output, target: (output.sum(), torch.ones(2)), r"returned the count a tensor of shape \(2,\)"),
    "no samples": (
        lambda output, target: (output.sum(), 0),
        r"loss_fn's counts of step 0 add up to 0\.0: expected something to average over",
    ),
    "a count of nan": (lambda output, target: (output.sum(), float("nan")), r"counts of step 0 add up to nan"),
}


@pytest.mark.thorough(but=["nothing-none", "three-full", "a word for a count-full"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("loss_fn", "message"), LOSSES.values(), ids=LOSSES.keys())
def test_losses(loss_fn: Callable[[Tensor, Tensor], Any], message: str, recompute: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(loss_fn=loss_fn, recompute=recompute).train_step(X, Y)


def test_a_count_now_and_then() -> None:
    calls: list[int] = []

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        calls.append(0)
        return (output.sum(), 4) if len(calls) == 3 else output.mean()

    message = r"a count for some microbatches of step 0, and none for microbatch 0: expected .* always"
    with pytest.raises(ValueError, match=message):
        make(loss_fn=loss_fn).train_step(X, Y)


def test_a_loss_that_is_not_finite_names_step_and_microbatch_and_leaves_all_as_it_was() -> None:
    model = layers()
    pipe = make(model=model, max_grad_norm=1.0)
    pipe.train_step(X, Y)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    bad = X.clone()
    bad[5] = float("inf")  # the third microbatch of two
    message = (
        r"the loss of step 1, microbatch 2 is (nan|inf): no update was made\. Expected a finite number; .*max_grad_norm"
    )
    for call in (pipe.train_step, pipe.forward_backward, pipe.eval_step):
        with pytest.raises(NonFiniteLossError, match=message):
            call(bad, Y)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert pipe.train_step(X, Y).loss_step == 1


def test_gradients_of_earlier_calls_survive_a_failure() -> None:
    model = layers()
    pipe = make(model=model, optimizer=None)
    pipe.forward_backward(X, Y)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(NonFiniteLossError):
        pipe.forward_backward(X * float("nan"), Y)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


# --- after an error of the user's own ---


def test_an_exception_in_a_stage_comes_through_and_the_pipe_goes_on() -> None:
    torch.manual_seed(0)
    model = layers()
    pipe = make(model=nn.Sequential(*model, nn.Dropout(0.5), Trip(raise_key_error)), loss_fn=F.mse_loss, optimizer=None)
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="the user's own trouble"):
        pipe.forward_backward(X, Y)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert pipe.forward_backward(X, Y).loss_step == 0
    pipe.close()
