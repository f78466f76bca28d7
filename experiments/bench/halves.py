"""A backward in two halves, I and W, beside the whole one, in a process of its own with one thread.

    whole    F  B
    ours     F  I W      products, embeddings and convolutions put gradients of weights aside
    torch    F  I W      torch.distributed.pipelining: a walk over the graph for each weight

All three run the same stage on the same input in turn, several times a repetition; a repetition's value is the median.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import tyro
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from ...partition.graph.split_backward import SplitBackward, WeightGradients
from ..training.gpt import Block, GPTConfig
from .records import HalvesTimes, write_records

_RUNS = 7  # of a repetition
_WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvesOptions:
    """Options of the measurement."""

    repetitions: int
    """Repetitions of each stage and side."""
    out: Path
    """Records go here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvedStage:
    """A stage, and one microbatch's input of it."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


STAGES = (
    HalvedStage(
        name="GPT, 4 blocks of width 256, length 128",
        make=lambda: nn.Sequential(*[Block(GPTConfig(width=256, heads=4, length=128)) for _ in range(4)]),
        shape=(4, 128, 256),
    ),
    HalvedStage(
        name="8 Linears of width 64, 64 rows",
        make=lambda: nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(64, 64), nn.ReLU())]),
        shape=(64, 64),
    ),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    options = tyro.cli(HalvesOptions, args=argv)
    torch.set_num_threads(1)
    write_records(options.out, [measure_halves(stage, repetitions=options.repetitions) for stage in STAGES])


def measure_halves(stage: HalvedStage, *, repetitions: int, runs: int = _RUNS) -> HalvesTimes:
    """All sides in turn, run by run."""
    torch.manual_seed(0)
    model = stage.make()
    x = torch.randn(stage.shape, requires_grad=True)
    gradient = torch.randn_like(model(x))
    sides = {"whole": _whole, "ours": _ours, "torch": _torchs}
    for side in sides.values():
        for _ in range(_WARM_UP):
            side(model, x, gradient)
    forward: dict[str, list[float]] = {name: [] for name in sides}
    backward: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repetitions):
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(runs):
            for name, side in sides.items():
                seen[name].append(side(model, x, gradient))
        for name, times in seen.items():
            forward[name].append(median(f for f, _ in times))
            backward[name].append(median(b for _, b in times))
    return HalvesTimes(stage=stage.name, forward=forward, backward=backward)


def _whole(model: nn.Module, x: Tensor, gradient: Tensor) -> tuple[float, float]:
    """Seconds of the forward, and of the backward."""
    start = time.perf_counter()
    y = model(x)
    middle = time.perf_counter()
    torch.autograd.backward([y], [gradient])
    return middle - start, time.perf_counter() - middle


def _ours(model: nn.Module, x: Tensor, gradient: Tensor) -> tuple[float, float]:
    split, weights = SplitBackward(), WeightGradients()
    start = time.perf_counter()
    with split.forward():
        y = model(x)
    middle = time.perf_counter()
    with split.backward(weights):
        torch.autograd.backward([y], [gradient])
    weights.add()
    return middle - start, time.perf_counter() - middle


def _torchs(model: nn.Module, x: Tensor, gradient: Tensor) -> tuple[float, float]:
    start = time.perf_counter()
    y = model(x)
    middle = time.perf_counter()
    _, groups = stage_backward_input([y], [gradient], [x], model.parameters())
    stage_backward_weight(model.parameters(), groups)
    return middle - start, time.perf_counter() - middle


if __name__ == "__main__":
    main()
