"""Linear layers for models to wire, and the comparison of a model that is cut with itself on one process."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stagewright.pipe import PipelineModule
from support.alone import same_gradients
from support.parts import Parts

WIDTH = 8
X = torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Layers(Parts, a=linear, b=linear, c=linear, d=linear):
    """Linear layers a, b, c, d for the models here to wire."""


def output_of(value: Any) -> Tensor:
    """The one tensor of a model's output that the loss compares with the target."""
    if isinstance(value, dict):
        return value["y"] + value["aux"][0].mean() + value["early"][0]
    return value[0] if isinstance(value, tuple) else value


def loss_of(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output_of(output), target)


def agree_with_one_process(
    make: Callable[[], nn.Module],
    *,
    ranks: int = 2,
    cut: Sequence[str] | None = None,
    recompute: str = "none",
    inputs: tuple[Tensor, ...] = (X,),
) -> PipelineModule:
    """Loss, gradients, buffers and evaluation of a model on `ranks` stages are those of its twin on one process."""
    torch.manual_seed(3)
    model = make().double()
    torch.manual_seed(3)
    twin = make().double()
    total = 0.0
    for k in range(4):
        loss = loss_of(twin(*(x.tensor_split(4)[k].clone() for x in inputs)), Y.tensor_split(4)[k]) / 4
        loss.backward()
        total += loss.item()
    given = tuple(x.clone() for x in inputs)
    options: dict[str, Any] = {"num_microbatches": 4, "mesh": {"pipe": ranks}, "cut": cut, "recompute": recompute}
    pipe = PipelineModule(model, loss_fn=loss_of, example_inputs=given, **options)
    assert pipe.forward_backward(*given, Y).loss == pytest.approx(total, abs=1e-12)
    same_gradients(model, twin)
    for (name, buffer), other in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        assert torch.equal(buffer, other[1]), name
    _same_outputs(pipe.eval_step(*given, Y).output, twin.eval()(*(x.clone() for x in inputs)))
    assert all(torch.equal(mine, x) for mine, x in zip(given, inputs, strict=True)), "the user's batch was changed"
    pipe.close()
    return pipe


def _same_outputs(found: Any, expected: Any) -> None:
    leaves, form = pytree.tree_flatten(found)
    wanted, wanted_form = pytree.tree_flatten(expected)
    assert form == wanted_form
    for one, other in zip(leaves, wanted, strict=True):
        if isinstance(other, Tensor) and other.dim():
            assert torch.allclose(one, other, rtol=0, atol=1e-12)
        elif not isinstance(other, Tensor):
            assert one == other


class Counting(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        if self.training:
            self.calls += 1
        return self.d(self.c(h))
