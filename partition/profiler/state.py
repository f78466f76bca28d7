"""Leave a model as it was found, whatever runs on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within: every trainable parameter has a zero gradient to add to, and the model may be run forth and back.

    Afterwards gradients, buffers, training flags and the states of torch's random generators are what they were.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
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
            yield
        finally:
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
