"""Leave a model as it was found, whatever runs on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of parameters: some step an optimizer


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within: every trainable parameter has a zero gradient to add to and no hook; the model may be run forth and back.

    Afterwards gradients, buffers, training flags and the states of torch's random generators are what they were.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    # Emptied in place: autograd holds the tables themselves.
    tables_of_hooks = [table for p, _ in gradients for name in _HOOKS if (table := getattr(p, name, None))]
    hooks = [(table, dict(table)) for table in tables_of_hooks]
    tables = [(module, dict(module._buffers)) for module in model.modules()]
    values = [
        (buffer, buffer.detach().clone()) for _, table in tables for buffer in table.values() if buffer is not None
    ]
    flags = [(module, module.training) for module in model.modules()]
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
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
            with torch.no_grad():
                for buffer, value in values:
                    buffer.copy_(value)
            for module, table in tables:
                module._buffers.clear()
                module._buffers.update(table)
            for module, training in flags:
                module.training = training
