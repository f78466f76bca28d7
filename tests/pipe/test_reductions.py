"""Losses that add up over samples, and outputs and losses of a whole batch that microbatches make."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.small import WIDTH, X, Y, layers, make
from torch import Tensor, nn

from stagewright.schedules import build

X64, Y64 = X.double(), Y.double()
RATE = 1e-3


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def trained(loss_fn: Any, options: dict[str, Any]) -> tuple[float | None, float | None, dict[str, Tensor]]:
    torch.manual_seed(0)
    pipe = make(model=layers().double(), loss_fn=loss_fn, example_inputs=None, optimizer=sgd, **options)
    evaluated = pipe.eval_step(X64[:3], Y64[:3]).loss  # of fewer microbatches
    result = [pipe.train_step(X64, Y64), *pipe.flush()][-1]
    return result.loss, evaluated, pipe.full_state_dict()


def assert_sums(found: tuple[float | None, float | None, dict[str, Tensor]]) -> None:
    torch.manual_seed(0)
    model = layers().double()
    few = F.mse_loss(model(X64[:3]), Y64[:3], reduction="sum")
    loss = F.mse_loss(model(X64), Y64, reduction="sum")
    loss.backward()
    sgd(list(model.parameters())).step()
    assert found[:2] == pytest.approx((loss.item(), few.item()), rel=1e-13)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[2][name], value, rtol=1e-12, atol=1e-14)


ONE_UPDATE = build("pipedream", num_ranks=2, num_microbatches=4, update_every=4)
CASES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b-uneven": {"num_microbatches": 3},
    "interleaved": {"schedule": "interleaved"},
    "zb-h1": {"schedule": "zb-h1"},
    "2bw": {"schedule": "2bw", "max_grad_norm": 1e9},
    "pipedream": {"schedule": ONE_UPDATE, "num_microbatches": None, "mesh": None},
    "replicas": {"mesh": {"pipe": 2, "data": 2}},
    "verified": {"verify": True, "recompute": "full"},
}


@pytest.mark.thorough(but=["zb-h1", "replicas"])
@pytest.mark.parametrize("case", CASES)
def test_a_loss_of_sums_is_the_sum_over_the_batch(case: str) -> None:
    assert_sums(trained(nn.MSELoss(reduction="sum"), CASES[case]))


def test_a_partial_with_sums() -> None:
    assert_sums(trained(partial(partial(F.mse_loss, reduction="mean"), reduction="sum"), {}))
    found = trained(partial(nn.MSELoss(reduction="sum")), {})
    assert_sums(found)


def test_none_is_named() -> None:
    with pytest.raises(ValueError, match=r"expected a scalar tensor; .* of torch's losses reduction='mean' or 'sum'"):
        make(loss_fn=nn.MSELoss(reduction="none")).train_step(X, Y)


class Similar(nn.Module):
    """Similarities of all samples, and the loss of a model that returns its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(4))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        found = {"hidden": h, "similar": h @ x.T}
        if labels is not None:
            found["loss"] = F.cross_entropy(h, labels)
        return found


LABELS = torch.tensor([0, 1, -100, -100, 2, -100, 3, 4])


@pytest.mark.filterwarnings("ignore:output 1 of the model has the batch")
def test_the_loss_of_a_prediction_is_that_of_an_evaluation() -> None:
    pipe = make(model=Similar(), loss_fn="model", loss_weight="labels", example_inputs=None)
    pipe.train_step(X64, labels=LABELS)
    expected = pipe.eval_step(X64, labels=LABELS)
    found = pipe.predict(X64, labels=LABELS)
    assert isinstance(found, dict)
    assert found["loss"].dim() == 0
    assert float(found["loss"]) == pytest.approx(expected.loss, rel=1e-14)
    assert float(found["loss"]) == pytest.approx(float(F.cross_entropy(found["hidden"], LABELS)), rel=1e-13)
    assert "loss" not in pipe.predict(X64)  # type: ignore[operator]


def test_an_output_with_the_batch_on_two_axes_is_told_once() -> None:
    pipe = make(model=Similar(), loss_fn=lambda output, y: F.mse_loss(output["hidden"], y), example_inputs=None)
    with pytest.warns(UserWarning, match="output 1 of the model has the batch on two axes, .* of 2 alone"):
        pipe.train_step(X64, Y64)
    pipe.train_step(X64, Y64)
    with pytest.warns(UserWarning, match="it comes as the list of their blocks. Expected num_microbatches=1"):
        found = pipe.predict(X64)
    assert [each.shape for each in found["similar"]] == [(2, 2)] * 4  # type: ignore[index]
    pipe.predict(X64)
    whole = make(model=Similar(), loss_fn=None, example_inputs=None, num_microbatches=1, optimizer=None)
    assert whole.predict(X64)["similar"].shape == (8, 8)  # type: ignore[index]
