"""Device models fitted to trainings that others measured: constants that make predictions least wrong.

    trainings.csv -> read_trainings -> MeasuredTraining, ...  -> fit_measured -+
    all_reduce.csv -> read_sums     -> MeasuredSum, ...       -> fit_sums     -+-> DeviceModel

Trainings are CSV with the columns of vTrain (Bang et al., MICRO 2024, github.com/VIA-Research/vTrain, data/), one line
for each; sums over the devices of a node are CSV with those of NCCL's tests. Lines that begin with "# " are comments,
except for the line of columns.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..cluster import Cluster
from ..strict import count, fail, number, read_text
from ..topology import Floats
from .device_model import CONSTANTS, DeviceModel
from .layers import LayerFormulas
from .transformer import Transformer

NODE = 8  # devices
NOISE = 0.04  # by which equal trainings on a shared cluster differ
SHOWN = tuple(constant for constant in CONSTANTS if constant != "link_efficiency")  # by trainings; that one by sums

_TRAINING = {  # argument of MeasuredTraining: column
    "num_devices": "# GPUs",
    "batch_size": "global batch",
    "microbatch_size": "micro batch",
    "hidden": "hidden size",
    "heads": "attention heads",
    "layers": "# layers",
    "length": "sequence length",
    "tensor": "tensor parallelism",
    "data": "data parallelism",
    "pipeline": "pipeline parallelism",
}
_MILLISECONDS = "iteration time (ms)"
_SUM = ("size(B)", "time(ns)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTraining:
    """Sizes of one training as Megatron-LM trained in 2021, and the seconds of its step.

    Stages of equally many layers, the embedding in the first and the head in the last; recompute by layer; tensor
    groups of neighbouring devices, replicas next to each other, stages outermost. The ranks of a tensor group send 1/T
    of an activation each, gathered on arrival (the scatter/gather of Narayanan et al. 2021, section 4.1).

    Arguments:
        layers, hidden, heads, vocabulary, length: of the model, see `Transformer`.
        tensor, pipeline, chunks, data: T, P, V and replicas.
        microbatch_size: sequences of a microbatch; `num_microbatches` M of one replica.
        batch_size: sequences of all replicas.
        num_devices: T * P * replicas, in nodes of eight (or one node of fewer).
        network: bandwidth of one device out of its node, its part of the node's cards [bytes/s].
        seconds: of a step.

    Raises ValueError for sizes that do not divide or multiply as said.
    """

    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    chunks: int
    data: int
    microbatch_size: int
    num_microbatches: int
    batch_size: int
    num_devices: int
    seconds: float
    vocabulary: int = 51200
    length: int = 2048
    network: float = 25e9

    def __post_init__(self) -> None:
        for size in ("tensor", "pipeline", "chunks", "data", "microbatch_size", "num_microbatches"):
            count(f"training: {size}", getattr(self, size))
        for figure in ("network", "seconds"):
            number(f"training: {figure}", getattr(self, figure), positive=True)
        if self.num_devices != self.tensor * self.pipeline * self.data:
            fail("training: num_devices", self.num_devices, f"{self.tensor} x {self.pipeline} x {self.data} of them")
        if self.num_devices > NODE and self.num_devices % NODE:
            fail("training: num_devices", self.num_devices, f"nodes of {NODE}")
        if self.batch_size != self.data * self.microbatch_size * self.num_microbatches:
            expected = f"{self.data} replicas of {self.num_microbatches} microbatches of {self.microbatch_size}"
            fail("training: batch_size", self.batch_size, expected)
        if self.layers % self.num_stages:
            fail("training: layers", self.layers, f"equally many in {self.num_stages} stages")
        self.model.refuse_tensor(self.tensor)

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.chunks

    @property
    def model(self) -> Transformer:
        sizes = ("layers", "hidden", "heads", "vocabulary", "length")
        return Transformer(**{size: getattr(self, size) for size in sizes})

    @property
    def cluster(self) -> Cluster:
        """Nodes of eight devices that NVLink joins."""
        return _cluster(self.num_devices, self.network)


class MeasuredSum(NamedTuple):
    """A sum over the devices of one node: bytes on each device, and seconds that it took."""

    num_bytes: float
    seconds: float


@cache
def _cluster(num_devices: int, network: float) -> Cluster:
    nodes, size = max(1, num_devices // NODE), min(NODE, num_devices)
    return Cluster.parse(f"{nodes}x{size}:nvlink=300GB/s,net={network:.0f}B/s")


def read_trainings(path: str | Path, *, network: float, vocabulary: int = 51200) -> tuple[MeasuredTraining, ...]:
    """Trainings of a file, under 1F1B with recompute by layer.

    Arguments:
        network: bandwidth of one device out of its node [bytes/s]; the file does not say it.
        vocabulary: of all of them; likewise.

    Raises ValueError that names the file, the line and the column.
    """
    trainings = []
    for where, row in _rows(path, (*_TRAINING.values(), _MILLISECONDS)):
        sizes = {name: _whole(f"{where}: {column}", row[column]) for name, column in _TRAINING.items()}
        seconds = _number(f"{where}: {_MILLISECONDS}", row[_MILLISECONDS]) / 1e3
        replica = sizes["data"] * sizes["microbatch_size"]
        parts, rest = divmod(sizes["batch_size"], replica)
        if rest:
            expected = f"a multiple of {replica}, a microbatch of each replica"
            fail(f"{where}: global batch", sizes["batch_size"], expected)
        sizes |= {"chunks": 1, "num_microbatches": parts, "vocabulary": vocabulary}
        try:
            trainings.append(MeasuredTraining(**sizes, network=network, seconds=seconds))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return tuple(trainings)


def read_sums(path: str | Path) -> tuple[MeasuredSum, ...]:
    """Sums of a file, smallest first, by their seconds out of place; ValueError as for trainings."""
    size, nanoseconds = _SUM
    found = [
        MeasuredSum(
            num_bytes=_number(f"{where}: {size}", row[size]),
            seconds=_number(f"{where}: {nanoseconds}", row[nanoseconds]) / 1e9,
        )
        for where, row in _rows(path, _SUM)
    ]
    return tuple(sorted(found, key=lambda each: each.num_bytes))


def _rows(path: str | Path, columns: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """[(file and line, cell by column)]; of columns that the file names twice the first."""
    lines = list(enumerate(read_text(path).splitlines(), start=1))
    wanted = set(columns)  # of which "# GPUs" may be the first
    header = next((n for n, line in lines if 2 * len(wanted.intersection(_cells(line))) > len(columns)), 0)
    lines = [(n, line) for n, line in lines if line.strip() and (n == header or not line.startswith("# "))]
    if not lines:
        raise ValueError(f"{path}: empty: expected a line of columns ({', '.join(columns)}), then one a measurement")
    (_, first), *body = lines
    names = _cells(first)
    missing = [column for column in columns if column not in names]
    if missing:
        raise ValueError(f"{path}: no column {', '.join(map(repr, missing))}: expected {', '.join(columns)}")
    if not body:
        raise ValueError(f"{path}: no measurement: expected a line each below the columns")
    rows = []
    for n, line in body:
        cells, where = _cells(line), f"{path}, line {n}"
        if len(cells) != len(names):
            fail(where, len(cells), f"{len(names)} cells, one a column")
        rows.append((where, {column: cells[names.index(column)] for column in columns}))
    return rows


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in next(csv.reader([line]), [])]


def _whole(where: str, text: str) -> int:
    return int(text) if text.isdecimal() and int(text) >= 1 else fail(where, text, "a whole number of at least 1")


def _number(where: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    return found if math.isfinite(found) and found > 0 else fail(where, text, "a finite number above 0")


def estimated(training: MeasuredTraining, device: DeviceModel) -> float:
    """Seconds of one step without a simulation: all work of the busiest rank, one microbatch of the other ranks (fill
    and drain), messages of the first and the last microbatch, and the update with the sums of gradients."""
    P, S = training.pipeline, training.num_stages
    formulas = LayerFormulas(
        training.model,
        microbatch_size=training.microbatch_size,
        tensor=training.tensor,
        device=device,
        cluster=training.cluster,
    )
    embedding, layer, head = formulas.parts()
    size = training.layers // S
    work = np.full(S, size * (2 * layer.forward_seconds + layer.backward_seconds))  # each layer's forward runs again
    update, gradients = np.full(S, size * layer.update_seconds), np.full(S, size * layer.parameter_bytes)  # of 16 bits
    for stage, node in ((0, embedding), (-1, head)):
        work[stage] += node.forward_seconds + node.backward_seconds
        if node is embedding or S > 1:  # in one stage the head's weights are the embedding's
            update[stage] += node.update_seconds
            gradients[stage] += node.parameter_bytes
    topology = formulas.topology
    ring = topology.ring(range(0, training.data * training.tensor, training.tensor))
    update += [ring.seconds(num_bytes) for num_bytes in gradients]
    ends = topology.ring((0, training.num_devices - training.num_devices // P))
    tied = sum(ends.seconds(shared) for _, shared in formulas.tied) if P > 1 else 0.0
    inner, outer = topology.cluster.levels  # in one node no message goes over the network
    link = outer if training.num_devices > NODE else inner
    message = layer.activation_bytes / training.tensor / link.bandwidth
    busiest = max(work[rank::P].sum() for rank in range(P))
    first = work[:P]  # the first chunk of each rank
    fill = first.sum() - first.max()
    return float(training.num_microbatches * busiest + fill + 2 * (S - 1) * message + tied + update[::P].sum())


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
        predict: what a device model says of the same runs [s]; called some ten times for each constant.
        constants: which to fit, of `CONSTANTS` of `device_model.py`; the others keep their value.
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
    low, high, start, step, spread = np.array([_FITTED[constant] for constant in constants]).T

    def with_values(values: Floats) -> DeviceModel:
        return replace(device, **{c: float(v) for c, v in zip(constants, values, strict=True)})  # type: ignore[arg-type]

    def errors(values: Floats) -> Floats:
        predicted = np.array(predict(with_values(values)), dtype=np.float64)
        if predicted.shape != goal.shape:
            fail("predict", predicted.tolist(), f"{len(goal)} numbers of seconds, one a measured run")
        logs: Floats = np.log(predicted / goal)
        return logs

    if noise is None:
        return with_values(least_squares(errors, start, bounds=(low, high), x_scale=step).x)

    scale = number("noise", noise, positive=True)
    if not known.all():
        at_zero = constants[int(np.argmin(known))]
        fail(f"device {device.name!r}: {at_zero}", 0.0, "a value above 0 to begin with, where noise is given")

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
