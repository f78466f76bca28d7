"""The backward in two halves: I leaves weights alone where it can, and both together are the whole, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from stagewright.experiments.training.gpt import Block, GPTConfig
from stagewright.partition.graph.split_backward import SplitBackward, WeightGradients


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


class Call(nn.Module):
    """A function of an input and of weights of these shapes."""

    def __init__(self, call: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.call = call
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, *self.weights)


class TiedTokens(nn.Module):
    """One weight that embeds and unembeds."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 4, **options)

    def forward(self, x: Tensor) -> Tensor:
        indices = (x.detach().abs() * 10).long() % 6
        return F.linear(self.tokens(indices) + x[..., None], self.tokens.weight)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant, self.calls = inner, use_reentrant, 0

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(x)

        return checkpoint(run, x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]


def mlp(*, inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace), nn.Linear(8, 4, bias=False), nn.LayerNorm(4))


def run(model: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients for them."""
    value = model(x)
    flat = [leaf for leaf in tree_leaves(value) if leaf.requires_grad]
    return flat, [torch.linspace(-1, 1, y.numel()).to(y.dtype).reshape(y.shape) for y in flat]


def whole(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    torch.autograd.backward(*run(model, x))
    return taken(model, x)


def halves(model: nn.Module, x: Tensor) -> tuple[list[Tensor | None], WeightGradients, SplitBackward]:
    """Gradients behind I; what is left to do."""
    split, weights = SplitBackward(), WeightGradients()
    with split.forward():
        values = run(model, x)
    with split.backward(weights):
        torch.autograd.backward(*values)
    return [None if t.grad is None else t.grad.clone() for t in (x, *model.parameters())], weights, split


def taken(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    found = [tensor.grad for tensor in (x, *model.parameters())]
    for tensor in (x, *model.parameters()):
        tensor.grad = None
    return found


def same(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) is (other is None)
        if one is not None and other is not None:
            assert one.layout == other.layout
            assert one.dtype == other.dtype
            assert torch.equal(one.to_dense(), other.to_dense())


# Model, shape of the input, names of parameters whose gradients come in I.
MODELS: list[Any] = [
    pytest.param(lambda: nn.Linear(4, 4), (2, 4), "", id="linear"),
    pytest.param(mlp, (3, 2, 4), "3.weight 3.bias", id="mlp"),
    pytest.param(lambda: mlp(inplace=True), (3, 2, 4), "3.weight 3.bias", id="in-place-behind-a-linear"),
    pytest.param(lambda: nn.Linear(4, 3), (2, 3, 5, 4), "", id="four-dimensions"),
    pytest.param(lambda: Block(GPTConfig(width=8, heads=2, length=4)), (2, 4, 8), None, id="gpt-block"),
    pytest.param(Branches, (2, 4), "places", id="branches"),
    pytest.param(Apart, (4,), "weight", id="apart"),
    pytest.param(Attention, (2, 3, 4), "", id="attention"),
    pytest.param(lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0), (2, 3, 4), None, id="encoder-layer"),
    pytest.param(lambda: nn.LSTM(4, 4), (3, 2, 4), None, id="lstm"),
    pytest.param(lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4)), (2, 4, 8), None, id="conv1d"),
    pytest.param(
        lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), groups=2), (2, 4, 6, 6), "", id="conv2d"
    ),
    pytest.param(lambda: nn.Conv2d(2, 2, 3, bias=False, dilation=2), (2, 2, 6, 6), "", id="conv-without-bias"),
    pytest.param(lambda: nn.Conv2d(2, 2, 3, padding="same"), (2, 2, 6, 6), "weight bias", id="conv-same"),
    pytest.param(
        lambda: nn.ConvTranspose2d(4, 2, 3, stride=2, output_padding=1), (2, 4, 3, 3), "", id="conv-transpose"
    ),
    pytest.param(TiedTokens, (2, 3), "", id="tied"),
    pytest.param(lambda: TiedTokens(padding_idx=-2), (2, 3), "", id="padding"),
    pytest.param(lambda: TiedTokens(scale_grad_by_freq=True), (2, 3), "", id="by-frequency"),
    pytest.param(lambda: TiedTokens(max_norm=0.5), (2, 3), "", id="max-norm"),
    pytest.param(lambda: Call(lambda x, b, w: torch.addmm(b, x, w), (5,), (4, 5)), (3, 4), "", id="addmm"),
    pytest.param(lambda: Call(lambda x, w: x @ w, (4, 5)), (2, 3, 4), "", id="at"),
    pytest.param(lambda: Call(lambda x, w: x @ w.T, (5, 4)), (2, 3, 4), "", id="at-transposed"),
    pytest.param(lambda: Call(lambda x, w: x @ w[:4], (5, 4)), (3, 4), "weights.0", id="a-part-of-a-weight"),
    pytest.param(lambda: Call(lambda x, w: x.t() @ w, (4, 5)), (4, 3), "", id="columns-first"),
    pytest.param(lambda: Call(torch.bmm, (3, 4, 5)), (3, 2, 4), "", id="experts"),
    pytest.param(
        lambda: Call(lambda x, b, w: torch.baddbmm(b, x, w), (3, 1, 5), (3, 4, 5)), (3, 2, 4), "", id="baddbmm"
    ),
    pytest.param(lambda: Call(lambda x, w: F.linear(x, w) * w.sum(), (4, 4)), (3, 4), "weights.0", id="in-both-ways"),
    pytest.param(lambda: weight_norm(nn.Linear(4, 4)), (3, 4), None, id="parametrized"),
]


@pytest.mark.parametrize(("make", "shape", "in_first_half"), MODELS)
def test_both_halves_are_the_whole(
    make: Callable[[], nn.Module], shape: tuple[int, ...], in_first_half: str | None
) -> None:
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = whole(model, x)
    first, weights, _ = halves(model, x)
    same(first[:1], expected[:1])
    if in_first_half is not None:
        names = [name for (name, _), grad in zip(model.named_parameters(), first[1:], strict=True) if grad is not None]
        assert names == in_first_half.split()
    weights.add()
    same(taken(model, x), expected)
