"""vTrain's measured trainings: half of them fit a device model, which predicts the other half.

Bang et al., MICRO 2024 (arXiv 2312.12391): GPTs of 3.6 to 175 billion parameters on 64 to 512 A100 under Megatron's
1F1B with recompute by layer, P up to 32. Nodes of eight with four cards of 200 Gbit/s, says the repository's config/.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ...partition.formulas.device_model import DeviceModel
from ...partition.formulas.measured import CONSTANTS, fit_measured, fit_sums, read_sums, read_trainings
from ...partition.formulas.training import MeasuredTraining, estimated, simulated
from ..jobs.case import Case
from ..jobs.figure import Figure, How

_DATA = Path(__file__).parent / "data"
NETWORK = 4 * 25e9 / 8  # [bytes/s] a device: four cards a node
FAR = 0.10  # off: rows that the report names
_NEAR = 0.06  # off: rows that the model explains
_OFF, _OFF_ALL = "predicted / measured", "fitted to all / measured"
_MEAN, _WORST, _FAR = "off on average", "off at worst", "rows off by more than 10%"


@cache
def trainings(path: str = "") -> tuple[MeasuredTraining, ...]:
    """The rows of a file in vTrain's form, in order; "": those of this repository."""
    return read_trainings(path or _DATA / "vtrain_a100.csv", network=NETWORK)


@cache
def typical() -> DeviceModel:
    """An A100 before any training is known: sums as measured by themselves, the rest round figures.

    Where trainings do not show a constant, a fit leaves it near these. Large products reach 250 of 312 TFLOP/s, copies
    three quarters of the memory's bandwidth. The host's 0.1 ms a kernel and the 0.3 of partly used nodes are what these
    rows themselves suggest; no data sheet has them.
    """
    device = replace(
        DeviceModel.preset("A100-80GB"),
        matrix_efficiency=0.8,
        wave_outputs=108 * 128 * 256,  # multiprocessors, each with the largest tile of cuBLAS
        memory_efficiency=0.75,
        kernel_seconds=1e-4,
        network_efficiency=0.85,
        partial_efficiency=0.3,
    )
    return fit_sums(device, read_sums(_DATA / "vtrain_allreduce_8.csv"), num_devices=8)


@cache
def fitted(rows: frozenset[int], path: str = "") -> DeviceModel:
    """`typical` as these rows show it."""
    return fit_measured(typical(), [trainings(path)[row] for row in sorted(rows)])


def all_rows(path: str = "") -> frozenset[int]:
    """0, 1, ..."""
    return frozenset(range(len(trainings(path))))


def every_second(first: int, path: str = "") -> frozenset[int]:
    """Rows first, first + 2, ..."""
    return frozenset(row for row in all_rows(path) if row % 2 == first)


def drawn(seed: int, path: str = "") -> frozenset[int]:
    """A random half."""
    rows = sorted(all_rows(path))
    return frozenset(random.Random(seed).sample(rows, len(rows) // 2))


def off(rows: Collection[int], device: DeviceModel, path: str = "") -> list[float]:
    """predicted / measured - 1 of these rows, in order."""
    known = trainings(path)
    return [estimated(known[row], device) / known[row].seconds - 1 for row in sorted(rows)]


def rows(case: Case, repetitions: int) -> Iterator[Figure]:
    """Steps of the "even" rows, measured, and simulated on the device that the odd ones gave; or of the "odd" ones.

    `trainings` is another file in vTrain's form.
    """
    del repetitions
    path, which = _path(case), case.text("rows")
    if which not in ("odd", "even"):
        raise ValueError(f"case {case}: rows: expected odd or even")
    known = every_second(0 if which == "even" else 1, path)  # rows count from 1
    device, of_all = fitted(known, path), fitted(all_rows(path), path)
    for at in sorted(all_rows(path) - known):
        training = trainings(path)[at]
        own = case.also(
            row=at + 1,
            gpus=training.num_devices,
            hidden=training.hidden,
            tensor=training.tensor,
            data=training.data,
            pipeline=training.pipeline,
            microbatch=training.microbatch_size,
        )
        seconds = simulated(training, device)
        yield Figure(case=own, name="step", value=training.seconds, unit="s", how=How.PUBLISHED)
        yield Figure(case=own, name="step", value=seconds, unit="s", how=How.SIMULATED)
        yield Figure(case=own, name=_OFF, value=seconds / training.seconds, unit="ratio", how=How.SIMULATED)
        best = estimated(training, of_all) / training.seconds
        yield Figure(case=own, name=_OFF_ALL, value=best, unit="ratio", how=How.SIMULATED)


def half(case: Case, repetitions: int) -> Iterator[Figure]:
    """Half of the rows predicted by the others, even rows and odd ones or a random half and its rest (`split`).

    `split` "none" fits to all rows and predicts the same: nothing is held out. `trainings` is another file.
    """
    del repetitions
    split, path = case.text("split"), _path(case)
    everything = all_rows(path)
    if split == "none":
        known = [everything]
    elif split == "even, odd":
        known = [every_second(0, path), every_second(1, path)]
    elif split.isdecimal():
        known = [drawn(int(split), path), everything - drawn(int(split), path)]
    else:
        raise ValueError(f"case {case}: split: expected none, 'even, odd', or the number of a random one")
    for side, members in enumerate(known):
        device = fitted(members, path)
        found = [abs(each) for each in off(everything if split == "none" else everything - members, device, path)]
        own = case.also(side=side + 1)
        yield Figure(case=own, name=_MEAN, value=sum(found) / len(found), unit="fraction", how=How.SIMULATED)
        yield Figure(case=own, name=_WORST, value=max(found), unit="fraction", how=How.SIMULATED)
        yield Figure(case=own, name=_FAR, value=sum(each > FAR for each in found), unit="", how=How.SIMULATED)
        for constant in CONSTANTS:
            unit = "s" if constant.endswith("_seconds") else "fraction"
            yield Figure(case=own, name=constant, value=getattr(device, constant), unit=unit, how=How.SIMULATED)


def _path(case: Case) -> str:
    return case.text("trainings") if "trainings" in case else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Figures of one row."""

    number: int
    gpus: int
    hidden: int
    tensor: int
    data: int
    pipeline: int
    microbatch: int
    seconds: float  # measured
    ratio: float  # predicted / measured, by the other half
    of_all: float  # likewise, by a fit to all rows

    @property
    def error(self) -> float:
        """How far it is off."""
        return abs(self.ratio - 1)

    @property
    def place(self) -> tuple[int, ...]:
        """All but the microbatch."""
        return self.gpus, self.hidden, self.tensor, self.data, self.pipeline

    def __str__(self) -> str:
        return (
            f"row {self.number} (h = {self.hidden}, T = {self.tensor}, {self.data} replicas, P = {self.pipeline}, "
            f"microbatches of {self.microbatch})"
        )


def findings(figures: Sequence[Figure]) -> list[str]:
    """How far the predictions are off, which rows they miss, and why."""
    found = _rows_of(figures)
    said = _of_halves(figures)
    if not found:
        return said
    far = sorted((row for row in found if row.error > FAR), key=lambda row: -row.error)
    rest = [row.error for row in found if row not in far]
    said.append(
        "Each row by the device that every second of the others gave: "
        f"{_mean_and_worst([row.error for row in found])}, {len(far)} of {len(found)} rows off by more than {FAR:.0%}."
    )
    if far and rest:
        said.append(f"The other {len(rest)}: {_mean_and_worst(rest)}.")
    return said + [_why(row, found) for row in far] + _disagreement(found)


def _rows_of(figures: Sequence[Figure]) -> list[_Row]:
    by_row: dict[int, dict[tuple[str, How], Figure]] = {}
    for figure in figures:
        if "row" in figure.case:
            by_row.setdefault(figure.case.count("row"), {})[figure.name, figure.how] = figure
    return [
        _Row(
            number=number,
            **{
                key: own["step", How.PUBLISHED].case.count(key)
                for key in ("gpus", "hidden", "tensor", "data", "pipeline", "microbatch")
            },
            seconds=own["step", How.PUBLISHED].value,
            ratio=own[_OFF, How.SIMULATED].value,
            of_all=own[_OFF_ALL, How.SIMULATED].value,
        )
        for number, own in sorted(by_row.items())
    ]


def _of_halves(figures: Sequence[Figure]) -> list[str]:
    said = []
    for held_out, what in (
        (True, "halves, each predicted by a device that the other rows gave"),
        (False, "fit to all rows, which predicts the same ones (nothing is held out)"),
    ):
        of = [
            figure for figure in figures if "split" in figure.case and (figure.case.get("split") != "none") is held_out
        ]
        means = [figure.value for figure in of if figure.name == _MEAN]
        worst = [figure.value for figure in of if figure.name == _WORST]
        if means:
            spread = f" ({min(means):.1%} to {max(means):.1%} by half)" if held_out else ""
            average = sum(means) / len(means)
            said.append(f"{len(means)} {what}: {average:.1%} off on average{spread}, {max(worst):.1%} at worst.")
    return said


def _why(row: _Row, found: Sequence[_Row]) -> str:
    """Which seconds are missing, and what other rows say of them."""
    way = "short" if row.ratio < 1 else "long"
    text = f"{row}: {row.error:.1%} too {way}, {row.error * row.seconds:.1f} s of {row.seconds:.1f} s. "
    if abs(row.of_all - 1) < _NEAR:
        return (
            text
            + f"Fitted to all rows it is {abs(row.of_all - 1):.1%} off: it shows a constant that the half does not."
        )
    same = [each for each in found if each.place == row.place and each != row]
    near = [each for each in same if each.error < _NEAR]
    if near:
        sizes = " and ".join(str(each.microbatch) for each in near)
        return text + (
            f"Microbatches of {sizes} on the same devices, with sums over the same ranks and messages on the same "
            f"links, are within {_NEAR:.0%}: seconds of this run, not of these sizes."
        )
    alike = [
        each
        for each in found
        if (each.gpus, each.hidden, each.pipeline) == (row.gpus, row.hidden, row.pipeline) and each.error < _NEAR
    ]
    if same and alike:
        most = max(each.error for each in alike)
        return text + (
            f"All {len(same) + 1} rows of these sizes are off; {len(alike)} others of the same model, P and number of "
            f"devices are within {most:.1%}: with as many layers in a stage what is missing is no cost of its layers."
        )
    return text + "No row of the same sizes is predicted well: what is missing may be a cost of these sizes."


def _disagreement(found: Sequence[_Row]) -> list[str]:
    """The pair of rows that differ in the microbatch alone of which one must be off the most."""
    pairs = [(low, high) for low in found for high in found if low.place == high.place and low.ratio < high.ratio]
    if not pairs:
        return []
    low, high = max(pairs, key=lambda pair: pair[1].ratio / pair[0].ratio)
    least = 1 - (low.ratio / high.ratio) ** 0.5
    predicted = low.seconds * low.ratio / (high.seconds * high.ratio)
    return [
        f"Rows that disagree: {low} took {low.seconds:.1f} s, with microbatches of {high.microbatch} it took "
        f"{high.seconds:.1f} s. The first took {low.seconds / high.seconds:.2f} times as long; the formulas say "
        f"{predicted:.2f} times. Whatever scales both alike, one of the two is off by {least:.1%} at least."
    ]


def _mean_and_worst(errors: Sequence[float]) -> str:
    return f"{sum(errors) / len(errors):.1%} off on average, {max(errors):.1%} at worst"
