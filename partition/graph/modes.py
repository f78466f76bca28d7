"""Ways in which modules run: evaluation mode, and as they were written where torch.compile made something of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Within: all parts of the modules are in evaluation mode."""
    flags = [(part, part.training) for module in modules for part in module.modules()]
    for part, _ in flags:
        part.training = False
    try:
        yield
    finally:
        for part, training in flags:
            part.training = training


def uncompiled() -> AbstractContextManager[None]:
    """Within: what torch.compile made runs as it was written, since nothing is gained by compiling it for fakes."""
    stance: AbstractContextManager[None] = nullcontext()
    if "torch._dynamo" in sys.modules:
        stance = torch.compiler.set_stance("force_eager")
    return stance
