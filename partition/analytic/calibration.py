"""Steps that a user measured -> the constants that they show, if these help to predict other steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from ..cluster import Cluster
from ..strict import check_figures, fail, number
from ..topology import Floats
from .device_model import DeviceModel
from .fit import FITTED, FREE, fit_device, with_values

NOISE = 0.04  # by which equal runs differ, as a part
SHRUNK = 0.8  # of the range before a fit, as a part: rows that leave less of it show a constant
LEAST_PLANS = 2  # to judge a fit by those that are left out
PLANS_DIFFER = 0.05  # by which predictions for one machine are off differently from plan to plan, as a part
LEAST_GAIN = 0.005  # on average over those, as a part: by less, equal runs differ
_FASTEST = FITTED["compute"].most  # scale of devices
_RATES = ("bandwidth", "reduce_bandwidth", "message_bandwidth")
_SECONDS = ("latency", "reduce_latency", "message_seconds")
_ADDED = ("wave_outputs", "kernel_seconds", "hop_seconds")  # a step grows with them; by the others it is divided


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """How many times as fast a cluster is as its file and the profiles say: what `calibrate` fits to profiles.

    Arguments:
        compute: its devices, at F, B, I, W and updates.
        links: messages and all-reduces, with their latencies.

    >>> Scales(compute=0.5, links=2.0).of(Cluster.parse("2:net=1GB/s@2us")).levels[0].latency
    1e-06
    """

    compute: float = 1.0
    links: float = 1.0

    def __post_init__(self) -> None:
        check_figures(self, "scales", positive=("compute", "links"))

    def of(self, cluster: Cluster) -> Cluster:
        """The cluster so many times as fast."""
        by, levels = self.links, []
        for level in cluster.levels:
            figures = {name: getattr(level, name) for name in (*_RATES, *_SECONDS)}
            scaled = {name: each and (each * by if name in _RATES else each / by) for name, each in figures.items()}
            levels.append(replace(level, **scaled))
        kinds = tuple(replace(kind, speed=kind.speed * self.compute) for kind in cluster.kinds)
        links = tuple((src, dst, bandwidth * by, latency / by) for src, dst, bandwidth, latency in cluster.node_links)
        return replace(cluster, levels=tuple(levels), kinds=kinds, node_links=links)


Constants = TypeVar("Constants", bound=DeviceModel | Scales)


class _Row(Protocol):
    @property
    def seconds(self) -> float: ...


Row = TypeVar("Row", bound=_Row)
NO_FIT, SCALE, MORE = "no fit", "one scale", "more constants"


class FittedConstant(NamedTuple):
    """A constant before and after the fit, and the ends of its 95% range."""

    before: float
    after: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration(Generic[Constants]):
    """The result of `calibrate`.

    Arguments:
        constants: as fitted, or as they were given where no fit helps.
        choice: "no fit", "one scale" or "more constants".
        fitted: by name of each constant that was fitted.
        before, after: [rows] predicted without and with the fit [s].
        left_out: by choice, [rows] each predicted by a fit to the rows of other plans [s]; empty where there are too
            few.
    """

    constants: Constants
    choice: str
    fitted: Mapping[str, FittedConstant]
    before: tuple[float, ...]
    after: tuple[float, ...]
    left_out: Mapping[str, tuple[float, ...]]


def calibrate(
    evaluate: Callable[[Row, Constants], float], rows: Sequence[Row], start: Constants
) -> Calibration[Constants]:
    """The constants of `start` that measured steps show, as many as help to predict steps which are left out.

    Three choices are compared: `start` as it is; one scale (`matrix_efficiency`, or `Scales.compute`); and all
    constants that the rows show, half as many as rows at most: the others stay. Each row is predicted by fits to the
    rows of other plans (equal predictions are of one), and more constants are taken where they come closer by more than
    chance gives. With one plan the scale is fitted, less what plans of one machine differ by (the positive part of
    James and Stein's estimate). Outliers hardly count. Constants that are ideal in `start`, 1 or 0 s, begin at typical
    values.

    Arguments:
        evaluate: seconds of a row's plan with these constants; called about 20 times a row.
        rows: each with its measured `seconds`.

    Raises ValueError for no rows, for seconds that are no finite numbers above 0, and where half of the rows or more
    took less than their plans take on devices of any speed.

    >>> class Step(NamedTuple):
    ...     seconds: float
    ...     profiled: float
    >>> steps = [Step(2.0, 1.0), Step(3.9, 2.0), Step(6.0, 3.0)]
    >>> found = calibrate(lambda row, scales: row.profiled / scales.compute, steps, Scales())
    >>> found.choice, round(found.constants.compute, 2)
    ('one scale', 0.5)
    """
    goal = np.array([number(f"rows[{i}].seconds", row.seconds, positive=True) for i, row in enumerate(rows)])
    if not len(goal):
        fail("rows", rows, "at least one measured step")
    names, before = [name for name in FITTED if hasattr(start, name)], [evaluate(row, start) for row in rows]
    some = {NO_FIT: (), SCALE: names[:1], MORE: names}
    tangents = {kind: _Tangent.at_fit(evaluate, rows, start, some[kind]) for kind in (SCALE, MORE)}
    choice, left_out = SCALE, {NO_FIT: np.array(before)}
    different, plans = np.unique(before, return_inverse=True)
    if len(different) >= LEAST_PLANS:
        for kind, tangent in tangents.items():
            fits = [tangent.of(plans != one).fit(start) for one in range(len(different))]
            left_out[kind] = np.array([evaluate(row, fits[one]) for row, one in zip(rows, plans, strict=True)])
        off = {kind: abs(np.log(each / goal)) for kind, each in left_out.items()}
        choice = _closest({kind: np.bincount(plans, each) / np.bincount(plans) for kind, each in off.items()})
    if choice == SCALE and isinstance(start, Scales):
        least = [evaluate(row, replace(start, compute=_FASTEST)) for row in rows]
        _refuse_faster_than_links(goal, np.where(np.log(before / goal) > PLANS_DIFFER, least, 0.0))
    best = tangents.get(choice)
    found = start if best is None else best.fit(start)
    if len(different) < LEAST_PLANS:
        missed = max(float(np.median(abs(np.log(np.array(before) / goal)))), PLANS_DIFFER)
        known, trusted = getattr(start, names[0]), 1 - (PLANS_DIFFER / missed) ** 2
        scale = known * (getattr(found, names[0]) / known) ** trusted
        found, (choice, best) = replace(start, **{names[0]: scale}), (SCALE, best) if trusted else (NO_FIT, None)
    return Calibration(
        constants=found,
        choice=choice,
        fitted={} if best is None else best.ranges(start, found),
        before=tuple(before),
        after=tuple(evaluate(row, found) for row in rows),
        left_out={kind: tuple(each.tolist()) for kind, each in left_out.items()} if len(left_out) > 1 else {},
    )


def _refuse_faster_than_links(measured: Floats, least: Floats) -> None:
    """Raises ValueError where half of the measured steps are no longer than the `least` that compute can make them."""
    too_fast = measured <= least
    if 2 * too_fast.sum() >= len(measured):
        at = int(too_fast.argmax())
        wanted = f"more than {least[at]:.4g} s, which its plan takes on devices {_FASTEST:g} times as fast: measure "
        wanted += "the links again, stagewright profile --links --out cluster.json, or leave the row out"
        fail(f"rows[{at}].seconds", float(measured[at]), wanted)


def _closest(off: Mapping[str, Floats]) -> str:
    """More constants where they come closer by more than chance gives: one standard error of the gain, or, of few
    plans, which hardly show it, up to two. `off`: of each plan, |log|."""
    best, number = NO_FIT, len(off[NO_FIT])
    for kind in (SCALE, MORE):
        gain = off[best] - off[kind]
        error = gain.std(ddof=1) / math.sqrt(number)
        if gain.mean() > (1 + 2 / (number - 1)) * error + LEAST_GAIN:
            best = kind
    return best


class _Tangent(NamedTuple):
    """Seconds of rows near one model: linear functions of its constants, or of 1 / constant where steps are divided by
    it. Names and values [n] of the constants, in that form; seconds [rows], measured [rows], slopes [rows, n]."""

    names: tuple[str, ...]
    at: Floats
    seconds: Floats
    measured: Floats
    slopes: Floats

    @classmethod
    def near(
        cls,
        evaluate: Callable[[Row, Constants], float],
        rows: Sequence[Row],
        model: Constants,
        names: Sequence[str],
    ) -> _Tangent:
        at, seconds = _linear(model, names), np.array([evaluate(row, model) for row in rows])
        slopes = []
        for k, name in enumerate(names):
            moved = replace(model, **{name: 0.95 * getattr(model, name)})
            change = np.array([evaluate(row, moved) for row in rows]) - seconds
            slopes.append(change / (_linear(moved, names)[k] - at[k]))
        return cls(tuple(names), at, seconds, np.array([row.seconds for row in rows]), np.array(slopes).T)

    @classmethod
    def at_fit(
        cls,
        evaluate: Callable[[Row, Constants], float],
        rows: Sequence[Row],
        start: Constants,
        names: Sequence[str],
    ) -> _Tangent:
        """Near the fit that is found from near the start. Of a row's measured seconds the place alone is in it."""
        begin = _typical(start, names)
        return cls.near(evaluate, rows, cls.near(evaluate, rows, begin, names).fit(begin), names)

    def predict(self, model: DeviceModel | Scales) -> Floats:
        found = self.seconds + self.slopes @ (_linear(model, self.names) - self.at)
        return np.maximum(found, 1e-3 * self.seconds)

    def of(self, rows: Floats) -> _Tangent:
        """The tangent of the rows that a mask selects."""
        return self._replace(seconds=self.seconds[rows], measured=self.measured[rows], slopes=self.slopes[rows])

    @property
    def shown(self) -> tuple[str, ...]:
        """The scale, and of the other constants those that these rows show best: half as many in all as rows."""
        spread = np.array([FITTED[name].spread for name in self.names])
        left = self._spreads(self.names, NOISE, np.ones(len(self.seconds))) / spread
        others = [k for k in np.argsort(left[1:]) + 1 if left[k] < SHRUNK]
        most = {0, *others[: (len(self.seconds) - 1) // 2]}
        return tuple(name for k, name in enumerate(self.names) if k in most)

    def fit(self, start: Constants) -> Constants:
        """Constants that fit the rows, found from their median scale, in which outliers do not count."""
        names = self.shown
        scaled = found = self._scaled(_typical(start, names))
        for _ in range(2):  # what the scale leaves is not all noise
            noise = self._noise(found)
            found = fit_device(scaled, self.measured, self.predict, constants=names, noise=noise, free=names[0])
        return found

    def _noise(self, model: DeviceModel | Scales) -> float:
        return max(NOISE, 1.48 * float(np.median(abs(np.log(self.predict(model) / self.measured)))))

    def _scaled(self, start: Constants) -> Constants:
        """`start` at the median of the scales that make each row exact, weighted by the share of it that scales."""
        name, slopes = self.names[0], self.slopes[:, 0]
        least, most, (rows,) = *FITTED[name][:2], np.nonzero(slopes > 0)
        if not len(rows):
            return start
        wanted = _linear(start, (name,)) + (self.measured - self.predict(start))[rows] / slopes[rows]
        logs, weights = np.log(np.clip(wanted, 1 / most, 1 / least)), (slopes / self.seconds)[rows]
        order = np.argsort(logs)
        middles = np.cumsum(weights[order]) - weights[order] / 2
        return with_values(start, (name,), np.exp([-np.interp(weights.sum() / 2, middles, logs[order])]))

    def ranges(self, start: Constants, found: Constants) -> dict[str, FittedConstant]:
        noise, names, ranges = self._noise(found), self.shown, {}
        weights = 1 / (1 + (np.log(self.predict(found) / self.measured) / noise) ** 2)
        for name, spread in zip(names, self._spreads(names, noise, weights), strict=True):
            limits, after = FITTED[name], getattr(found, name)
            low, high = (after * math.exp(sign * 1.96 * spread) for sign in (-1, 1))
            ranges[name] = FittedConstant(getattr(start, name), after, max(low, limits.least), min(high, limits.most))
        return ranges

    def _spreads(self, names: Sequence[str], noise: float, weights: Floats) -> Floats:
        """[names] standard deviation of the logarithm of each constant, fitted together; of the scale little is known
        before."""
        columns = [self.names.index(name) for name in names]
        shares = (self.slopes * self.at / self.seconds[:, None])[:, columns]
        before = np.array([FITTED[name].spread * (FREE if name == self.names[0] else 1) for name in names])
        found = np.linalg.inv(shares.T @ (shares * weights[:, None]) / noise**2 + np.diag(before**-2.0))
        return np.asarray(np.sqrt(np.diag(found)), dtype=np.float64)


def _typical(model: Constants, names: Sequence[str]) -> Constants:
    """The model with typical values of devices for its ideal ones (all of a data sheet's figure, or no seconds)."""
    found = {name: FITTED[name].start for name in names if getattr(model, name, None) in (0.0, 1.0)}
    return replace(model, **found)  # type: ignore[arg-type]


def _linear(model: DeviceModel | Scales, names: Sequence[str]) -> Floats:
    values = [getattr(model, name) for name in names]
    return np.array([value if name in _ADDED else 1 / value for name, value in zip(names, values, strict=True)])
