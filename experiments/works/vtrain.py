"""vTrain's measured trainings: half of them fit a device model, which predicts the other half.

Bang et al., MICRO 2024 (arXiv 2312.12391): GPTs of 3.6 to 175 billion parameters on 64 to 512 A100 under Megatron's
1F1B with recompute by layer, P up to 32. Nodes of eight with four cards of 200 Gbit/s, says the repository's config/.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
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
def trainings() -> tuple[MeasuredTraining, ...]:
    """The rows, in the order of the file."""
    return read_trainings(_DATA / "vtrain_a100.csv", network=NETWORK)


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
def fitted(rows: frozenset[int]) -> DeviceModel:
    """`typical` as these rows show it."""
    return fit_measured(typical(), [trainings()[row] for row in sorted(rows)])


def every_second(first: int) -> frozenset[int]:
    """Rows first, first + 2, ..."""
    return frozenset(range(first, len(trainings()), 2))


def drawn(seed: int) -> frozenset[int]:
    """A random half."""
    rows = range(len(trainings()))
    return frozenset(random.Random(seed).sample(rows, len(rows) // 2))


def off(rows: Collection[int], device: DeviceModel) -> list[float]:
    """predicted / measured - 1 of these rows, in order."""
    known = trainings()
    return [estimated(known[row], device) / known[row].seconds - 1 for row in sorted(rows)]


def row(case: Case, repetitions: int) -> Iterator[Figure]:
    """Step of one row, measured, and simulated on the device that every second row but this one gave."""
    del repetitions
    at = case.count("row") - 1
    if at >= len(trainings()):
        raise ValueError(f"case {case}: expected a row of 1 to {len(trainings())}")
    training = trainings()[at]
    case = case.also(
        gpus=training.num_devices,
        hidden=training.hidden,
        tensor=training.tensor,
        data=training.data,
        pipeline=training.pipeline,
        microbatch=training.microbatch_size,
    )
    seconds = simulated(training, fitted(every_second(1 - at % 2)))
    yield Figure(case=case, name="step", value=training.seconds, unit="s", how=How.PUBLISHED)
    yield Figure(case=case, name="step", value=seconds, unit="s", how=How.SIMULATED)
    yield Figure(case=case, name=_OFF, value=seconds / training.seconds, unit="ratio", how=How.SIMULATED)
    known = simulated(training, fitted(frozenset(range(len(trainings()))))) / training.seconds
    yield Figure(case=case, name=_OFF_ALL, value=known, unit="ratio", how=How.SIMULATED)


def half(case: Case, repetitions: int) -> Iterator[Figure]:
    """Half of the rows predicted by the others, even rows and odd ones or a random half and its rest (`split`).

    `split` "none" fits to all rows and predicts the same: no constants are better, whatever the half.
    """
    del repetitions
    split, everything = case.text("split"), frozenset(range(len(trainings())))
    if split == "none":
        known = [everything]
    elif split == "even, odd":
        known = [every_second(0), every_second(1)]
    elif split.isdecimal():
        known = [drawn(int(split)), everything - drawn(int(split))]
    else:
        raise ValueError(f"case {case}: expected a split of 'none', 'even, odd', or the number of a random one")
    for side, rows in enumerate(known):
        device = fitted(rows)
        found = [abs(each) for each in off(everything if split == "none" else everything - rows, device)]
        own = case.also(side=side + 1)
        yield Figure(case=own, name=_MEAN, value=sum(found) / len(found), unit="fraction", how=How.SIMULATED)
        yield Figure(case=own, name=_WORST, value=max(found), unit="fraction", how=How.SIMULATED)
        yield Figure(case=own, name=_FAR, value=sum(each > FAR for each in found), unit="", how=How.SIMULATED)
        for constant in CONSTANTS:
            unit = "s" if constant.endswith("_seconds") else "fraction"
            yield Figure(case=own, name=constant, value=getattr(device, constant), unit=unit, how=How.SIMULATED)


def findings(figures: Sequence[Figure]) -> list[str]:
    """How far the predictions are off, which rows they miss, and why."""
    ratios = {figure.case.count("row") - 1: figure.value for figure in figures if figure.name == _OFF}
    of_all = {figure.case.count("row") - 1: figure.value for figure in figures if figure.name == _OFF_ALL}
    said = [*_of_halves(figures)]
    if not ratios:
        return said
    errors = {at: abs(ratio - 1) for at, ratio in ratios.items()}
    far = sorted((at for at in errors if errors[at] > FAR), key=lambda at: -errors[at])
    rest = [errors[at] for at in errors if at not in far]
    said.append(
        f"Each row by the device that every second of the others gave: {_percent(sum(errors.values()) / len(errors))} "
        f"off on average, {_percent(max(errors.values()))} at worst, {len(far)} of {len(errors)} rows off by more than "
        f"{_percent(FAR)}."
    )
    if far and rest:
        said.append(
            f"The other {len(rest)}: {_percent(sum(rest) / len(rest))} on average, {_percent(max(rest))} at worst."
        )
    said += [_why(at, ratios, of_all[at]) for at in far]
    return said + _disagreement(ratios)


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
            spread = f" ({_percent(min(means))} to {_percent(max(means))} by half)" if held_out else ""
            said.append(
                f"{len(means)} {what}: {_percent(sum(means) / len(means))} off on average{spread}, "
                f"{_percent(max(worst))} at worst."
            )
    return said


def _why(at: int, ratios: dict[int, float], of_all: float) -> str:
    """One row, the seconds that are missing, and what rows of equal T, D, P say of it."""
    training = trainings()[at]
    missing = training.seconds * (1 - ratios[at])
    same = [each for each in _same_but_microbatch(at) if each in ratios]
    near = [each for each in same if abs(ratios[each] - 1) < _NEAR]
    text = f"{_name(at)}: predicted {_percent(1 - ratios[at])} too short, {missing:.1f} s of {training.seconds:.1f} s. "
    if abs(of_all - 1) < _NEAR:
        return text + (
            f"Fitted to all rows it is {_percent(abs(of_all - 1))} off: it shows a constant that the half does not."
        )
    if near:
        sizes = " and ".join(str(trainings()[each].microbatch_size) for each in near)
        return text + (
            f"Microbatches of {sizes} on the same devices, with the same messages and sums but for their number and "
            f"size, are predicted within {_percent(_NEAR)}: seconds of this run, not of these sizes."
        )
    steps = [
        trainings()[each].seconds
        for each in ratios
        if each != at
        and _pipeline_of(each) == _pipeline_of(at)
        and trainings()[each].microbatch_size == training.microbatch_size
        and abs(ratios[each] - 1) < _NEAR
    ]
    if steps:
        return text + (
            f"With another T on as many devices, stages and layers the same microbatches took {min(steps):.1f} s: "
            "seconds of this run, or of these replicas."
        )
    return text + "No row of the same sizes is predicted well: what is missing may be a cost of these sizes."


def _disagreement(ratios: dict[int, float]) -> list[str]:
    """The pair of rows that differ in the microbatch alone of which one must be off the most."""
    least = {}
    for at, ratio in ratios.items():
        for other in _same_but_microbatch(at):
            if ratios.get(other, 0.0) > ratio:
                least[at, other] = (ratios[other] / ratio) ** 0.5 - 1
    if not least:
        return []
    (low, high), bound = max(least.items(), key=lambda item: item[1])
    return [
        f"Rows that disagree: {_name(low)} took {trainings()[low].seconds:.1f} s, with microbatches of "
        f"{trainings()[high].microbatch_size} it took {trainings()[high].seconds:.1f} s. Formulas that find the second "
        f"{_percent(1 - trainings()[low].seconds / trainings()[high].seconds * ratios[low] / ratios[high])} longer "
        f"than the first miss one of the two by {_percent(bound)} at least, whatever their constants."
    ]


def _same_but_microbatch(at: int) -> list[int]:
    def key(training: MeasuredTraining) -> tuple[int, ...]:
        return training.num_devices, training.hidden, training.tensor, training.data, training.pipeline

    known = trainings()
    return [each for each in range(len(known)) if each != at and key(known[each]) == key(known[at])]


def _pipeline_of(at: int) -> tuple[int, int, int]:
    training = trainings()[at]
    return training.num_devices, training.hidden, training.pipeline


def _name(at: int) -> str:
    training = trainings()[at]
    return (
        f"row {at + 1} (h = {training.hidden}, T = {training.tensor}, {training.data} replicas, "
        f"P = {training.pipeline}, microbatches of {training.microbatch_size})"
    )


def _percent(part: float) -> str:
    return f"{part:.1%}"
