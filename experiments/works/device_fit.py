"""Device models fitted to measurements: constants that make predictions least wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...partition.analytic.device_model import CONSTANTS, DeviceModel
from ...partition.strict import fail, number
from .training_files import MeasuredSum
from .trainings import MeasuredTraining, estimated

Floats = npt.NDArray[np.float64]
SHOWN = tuple(constant for constant in CONSTANTS if constant != "link_efficiency")  # by trainings; that by sums
NOISE = 0.04  # by which equal trainings on a shared cluster differ


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    """Where a constant may lie, where a fit starts, how far it moves; by which factor e^spread it differs elsewhere."""

    least: float
    most: float
    start: float
    step: float
    spread: float


def _part(start: float, spread: float) -> _Range:
    """Range of a part of a data sheet's figure."""
    return _Range(least=0.01, most=1.0, start=start, step=0.1, spread=spread)


_FITTED = {
    "matrix_efficiency": _part(0.5, 0.1),
    "wave_outputs": _Range(least=0.0, most=1e9, start=3e6, step=1e6, spread=1.0),
    "link_efficiency": _part(0.8, 0.05),
    "memory_efficiency": _part(0.8, 0.15),
    "kernel_seconds": _Range(least=0.0, most=1e-2, start=5e-5, step=1e-5, spread=0.3),
    "hop_seconds": _Range(least=0.0, most=1e-2, start=5e-6, step=1e-6, spread=0.5),
    "network_efficiency": _part(0.8, 0.1),
    "partial_efficiency": _part(0.5, 0.3),
}


def fit_device(
    device: DeviceModel,
    measured: Sequence[float],
    predict: Callable[[DeviceModel], Sequence[float]],
    *,
    constants: Sequence[str] = ("matrix_efficiency",),
    noise: float | None = None,
) -> DeviceModel:
    """The same device with the constants that make the sum of squares of log(predicted / measured) least.

    Arguments:
        measured: of each run [s].
        predict: what a device model says of the same runs [s]; called some ten times a constant.
        constants: which to fit, of `CONSTANTS` of `partition/analytic/device_model.py`; the others keep their value.
        noise: by how much equal runs differ, as a part (such as 0.04). With it, a run that is off by much more
            hardly counts (Cauchy's loss), and a constant that few runs show stays near this device's value; fewer
            runs than constants will do, then. None: neither.

    Raises ValueError for another constant, for fewer runs than constants without `noise`, and with it for a
    constant whose value here is 0.

    >>> device = DeviceModel.preset("A100-80GB")
    >>> fitted = fit_device(device, [2.0], lambda model: [model.matrix_seconds(312e12, outputs=1e12)])
    >>> round(fitted.matrix_efficiency, 5)
    0.5
    """
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    goal = np.array([number(f"measured[{i}]", seconds, positive=True) for i, seconds in enumerate(measured)])
    unknown = [each for each in constants if each not in _FITTED]
    if unknown or not constants or len(set(constants)) < len(constants):
        fail("constants", tuple(constants), f"some of {', '.join(_FITTED)}, each once")
    known = np.array([getattr(device, constant) for constant in constants])
    if noise is None and len(goal) < len(constants):
        fail("measured", tuple(measured), f"at least {len(constants)} runs for {len(constants)} constants")
    ranges = [_FITTED[constant] for constant in constants]
    low, high = (np.array([getattr(each, end) for each in ranges]) for end in ("least", "most"))

    def with_values(values: Floats) -> DeviceModel:
        return replace(device, **{c: float(v) for c, v in zip(constants, values, strict=True)})  # type: ignore[arg-type]

    def errors(values: Floats) -> Floats:
        predicted = np.array(predict(with_values(values)), dtype=np.float64)
        if predicted.shape != goal.shape:
            fail("predict", predicted.tolist(), f"{len(goal)} numbers of seconds, one a measured run")
        logs: Floats = np.log(predicted / goal)
        return logs

    if noise is None:
        start, step = ([getattr(each, name) for each in ranges] for name in ("start", "step"))
        return with_values(least_squares(errors, start, bounds=(low, high), x_scale=step).x)

    scale = number("noise", noise, positive=True)
    if not known.all():
        at_zero = constants[int(np.argmin(known))]
        fail(f"device {device.name!r}: {at_zero}", 0.0, "a value above 0 to begin with, where noise is given")
    spread = np.array([each.spread for each in ranges])

    def robust(factors: Floats) -> Floats:  # logarithms, so that a constant moves by parts of itself
        off = errors(known * np.exp(factors)) / scale
        return np.concatenate([np.sign(off) * np.sqrt(np.log1p(off**2)), factors / spread])

    ends = np.log(np.maximum(low, 1e-12 * known) / known), np.log(high / known)
    inside = np.clip(0.0, ends[0] + 1e-9, ends[1] - 1e-9)
    return with_values(known * np.exp(least_squares(robust, inside, bounds=ends, x_scale=spread, ftol=1e-5).x))


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


def fit_measured(
    device: DeviceModel,
    trainings: Sequence[MeasuredTraining],
    *,
    constants: Sequence[str] = SHOWN,
    noise: float | None = NOISE,
) -> DeviceModel:
    """The device as measured trainings show it; a constant that they do not show stays near the value that it has here.

    A training that is off by more than others (a slow node, a busy network) counts little: see `fit_device`, also for
    the arguments.
    """
    return fit_device(
        device,
        [training.seconds for training in trainings],
        lambda model: [estimated(training, model) for training in trainings],
        constants=constants,
        noise=noise,
    )
