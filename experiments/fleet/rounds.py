"""A fleet over time, simulated in rounds, by a policy's shares for the present jobs.

    a job arrives or ends   new shares
    a round                 jobs in order of share / past rounds on that kind; each takes its devices, if available
    a job's device changes  it loses `restart_seconds` of that round

Gavel's mechanism (OSDI 2020, section 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...partition.strict import number
from ...partition.topology import Floats
from .policies import FleetJob, Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRun:
    """Result of a fleet.

    Arguments:
        completions: by job, the time of its end [s].
        rounds: their number.
        cost: of the devices in use [money].
    """

    jobs: tuple[FleetJob, ...]
    completions: tuple[float, ...]
    rounds: int
    cost: float

    @property
    def makespan(self) -> float:
        return max(self.completions) - min(job.arrival for job in self.jobs)

    @property
    def mean_completion(self) -> float:
        """From arrival to end [s]."""
        return float(np.mean([end - job.arrival for end, job in zip(self.completions, self.jobs, strict=True)]))

    @property
    def missed(self) -> tuple[str, ...]:
        """Jobs that ended after their deadline."""
        pairs = zip(self.jobs, self.completions, strict=True)
        return tuple(job.name for job, end in pairs if job.deadline is not None and end > job.deadline)


def run_fleet(
    jobs: Sequence[FleetJob],
    counts: Sequence[int],
    policy: str,
    *,
    prices: Sequence[float] | None = None,
    round_seconds: float = 360.0,
    restart_seconds: float = 0.0,
    is_agnostic: bool = False,
) -> FleetRun:
    """Run all jobs to their end. `is_agnostic`: the policy ignores the kinds of devices, like schedulers with one speed
    per job. Raises ValueError for an empty fleet, and for a restart as long as a round."""
    if not jobs:
        raise ValueError("a fleet without jobs: expected at least one")
    if policy == "deadline" and all(job.deadline is None for job in jobs):
        raise ValueError("policy 'deadline': no job has one: expected a deadline, or another policy")
    number("round_seconds", round_seconds, positive=True)
    if number("restart_seconds", restart_seconds) >= round_seconds:
        raise ValueError(f"restart_seconds={restart_seconds:g}: expected less than a round, {round_seconds:g}")
    seen = [replace(job, throughputs=_alike(job.throughputs)) for job in jobs] if is_agnostic else list(jobs)
    left = np.array([job.samples for job in jobs])
    ends = np.full(len(jobs), math.inf)
    had = np.zeros((len(jobs), len(counts)))
    before: dict[int, int] = {}
    shares: Floats = np.zeros_like(had)
    known: list[int] = []
    now, cost, rounds = min(job.arrival for job in jobs), 0.0, 0
    money = [1.0] * len(counts) if prices is None else prices
    while not np.isfinite(ends).all():
        here = [m for m, job in enumerate(jobs) if job.arrival <= now and not math.isfinite(ends[m])]
        if not here:
            now = min(job.arrival for m, job in enumerate(jobs) if not math.isfinite(ends[m]))
            continue
        if here != known:
            own = Shares([seen[m] for m in here], counts, prices=prices, left=left[here].tolist(), now=now)
            shares[here], known = own.of(policy), here
        placed = _place(here, shares, had, seen, counts)
        for m, k in placed.items():
            lost = restart_seconds if before.get(m) != k else 0.0
            took = lost + left[m] / jobs[m].throughputs[k]
            if took <= round_seconds:
                ends[m] = now + took
            left[m] -= jobs[m].throughputs[k] * (min(took, round_seconds) - lost)
            cost += min(took, round_seconds) * jobs[m].devices * money[k]
            had[m, k] += 1
        before, now, rounds = placed, now + round_seconds, rounds + 1
    return FleetRun(jobs=tuple(jobs), completions=tuple(ends.tolist()), rounds=rounds, cost=cost)


def _alike(rates: Sequence[float]) -> tuple[float, ...]:
    runs = [rate for rate in rates if rate]
    return tuple(sum(runs) / len(runs) if rate else 0.0 for rate in rates)


def _place(
    here: Sequence[int], shares: Floats, had: Floats, jobs: Sequence[FleetJob], counts: Sequence[int]
) -> dict[int, int]:
    """By job its kind in this round: by descending share per past round, then any job that runs there."""
    free = list(counts)
    wanted = []
    for m in here:
        for k, rate in enumerate(jobs[m].throughputs):
            if rate > 0:
                share = float(shares[m, k])
                wanted.append((-share / (had[m, k] + 1e-3) if share > 1e-9 else 0.0, -rate, m, k))
    placed: dict[int, int] = {}
    for _, _, m, k in sorted(wanted):
        if m not in placed and jobs[m].devices <= free[k]:
            placed[m] = k
            free[k] -= jobs[m].devices
    return placed
