"""Constants fitted to measurements: those that make predictions least wrong.

    seconds of runs, predictions by constants -> fit_device -> constants
    all_reduce.csv -> read_sums -> MeasuredSum, ... -> fit_sums -> DeviceModel

Files are CSV: a line of columns, then a line for each measurement; lines that begin with "#" are comments.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from ..strict import fail, number, read_text
from ..topology import Floats
from .device_model import DeviceModel

FREE = 10.0  # times its range is as good as none
_SUM = ("size(B)", "time(ns)")


class MeasuredSum(NamedTuple):
    """A sum over the devices of one node: bytes on each device, and seconds that it took."""

    num_bytes: float
    seconds: float


def read_sums(path: str | Path) -> tuple[MeasuredSum, ...]:
    """Sums of a file with the columns of NCCL's tests, smallest first, by their seconds out of place; ValueError names
    the file, the line and the column."""
    size, nanoseconds = _SUM
    found = [
        MeasuredSum(
            num_bytes=read_number(f"{where}: column {size}", row[size]),
            seconds=read_number(f"{where}: column {nanoseconds}", row[nanoseconds]) / 1e9,
        )
        for where, row in read_rows(path, _SUM)
    ]
    return tuple(sorted(found, key=lambda each: each.num_bytes))


def read_rows(
    path: str | Path, needed: Sequence[str], *, known: Collection[str] | None = None
) -> list[tuple[str, dict[str, str]]]:
    """[(file and line, cell by column)] of a CSV file; of columns that it names twice the first. `known`: columns that
    it may have; None: any. ValueError names file, line and column."""
    lines = list(enumerate(read_text(path).splitlines(), start=1))
    lines = [(n, line) for n, line in lines if line.strip() and not line.startswith("#")]
    if not lines:
        raise ValueError(f"{path}: empty: expected a line of columns ({','.join(needed)}), then one a measurement")
    (at, first), *body = lines
    names = _cells(first)
    missing, strange = (
        [each for each in needed if each not in names],
        set(names) - set(names if known is None else known),
    )
    if missing:
        raise ValueError(
            f"{path}, line {at}: no column {', '.join(map(repr, missing))}: expected {','.join(needed)}, "
            f"with commas between columns"
        )
    if strange:
        fail(f"{path}, line {at}: column", min(strange), f"some of {','.join(known or ())}")
    if not body:
        raise ValueError(f"{path}: no measurement: expected a line each below the columns")
    rows = []
    for n, line in body:
        cells, where = _cells(line), f"{path}, line {n}"
        if len(cells) != len(names):
            fail(where, len(cells), f"{len(names)} cells, one per column: {','.join(names)}")
        rows.append((where, {name: cells[names.index(name)] for name in names}))
    return rows


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in next(csv.reader([line]), [])]


def read_number(where: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    return found if math.isfinite(found) and found > 0 else fail(where, text, "a finite number above 0, such as 1.25")


class _Range(NamedTuple):
    """Limits of a constant, where a fit starts, and its first step; devices differ by a factor of about e^spread."""

    least: float
    most: float
    start: float
    step: float
    spread: float


def _part(start: float, spread: float) -> _Range:
    """Range of a part of a data sheet's figure."""
    return _Range(least=0.01, most=1.0, start=start, step=0.1, spread=spread)


def _times(spread: float) -> _Range:
    return _Range(least=1e-3, most=1e3, start=1.0, step=0.1, spread=spread)


FITTED = {  # the first of a model's is the scale of all that it computes
    "matrix_efficiency": _part(0.5, 0.1),
    "wave_outputs": _Range(least=0.0, most=1e9, start=3e6, step=1e6, spread=1.0),
    "link_efficiency": _part(0.8, 0.05),
    "memory_efficiency": _part(0.8, 0.15),
    "kernel_seconds": _Range(least=0.0, most=1e-2, start=5e-5, step=1e-5, spread=0.3),
    "hop_seconds": _Range(least=0.0, most=1e-2, start=5e-6, step=1e-6, spread=0.5),
    "network_efficiency": _part(0.8, 0.1),
    "partial_efficiency": _part(0.5, 0.3),
    "compute": _times(0.1),
    "links": _times(1.0),
}
Constants = TypeVar("Constants")  # a dataclass that has some of them


def fit_device(
    device: Constants,
    measured: Sequence[float] | Floats,
    predict: Callable[[Constants], Sequence[float] | Floats],
    *,
    constants: Sequence[str] = ("matrix_efficiency",),
    noise: float | None = None,
    free: str | None = None,
) -> Constants:
    """The same device with the constants that make the sum of squares of log(predicted / measured) least.

    Arguments:
        measured: of each run [s].
        predict: what a device model says of the same runs [s]; called some ten times for each constant.
        constants: which to fit, of `CONSTANTS` of `device_model.py`; the others keep their value.
        noise: by how much equal runs differ, as a part (such as 0.04). With it, a run that is off by much more
            hardly counts (Cauchy's loss), and a constant that few runs show stays near this device's value; fewer
            runs than constants will do, then. None: neither.
        free: a constant of which little is known before, with `noise`.

    Raises ValueError for another constant, for fewer runs than constants without `noise`, and with it for a
    constant whose value here is 0.

    >>> device = DeviceModel.preset("A100-80GB")
    >>> fitted = fit_device(device, [2.0], lambda model: [model.matrix_seconds(312e12, outputs=1e12)])
    >>> round(fitted.matrix_efficiency, 5)
    0.5
    """
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    goal = np.array([number(f"measured[{i}]", seconds, positive=True) for i, seconds in enumerate(measured)])
    all_of_it = [each for each in FITTED if hasattr(device, each)]
    if not constants or not {*constants} <= {*all_of_it} or len(set(constants)) < len(constants):
        fail("constants", tuple(constants), f"some of {', '.join(all_of_it)}, each once")
    if noise is None and len(goal) < len(constants):
        fail("measured", tuple(measured), f"at least {len(constants)} runs for {len(constants)} constants")

    def errors(values: Floats) -> Floats:
        predicted = np.array(predict(with_values(device, constants, values)), dtype=np.float64)
        if predicted.shape != goal.shape:
            fail("predict", predicted.tolist(), f"{len(goal)} numbers of seconds, one a measured run")
        logs: Floats = np.log(predicted / goal)
        return logs

    low, high, start, step, spread = np.array([FITTED[constant] for constant in constants]).T
    if noise is None:
        return with_values(device, constants, least_squares(errors, start, bounds=(low, high), x_scale=step).x)

    scale, known = number("noise", noise, positive=True), np.array([getattr(device, each) for each in constants])
    if not known.all():
        at_zero = constants[int(np.argmin(known))]
        fail(at_zero, 0.0, "a value above 0 to begin with, where noise is given")
    if free is not None:
        spread[constants.index(free)] *= FREE

    def robust(factors: Floats) -> Floats:  # logarithms, so that a constant moves by parts of itself
        off = errors(known * np.exp(factors)) / scale
        return np.concatenate([np.sign(off) * np.sqrt(np.log1p(off**2)), factors / spread])

    ends = np.log(np.maximum(low, 1e-12 * known) / known), np.log(high / known)
    inside = np.clip(0.0, ends[0] + 1e-9, ends[1] - 1e-9)
    found = least_squares(robust, inside, bounds=ends, x_scale=spread, ftol=1e-5).x
    return with_values(device, constants, known * np.exp(found))


def with_values(device: Constants, names: Sequence[str], values: Floats) -> Constants:
    return replace(device, **dict(zip(names, values.tolist(), strict=True)))  # type: ignore[type-var]


def fit_sums(device: DeviceModel, sums: Sequence[MeasuredSum], *, num_devices: int) -> DeviceModel:
    """The device with link_efficiency and hop_seconds of measured sums over `num_devices` of a node.

    seconds = 2 (n-1) (hop_seconds + bytes / n / (link_bandwidth * link_efficiency)), with least relative errors.

    Raises ValueError for sums of fewer than two sizes, of one device, or faster than the link.
    """
    if len({each.num_bytes for each in sums}) < 2:
        fail("sums", len(sums), "some of at least two sizes")
    if num_devices < 2:
        fail("num_devices", num_devices, "at least 2")
    seconds = np.array([each.seconds for each in sums])
    hops = 2 * (num_devices - 1)
    moved = np.array([each.num_bytes for each in sums]) * hops / num_devices
    (start, per_byte), *_ = np.linalg.lstsq(np.stack([1 / seconds, moved / seconds], 1), np.ones(len(sums)), rcond=None)
    efficiency = 1 / per_byte / device.link_bandwidth if per_byte > 0 else math.inf
    if efficiency > 1:
        expected = f"seconds that {device.link_bandwidth / 1e9:g} GB/s allow"
        raise ValueError(f"sums of {len(sums)} sizes: as if by {efficiency:.3g} of the link: expected {expected}")
    return replace(device, link_efficiency=float(efficiency), hop_seconds=max(float(start) / hops, 0.0))
