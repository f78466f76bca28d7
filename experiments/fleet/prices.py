"""A job on devices whose price changes and which may be withdrawn: its cost by a plan, and by the best plans.

A trace is a table of times: from each to the next a kind of device has a price, or is not available. A plan has a rate
[samples/s] on a number of devices of a kind. Beginning or changing a plan is a restart: `restart_seconds` are paid
without samples. A checkpoint is written every `checkpoint_every` seconds and takes `checkpoint_seconds`; samples after
the last one are lost when the device is withdrawn.

replay      one plan whenever its kind is available
cheapest    a plan per part of the trace, at the least cost by the deadline: keeps, part by part, all states that may
            still become the cheapest
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...partition.strict import check_figures, count, number, printable

_HEADER = ("seconds", "kind", "price")
_MOST = 1000  # states kept at once


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """A plan of a job: `devices` of a `kind`, and its `rate` [samples/s]."""

    name: str
    kind: str
    devices: int
    rate: float

    def __post_init__(self) -> None:
        where = f"plan {printable('plan', self.name)!r}"
        check_figures(self, where, positive=("rate",))
        count(f"{where}: devices", self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTrace:
    """Ascending times [s], and by kind the price from each time to the next [money per device and second]; None: not
    available."""

    times: tuple[float, ...]
    prices: Mapping[str, tuple[float | None, ...]]

    @classmethod
    def parse(cls, text: str, *, source: str = "trace") -> PriceTrace:
        """Read CSV: seconds, kind, price per device and hour (empty: not available from then on). A row of kind "end"
        ends it. Raises ValueError, with source and line, for times out of order, negative prices and non-numbers."""
        rows = list(csv.reader(io.StringIO(text, newline=None)))  # also ends lines at a lone carriage return
        if not rows or tuple(map(str.strip, rows[0])) != _HEADER:
            raise ValueError(f"{source}, line 1: {rows[:1]!r:.60}: expected {','.join(_HEADER)}")
        now: dict[str, float | None] = {}
        moments: list[tuple[float, dict[str, float | None]]] = []
        for line, row in enumerate(rows[1:], 2):
            where = f"{source}, line {line}"
            if len(row) != len(_HEADER):
                raise ValueError(f"{where}: {row!r:.60}: expected {','.join(_HEADER)}")
            at, kind, price = _number(f"{where}: seconds", row[0]), row[1].strip(), row[2].strip()
            if moments and at < moments[-1][0]:
                raise ValueError(f"{where}: seconds {at:g} after {moments[-1][0]:g}: expected times in order")
            if kind != "end":
                now = now | {kind: _number(f"{where}: price", price) / 3600 if price else None}
            if moments and moments[-1][0] == at:
                moments.pop()
            moments.append((at, now))
        if len(moments) < 2:
            raise ValueError(f"{source}: {len(moments)} moments: expected at least two; a row 'SECONDS,end,' ends it")
        kinds = moments[-1][1]
        return cls(
            times=tuple(at for at, _ in moments),
            prices={kind: tuple(each.get(kind) for _, each in moments[:-1]) for kind in kinds},
        )

    @property
    def lengths(self) -> list[float]:
        return [until - begin for begin, until in pairwise(self.times)]


def _number(where: str, text: str) -> float:
    try:
        return number(where, float(text))
    except ValueError as error:
        raise ValueError(
            str(error) if str(error).startswith(where) else f"{where}: {text!r}: expected a number"
        ) from None


class PricedRun(NamedTuple):
    """A job through a trace."""

    used: tuple[str | None, ...]  # by part of the trace, the plan's name; None: it waits
    cost: float  # [money]
    seconds: float | None  # until its end; None: not done by the trace's end or the deadline
    samples: float  # made and kept
    lost: float  # samples made and lost
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Charges:
    """Seconds of interruptions: from getting a device to the first step, and the interval (0: only at the end) and
    duration of checkpoints, as `stagewright train` measures them."""

    restart_seconds: float = 0.0
    checkpoint_every: float = 0.0
    checkpoint_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_figures(self, "charges")

    @property
    def share(self) -> float:
        every = self.checkpoint_every
        return every / (every + self.checkpoint_seconds) if every else 1.0

    def kept(self, seconds: float) -> float:
        """Seconds, of `seconds` after a restart, whose samples are in a checkpoint when the device is withdrawn."""
        if not self.checkpoint_every:
            return 0.0
        whole = math.floor(seconds / (self.checkpoint_every + self.checkpoint_seconds) + 1e-9)
        return whole * self.checkpoint_every


class _Way(NamedTuple):
    """State of a job between two parts of a trace: a plan runs since `begun`, with `sure` samples at that time."""

    before: _Way | None = None  # the state before the previous part
    running: PricedPlan | None = None
    begun: float = 0.0
    sure: float = 0.0
    made: float = 0.0
    cost: float = 0.0
    lost: float = 0.0
    restarts: int = 0
    done: float | None = None  # time at which all samples are made; None: not yet


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    trace: PriceTrace
    samples: float
    charges: Charges
    end: float

    def __post_init__(self) -> None:
        number("samples", self.samples, positive=True)

    def price(self, plan: PricedPlan | None, part: int) -> float | None:
        begin = self.trace.times[part]
        prices = self.trace.prices.get(plan.kind) if plan is not None and begin < self.end else None
        price = None if prices is None else prices[part]
        return None if plan is None or price is None else price * plan.devices

    def after(self, way: _Way, part: int, plan: PricedPlan | None) -> _Way:
        """The state after one more part, with this plan if it can run."""
        begin, until = self.trace.times[part], min(self.trace.times[part + 1], self.end)
        price, charges = self.price(plan, part), self.charges
        plan = None if price is None else plan
        _, running, begun, sure, made, cost, lost, restarts, _ = way
        if plan != running:
            if running is not None and self.trace.prices[running.kind][part] is None:  # else it is left, with all
                keeps = sure + charges.kept(begin - begun - charges.restart_seconds) * running.rate
                lost, made = lost + made - keeps, keeps
            sure, begun, restarts = made, begin if plan else 0.0, restarts + (plan is not None)
        if plan is None or price is None:
            return _Way(way, None, begun, sure, made, cost, lost, restarts)
        first, rate = max(begin, begun + charges.restart_seconds), plan.rate * charges.share
        more = rate * max(0.0, until - first)
        if made + more < self.samples * (1 - 1e-12):
            return _Way(way, plan, begun, sure, made + more, cost + (until - begin) * price, lost, restarts)
        done = first + (self.samples - made) / rate
        return _Way(way, plan, begun, sure, self.samples, cost + (done - begin) * price, lost, restarts, done)

    def least(self, part: int, plans: Sequence[PricedPlan], samples: Sequence[float]) -> list[float]:
        """Lower bound of the cost of so many samples from this part on; infinite if they cannot be made."""
        steps = []  # by part: cost per sample of its cheapest plan, samples of its fastest plan
        for i in range(part, len(self.trace.lengths)):
            seconds = max(0.0, min(self.trace.times[i + 1], self.end) - self.trace.times[i])
            known = [(price, plan.rate) for plan in plans if (price := self.price(plan, i)) is not None]
            if known:
                most = max(rate for _, rate in known) * self.charges.share * seconds
                steps.append((min(price / rate for price, rate in known) / self.charges.share, most))
        a_sample, most_samples = np.array([(0.0, 0.0), *sorted(steps)]).T
        whole = np.cumsum(most_samples)
        needed = np.asarray(samples)
        money = np.interp(needed, whole, np.cumsum(a_sample * most_samples))
        return np.where(needed > whole[-1] * (1 + 1e-9), np.inf, money).tolist()  # type: ignore[no-any-return]

    def result(self, way: _Way) -> PricedRun:
        names, at = list[str | None](), way
        while at.before is not None:
            names.append(None if at.running is None else at.running.name)
            at = at.before
        names[:0] = [None] * (len(self.trace.lengths) - len(names))
        seconds = None if way.done is None else way.done - self.trace.times[0]
        return PricedRun(tuple(names[::-1]), way.cost, seconds, way.made, way.lost, way.restarts)


def replay(
    used: Sequence[PricedPlan | None],
    trace: PriceTrace,
    samples: float,
    charges: Charges,
    deadline: float | None = None,
) -> PricedRun:
    """Run the plan of each part until the samples are made; wait while its kind is not available. Continuing with the
    same plan needs no restart."""
    end = math.inf if deadline is None else deadline
    job, way = _Job(trace=trace, samples=samples, charges=charges, end=end), _Way()
    for part, plan in enumerate(used):
        way = way if way.done is not None else job.after(way, part, plan)
    return job.result(way)


def cheapest(
    plans: Sequence[PricedPlan], trace: PriceTrace, samples: float, charges: Charges, deadline: float | None = None
) -> PricedRun:
    """The run of least cost that makes the samples by the deadline, knowing the trace; never dearer than one plan.

    A state is dropped if another with the same plan since the same time has made more at a lower cost, or if the rest
    would be too expensive even without restarts. Of over 1,000 remaining states, as in long traces, the most promising
    are kept, and the answer may be some 0.1% too expensive. Raises ValueError if no plans finish in time.
    """
    single = [replay([plan] * len(trace.lengths), trace, samples, charges, deadline) for plan in plans]
    best = min((each for each in single if each.seconds is not None), key=lambda each: each.cost, default=None)
    end = math.inf if deadline is None else deadline
    job, ways = _Job(trace=trace, samples=samples, charges=charges, end=end), [_Way()]
    for part in range(len(trace.lengths)):
        found: dict[tuple[PricedPlan | None, float], list[_Way]] = {}
        runs = [None, *(plan for plan in plans if job.price(plan, part) is not None)]
        for way in (job.after(way, part, plan) for way in ways for plan in runs):
            if way.done is None:
                found.setdefault((way.running, way.begun), []).append(way)
            elif best is None or way.cost < best.cost:
                best = job.result(way)
        ways = [way for alike in found.values() for way in _front(alike)]
        left = job.least(part + 1, plans, [samples - way.made for way in ways])
        limit = math.inf if best is None else best.cost
        hopeful = [(way.cost + more, way) for way, more in zip(ways, left, strict=True) if way.cost + more < limit]
        if len(hopeful) > _MOST:  # of states with a similar number of samples, the most promising one
            hopeful.sort(key=lambda each: -each[0])
            hopeful = [*{int(each[1].made / samples * _MOST): each for each in hopeful}.values()]
        ways = [way for _, way in hopeful]
    if best is None:
        most = max(each.samples for each in single)
        raise ValueError(
            f"{samples:g} samples by {'the end of the trace' if deadline is None else f'{deadline:g} s'}: the most "
            f"that these plans make is {most:g}: expected a later deadline, or faster plans"
        )
    return best


def _front(ways: list[_Way]) -> list[_Way]:
    kept: list[_Way] = []
    for way in sorted(ways, key=lambda each: (-each.made, each.cost)):
        if not kept or way.cost < kept[-1].cost:
            kept.append(way)
    return kept
