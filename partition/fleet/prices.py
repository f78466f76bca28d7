"""A job on devices whose price changes and which are taken away: what it costs by which plan, and by which at best.

A trace is a table of moments: from each to the next a kind of device has a price, or is not to be had. A plan makes so
many samples/s for so many devices of a kind. Whoever begins, or changes the plan, restarts: `restart_seconds` are paid
and make nothing. A checkpoint stands every `checkpoint_every` seconds and takes `checkpoint_seconds`; what was made
behind the last one is lost where the device is taken away.

replay      one plan wherever its kind is to be had
cheapest    which plan runs in which part of the trace, for the least money by the deadline: a mixed-integer program
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
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from scipy.sparse import lil_array  # type: ignore[import-untyped]

from ..strict import check_figures, count, number, printable

_HEADER = ("seconds", "kind", "price")


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
        rows = list(csv.reader(io.StringIO(text)))
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


def replay(
    used: Sequence[PricedPlan | None],
    trace: PriceTrace,
    samples: float,
    charges: Charges,
    deadline: float | None = None,
) -> PricedRun:
    """Run the plan of each part, one after the other, until the samples are made; waits where its kind is not to be
    had. A device that goes on with the same plan does not restart."""
    made = cost = lost = 0.0
    restarts, begun = 0, None  # when the plan that runs was begun
    sure, names = 0.0, list[str | None]()
    end = math.inf if deadline is None else deadline
    running: PricedPlan | None = None
    for part, (begin, until) in enumerate(pairwise(trace.times)):
        until = min(until, end)
        plan = used[part] if begin < until else None
        price = None if plan is None else trace.prices.get(plan.kind, (None,) * len(used))[part]
        if price is None:
            plan = None
        if plan != running:
            if running is not None and begun is not None:  # taken away, or left: a planned change keeps all
                went = trace.prices[running.kind][part] is None
                keeps = charges.kept(begin - begun - charges.restart_seconds) * running.rate if went else made - sure
                lost, made = lost + made - sure - keeps, sure + keeps
            sure, begun, running = made, begin, plan
            restarts += plan is not None
        names.append(None if plan is None else plan.name)
        if plan is None or price is None or begun is None:
            continue
        first = max(begin, begun + charges.restart_seconds)
        rate = plan.rate * charges.share
        if made + rate * max(0.0, until - first) >= samples * (1 - 1e-12):
            done = first + (samples - made) / rate
            names += [None] * (len(used) - part - 1)
            cost += (done - begin) * price * plan.devices
            return PricedRun(
                used=tuple(names),
                cost=cost,
                seconds=done - trace.times[0],
                samples=samples,
                lost=lost,
                restarts=restarts,
            )
        made += rate * max(0.0, until - first)
        cost += (until - begin) * price * plan.devices
    return PricedRun(tuple(names), cost, None, made, lost, restarts)


def cheapest(
    plans: Sequence[PricedPlan], trace: PriceTrace, samples: float, charges: Charges, deadline: float | None = None
) -> PricedRun:
    """The least money by which the samples are made by the deadline, knowing the trace; never dearer than one plan.
    Raises ValueError where no plans make them in time."""
    candidates = [replay([plan] * len(trace.lengths), trace, samples, charges, deadline) for plan in plans]
    found = _solve(plans, trace, samples, charges, deadline)
    if found is not None:
        candidates.append(replay(found, trace, samples, charges, deadline))
    done = [each for each in candidates if each.seconds is not None]
    if not done:
        most = max(candidates, key=lambda each: each.samples)
        raise ValueError(
            f"{samples:g} samples by {'the end of the trace' if deadline is None else f'{deadline:g} s'}: the most "
            f"that these plans make is {most.samples:g}: expected a later deadline, or faster plans"
        )
    return min(done, key=lambda each: each.cost)


def _solve(
    plans: Sequence[PricedPlan], trace: PriceTrace, samples: float, charges: Charges, deadline: float | None
) -> list[PricedPlan | None] | None:
    """u[i, c]: seconds of part i on plan c; on[i, c]: whether; begin[i, c]: whether it restarts there."""
    end = math.inf if deadline is None else deadline
    lengths = [max(0.0, min(until, end) - begin) for begin, until in pairwise(trace.times)]
    pairs = [
        (i, c)
        for i, length in enumerate(lengths)
        for c, plan in enumerate(plans)
        if length > 0 and trace.prices.get(plan.kind, (None,) * len(lengths))[i] is not None
    ]
    size, at = len(pairs), {pair: n for n, pair in enumerate(pairs)}
    if not pairs:
        return None
    rows, low, high = lil_array((3 * size + len(lengths) + 1, 3 * size)), [], []
    money, work = np.zeros(3 * size), 3 * size + len(lengths)
    for n, (i, c) in enumerate(pairs):
        plan, price = plans[c], trace.prices[plans[c].kind][i]
        assert price is not None
        money[n] = price * plan.devices
        rows[3 * n, n], rows[3 * n, size + n] = 1.0, -lengths[i]  # u <= length on
        rows[3 * n + 1, 2 * size + n], rows[3 * n + 1, size + n] = 1.0, -1.0  # begin >= on - on of the part in front
        if (i - 1, c) in at:
            rows[3 * n + 1, size + at[i - 1, c]] = 1.0
        rows[3 * n + 2, n], rows[3 * n + 2, 2 * size + n] = (
            1.0,
            -min(charges.restart_seconds, lengths[i]),
        )
        low += [-np.inf, 0.0, 0.0]
        high += [0.0, np.inf, np.inf]
        rows[3 * size + i, size + n] = 1.0  # one plan a part
        rows[work, n] = plan.rate * charges.share
        rows[work, 2 * size + n] = -plan.rate * charges.share * charges.restart_seconds
    low += [-np.inf] * len(lengths) + [samples]
    high += [1.0] * len(lengths) + [np.inf]
    upper = np.concatenate([[lengths[i] for i, _ in pairs], np.ones(2 * size)])
    found = milp(
        money,
        constraints=LinearConstraint(rows.tocsr(), low, high),
        bounds=Bounds(np.zeros(3 * size), upper),
        integrality=np.concatenate([np.zeros(size), np.ones(2 * size)]),
        options={"time_limit": 60.0},
    )
    if found.x is None:
        return None
    used: list[PricedPlan | None] = [None] * len(lengths)
    for n, (i, c) in enumerate(pairs):
        if found.x[size + n] > 0.5:
            used[i] = plans[c]
    return used
