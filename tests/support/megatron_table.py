"""Megatron-LM's Table 1, and a training's step as the simulator has it. No torch.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC'21, arXiv
2104.04473): nodes of eight A100, eight cards of 200 Gbit/s each.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

from stagewright.partition import GivenStage, evaluate
from support.inside import DeviceModel, TransformerSource
from support.trainings import MeasuredTraining

_TABLE_1 = Path(__file__).parents[1] / "data" / "megatron_table1.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(MeasuredTraining):
    """A line of Table 1; its seconds are computed from the published rate.

    Arguments:
        billion_parameters: as printed.
        teraflops_published: of each device.
    """

    billion_parameters: float
    teraflops_published: int


@cache
def table() -> tuple[Run, ...]:
    """Table 1, smallest model first."""
    runs = json.loads(_TABLE_1.read_text(encoding="utf-8"))["runs"]
    return tuple(Run(teraflops_published=run.pop("teraflops"), **run) for run in runs)


@cache
def simulated(training: MeasuredTraining, device: DeviceModel) -> float:
    """Seconds of one step of the training's own plan. `estimated` has the same in a hundredth of the time, for fits.

    No all-reduce of gradients overlaps a backward; messages travel in parts and overlap computation.
    """
    reached = device.reached(training.cluster)
    names = ["embedding", *(f"layer{at}" for at in range(training.layers)), "head"]
    wide, size = training.num_devices // training.pipeline, training.layers // training.num_stages
    ends = [0, *range(size + 1, training.layers + 1, size), len(names)]
    ranks = [range(wide * at, wide * (at + 1)) for at in range(training.pipeline)]
    plan = evaluate(
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
    assert plan.simulated_step_time is not None
    return plan.simulated_step_time
