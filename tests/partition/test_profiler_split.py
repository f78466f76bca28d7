"""The backward in two halves: I touches no parameter, and both together are the whole backward, to the last bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagewright.experiments.training.gpt import Block, GPTConfig
from stagewright.partition.graph.split_backward import SplitBackward


class Branches(nn.Module):
    """Parameters alone on a branch, a parameter used twice, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(3, 4))
        self.twice = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(F.gelu(self.twice(x + self.places.exp()[:2])))


class Apart(nn.Module):
    """Two outputs, of which one has nothing to do with the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.weight, self.weight.square()


MODELS = [
    (lambda: nn.Linear(4, 4), (2, 4)),
    (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2, bias=False)), (2, 4)),
    (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.Conv1d(4, 2, 1)), (2, 4, 8)),
    (lambda: Block(GPTConfig(width=8, heads=2, length=4)), (2, 4, 8)),
    (Branches, (2, 4)),
    (Apart, (4,)),
]


@pytest.mark.parametrize(("make", "shape"), MODELS)
def test_both_halves_are_the_whole(make: type[nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = make().double()
    parameters = list(model.parameters())
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def outputs() -> tuple[list[Tensor], list[Tensor]]:
        for tensor in (x, *parameters):
            tensor.grad = None
        value = model(x)
        flat = list(value) if isinstance(value, tuple) else [value]
        return flat, [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape) for y in flat]

    values, gradients = outputs()
    torch.autograd.backward(values, gradients)
    expected = [None if t.grad is None else t.grad.clone() for t in (x, *parameters)]

    values, gradients = outputs()
    split = SplitBackward(values, gradients, leaves=[x], parameters=parameters)
    split.input_grad()
    assert x.grad is not None
    assert torch.equal(x.grad, expected[0])
    assert all(p.grad is None for p in parameters)
    split.weight_grad()
    for name_and_parameter, right in zip(model.named_parameters(), expected[1:], strict=True):
        name, parameter = name_and_parameter
        if right is None:
            assert parameter.grad is None
        elif not name.startswith("twice"):  # a parameter on two ways is walked to on both, see there
            torch.testing.assert_close(parameter.grad, right, rtol=1e-14, atol=1e-15)
