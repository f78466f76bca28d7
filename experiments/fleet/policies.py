"""Shares of a fleet's devices for each job, as linear programs (Gavel, OSDI 2020).

X[m, k]     part of the time for which job m runs on kind k     sum over k: at most 1
demand      devices of a job times its parts                    sum over m: at most the devices of that kind
rate        samples/s of job m: sum over k of throughputs[m, k] X[m, k]

policy        objective
max-min       maximises the least rate relative to an equal split, by weight
finish-time   minimises the largest (time so far + time left) relative to an equal split from the start (Themis' rho)
makespan      finishes all jobs as early as possible
cost          minimises the cost of at least the rates of an equal split
deadline      minimises the cost at which no deadline is missed; if impossible, misses each by the same factor

The first three distribute the remaining devices by a second program that keeps the first's result. An equal split gives
each job the same share, by weight, of each kind.

`run_fleet` simulates a fleet over time in rounds (Gavel's mechanism, section 5):

a job arrives or ends   new shares
a round                 jobs in order of share / past rounds on that kind; each takes its devices, if available
a job's device changes  it loses `restart_seconds` of that round
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog  # type: ignore[import-untyped]

from ...partition.strict import check_figures, count, number, printable
from ...partition.topology import Floats

POLICIES = ("max-min", "finish-time", "makespan", "cost", "deadline", "equal")
_HALVINGS = 30  # of the interval of rho
_SLACK = 1e-7  # relative loss of the first program's result that the second one may cause


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetJob:
    """A training job.

    Raises ValueError for invalid figures, and for a job that runs nowhere.
    """

    name: str
    throughputs: tuple[float, ...]  # by kind of device, of all its devices together [samples/s]; 0: does not run there
    samples: float  # to train on in total
    devices: int = 1  # used at once, all of one kind
    weight: float = 1.0  # relative to the other jobs
    arrival: float = 0.0  # time of its arrival [s]
    deadline: float | None = None  # latest time of its end [s]; None: no limit

    def __post_init__(self) -> None:
        where = f"job {printable('job', self.name)!r}"
        check_figures(self, where, positive=("samples", "weight", "deadline"))
        count(f"{where}: devices", self.devices)
        rates = tuple(number(f"{where}: throughputs[{k}]", rate) for k, rate in enumerate(self.throughputs))
        object.__setattr__(self, "throughputs", rates)
        if not any(rates):
            raise ValueError(f"{where}: throughputs {list(rates)}: expected one above 0, on some kind of device")
        if self.deadline is not None and self.deadline <= self.arrival:
            raise ValueError(f"{where}: deadline {self.deadline:g}: expected one after its arrival, {self.arrival:g}")


class Shares:
    """The programs for jobs on a fleet at one time.

    Arguments:
        counts: [K] devices of each kind.
        prices: [K] of a device [money/s].
        left: [m] remaining samples; None: all.
        now: the time [s].
    """

    def __init__(
        self,
        jobs: Sequence[FleetJob],
        counts: Sequence[int],
        *,
        prices: Sequence[float] | None = None,
        left: Sequence[float] | None = None,
        now: float = 0.0,
    ) -> None:
        for job in jobs:
            if len(job.throughputs) != len(counts):
                raise ValueError(
                    f"job {job.name!r}: {len(job.throughputs)} throughputs for {len(counts)} kinds of devices: "
                    f"expected one a kind"
                )
            if all(rate == 0 or job.devices > have for rate, have in zip(job.throughputs, counts, strict=True)):
                raise ValueError(
                    f"job {job.name!r} takes {job.devices} devices of a kind: expected at most {max(counts)}, which "
                    f"some kind has on which it runs"
                )
        self.jobs, self.now = jobs, now
        self.counts = np.array(counts, dtype=np.float64)
        self.devices = np.array([job.devices for job in jobs], dtype=np.float64)
        fits = self.devices[:, None] <= self.counts
        self.rates = np.array([job.throughputs for job in jobs]) * fits
        self.weights = np.array([job.weight for job in jobs])
        self.left = np.array([job.samples for job in jobs] if left is None else left, dtype=np.float64)
        self.prices = np.array([1.0] * len(counts) if prices is None else prices, dtype=np.float64)
        self.fits = fits & (self.rates > 0)

    @property
    def equal(self) -> Floats:
        parts = self.weights[:, None] / self.weights.sum() * self.counts / self.devices[:, None]
        parts = np.where(self.devices[:, None] <= self.counts, parts, 0.0)
        return np.asarray(parts / np.maximum(1.0, parts.sum(axis=1, keepdims=True)))

    def rate(self, shares: Floats) -> Floats:
        return np.asarray((self.rates * shares).sum(axis=1))

    def of(self, policy: str) -> Floats:
        """[m, K] the policy's shares. Raises ValueError for an unknown policy."""
        match policy:
            case "max-min":
                return self._most_of_least(self.rate(self.equal))
            case "makespan":
                return self._most_of_least(self.left)
            case "finish-time":
                return self._finish_time()
            case "cost":
                found = self._for_least_money(self.rate(self.equal))
                assert found is not None
                return found
            case "deadline":
                return self._deadlines()
            case "equal":
                return self.equal
        raise ValueError(f"policy {policy!r}: expected one of {', '.join(POLICIES)}")

    def _most_of_least(self, wanted: Floats) -> Floats:
        """The largest z with rate >= z wanted for all, then the most work relative to the best kinds."""
        size = self.rates.size
        objective = np.zeros(size + 1)
        objective[-1] = -1.0
        found = self._solve(objective, least=(wanted, 0.0), extra=1)
        assert found is not None
        return self._rest(wanted * found[-1])

    def _rest(self, least: Floats) -> Floats:
        gain = -(self.rates / self.rates.max(axis=1, keepdims=True)).ravel()
        found = self._solve(gain, least=(np.zeros_like(least), least * (1 - _SLACK)))
        assert found is not None
        return found.reshape(self.rates.shape)

    def _finish_time(self) -> Floats:
        """Rho by bisection: it determines the required rates."""
        spent = np.array([self.now - job.arrival for job in self.jobs])
        alone = spent + self.left / self.rate(self.equal)
        low, high = 0.0, 1.0  # the equal split has 1
        shares = self.equal
        for _ in range(_HALVINGS):
            rho = (low + high) / 2
            time = rho * alone - spent
            least = np.where(time > 0, self.left / np.maximum(time, 1e-300), math.inf)
            best = self.rates.max(axis=1)
            found = None
            if (least <= best).all():
                found = self._solve(np.zeros(self.rates.size), least=(np.zeros_like(least), least))
            if found is None:
                low = rho
            else:
                high, shares = rho, found.reshape(self.rates.shape)
        return self._rest(self.rate(shares))

    def _deadlines(self) -> Floats:
        time = np.array([math.inf if job.deadline is None else job.deadline - self.now for job in self.jobs])
        wanted = np.where(time > 0, self.left / np.maximum(time, 1e-300), 0.0)  # a missed deadline needs no rate
        shares = self._for_least_money(wanted) if wanted.any() else self._rest(wanted)
        return self._most_of_least(wanted) if shares is None else shares

    def _for_least_money(self, least: Floats) -> Floats | None:
        money = (self.prices * self.devices[:, None]).ravel()
        found = self._solve(money, least=(np.zeros_like(least), least * (1 - _SLACK)))
        return None if found is None else found.reshape(self.rates.shape)

    def _solve(self, objective: Floats, *, least: tuple[Floats, Floats | float], extra: int = 0) -> Floats | None:
        """The program's variables; None: no shares have rate >= least[0] z + least[1]. `extra`: 1 adds the variable z
        after the shares."""
        jobs, kinds = self.rates.shape
        size = jobs * kinds
        rows = np.zeros((jobs + kinds + jobs, size + extra))
        for m in range(jobs):
            own = slice(m * kinds, (m + 1) * kinds)
            rows[m, own] = 1.0
            rows[jobs + kinds + m, own] = -self.rates[m]
        for k in range(kinds):
            rows[jobs + k, k:size:kinds] = self.devices
        if extra:
            rows[jobs + kinds :, -1] = least[0]
        limits = np.concatenate([np.ones(jobs), self.counts, -np.broadcast_to(least[1], (jobs,))])
        scale = np.maximum(np.abs(rows).max(axis=1), 1e-300)
        bounds = [(0.0, 1.0 if each else 0.0) for each in self.fits.ravel()] + [(0.0, None)] * extra
        found = linprog(objective, A_ub=rows / scale[:, None], b_ub=limits / scale, bounds=bounds, method="highs")
        return np.asarray(found.x) if found.status == 0 else None


# --- a fleet over time ---


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRun:
    """Result of a fleet."""

    jobs: tuple[FleetJob, ...]
    completions: tuple[float, ...]  # by job, the time of its end [s]
    rounds: int
    cost: float  # of the devices in use [money]

    @property
    def makespan(self) -> float:
        return max(self.completions) - min(job.arrival for job in self.jobs)

    @property
    def mean_completion(self) -> float:
        return float(np.mean([end - job.arrival for end, job in zip(self.completions, self.jobs, strict=True)]))

    @property
    def missed(self) -> tuple[str, ...]:
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
