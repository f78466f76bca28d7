"""Timing of a step over all ranks, figures of two sides, and progress lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ...schedules.wording import duration
from ..jobs.case import Case
from ..jobs.figure import Figure, How, Target, repeated
from .models import SPIN, sleep_until

_AHEAD = 0.005  # [s] from rank 0's message to the common start, longer than the message takes


def timed(step: Callable[[], object]) -> float:
    """Run a step on all ranks from a common start. Returns seconds to the end of the last rank."""
    instant = torch.zeros((), dtype=torch.float64)
    dist.barrier()
    if dist.get_rank() == 0:
        instant.fill_(time.perf_counter() + _AHEAD + SPIN)
    dist.broadcast(instant, src=0)
    start = float(instant)
    sleep_until(start)
    step()
    return slowest(time.perf_counter() - start)


def say(text: str) -> None:
    """Print progress on standard error from rank 0; standard output may hold JSON."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def slowest(seconds: float) -> float:
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Ratios by repetition: a disturbance of a repetition affects both sides of it.

    >>> ratios([1.0, 2.0, 6.0], [2.0, 4.0, 4.0])
    [0.5, 0.5, 1.5]
    """
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def typical(samples: Sequence[float]) -> str:
    """The median as text: '12.3 ms'."""
    return duration(median(samples))


def median_of(step: Callable[[], object], count: int) -> float:
    """The median of `count` steps, each timed on all ranks [s]."""
    return median(timed(step) for _ in range(count))


def cpu_of(step: Callable[[], object], count: int) -> float:
    """CPU seconds per step and rank, of all threads of a process: the mean of `count` steps in a row on all ranks."""
    dist.barrier()
    start = time.process_time()
    for _ in range(count):
        step()
    used = torch.tensor(time.process_time() - start, dtype=torch.float64)
    dist.all_reduce(used)
    return float(used) / (count * dist.get_world_size())


def compared(sides: tuple[Sequence[float], Sequence[float]], *, note: str = "", **figure: Any) -> Iterator[Figure]:
    """Seconds of one side over those of the other; `note` follows both medians."""
    first, other = sides
    told = f"{typical(first)} / {typical(other)}{note}"
    return repeated(ratios(first, other), unit="ratio", note=told, **figure)


def off(predicted: float, measured: Sequence[float], *, note: str = "", **figure: Any) -> Iterator[Figure]:
    """Error of predicted seconds, as a share of the measured ones; `note` follows both."""
    told = f"{duration(predicted)} / {typical(measured)}{note}"
    return repeated([predicted / value - 1 for value in measured], unit="error", note=told, **figure)


def foretold(
    seconds: Mapping[str, Sequence[float]], predicted: Mapping[str, float], *, case: Case, what: str, slack: float
) -> Iterator[Figure]:
    """An emulated saving next to the simulated one, and the simulator's error for each side, the one that saves first.

    Arguments:
        what: what the sides differ in, such as "sums".
        slack: times the simulated ratio that the measured one may take.
    """
    saves, other = seconds
    part = predicted[saves] / predicted[other]
    yield from compared(
        (seconds[saves], seconds[other]),
        case=case,
        name=f"step, {what} {saves} / {other}",
        how=How.EMULATED,
        target=Target(limit=slack * part),
        note=f", simulated {part:.3f}",
    )
    for name, taken in seconds.items():
        yield from off(
            predicted[name],
            taken,
            case=case.also(predicted="simulated"),
            name=f"error of the step, {what} {name}",
            how=How.EMULATED,
            target=Target(limit=0.05),
        )


def in_turn(
    name: str, sides: Mapping[str, Callable[[], float]], *, repetitions: int, after: Callable[[], None] | None = None
) -> dict[str, list[float]]:
    """[repetitions] seconds of each side, run in turn, so that a disturbance affects all of them; `after` is called
    after each repetition of all sides."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for repetition in range(repetitions):
        for side, run in sides.items():
            seconds[side].append(run())
        if after is not None:
            after()
        shown = ", ".join(f"{side} {duration(values[-1])}" for side, values in seconds.items())
        say(f"{name}: repetition {repetition + 1}/{repetitions}: {shown}")
    return seconds
