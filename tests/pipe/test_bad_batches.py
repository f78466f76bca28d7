"""Batches and losses that cannot be trained on, and the pipe after them: the next good batch trains exactly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.alone import train_alone
from support.failing import Told, Trip, raise_key_error, told
from support.parts import Does, Parts
from support.pool import Pool
from support.small import WIDTH, X, Y, layers, make, sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stagewright.pipe import NonFiniteLossError

BATCHES: dict[str, tuple[tuple[Any, ...], str]] = {
    "nothing": ((), r"no input: expected at least one tensor with the batch in dimension 0, then the target"),
    "no target": ((X,), r"no input: Tensor as the only argument would be the target\. Expected inputs and the target"),
    "a loader": (
        (DataLoader(TensorDataset(X, Y)),),
        r"no input: DataLoader as the only argument would be the target\. Expected .* in loader: train_step\(\*batch\)",
    ),
    "a batch in a list": (([X, Y],), r"no input: list as the only argument would be the target"),
    "two inputs": ((X, X, Y), r"2 inputs and a target for a model that was built for 1: expected 1, then the target"),
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
    "fewer targets": ((X, Y[:6]), r"a target of 6 samples for inputs of 8: expected the same number in dimension 0"),
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


@pytest.mark.thorough(
    but=[
        "nothing-eval_step",
        "a nested input-train_step",
        "a target of numpy's-eval_step",
        "inputs of other sizes-eval_step",
        "another type-eval_step",
    ]
)
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


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "no scalar": (
        lambda output, target: (output - target) ** 2,
        r"loss_fn returned a tensor of shape \(2, 6\): expected a scalar tensor; return loss\.mean\(\), or \(sum, c",
    ),
    "one of torch that is not reduced": (
        nn.MSELoss(reduction="none"),
        r"expected a scalar tensor; .* of torch's losses reduction='mean' or 'sum'",
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


@pytest.mark.thorough(but=["one of torch that is not reduced-full", "three-full", "a word for a count-full"])
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


BAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "float64": ((X.double(), Y), r"stage 0 cannot take .* addmm of torch\.float32 and torch\.float64, which takes one"),
    "ints": ((X.long(), Y), r"stage 0 cannot take .* addmm of torch\.float32 and torch\.int64, which takes one type"),
    "another width": (
        (X[:, :5], Y),
        r"(stage 0 cannot take|inputs that it takes \(given:) \(\(2, 5\) torch\.float32\)",
    ),
    "an input too many": ((X, X, Y), r"stage 0 cannot take .* takes 2 positional|forward\(x.* not take 2"),
    "a target of another width": ((X, Y[:, :5]), r"Using a target size \(torch\.Size\(\[2, 5\]\)\)"),
    "a target that is none": ((X, "words"), r"'str' object has no attribute 'size'"),
    "numbers that are none": ((X / 0.0, Y), r"the loss of step 0, microbatch 0 is nan"),
}


class Gate(Parts, first=lambda: layers(3), last=lambda: layers(3)):
    """Its code is recorded."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.first(x)))


def plain_losses(kind: type[nn.Module] | None) -> list[float]:
    torch.manual_seed(0)
    return train_alone(layers() if kind is None else kind(), [(X, Y)] * 3, sgd).losses


@pytest.mark.thorough(but=["ints-None"])
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, None) for name in BAD), *((name, Gate) for name in ("float64", "another width"))]
)
def test_the_next_good_batch_builds_and_trains(name: str, kind: type[nn.Module] | None) -> None:
    bad, message = BAD[name]
    torch.manual_seed(0)
    pipe = make(model=layers() if kind is None else kind(), example_inputs=None)
    for step in (pipe.train_step, pipe.train_step, pipe.forward_backward):
        with pytest.raises(Exception, match=message):
            step(*bad)
    assert [pipe.train_step(X, Y).loss for _ in range(3)] == pytest.approx(plain_losses(kind), rel=1e-5)


@pytest.mark.parametrize("call", ["predict", "eval_step", "build", "verify"])
def test_whatever_call_comes_first(call: str) -> None:
    torch.manual_seed(0)
    pipe = make(example_inputs=None)
    with pytest.raises(ValueError, match=r"stage 0 cannot take"):
        getattr(pipe, call)(*(X.double(), Y)[: 1 if call == "predict" else 2])
    assert pipe.train_step(X, Y).loss == pytest.approx(plain_losses(None)[0], rel=1e-5)


def test_a_stream_begins_anew() -> None:
    """The batches in an asynchronous pipeline would be lost with a target that does not fit."""
    torch.manual_seed(0)
    pipe = make(schedule="2bw", example_inputs=None)
    with pytest.raises(AttributeError, match=r"'str' object"):
        pipe.train_step(X, "words")
    results = [pipe.train_step(X, Y), *pipe.flush()]
    assert [result.loss for result in results][-1] == pytest.approx(plain_losses(None)[0], rel=1e-5)


NORMED = {
    "layer norm": nn.LayerNorm(WIDTH),
    "batch norm": nn.BatchNorm1d(WIDTH),
    "group norm": nn.GroupNorm(2, WIDTH),
    "bilinear": nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 2, 1), nn.Flatten()),
    "attention": nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0),
}


@pytest.mark.parametrize("first", NORMED.values(), ids=NORMED.keys())
def test_what_real_tensors_refuse_is_refused_before_anything_runs(first: nn.Module) -> None:
    pipe = make(model=nn.Sequential(first, *layers(3)), example_inputs=None)
    with pytest.raises(ValueError, match=r"stage 0 cannot take \(\(2, 6\) torch\.float64\)"):
        pipe.train_step(X.double(), Y)
    pipe.train_step(X, Y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_take_reduced_inputs_beside_float32_weights(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH), Does(Tensor.float), *layers(2))
    expected = model(X.to(dtype))
    torch.testing.assert_close(make(model=model, example_inputs=(X.to(dtype),)).predict(X.to(dtype)), expected)


@pytest.mark.thorough(but=["no_grad-sequential"])
@pytest.mark.parametrize("kind", [None, Gate], ids=["sequential", "recorded"])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_whatever_mode_the_first_call_is_made_in(mode: Any, kind: type[nn.Module] | None) -> None:
    torch.manual_seed(0)
    model = layers() if kind is None else kind()
    pipe = make(model=model, example_inputs=None)
    with mode():
        torch.testing.assert_close(pipe.predict(X), model(X))
        torch.testing.assert_close(pipe.predict(X[:7]), model(X[:7]))  # of another size
        losses = [pipe.train_step(X, Y).loss for _ in range(2)]
    assert [*losses, pipe.train_step(X, Y).loss] == pytest.approx(plain_losses(kind), rel=1e-5)


def refused_at_first(data: int, recorded: bool) -> tuple[list[Told], list[float], bool]:
    """The error of each refused batch; then losses, and whether the groups of processes are those of one pipeline."""
    torch.manual_seed(0)
    rank, replica = dist.get_rank(), dist.get_rank() % data
    model = Gate() if recorded else layers()
    pipe = make(model=model, mesh={"pipe": 2, "data": data}, num_microbatches=2, example_inputs=None)
    wrong = [(X.double(), Y), (X[:, :5], Y), (X, X, Y)]
    wrong += [(X[:, :5], Y) if rank == 0 else (X, Y), (X[:, :5], Y) if rank == 2 * data - 1 else (X, Y)]
    found = [told(lambda bad=bad: pipe.train_step(*bad)) for bad in wrong]
    mine = slice(0, 8) if data == 1 else [slice(0, 6), slice(6, 8)][replica]  # other sizes, from the first batch on
    losses = [pipe.train_step(X[mine], Y[mine]).loss for _ in range(3)]
    pipe.close()
    return found, losses, pipe.num_steps == 3


@pytest.mark.thorough(but=["1-True"])
@pytest.mark.parametrize(("data", "recorded"), [(1, True), (2, False)])
def test_over_processes_the_run_goes_on(gloo: Pool, data: int, recorded: bool) -> None:
    results = gloo.run(refused_at_first, ranks=2 * data, args=(data, recorded))
    for found, losses, is_right in results:
        assert losses == pytest.approx(plain_losses(Gate if recorded else None), rel=1e-5)
        assert is_right
        assert [one.kind for one in found] == ["ValueError"] * len(found)
        assert all("failed on" in one.text for one in found[:2] + found[3:])
        assert "stage 0 cannot take ((4, 6) torch.float64): RuntimeError: addmm of" in found[0].text
        assert "((4, 5) torch.float32)" in found[1].text
    assert len({tuple(one.text for one in found) for found, _, _ in results}) == 1
