"""Asynchronous schedules over real gloo processes, against the replay of their weight versions."""

from __future__ import annotations

import pytest
from support.async_pipeline import make_pipeline, run
from support.async_reference import UNEVEN, AsyncCase, agree, make_batch, make_model, replay
from support.pool import Pool

CASES = {
    "momentum": AsyncCase(task="conv-norm", num_ranks=3, optimizer="momentum", sizes=UNEVEN),
    "pipedream": AsyncCase(task="conv-norm", schedule="pipedream", num_ranks=4, optimizer="adamw", sizes=UNEVEN),
    "rates, flush and evaluation": AsyncCase(
        **{"task": "small-gpt", "schedule": "pipedream", "update_every": 2, "num_ranks": 3},
        **{"optimizer": "adamw-fused", "decay": True, "flushes": (2,), "evals": (4,)},
    ),
    "recompute": AsyncCase(task="lstm", num_ranks=3, recompute="full", sizes=UNEVEN, flushes=(4,)),
    "running statistics": AsyncCase(task="batchnorm", sizes=(19, 23, 16, 18, 20, 11), recompute="full", evals=(3,)),
    "tied, clipped": AsyncCase(task="small-tied", num_ranks=4, max_grad_norm=0.05, sizes=UNEVEN, evals=(3,)),
    "replicas": AsyncCase(
        task="small-gpt", num_ranks=3, replicas=(1, 2), num_microbatches=5, sizes=UNEVEN, flushes=(3,)
    ),
    "replicas with a flush": AsyncCase(
        **{"task": "small-tied", "schedule": "1f1b", "num_ranks": 4, "replicas": (2, 1, 1), "num_microbatches": 5},
        **{"optimizer": "adamw", "max_grad_norm": 0.05, "decay": True, "recompute": "full", "evals": (1,)},
    ),
    "skips": AsyncCase(task="unet", num_ranks=3, optimizer="momentum", sizes=UNEVEN),
}


@pytest.mark.thorough(but=["tied, clipped"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_equals_one_process(gloo: Pool, case: AsyncCase) -> None:
    """Every rank has all losses in the end, and the same full_state_dict."""
    agree(gloo.run(run, ranks=case.num_ranks, args=(case,)), case)


def losses_as_they_come(case: AsyncCase) -> list[tuple[int | None, float | None]]:
    """The result of each train_step; nothing is flushed before the end."""
    pipe = make_pipeline(case, make_model(case))
    said = []
    for t, size in enumerate(case.sizes):
        inputs, target = make_batch(case, t, size)
        result = pipe.train_step(*inputs, target)
        said.append((result.loss_step, result.loss))
    pipe.flush()
    pipe.close()
    return said


def test_a_step_leaves_the_pipeline_full(gloo: Pool) -> None:
    """Rank 0 returns from its first step before the last stage has seen the batch."""
    case = AsyncCase(task="conv-norm", schedule="pipedream", num_ranks=4, num_microbatches=3)
    said = gloo.run(losses_as_they_come, ranks=4, args=(case,))
    assert said[0][0] == (None, None)
    for rank in said:
        steps = [-1 if step is None else step for step, _ in rank]
        assert steps == sorted(steps)
        assert all(step <= t for t, step in enumerate(steps))
        assert all(abs(loss - replay(case).losses[step]) < 1e-12 for step, loss in rank if step is not None)
