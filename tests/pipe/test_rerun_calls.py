"""recompute= of single modules: how often the user's code runs, and what it may leave behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.layers import D
from support.reruns import WORDS, M, X, Y, made, pipeline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Counted(nn.Module):
    """Counts its runs; its inner part may be under a checkpoint of the user's own."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.inner = Inner()
        self.last = nn.Linear(D, D)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.kind == "plain" or not torch.is_grad_enabled():
            return torch.tanh(self.last(self.inner(x)))
        h = checkpoint(self.inner, x, use_reentrant=self.kind == "reentrant")
        return torch.tanh(self.last(h))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return torch.sin(self.linear(x)) * x


class Around(Counted):
    """All of it under a checkpoint of the user's own, as layers of `transformers` are."""

    def __call__(self, x: Tensor) -> Tensor:
        return checkpoint(super().__call__, x, use_reentrant=False)  # type: ignore[no-any-return]


KINDS = ("plain", "reentrant", "not reentrant", "around")


@pytest.mark.thorough(but=["full", "{'*.inner': 'selective'}"])
@pytest.mark.parametrize(
    "recompute",
    [*WORDS, {"*": "full"}, {"*": "full", "*.inner": "selective"}, {"*.inner": "full"}, {"*.inner": "selective"}],
    ids=str,
)
def test_a_module_runs_again_at_most_once(recompute: Any) -> None:
    """Also one with a checkpoint of the user's own inside or around it: one of each kind on both stages."""

    def make() -> nn.Sequential:
        first = nn.Linear(D, D)  # a reentrant checkpoint wants an input with a gradient
        return nn.Sequential(first, *[Around() if kind == "around" else Counted(kind) for kind in 2 * KINDS])

    model, plain = made(make), made(lambda: nn.Sequential(nn.Linear(D, D), *[Counted() for _ in 2 * KINDS]))
    blocks = list(model)[1:]
    pipe = pipeline(model, recompute)
    for block in blocks:
        block.runs = block.inner.runs = 0
    pipe.forward_backward(X, Y)
    for x, y in zip(X.chunk(M), Y.chunk(M), strict=True):
        (F.mse_loss(plain(x), y) / M).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    for kind, block in zip(2 * KINDS, blocks, strict=True):
        outer = kind == "around" or recompute in ("full", "layer", "selective") or "*" in recompute
        inner = outer or kind != "plain" or recompute != "none"
        assert block.runs == (2 * M if outer else M), kind
        assert block.inner.runs == (2 * M if inner else M), kind
    pipe.eval_step(X, Y)  # the first one looks at shapes, too
    for block in blocks:
        block.runs = 0
    pipe.eval_step(X, Y)
    pipe.predict(X)
    assert all(block.runs == 2 * M for block in blocks)


@pytest.mark.parametrize("recompute", ["layer", {"*": "selective"}], ids=str)
def test_hooks_of_a_module_run_once(recompute: Any) -> None:
    model = made(lambda: nn.Sequential(*[Counted() for _ in range(4)]))
    seen: list[str] = []
    model[1].register_forward_hook(lambda *_: seen.append("forward"))
    model[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    pipe = pipeline(model, recompute)
    seen.clear()
    pipe.forward_backward(X, Y)
    assert sorted(seen) == ["backward"] * M + ["forward"] * M
    assert all("forward" not in vars(module) for module in model.modules()), "the user's module was left changed"


def test_an_error_in_a_module_leaves_it_as_it_was() -> None:
    class Fails(nn.Linear):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise RuntimeError("a mistake of the user's")
            return super().forward(x)

    model = nn.Sequential(nn.Linear(D, D), Fails(D, D), nn.Linear(D, D)).double()
    pipe = pipeline(model, "layer")
    model[1].fails = True
    with pytest.raises(RuntimeError, match="a mistake of the user's"):
        pipe.forward_backward(X, Y)
    assert all("forward" not in vars(module) for module in model.modules())
    model[1].fails = False
    pipe.forward_backward(X, Y)
