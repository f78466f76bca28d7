"""The clock of a device: the host's on the CPU, events on the stream on CUDA. The profiler and running steps use it."""

from __future__ import annotations

import time
from typing import Protocol

import torch

Stamp = float | torch.cuda.Event


class Clock(Protocol):
    """Stamps are cheap and never wait; what turns them into times waits where it must."""

    def stamp(self) -> Stamp:
        """This moment, in the order of the work given to the device so far."""

    def settle(self) -> None:
        """Wait until the device has passed all stamps."""

    def seconds(self, stamp: Stamp) -> float:
        """The stamp on this host's monotonic clock [s]."""

    def between(self, begin: Stamp, end: Stamp) -> float:
        """From one stamp to another [s]: more exact than a difference of `seconds`."""

    def now(self) -> float:
        """This host's monotonic clock [s], whatever the device still does."""


class HostClock:
    """The monotonic clock, which all processes of a host share: on the CPU an operation ends when its call returns."""

    def stamp(self) -> float:
        """See Clock."""
        return time.perf_counter()

    def settle(self) -> None:
        """Nothing is under way."""

    def seconds(self, stamp: Stamp) -> float:
        """The stamp as it is."""
        assert isinstance(stamp, float)
        return stamp

    def between(self, begin: Stamp, end: Stamp) -> float:
        """See Clock."""
        return self.seconds(end) - self.seconds(begin)

    def now(self) -> float:
        """See Clock."""
        return self.stamp()


class CudaClock:
    """Events on the current stream, placed on the host's clock by one synchronisation at the start."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._origin = self.stamp()
        self._origin.synchronize()
        self._origin_seconds = time.perf_counter()

    def stamp(self) -> torch.cuda.Event:
        """An event behind the work so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """See Clock."""
        torch.cuda.synchronize(self._device)

    def seconds(self, stamp: Stamp) -> float:
        """See Clock; waits for the event."""
        return self._origin_seconds + self.between(self._origin, stamp)

    def between(self, begin: Stamp, end: Stamp) -> float:
        """See Clock; waits for the event at the end."""
        assert not isinstance(begin, float)
        assert not isinstance(end, float)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def now(self) -> float:
        """See Clock."""
        return time.perf_counter()


def clock_for(device: torch.device) -> Clock:
    """The clock of a device; ValueError for a kind that has none here."""
    if device.type == "cpu":
        return HostClock()
    if device.type == "cuda":
        return CudaClock(device)
    raise ValueError(f"device {str(device)!r}: expected a model on the CPU or on a CUDA device")
