"""Bytes of live tensors, counted between operations."""

from __future__ import annotations

import pytest
import torch
from support.inside import LiveBytes
from torch import nn

MEGABYTE = 1 << 20


def test_what_is_let_go_of_makes_room() -> None:
    with LiveBytes() as live:
        kept = torch.empty(MEGABYTE, dtype=torch.uint8)
        for _ in range(3):
            kept + kept  # one at a time
    live.settle()
    assert (live.level, live.most) == (MEGABYTE, 2 * MEGABYTE)
    assert kept[:1].numel() == 1


def test_views_and_changes_in_place_are_no_new_bytes() -> None:
    before = torch.zeros(MEGABYTE, dtype=torch.uint8)
    with LiveBytes() as live:
        before.add_(1)
        view = before[1:].view(-1)
    assert (live.most, view.numel()) == (0, MEGABYTE - 1)


@pytest.mark.thorough
def test_a_step_whose_old_gradients_make_room() -> None:
    """Gradients of 4 layers of 1,000 x 1,000 weights go, activations come, new gradients come: [500, 1000] each."""
    layers = [nn.Linear(1000, 1000, bias=False) for _ in range(4)]
    model, x = nn.Sequential(*layers), torch.zeros(500, 1000)
    model(x).sum().backward()
    with LiveBytes(p.grad for p in model.parameters() if p.grad is not None) as live:
        for p in model.parameters():
            p.grad = None
        model(x).sum().backward()
    live.settle()
    assert live.level == 0
    assert live.most <= 2_000_100  # the last weight's gradient beside one gradient of an activation
    for p in model.parameters():
        p.grad = None
    with LiveBytes() as live:
        model(x).sum().backward()
    assert 16_000_000 <= live.most <= 20_000_100
