"""Throughput: several runners train the same stages batch after batch, each as fast as it goes.

A step of an asynchronous schedule has no end of its own, since it returns with the pipeline full. So what is timed is
many batches in a row on each rank, from its return from one step to its return from a later one; the slowest rank
counts. Runners take turns, repetition by repetition.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .workloads import ModelKind, Workload


class Runner(StrEnum):
    """Runner of a workload."""

    OURS = "ours"
    TORCH = "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One runner with its workload.

    Arguments:
        at_least: what the first entry's throughput must be as a multiple of this one's; None where nothing is asked.
        ideal: that multiple with equal stages, free messages and free updates.
    """

    runner: Runner
    workload: Workload
    at_least: float | None = None
    ideal: float | None = None

    @property
    def label(self) -> str:
        """For people and records."""
        chunks = f" V={self.workload.num_chunks}" if self.workload.num_chunks > 1 else ""
        eager = " eager" if self.workload.warmup == "eager" else ""
        return f"{self.runner.value} {self.workload.schedule}{eager}{chunks}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """The first entry against the others.

    Arguments:
        batches: in a row, in one repetition of one runner.
    """

    name: str
    entries: tuple[Entry, ...]
    batches: int

    @property
    def num_ranks(self) -> int:
        """P, the same for all."""
        return self.entries[0].workload.num_ranks


def _sleeping(schedule: str, num_ranks: int) -> Workload:
    return Workload(
        name=f"race-sleep-{schedule}-{num_ranks}",
        model=ModelKind.SLEEP,
        schedule=schedule,
        num_ranks=num_ranks,
        num_microbatches=num_ranks,
        forward=0.010,
        backward=0.020,
    )


def _sleep_race(num_ranks: int, *, at_least: float) -> Race:
    ideal = (2 * num_ranks - 1) / num_ranks  # (M + P - 1) / M
    return Race(
        name=f"async-sleep-{num_ranks}",
        entries=(
            Entry(runner=Runner.OURS, workload=_sleeping("2bw", num_ranks)),
            Entry(runner=Runner.OURS, workload=_sleeping("1f1b", num_ranks), at_least=at_least, ideal=ideal),
            Entry(runner=Runner.TORCH, workload=_sleeping("1f1b", num_ranks), at_least=at_least, ideal=ideal),
        ),
        batches=12,
    )


def _gpt(schedule: str, num_chunks: int = 1, warmup: str = "plain") -> Workload:
    return Workload(
        name=f"race-gpt-{schedule}",
        warmup=warmup,
        model=ModelKind.GPT,
        schedule=schedule,
        num_ranks=2,
        num_microbatches=2,
        num_chunks=num_chunks,
    )


RACES: dict[str, Race] = {
    race.name: race
    for race in (
        _sleep_race(4, at_least=1.68),
        _sleep_race(8, at_least=1.8),
        Race(
            name="async-gpt",
            entries=(
                Entry(runner=Runner.OURS, workload=_gpt("2bw")),
                Entry(runner=Runner.TORCH, workload=_gpt("1f1b"), at_least=1.42, ideal=1.5),
                Entry(runner=Runner.TORCH, workload=_gpt("interleaved", 2), at_least=1.22),
                Entry(runner=Runner.OURS, workload=_gpt("2bw", warmup="eager")),
                Entry(runner=Runner.OURS, workload=_gpt("1f1b")),
                Entry(runner=Runner.OURS, workload=_gpt("interleaved", 2)),
            ),
            batches=8,
        ),
    )
}
