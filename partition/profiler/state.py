"""Leave a model as it was found, run forth and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..graph.untouched import untouched
from .optimizers import HOOKS


@contextmanager
def profiled(*roots: nn.Module, device: torch.device) -> Iterator[None]:
    """Within: every trainable parameter has a zero gradient to add to and no hook; the model may be run forth and back.

    Afterwards gradients, and all that `untouched` keeps, are what they were.
    """
    gradients = [(parameter, parameter.grad) for root in roots for parameter in root.parameters()]
    # Emptied in place: autograd holds the tables themselves.
    tables_of_hooks = [table for p, _ in gradients for name in HOOKS if (table := getattr(p, name, None))]
    hooks = [(table, dict(table)) for table in tables_of_hooks]
    with untouched(*roots, device=device):
        try:
            for parameter, _ in gradients:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            for table, _ in hooks:
                table.clear()
            yield
        finally:
            for table, entries in hooks:
                table.update(entries)
            for parameter, gradient in gradients:
                parameter.grad = gradient
