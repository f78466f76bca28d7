"""A pipeline over processes that goes wrong where a test says, and what a rank then tells."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.pipe import PipelineModule

from .small import WIDTH, layers, make

LONG = 120.0  # [s] a time-out that must not run out


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The error of a rank: the error's type and message, and after how many seconds."""

    kind: str
    text: str
    seconds: float


def told(call: Callable[[], object]) -> Told:
    started = time.monotonic()
    try:
        value = call()
    except Exception as error:
        return Told(kind=type(error).__name__, text=str(error), seconds=time.monotonic() - started)
    return Told(kind="none", text=repr(value), seconds=time.monotonic() - started)


class Trip(nn.Module):
    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__()
        self.action = action
        self.countdown = 3

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:  # shapes are inferred on tensors of another type
            self.countdown -= 1
            if self.countdown == 0:
                self.action()
        return x * 1.0


def pipeline(*, timeout: float = LONG, trip: dict[int, Callable[[], None]] | None = None, **options: Any) -> Any:
    """The small pipeline with a Trip on some ranks; its first two layers are on rank 0, the next on rank 1, ..."""
    torch.manual_seed(0)
    ranks = int(os.environ["WORLD_SIZE"])
    model = layers(2 * ranks)
    for where, action in (trip or {}).items():
        model[2 * where + 1] = nn.Sequential(model[2 * where + 1], Trip(action))
    names = [str(2 * one) for one in range(1, ranks)]
    return make(model=model, mesh=None, cut=names, timeout=timeout, **options)


def step(pipe: PipelineModule) -> Callable[[], float]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
    return lambda: pipe.train_step(x, y).loss


def raise_key_error() -> None:
    raise KeyError("the user's own trouble")


def refusal(call: Callable[[], object], *kinds: type[Exception]) -> str:
    """What a call is refused with: a ValueError, or an error of these kinds; "" where it is taken."""
    expected = kinds or (ValueError,)
    try:
        call()
    except expected as error:
        return str(error)
    return ""
