"""Asynchronous schedules over real gloo processes, against the replay of their weight versions: the rules of
test_async_numerics.py, and what only several processes can show."""

from __future__ import annotations

from typing import Any

import pytest
from support.async_pipeline import make_pipeline, run
from support.async_reference import UNEVEN, AsyncCase, agree, make_batch, make_model, replay
from support.grids import nightly, one_in
from support.pool import Pool

pytestmark = pytest.mark.gloo

RULES: dict[str, dict[str, Any]] = {
    "2bw": {"schedule": "2bw"},
    "pipedream": {"schedule": "pipedream"},
    "pipedream-k2": {"schedule": "pipedream", "update_every": 2},
    "vertical": {"schedule": "pipedream", "vertical_sync": True},
}


def check(gloo: Pool, case: AsyncCase) -> None:
    """Every rank has all losses in the end, and the same full_state_dict."""
    agree(gloo.run(run, ranks=case.num_ranks, args=(case,)), case)


@pytest.mark.parametrize(
    ("ranks_and_optimizer", "schedule"), one_in(2, [(2, "sgd"), (3, "momentum"), (4, "adamw")], ("pipedream", "2bw"))
)
def test_every_rule(gloo: Pool, ranks_and_optimizer: tuple[int, str], schedule: str) -> None:
    num_ranks, optimizer = ranks_and_optimizer
    check(gloo, AsyncCase(task="conv-norm", schedule=schedule, num_ranks=num_ranks, optimizer=optimizer, sizes=UNEVEN))


@pytest.mark.parametrize(
    "rule",
    [nightly(RULES["2bw"]), nightly(RULES["pipedream"]), RULES["pipedream-k2"], nightly(RULES["vertical"])],
    ids=RULES.keys(),
)
def test_fused_optimizer_schedule_of_learning_rates_flush_and_eval_step(gloo: Pool, rule: dict[str, Any]) -> None:
    check(
        gloo,
        AsyncCase(task="small-gpt", num_ranks=3, optimizer="adamw-fused", decay=True, flushes=(2,), evals=(4,), **rule),
    )


@pytest.mark.parametrize(
    ("task", "schedule"), [("lstm", "2bw"), nightly("lstm", "pipedream"), nightly("masked-stages", "pipedream")]
)
def test_models(gloo: Pool, task: str, schedule: str) -> None:
    """The LSTM with recompute: it needs the version again in the backward."""
    recompute = "none" if task == "masked-stages" else "full"
    check(
        gloo,
        AsyncCase(
            task=task,
            schedule=schedule,
            num_ranks=3,
            optimizer="momentum",
            recompute=recompute,
            sizes=UNEVEN,
            flushes=(4,),
        ),
    )


@pytest.mark.parametrize("schedule", ["2bw", nightly("pipedream")])
def test_batchnorm_and_its_running_statistics(gloo: Pool, schedule: str) -> None:
    sizes = (19, 23, 16, 18, 20, 11)
    check(gloo, AsyncCase(task="batchnorm", schedule=schedule, sizes=sizes, recompute="full", evals=(3,)))


@pytest.mark.parametrize("num_ranks", [nightly(2), 3])
def test_tied_weights_of_the_first_and_last_stage(gloo: Pool, num_ranks: int) -> None:
    check(gloo, AsyncCase(task="small-tied", num_ranks=num_ranks, optimizer="momentum", sizes=UNEVEN, flushes=(4,)))


@pytest.mark.parametrize(
    ("task", "num_ranks", "optimizer"),
    [nightly("conv-norm", 2, "sgd"), nightly("conv-norm", 4, "adamw"), ("small-tied", 4, "sgd")],
)
def test_max_grad_norm(gloo: Pool, task: str, num_ranks: int, optimizer: str) -> None:
    case = AsyncCase(task=task, num_ranks=num_ranks, optimizer=optimizer, max_grad_norm=0.05, sizes=UNEVEN, evals=(3,))
    assert min(replay(case).grad_norms) > 0.05
    check(gloo, case)


@pytest.mark.parametrize("replicas", [nightly((2, 1)), (1, 2), nightly((2, 1, 1))], ids=str)
def test_replicas(gloo: Pool, replicas: tuple[int, ...]) -> None:
    check(
        gloo,
        AsyncCase(
            task="small-gpt",
            num_ranks=sum(replicas),
            flushes=(3,),
            replicas=replicas,
            num_microbatches=5,
            optimizer="momentum",
            sizes=UNEVEN,
        ),
    )


def test_a_traced_model_with_skips(gloo: Pool) -> None:
    check(gloo, AsyncCase(task="unet", num_ranks=3, optimizer="momentum", sizes=UNEVEN))


# --- what only several processes can show ---


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


@pytest.mark.parametrize("schedule", [nightly("2bw"), "pipedream"])
def test_a_step_leaves_the_pipeline_full(gloo: Pool, schedule: str) -> None:
    """Rank 0 returns from its first step before the last stage has seen the batch."""
    case = AsyncCase(task="conv-norm", schedule=schedule, num_ranks=4, num_microbatches=3)
    said = gloo.run(losses_as_they_come, ranks=4, args=(case,))
    assert said[0][0] == (None, None)
    for rank in said:
        steps = [-1 if step is None else step for step, _ in rank]
        assert steps == sorted(steps)
        assert all(step <= t for t, step in enumerate(steps))
        assert all(abs(loss - replay(case).losses[step]) < 1e-12 for step, loss in rank if step is not None)
