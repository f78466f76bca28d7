"""A job on devices whose price changes and which are taken away: what it costs by which plan, and by which at best.

A trace is a table of moments: from each to the next a kind of device has a price, or is not to be had. A plan makes so
many samples/s for so many devices of a kind. Whoever begins, or changes the plan, restarts: `restart_seconds` are paid
and make nothing. A checkpoint stands every `checkpoint_every` seconds and takes `checkpoint_seconds`; what was made
behind the last one is lost where the device is taken away.

replay      one plan wherever its kind is to be had
cheapest    which plan runs in which part of the trace, for the least money by the deadline: part by part, what may
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
_MOST = 1000  # ways that are followed at once


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """A plan to run a job by.

    Arguments:
        name: for people.
        kind: of device.
        devices: of that kind.
        rate: that it makes [samples/s].
    """

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
    """Prices over time.

    Arguments:
        times: ascending [s]; the last one ends the trace.
        prices: by kind, one from each time to the next [money a device and second]; None: not to be had.
    """

    times: tuple[float, ...]
    prices: Mapping[str, tuple[float | None, ...]]

    @classmethod
    def parse(cls, text: str, *, source: str = "trace") -> PriceTrace:
        """Read CSV: seconds, kind, price a device and hour; an empty price: not to be had from then on. A row of a kind
        "end" ends it. Raises ValueError, with source and line, for times out of order, negative prices and whatever is
        no number."""
        rows = list(csv.reader(io.StringIO(text, newline=None)))  # a carriage return alone ends a line, too
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
                raise ValueError(f"{where}: seconds {at:g} behind {moments[-1][0]:g}: expected times in order")
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
    """A job through a trace.

    Arguments:
        used: by part of the trace, the plan's name; None: it waits.
        cost: [money].
        seconds: until it is done; None: it is not, by the trace's end or the deadline.
        samples: that were made and kept.
        lost: samples that were made and taken away.
        restarts: of them.
    """

    used: tuple[str | None, ...]
    cost: float
    seconds: float | None
    samples: float
    lost: float
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Charges:
    """Seconds that interruptions take, as measured (`stagewright train` writes those of its checkpoints).

    Arguments:
        restart_seconds: from having a device to the first step.
        checkpoint_every, checkpoint_seconds: one so often, for so long; every 0: none but at the end.
    """

    restart_seconds: float = 0.0
    checkpoint_every: float = 0.0
    checkpoint_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_figures(self, "charges")

    @property
    def share(self) -> float:
        """Part of the time that makes samples."""
        every = self.checkpoint_every
        return every / (every + self.checkpoint_seconds) if every else 1.0

    def kept(self, seconds: float) -> float:
        """Seconds, of so many behind a restart, whose samples a checkpoint has when the device goes."""
        if not self.checkpoint_every:
            return 0.0
        whole = math.floor(seconds / (self.checkpoint_every + self.checkpoint_seconds) + 1e-9)
        return whole * self.checkpoint_every


class _Way(NamedTuple):
    """A job between two parts of a trace: a plan runs since `begun`, where so many samples were `sure`.

    Arguments:
        before: the way to the part in front.
        done: moment at which all samples are made; None: they are not.
    """

    before: _Way | None = None
    running: PricedPlan | None = None
    begun: float = 0.0
    sure: float = 0.0
    made: float = 0.0
    cost: float = 0.0
    lost: float = 0.0
    restarts: int = 0
    done: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Samples to make along a trace, until `end`."""

    trace: PriceTrace
    samples: float
    charges: Charges
    end: float

    def __post_init__(self) -> None:
        number("samples", self.samples, positive=True)

    def price(self, plan: PricedPlan | None, part: int) -> float | None:
        """The price of a plan's devices; None where they are not to be had."""
        begin = self.trace.times[part]
        prices = self.trace.prices.get(plan.kind) if plan is not None and begin < self.end else None
        price = None if prices is None else prices[part]
        return None if plan is None or price is None else price * plan.devices

    def after(self, way: _Way, part: int, plan: PricedPlan | None) -> _Way:
        """Behind one more part, with this plan where it can run."""
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
        """Money that so many samples cost at least from this part on; infinite where they cannot be made."""
        steps = []  # money a sample, and the samples, of a part whose best plan costs what its cheapest one costs
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
    """Run the plan of each part, one after the other, until the samples are made; waits where its kind is not to be
    had. A device that goes on with the same plan does not restart."""
    end = math.inf if deadline is None else deadline
    job, way = _Job(trace=trace, samples=samples, charges=charges, end=end), _Way()
    for part, plan in enumerate(used):
        way = way if way.done is not None else job.after(way, part, plan)
    return job.result(way)


def cheapest(
    plans: Sequence[PricedPlan], trace: PriceTrace, samples: float, charges: Charges, deadline: float | None = None
) -> PricedRun:
    """The least money by which the samples are made by the deadline, knowing the trace; never dearer than one plan.

    A way is followed unless one with the same plan since the same moment has made more for less money, or what is left
    costs too much even without restarts. Where that leaves over 1,000, as in long traces, those that promise most are,
    and the answer may be some 0.1% too dear. Raises ValueError where no plans make them in time.
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
        if len(hopeful) > _MOST:  # of those that have made about as much, the one that promises most
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
    """Those to which none has made as much for less money."""
    kept: list[_Way] = []
    for way in sorted(ways, key=lambda each: (-each.made, each.cost)):
        if not kept or way.cost < kept[-1].cost:
            kept.append(way)
    return kept
