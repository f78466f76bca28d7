"""Asynchronous schedules, all ranks in one process, against a replay of their weight versions, float64.

    difference 0      chains: losses, parameters, buffers, optimizer states
    below 1e-12       where sums are reordered: replicas, ties, traced models, (sum, count) losses, clipping
    below 1e-10       the same after AdamW steps

What every case runs is in support/async_pipeline.py, what is right in support/async_reference.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.async_pipeline import run
from support.async_reference import UNEVEN, AsyncCase, agree, assert_exact, replay
from support.grids import one_in

OPTIMIZERS = ("sgd", "adamw", "adamw-foreach", "adamw-fused")
RULES: dict[str, dict[str, Any]] = {
    "2bw": {"schedule": "2bw"},
    "pipedream": {"schedule": "pipedream"},
    "pipedream-k2": {"schedule": "pipedream", "update_every": 2},
    "pipedream-kM": {"schedule": "pipedream", "update_every": 4},
    "vertical": {"schedule": "pipedream", "vertical_sync": True},
    "vertical-k2": {"schedule": "pipedream", "update_every": 2, "vertical_sync": True},
}
ONE_OF_EACH = {name: RULES[name] for name in ("2bw", "pipedream", "vertical-k2")}
one_of_each = pytest.mark.parametrize("rule", ONE_OF_EACH.values(), ids=ONE_OF_EACH.keys())


def check(case: AsyncCase) -> None:
    agree(run(case), case)


# --- the rules ---


@pytest.mark.thorough(but=["1-pipedream-k2"])
@pytest.mark.parametrize(("num_ranks", "rule"), one_in(2, (1, 2, 3, 4), RULES))
def test_every_rule_on_every_number_of_ranks(rule: dict[str, Any], num_ranks: int) -> None:
    check(AsyncCase(task="conv-norm", num_ranks=num_ranks, optimizer="momentum", sizes=UNEVEN, **rule))


@pytest.mark.thorough
@pytest.mark.parametrize(("optimizer", "rule"), one_in(2, OPTIMIZERS, ONE_OF_EACH))
def test_every_optimizer(rule: dict[str, Any], optimizer: str) -> None:
    check(AsyncCase(task="conv-norm", num_ranks=4, optimizer=optimizer, **rule))


@pytest.mark.thorough
@pytest.mark.parametrize(("num_ranks", "warmup"), [(2, "eager"), (4, "eager"), (3, (3, 2, 0)), (3, (6, 3, 0))], ids=str)
def test_a_deeper_warmup_changes_no_number(num_ranks: int, warmup: Any) -> None:
    plain = AsyncCase(task="small-gpt", num_ranks=num_ranks, num_microbatches=6, optimizer="adamw", flushes=(4,))
    outcome = run(replace(plain, warmup=warmup))
    assert_exact(outcome, replay(plain))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("replicas", "optimizer"),
    [((2, 1), "sgd"), ((1, 2), "adamw"), ((2, 2), "momentum"), ((3, 1), "sgd"), ((2, 1), "adamw")],
    ids=str,
)
def test_replicas_change_no_number(replicas: tuple[int, ...], optimizer: str) -> None:
    case = AsyncCase(task="conv-norm", num_ranks=sum(replicas), replicas=replicas, optimizer=optimizer, sizes=UNEVEN)
    check(case)


@pytest.mark.thorough(but=["2-1"])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 1), (2, 2), (3, 2), (4, 3), (3, 8), (2, 7)])
def test_2bw_from_the_fewest_microbatches_on(num_ranks: int, num_microbatches: int) -> None:
    check(AsyncCase(task="conv-norm", num_ranks=num_ranks, num_microbatches=num_microbatches, evals=(4,)))


@pytest.mark.thorough(but=["False-4-1", "True-3-5"])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(4, 1), (4, 2), (3, 5)])
@pytest.mark.parametrize("vertical_sync", [False, True])
def test_pipedream_with_batches_shorter_than_the_pipeline(
    num_ranks: int, num_microbatches: int, vertical_sync: bool
) -> None:
    case = AsyncCase(
        task="conv-norm",
        schedule="pipedream",
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        vertical_sync=vertical_sync,
        flushes=(4,),
        optimizer="momentum",
    )
    check(case)


# --- draining in the middle ---


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rule", "flushes_and_evals"),
    one_in(2, ONE_OF_EACH, [((3,), ()), ((), (4,)), ((0, 4), (2, 4)), (tuple(range(6)), ())]),
)
def test_flush_and_eval_step_in_the_middle(
    rule: dict[str, Any], flushes_and_evals: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    flushes, evals = flushes_and_evals
    case = AsyncCase(task="mlp", num_ranks=3, optimizer="momentum", flushes=flushes, evals=evals, **rule)
    check(case)


# --- models ---


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("task", "rule"), one_in(3, ("mlp", "lstm", "masked-stages", "sequential-stages"), ONE_OF_EACH)
)
def test_every_model(task: str, rule: dict[str, Any]) -> None:
    check(AsyncCase(task=task, num_ranks=3, optimizer="adamw", sizes=UNEVEN, flushes=(3,), **rule))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("task", "recompute", "rule"),
    one_in(3, ("small-gpt", "conv-norm", "lstm"), ("full", "layer", "selective"), ("2bw", "pipedream")),
)
def test_recompute(task: str, recompute: str, rule: str) -> None:
    """The backward runs the forward again: under the version of the microbatch, with its random numbers."""
    check(AsyncCase(task=task, num_ranks=3, recompute=recompute, optimizer="momentum", flushes=(4,), **RULES[rule]))


@pytest.mark.thorough
@pytest.mark.parametrize(("recompute", "rule"), one_in(2, ("none", "full"), ONE_OF_EACH))
def test_batchnorm_and_its_running_statistics(rule: dict[str, Any], recompute: str) -> None:
    sizes = (19, 23, 16, 18, 20, 11)
    check(AsyncCase(task="batchnorm", num_ranks=3, sizes=sizes, recompute=recompute, evals=(3,), **rule))


@pytest.mark.thorough
@pytest.mark.parametrize(("rule", "bounds"), one_in(2, ONE_OF_EACH, [(2, 9), (10, 12)]))
def test_stages_of_the_users_own_cut(rule: dict[str, Any], bounds: tuple[int, ...]) -> None:
    """One by one, and as split_points; stages begin with an activation, a convolution, a LayerNorm."""
    for as_stages in (False, True):
        check(AsyncCase(task="conv-norm", num_ranks=3, bounds=bounds, as_stages=as_stages, optimizer="adamw", **rule))


@pytest.mark.thorough
@one_of_each
def test_stages_with_nothing_to_train(rule: dict[str, Any]) -> None:
    check(AsyncCase(task="mlp", num_ranks=4, bounds=(1, 3, 6), optimizer="momentum", **rule))


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_tied_weights_of_the_first_and_last_stage(num_ranks: int, optimizer: str) -> None:
    case = AsyncCase(task="small-tied", num_ranks=num_ranks, optimizer=optimizer, sizes=UNEVEN, flushes=(4,))
    outcome = run(case)
    agree(outcome, case)
    assert torch.equal(outcome.state["0.weight"], outcome.state["5.weight"])


@pytest.mark.thorough
@pytest.mark.parametrize("task", ["unet", "batchnorm-cnn"])
def test_traced_models(task: str) -> None:
    sizes = (19,) * 6 if task == "batchnorm-cnn" else UNEVEN
    check(AsyncCase(task=task, num_ranks=3, optimizer="momentum", sizes=sizes, flushes=(4,)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rule", "task_and_recompute"),
    one_in(3, ONE_OF_EACH, [("conv-norm", "none"), ("small-gpt", "full"), ("small-gpt", "selective")]),
)
def test_autocast_around_the_whole_loop(rule: dict[str, Any], task_and_recompute: tuple[str, str]) -> None:
    """Its cache of casted weights must not outlive a version."""
    task, recompute = task_and_recompute
    check(
        AsyncCase(task=task, num_ranks=3, autocast=True, optimizer="adamw", recompute=recompute, flushes=(4,), **rule)
    )


# --- losses, norms, learning rates ---


@pytest.mark.thorough(but=["{'schedule': 'pipedream', 'update_every': 4}-sgd"])
@pytest.mark.parametrize(("rule", "optimizer"), [(RULES["2bw"], "adamw"), (RULES["pipedream-kM"], "sgd")], ids=str)
def test_losses_given_as_sum_and_count(rule: dict[str, Any], optimizer: str) -> None:
    check(AsyncCase(task="small-masked", num_ranks=3, optimizer=optimizer, sizes=UNEVEN, evals=(4,), **rule))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("task", "optimizer"),
    [("conv-norm", "sgd"), ("conv-norm", "adamw"), ("small-tied", "adamw"), ("small-masked", "sgd")],
)
def test_max_grad_norm(task: str, optimizer: str) -> None:
    case = AsyncCase(task=task, num_ranks=3, optimizer=optimizer, max_grad_norm=0.05, sizes=UNEVEN, flushes=(2,))
    assert min(replay(case).grad_norms) > 0.05
    check(case)


@pytest.mark.thorough(but=["2bw"])
@one_of_each
def test_learning_rate_scheduler(rule: dict[str, Any]) -> None:
    check(AsyncCase(task="conv-norm", num_ranks=3, optimizer="momentum", decay=True, flushes=(1,), **rule))
