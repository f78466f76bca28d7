"""Clocks that stamp the starts and ends of actions: the host's for the CPU, events on the stream for CUDA."""

from __future__ import annotations

import time
from typing import Protocol

import torch

Stamp = float | torch.cuda.Event


class Clock(Protocol):
    """`stamp()` is cheap and never waits; `seconds` turns a stamp into time, waiting if it must."""

    def stamp(self) -> Stamp:
        """Now, in the order of the work given to the device so far."""

    def seconds(self, stamp: Stamp) -> float:
        """Seconds on this host's monotonic clock."""


class HostClock:
    """The monotonic clock, which all processes of a host share."""

    def stamp(self) -> float:
        """Seconds."""
        return time.perf_counter()

    def seconds(self, stamp: Stamp) -> float:
        """As it is."""
        assert isinstance(stamp, float)
        return stamp


class CudaClock:
    """Events on the current stream, placed on the host's clock by one synchronisation at the start."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._origin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._origin.record(torch.cuda.current_stream(device))
        self._origin.synchronize()
        self._origin_seconds = time.perf_counter()
        self._device = device

    def stamp(self) -> torch.cuda.Event:
        """An event behind the work so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, stamp: Stamp) -> float:
        """Waits for the event."""
        assert not isinstance(stamp, float)
        stamp.synchronize()
        return self._origin_seconds + float(self._origin.elapsed_time(stamp)) / 1000.0


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
