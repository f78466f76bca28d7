"""vTrain's measured trainings: half of them fit a device model, which predicts the other half.

Bang et al., MICRO 2024 (arXiv 2312.12391): GPTs of 3.6 to 175 billion parameters on 64 to 512 A100, measured with
Megatron-DeepSpeed (the repository's data/README.md), P up to 32. Nodes of eight with 800 Gbit/s together, 1F1B and
recompute by layer say its config/validation/.
What the report says of the figures is in `vtrain_report.py`.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from ...partition.formulas import DeviceModel
from ..jobs.case import Case
from ..jobs.figure import Figure, How
from .agreement import least_errors
from .device_fit import SHOWN, fit_measured, fit_sums
from .training_files import read_sums, read_trainings
from .trainings import MeasuredTraining, estimated, simulated

_DATA = Path(__file__).parent / "data"
NETWORK = 4 * 25e9 / 8  # [bytes/s] a device: four cards a node
FAR = 0.10  # off: rows that the report names
OFF, OFF_ALL = "predicted / measured", "fitted to all / measured"
MEAN, WORST, COUNT_FAR = "off on average", "off at worst", "rows off by more than 10%"
LEAST_MEAN, LEAST_WORST, ROWS = "least off on average", "least off at worst", "rows of it"
APART_MEAN, APART_WORST = "on average, layouts apart", "at worst, layouts apart"


@cache
def trainings(path: str = "") -> tuple[MeasuredTraining, ...]:
    """The rows of a file in vTrain's form, in order; "": those of this repository.

    ValueError names the file, and in it the line and the column, where it cannot be read so.
    """
    try:
        return read_trainings(path or _DATA / "vtrain_a100.csv", network=NETWORK)
    except OSError as error:
        raise ValueError(
            f"trainings={path}: {error.strerror or error}: expected a CSV file with vTrain's columns, as in --set "
            f"trainings=FILE.csv"
        ) from None


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
            **_model(training),
            tensor=training.tensor,
            data=training.data,
            pipeline=training.pipeline,
            microbatch=training.microbatch_size,
        )
        seconds = simulated(training, device)
        yield Figure(case=own, name="step", value=training.seconds, unit="s", how=How.PUBLISHED)
        yield Figure(case=own, name="step", value=seconds, unit="s", how=How.SIMULATED)
        yield Figure(case=own, name=OFF, value=seconds / training.seconds, unit="ratio", how=How.SIMULATED)
        best = estimated(training, of_all) / training.seconds
        yield Figure(case=own, name=OFF_ALL, value=best, unit="ratio", how=How.SIMULATED)


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
        yield Figure(case=own, name=MEAN, value=sum(found) / len(found), unit="fraction", how=How.SIMULATED)
        yield Figure(case=own, name=WORST, value=max(found), unit="fraction", how=How.SIMULATED)
        yield Figure(case=own, name=COUNT_FAR, value=sum(each > FAR for each in found), unit="", how=How.SIMULATED)
        for constant in SHOWN:
            unit = "s" if constant.endswith("_seconds") else "fraction"
            yield Figure(case=own, name=constant, value=getattr(device, constant), unit=unit, how=How.SIMULATED)


def agreement(case: Case, repetitions: int) -> Iterator[Figure]:
    """How far rows of one model, number of devices, batch and T contradict each other, whatever their parts take.

    `rows` is "all": of each such block of at least three rows; `trainings` is another file.
    """
    del repetitions
    if case.text("rows") != "all":
        raise ValueError(f"case {case}: rows: expected all")
    blocks: dict[tuple[int, ...], list[MeasuredTraining]] = {}
    for training in trainings(_path(case)):
        blocks.setdefault((*_model(training).values(), training.tensor), []).append(training)
    for block in blocks.values():
        if len(block) < 3:
            continue
        own = case.also(**_model(block[0]), tensor=block[0].tensor)
        yield Figure(case=own, name=ROWS, value=len(block), unit="", how=How.PUBLISHED)
        for apart, mean, worst in ((False, LEAST_MEAN, LEAST_WORST), (True, APART_MEAN, APART_WORST)):
            least = least_errors(block, layouts_apart=apart)
            yield Figure(case=own, name=mean, value=least.average, unit="fraction", how=How.SIMULATED)
            yield Figure(case=own, name=worst, value=least.worst, unit="fraction", how=How.SIMULATED)


def _model(training: MeasuredTraining) -> dict[str, int]:
    """Settings that rows which are compared have in common."""
    return {
        "gpus": training.num_devices,
        "hidden": training.hidden,
        "layers": training.layers,
        "batch": training.batch_size,
    }


def _path(case: Case) -> str:
    return case.text("trainings") if "trainings" in case else ""
