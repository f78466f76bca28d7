"""The simulator's own speed and memory, in a process of its own without torch (its peak counts Python's)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tyro

from ...schedules import Costs, build, check, simulate
from ..host import peak_resident_bytes
from .records import SimulatorSpeed, write_records

_COSTS = Costs(forward=1.0, backward=2.0, latency=0.01)
_RUNS = 5  # of the small schedule in one process


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorOptions:
    """Output of the measurement."""

    out: Path
    """The record goes here."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure once and write."""
    write_records(tyro.cli(SimulatorOptions, args=argv).out, [measure_simulator()])


def measure_simulator(*, num_ranks: int = 64, num_chunks: int = 4, num_microbatches: int = 512) -> SimulatorSpeed:
    """The rate on a schedule of ordinary size; then build, check and simulate the large one, once."""
    rate = _rate()
    start = time.perf_counter()
    schedule = build("interleaved", num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    check(schedule)
    timeline = simulate(schedule, _COSTS)
    seconds = time.perf_counter() - start
    return SimulatorSpeed(
        actions_per_second=rate,
        build_check_simulate=seconds,
        num_actions=sum(len(rank.compute) for rank in timeline.ranks),
        peak_bytes=peak_resident_bytes(),
    )


def _rate() -> float:
    """Compute actions a second of `simulate` alone: interleaved, P=8, V=2, M=512 (16,384 actions)."""
    schedule = build("interleaved", num_ranks=8, num_microbatches=512, num_chunks=2)
    num_actions = sum(map(len, schedule.programs))
    times = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        simulate(schedule, _COSTS)
        times.append(time.perf_counter() - start)
    return num_actions / median(times)


if __name__ == "__main__":
    main()
