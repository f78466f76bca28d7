"""H100 trainings that NVIDIA published, foretold by products and rings alone: nothing is fitted to them.

Megatron Bridge, docs/performance-summary.md, container 25.11, DGX-H100, FP8 with one scale a tensor: tokens a second of
a GPU, microbatches of one sequence of 8,192; gradients summed in 16 bits. Llama-3 8B ran fully sharded; here its
replicas hold all.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from support.inside import MEGATRON_CORE, DeviceModel, Transformer, TransformerSource

from stagewright.partition import Cluster, GivenStage, evaluate

LENGTH = 8192


class Run(NamedTuple):
    shape: dict[str, Any]
    devices: int
    tensor: int
    pipeline: int
    chunks: int
    context: int
    batch: int
    rate: float  # [tokens/s] of a GPU


LLAMA: dict[str, Any] = {"kv_heads": 8, "vocabulary": 128256, "length": LENGTH, "style": "llama", "precision": "fp8"}
RUNS = {
    "8B": Run({"layers": 32, "hidden": 4096, "heads": 32, "mlp_ratio": 3.5}, 8, 1, 1, 1, 1, 128, 14451),
    "70B": Run({"layers": 80, "hidden": 8192, "heads": 64, "mlp_ratio": 3.5}, 64, 4, 8, 5, 1, 128, 1602),
    "405B": Run({"layers": 126, "hidden": 16384, "heads": 128, "mlp_ratio": 3.25}, 1024, 8, 8, 8, 2, 512, 292),
}


def rate(run: Run) -> float:
    """Tokens a second of a GPU."""
    model = Transformer(**LLAMA | run.shape, head="untied", attention="flash", split="sequence")
    cluster = Cluster.parse(f"{run.devices // 8}x8:nvlink=450GB/s,net=50GB/s")
    device = DeviceModel.preset("H100-80GB")
    source = TransformerSource(
        transformer=model, device=device, cluster=cluster, context=run.context, runtime=MEGATRON_CORE
    )
    names = ["embedding", *(f"layer{at}" for at in range(model.layers)), "head"]
    number, wide = run.pipeline * run.chunks, run.devices // run.pipeline
    ends = [0, *(1 + round(model.layers * at / number) for at in range(1, number)), len(names)]
    places = [range(wide * at, wide * (at + 1)) for at in range(run.pipeline)]
    stages = [
        GivenStage(names[a:b], places[at % run.pipeline], run.tensor * run.context)
        for at, (a, b) in enumerate(pairwise(ends))
    ]
    schedule = "interleaved" if run.chunks > 1 else "1f1b"
    found = evaluate(source, cluster, stages, num_microbatches=run.batch, schedule=schedule, microbatch_size=1)
    return run.batch * LENGTH / found.simulated_step_time / run.devices


@pytest.mark.thorough(but=["8B"])
@pytest.mark.parametrize("name", RUNS)
def test_published_rates(name: str) -> None:
    found, published = rate(RUNS[name]), RUNS[name].rate
    print(f"{name}: {found:,.0f} tokens/s a GPU, published {published:,.0f}: {found / published - 1:+.1%}")
    assert found == pytest.approx(published, rel=0.08)
