"""A pipeline with recompute=, and its comparison with plain PyTorch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stagewright.pipe import PipelineModule
from support.alone import same_gradients
from support.records import records

from .layers import D, T

X, Y = (torch.randn(8, T, D, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in range(2))
M = 4
WORDS = ("none", "full", "layer", "selective")


def pipeline(model: Any, recompute: Any, **options: Any) -> PipelineModule:
    what = {"stages": model} if isinstance(model, list) else {"model": model}
    settings = {"num_microbatches": M, "mesh": {"pipe": 2}, "loss_fn": F.mse_loss, "example_inputs": (X,)}
    return PipelineModule(**records(**what, recompute=recompute, **(settings | options)))


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    model = make()
    for part in model if isinstance(model, list) else [model]:
        part.double()
    return model


def as_one(model: Any) -> nn.Module:
    return nn.Sequential(*model) if isinstance(model, list) else model


def equals_one_process(make: Callable[[], Any], recompute: Any, *, atol: float = 0.0, **options: Any) -> None:
    """Gradients, to `atol`, and buffers of two batches, and the evaluation between them, are those of plain PyTorch."""
    model, plain = made(make), made(make)
    pipe = pipeline(model, recompute, **options)
    whole, chain = as_one(model), as_one(plain)
    for _ in range(2):
        for x, y in zip(X.chunk(M), Y.chunk(M), strict=True):
            (F.mse_loss(chain(x.clone()), y) / M).backward()
        pipe.forward_backward(X, Y)
        same_gradients(whole, chain, atol=atol)
        assert all(torch.equal(mine, wanted) for mine, wanted in zip(whole.buffers(), chain.buffers(), strict=True))
        whole.zero_grad()
        chain.zero_grad()
        assert torch.allclose(pipe.predict(X), chain.eval()(X.clone()), rtol=0, atol=1e-12)  # type: ignore[arg-type]
        chain.train()
    pipe.close()
