"""A first batch that is refused leaves nothing behind: the next good one builds the stages, and trains exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.failing import Told, told
from support.parts import Parts
from support.pool import Pool
from support.small import WIDTH, X, Y, layers, make, sgd
from torch import Tensor, nn

BAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "float64": ((X.double(), Y), r"stage 0 cannot take .* addmm of torch\.float32 and torch\.float64, which takes one"),
    "integers": (
        (X.long(), Y),
        r"stage 0 cannot take .* addmm of torch\.float32 and torch\.int64, which takes one type",
    ),
    "half": ((X.half(), Y), r"stage 0 cannot take .* addmm of torch\.float32 and torch\.float16, which takes one type"),
    "another width": (
        (X[:, :5], Y),
        r"(stage 0 cannot take|inputs that it takes \(given:) \(\(2, 5\) torch\.float32\)",
    ),
    "an input too many": ((X, X, Y), r"stage 0 cannot take .* takes 2 positional|forward\(x.* not take 2"),
    "few samples": ((X[:3], Y[:3]), r"a batch of 3 samples for 4 microbatches"),
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
    model = layers() if kind is None else kind()
    optimizer, losses = sgd(list(model.parameters())), []
    for _ in range(3):
        loss = F.mse_loss(model(X), Y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.thorough(but=["integers-None"])
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


@pytest.mark.thorough(but=["layer norm"])
@pytest.mark.parametrize("first", NORMED.values(), ids=NORMED.keys())
def test_what_real_tensors_refuse_is_refused_before_anything_runs(first: nn.Module) -> None:
    pipe = make(model=nn.Sequential(first, *layers(3)), example_inputs=None)
    with pytest.raises(ValueError, match=r"stage 0 cannot take \(\(2, 6\) torch\.float64\)"):
        pipe.train_step(X.double(), Y)
    pipe.train_step(X, Y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_take_reduced_inputs_beside_float32_weights(dtype: torch.dtype) -> None:
    class Widened(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float()

    model = nn.Sequential(nn.LayerNorm(WIDTH), Widened(), *layers(2))
    expected = model(X.to(dtype))
    torch.testing.assert_close(make(model=model, example_inputs=(X.to(dtype),)).predict(X.to(dtype)), expected)


@pytest.mark.thorough(but=["inference_mode-sequential"])
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


# --- over processes ---


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


@pytest.mark.thorough
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
