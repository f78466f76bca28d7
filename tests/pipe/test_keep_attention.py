"""Fused attention in place of weights that are kept: its refusals and its memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stagewright.pipe import edit

from .test_keep_less import T4, kept_bytes


class AsksForWeights(nn.Module):
    def __init__(self, *, as_keyword: bool) -> None:
        super().__init__()
        self.attention, self.as_keyword = nn.MultiheadAttention(8, 2), as_keyword

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x, need_weights=True) if self.as_keyword else self.attention(x, x, x, None, True)


@pytest.mark.parametrize("as_keyword", [True, False])
def test_fused_attention_refuses_to_give_weights(as_keyword: bool) -> None:
    edits = edit(AsksForWeights(as_keyword=as_keyword))
    edits["attention"].keep_less("attention")
    with pytest.raises(ValueError, match=r"its weights are asked for, and nothing makes them"):
        edits.build()(torch.randn(3, 1, 8))


USES: dict[str, Callable[[Tensor, Any], object]] = {
    "method": lambda x, weights: x * weights.mean(),
    "attribute": lambda x, weights: x * weights.shape[0],
    "index": lambda x, weights: weights[0],
    "arithmetic": lambda x, weights: 2 * weights + 1,
    "power": lambda x, weights: weights**2,
    "beside a tensor": lambda x, weights: x[..., :1] * weights,
    "function": lambda x, weights: torch.stack([weights, weights]),
    "loop": lambda x, weights: sum(each for each in weights),
    "comparison": lambda x, weights: weights > 0,
}


class UsesWeights(nn.Module):
    """Asks for weights by default."""

    def __init__(self, use: Callable[[Tensor, Any], object]) -> None:
        super().__init__()
        self.attention, self.use = nn.MultiheadAttention(8, 2), use

    def forward(self, x: Tensor) -> object:
        return self.use(*self.attention(x, x, x))


@pytest.mark.parametrize("name", USES)
def test_weights_that_are_there_by_default_are_not_used(name: str) -> None:
    edits = edit(UsesWeights(USES[name]))
    edits["attention"].keep_less("attention")
    x = torch.randn(3, 1, 8)
    assert edits.model(x) is not None
    with pytest.raises(ValueError, match=r"its weights are asked for, and nothing makes them: expected need_weights=F"):
        edits.build()(x)


def test_weights_that_are_passed_on_are_missed() -> None:
    edits = edit(UsesWeights(lambda x, weights: (x, weights)))
    edits["attention"].keep_less("attention")
    with pytest.raises(ValueError, match=r"the model returns 1 tensors, and 2 untouched"):
        edits.verify((torch.randn(3, 1, 8),))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_fused_attention_keeps_nothing_of_length_times_length(dropout: float) -> None:
    """With dropout torch has no such kernel on a CPU: three such tensors stayed, as many as without the edit."""
    torch.manual_seed(0)
    length = 64

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.attention(x, x, x)[0]
            return made

    plain, x = Attends(), torch.randn(1, length, 8)
    edits = edit(copy.deepcopy(plain))
    edits["attention"].keep_less("attention")
    assert edits.verify((x,)) == []
    before, after = kept_bytes(plain, x), kept_bytes(edits.build(), x)
    tensors = 3 if dropout else 1  # with a probability for each of two heads; with dropout a mask, and both
    assert before - after >= tensors * 2 * length * length * T4
    assert not hasattr(torch.nn.functional.scaled_dot_product_attention, "func")  # it is torch's again
