"""Megatron-LM's figure 12: what interleaving gains, and how the gain goes with the batch.

Narayanan et al. 2021 (arXiv 2104.04473), section 5.3.2: a GPT of 175 billion parameters on 96 GPUs, T = 8, P = 12,
microbatches of one sequence, two layers a chunk (V = 4; `examples/sc21/run_figure_12.sh` of Megatron-LM), batches of 12
to 60 sequences. The paper plots the rates and does not print them, so none is published here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...partition.analytic.device_model import DeviceModel
from ...schedules import simulate
from ..jobs.case import Case
from ..jobs.figure import Figure, How, repeated
from ..measure.equal_stages import costs_of, schedule_of
from .ptd_p import DEVICE
from .trainings import Training, step_costs
from .trainings import schedule_of as schedule_of_training

_GAIN = "interleaved / 1f1b"
_BATCHES = 2  # of a repetition of one schedule


def simulated_175b(case: Case, repetitions: int) -> Iterator[Figure]:
    """Rates of both schedules, and their ratio, for a `batch`; the ranks of a tensor group send `parts` or `whole` ones
    (`sent`), which travel `beside` compute or are `waited` for (`messages`)."""
    del repetitions
    batch = case.count("batch")
    default = Training(
        heads=96,
        hidden=12288,
        layers=96,
        tensor=8,
        pipeline=12,
        chunks=1,
        data=1,
        microbatch_size=1,
        num_microbatches=batch,
        batch_size=batch,
        num_devices=96,
        parts_sent=_either(case, "sent", "parts", "whole"),
        sends_wait=_either(case, "messages", "waited", "beside"),
    )
    rates = {}
    for schedule, training in (("1f1b", default), ("interleaved", replace(default, chunks=4))):
        costs = step_costs(training, DeviceModel.preset(DEVICE))
        rates[schedule] = training.teraflops(simulate(schedule_of_training(training), costs).makespan)
        shown = case.also(schedule=schedule)
        yield Figure(case=shown, name="rate of a GPU", value=rates[schedule], unit="TFLOP/s", how=How.SIMULATED)
    gain = rates["interleaved"] / rates["1f1b"]
    yield Figure(case=case, name=_GAIN, value=gain, unit="ratio", how=How.SIMULATED)


def _either(case: Case, key: str, yes: str, no: str) -> bool:
    if case.text(key) not in (yes, no):
        raise ValueError(f"case {case}: {key}: expected {yes} or {no}")
    return case.text(key) == yes


def emulated(case: Case, repetitions: int) -> Iterator[Figure]:
    """Both schedules in turn on real processes with stages that sleep, and their ratio; on all of the case's ranks."""
    from ..measure.sleeping import SleepingPipe, in_turn_asleep
    from ..measure.timing import median_of, ratios

    schedules = {name: schedule_of(case.also(schedule=name)) for name in ("1f1b", "interleaved")}
    ideals = {name: simulate(each, costs_of(each)).makespan for name, each in schedules.items()}
    yield Figure(case=case, name=_GAIN, value=ideals["1f1b"] / ideals["interleaved"], unit="ratio", how=How.SIMULATED)

    def seconds(pipe: SleepingPipe) -> float:
        return median_of(pipe.step, _BATCHES)

    times = in_turn_asleep(str(case), schedules, seconds, repetitions=repetitions)
    gains = ratios(times["1f1b"], times["interleaved"])
    yield from repeated(gains, case=case, name=_GAIN, unit="ratio", how=How.EMULATED)
