"""The clock of a device: the host's on the CPU, events on the stream on CUDA. The profiler and running steps use it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

Stamp = float | torch.cuda.Event


class HostClock:
    """The monotonic clock, which all processes of a host share: on the CPU an operation ends when its call returns.

    Stamps are cheap and never wait; what turns them into times waits where it must.
    """

    def stamp(self) -> float:
        """This moment, in the order of the work given to the device so far."""
        return time.perf_counter()

    def settle(self) -> None:
        """Wait until the device has passed all stamps; on the CPU nothing is under way."""

    def seconds(self, stamp: Stamp) -> float:
        """The stamp on this host's monotonic clock [s]."""
        return stamp  # type: ignore[return-value]  # this clock's are floats; an assertion would cost as much as this

    def between(self, begin: Stamp, end: Stamp) -> float:
        """Time from one stamp to another [s]: more exact than a difference of `seconds`."""
        return end - begin  # type: ignore[operator]

    def now(self) -> float:
        """This host's monotonic clock [s], even while the device still works."""
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
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, stamp: Stamp) -> float:
        """See HostClock; waits for the event."""
        return self._origin_seconds + self.between(self._origin, stamp)

    def between(self, begin: Stamp, end: Stamp) -> float:
        """See HostClock; waits for the event at the end."""
        assert not isinstance(begin, float)
        assert not isinstance(end, float)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def now(self) -> float:
        return time.perf_counter()


Clock = HostClock | CudaClock


def clock_for(device: torch.device) -> Clock:
    """The clock of a device; ValueError for a kind that has none here."""
    if device.type == "cpu":
        return HostClock()
    if device.type == "cuda":
        return CudaClock(device)
    raise ValueError(f"device {str(device)!r}: expected a model on the CPU or on a CUDA device")


LEAST_FASTEST = 3  # samples


def fastest(samples: Sequence[float]) -> float:
    """A robust estimate: the median of the fastest quarter, of at least LEAST_FASTEST samples [s].

    What else runs on a machine makes samples longer, in bursts, and never shorter: a median of all moves with it, and
    moves less for a short action than for a long one, which is hit more often. A single fastest sample would say more
    of luck than of the action.

    >>> fastest([1.0, 1.5, 2.0, 1.0, 9.0])
    1.0
    """
    return statistics.median(sorted(samples)[: max(LEAST_FASTEST, len(samples) // 4)])


def spread_of(samples: Sequence[float]) -> float:
    """Half the interquartile range over the median.

    >>> spread_of([1.0, 1.5, 2.0, 1.0, 9.0])
    0.3333333333333333
    """
    middle = statistics.median(samples)
    if len(samples) < 2 or middle == 0:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2 / middle
