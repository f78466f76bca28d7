"""Megatron-LM's Table 1: each training predicted by what the others say of the device. No torch.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC'21, arXiv
2104.04473): nodes of eight A100, eight cards of 200 Gbit/s each. What is predicted is one step, as a plan that is
given: no sum of gradients is hidden by backwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

from ...partition import GivenStage, Plan, evaluate
from ...partition.analytic import DeviceModel, TransformerSource
from ...partition.analytic.fit import MeasuredTraining, fit_measured
from ..jobs.case import Case
from ..jobs.figure import Figure, How

_TABLE_1 = Path(__file__).parent / "data" / "megatron_table1.json"
DEVICE = "A100-80GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(MeasuredTraining):
    """A line of Table 1; its seconds are computed from the published rate.

    Arguments:
        billion_parameters: as printed.
        teraflops_published: of each device.
    """

    billion_parameters: float
    teraflops_published: int

    def teraflops(self, seconds: float) -> float:
        """TFLOP/s of each device, by Megatron-LM's count of a step's operations."""
        flops = self.model.flops(batch_size=self.batch_size, recompute="layer")
        return flops / self.num_devices / seconds / 1e12


@cache
def table() -> tuple[Run, ...]:
    """Table 1, smallest model first."""
    runs = json.loads(_TABLE_1.read_text(encoding="utf-8"))["runs"]
    return tuple(Run(teraflops_published=run.pop("teraflops"), **run) for run in runs)


def evaluated(training: MeasuredTraining, device: DeviceModel) -> Plan:
    """Its plan: messages in parts that travel beside compute, whatever the training says of them."""
    reached = device.reached(training.cluster)
    names = ["embedding", *(f"layer{at}" for at in range(training.layers)), "head"]
    wide, size = training.num_devices // training.pipeline, training.layers // training.num_stages
    ends = [0, *range(size + 1, training.layers + 1, size), len(names)]
    ranks = [range(wide * at, wide * (at + 1)) for at in range(training.pipeline)]
    return evaluate(
        TransformerSource(transformer=training.model, device=device, cluster=training.cluster),
        replace(reached, levels=tuple(replace(level, sum_busy=1.0) for level in reached.levels)),
        [
            GivenStage(names[a:b], ranks[stage % training.pipeline], training.tensor, "layer")
            for stage, (a, b) in enumerate(pairwise(ends))
        ],
        num_microbatches=training.data * training.num_microbatches,
        schedule="1f1b" if training.chunks == 1 else "interleaved",
        microbatch_size=training.microbatch_size,
    )


@cache
def simulated(training: MeasuredTraining, device: DeviceModel) -> float:
    """Seconds of one step; `estimated`, which fits use, says the same in a hundredth of the time."""
    seconds = evaluated(training, device).simulated_step_time
    assert seconds is not None
    return seconds


def fitted(runs: Sequence[Run], constants: Sequence[str] = ("matrix_efficiency",)) -> DeviceModel:
    return fit_measured(DeviceModel.preset(DEVICE), runs, constants=constants, noise=None)


def simulate_run(case: Case, repetitions: int) -> Iterator[Figure]:
    """Step and rate of one line of the table, simulated and published.

    The device's one constant is fitted to lines that this one is not among: of ten runs, five predict the other five.
    """
    del repetitions
    runs = table()
    at = next((at for at, run in enumerate(runs) if run.billion_parameters == case.number("billion_parameters")), None)
    if at is None:
        known = ", ".join(str(run.billion_parameters) for run in runs)
        raise ValueError(f"case {case}: expected billion_parameters of {known}")
    run = runs[at]
    case = case.also(gpus=run.num_devices, pipeline=run.pipeline, chunks=run.chunks)
    seconds = simulated(run, _fitted_on(1 - at % 2))
    rates = {How.PUBLISHED: float(run.teraflops_published), How.SIMULATED: run.teraflops(seconds)}
    for how, step in ((How.PUBLISHED, run.seconds), (How.SIMULATED, seconds)):
        yield Figure(case=case, name="step", value=step, unit="s", how=how)
        yield Figure(case=case, name="rate of a GPU", value=rates[how], unit="TFLOP/s", how=how)
    ratio = seconds / run.seconds
    yield Figure(case=case, name="predicted / published", value=ratio, unit="ratio", how=How.SIMULATED)


@cache
def _fitted_on(parity: int) -> DeviceModel:
    return fitted(table()[parity::2])


def findings(figures: Sequence[Figure]) -> list[str]:
    """How far the predictions are off."""
    off = [abs(figure.value - 1) for figure in figures if figure.name == "predicted / published"]
    root_mean_square = (sum(each**2 for each in off) / len(off)) ** 0.5
    return [
        f"Off by {max(off):.1%} at most, {root_mean_square:.1%} root mean square over {len(off)} trainings (simulated "
        "beside published), each predicted by a device whose one constant was fitted to five others."
    ]
