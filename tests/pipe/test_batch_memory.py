"""A batch whose memory the user fills again behind the call, as a DataLoader of one buffer does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.small import WIDTH, make
from torch import Tensor, nn


class Skipping(nn.Module):
    """The last stage takes the batch's input, too, and a mask out of a nested argument."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor, *, extra: dict[str, tuple[Tensor]]) -> Tensor:
        h = self.two(self.one(x).relu()) * extra["mask"][0]
        return self.three(h) + x


def loss(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, target["y"])


def state_after_training(refill: bool, options: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    pipe = make(model=Skipping(), loss_fn=loss, example_inputs=None, **options)
    random = np.random.default_rng(0)
    buffers = [np.empty((8, WIDTH)) for _ in range(3)]
    for _ in range(5):
        filled = [random.standard_normal((8, WIDTH)) for _ in buffers]
        if refill:
            for buffer, values in zip(buffers, filled, strict=True):
                buffer[:] = values
        x, y, mask = map(torch.from_numpy, buffers if refill else filled)
        pipe.train_step(x, extra={"mask": (mask,)}, target={"y": y})
        for buffer in buffers:
            buffer[:] = 7.0
    return pipe.full_state_dict()


def both(options: dict[str, Any]) -> list[dict[str, Tensor]]:
    return [state_after_training(refill, options) for refill in (True, False)]


@pytest.mark.thorough(but=["1f1b"])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b"},
        {"schedule": "2bw"},
        {"schedule": "2bw", "recompute": "full"},
        {"schedule": "pipedream"},
        {"schedule": "paci"},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_the_numbers_are_those_of_batches_that_stay(options: dict[str, Any]) -> None:
    found, expected = both(options)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
