"""1F1B with replicated stages against one process, float64: replicas sum their gradients, and their ranks the losses.

The replay of support/async_reference.py runs flush schedules, too; asynchronous replicas are in test_async_numerics.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.async_pipeline import run
from support.async_reference import UNEVEN, AsyncCase, agree
from support.pool import Pool
from support.small import X, Y, make
from torch import nn

from stagewright.schedules import build, check

LAYOUTS = [(2, 1), (1, 2), (3, 1), (1, 3), (2, 1, 1), (2, 2)]


def case(replicas: tuple[int, ...], **options: Any) -> AsyncCase:
    settings = {"task": "conv-norm", "optimizer": "momentum", "sizes": UNEVEN[:4], "num_microbatches": 5}
    return AsyncCase(schedule="1f1b", num_ranks=sum(replicas), replicas=replicas, **(settings | options))


@pytest.mark.thorough(but=["replicas6-2"])
@pytest.mark.parametrize(
    ("replicas", "num_microbatches"), [(each, m) for i, each in enumerate(LAYOUTS) for m in ((1, 6), (2, 5))[i % 2]]
)
def test_in_one_process(replicas: tuple[int, ...], num_microbatches: int) -> None:
    """M need not be a multiple of the replicas; with M=1 some have nothing to do."""
    check(build("1f1b", num_ranks=sum(replicas), num_microbatches=num_microbatches, replicas=replicas))
    one = case(replicas, num_microbatches=num_microbatches)
    agree(run(one), one)


def _replicas_that_start_apart() -> list[float]:
    torch.manual_seed(torch.distributed.get_rank() == 1)  # the second replica of the first stage makes other weights
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    schedule = build("1f1b", num_ranks=3, num_microbatches=4, replicas=(2, 1))
    pipe = make(model=model, schedule=schedule, num_microbatches=None, mesh=None)
    for _ in range(3):
        pipe.train_step(X, Y)
    return [float(value.detach().double().sum()) for value in pipe.state_dict().values()]


@pytest.mark.thorough
def test_replicas_begin_with_the_weights_of_the_first_one_and_stay_equal(gloo: Pool) -> None:
    first, second, _ = gloo.run(_replicas_that_start_apart, ranks=3)
    assert first == second


def _in_small_buckets(one: AsyncCase, num_bytes: int) -> Any:
    from support.inside import buckets

    before, buckets.BUCKET_BYTES = buckets.BUCKET_BYTES, num_bytes
    try:
        return run(one)
    finally:
        buckets.BUCKET_BYTES = before


@pytest.mark.thorough
def test_gradients_are_summed_bucket_by_bucket(gloo: Pool) -> None:
    """Each alone and in its own place; several at once and the rest."""
    one = case((2, 1), optimizer="adamw")
    agree(gloo.run(_in_small_buckets, ranks=3, args=(one, 300)), one)
