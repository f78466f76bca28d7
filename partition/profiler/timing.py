"""Clocks for code on a device, and estimates from repeated measurements."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

LEAST_FASTEST = 3  # samples


class Clock(Protocol):
    """Marks moments on a device; `seconds` between two marks may be asked for once the clock has settled."""

    def mark(self) -> Any:
        """This moment, as the device will reach it."""

    def settle(self) -> None:
        """Wait until the device has passed all marks."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks [s]."""


class CpuClock:
    """The process's own clock: on the CPU an operation has ended when its call returns."""

    def mark(self) -> float:
        """time.perf_counter."""
        return time.perf_counter()

    def settle(self) -> None:
        """Nothing is under way."""

    def seconds(self, begin: float, end: float) -> float:
        """[s]"""
        return end - begin


class CudaClock:
    """Events on the current stream of a CUDA device: no mark makes the device wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """An event behind all that was launched so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """[s]"""
        return float(begin.elapsed_time(end)) / 1e3


def clock_for(device: torch.device) -> Clock:
    """The clock of a device; ValueError for a kind that has none here."""
    if device.type == "cpu":
        return CpuClock()
    if device.type == "cuda":
        return CudaClock(device)
    raise ValueError(f"device {str(device)!r}: expected a model on the CPU or on a CUDA device")


def typical(samples: Sequence[float]) -> float:
    """The mean without the slowest tenth [s]: what an action takes beside whatever else runs on the machine.

    Sums of many actions, such as a step, come out near the sum of their means, not of their best times.

    >>> typical([1.0] * 8 + [2.0, 9.0])
    1.1111111111111112
    """
    ranked = sorted(samples)
    return statistics.fmean(ranked[: max(1, len(ranked) - len(ranked) // 10)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A robust estimate: the median of the fastest quarter [s], and half the interquartile range over the median.

    What else runs on a machine makes samples longer, in bursts, and never shorter: a median of all moves with it, and
    moves less for a short action than for a long one, which is hit more often. A single fastest sample would say more
    of luck than of the action.
    """

    seconds: float
    spread: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Estimate:
        """From at least one sample [s]; the fastest quarter are at least LEAST_FASTEST.

        >>> Estimate.of([1.0, 1.5, 2.0, 1.0, 9.0])
        Estimate(seconds=1.0, spread=0.3333333333333333)
        """
        ranked = sorted(samples)
        fastest = ranked[: max(LEAST_FASTEST, len(ranked) // 4)]
        middle = statistics.median(ranked)
        if len(ranked) < 2 or middle == 0:
            return cls(seconds=statistics.median(fastest), spread=0.0)
        low, _, high = statistics.quantiles(ranked, n=4, method="inclusive")
        return cls(seconds=statistics.median(fastest), spread=(high - low) / 2 / middle)
