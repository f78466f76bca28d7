"""Optimizers that clip in front of their step, for the profile of an update."""

from __future__ import annotations

import torch
from support.inside import clipping, make_optimizers, named
from torch import nn


def test_the_first_step_clips_by_the_norm_of_all_parameters() -> None:
    torch.manual_seed(0)
    plain, clipped = (nn.Linear(3, 2).double() for _ in range(2))
    clipped.load_state_dict(plain.state_dict())

    def make(parameters: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([p], lr=0.1) for _, p in parameters]  # a step each for weight and bias

    for model, factory in ((plain, named(make)), (clipped, clipping(named(make), 0.5))):
        model(torch.arange(6.0, dtype=torch.float64).view(2, 3)).square().sum().backward()
        if model is plain:
            assert nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 1
        for optimizer in make_optimizers(factory, list(model.named_parameters()), where="here"):
            optimizer.step()
    for one, other in zip(plain.parameters(), clipped.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0)  # the runtime adds 1e-6 to the norm, as torch does


def test_nothing_is_changed_where_nobody_clips() -> None:
    factory = named(lambda parameters: [])
    assert clipping(factory, None) is clipping(factory, 0.0) is factory
