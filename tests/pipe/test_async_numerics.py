"""Asynchronous schedules, all ranks in one process, against a replay of their weight versions, float64.

    difference 0      chains: losses, parameters, buffers, optimizer states
    below 1e-12       where sums are reordered: replicas, ties, traced models, (sum, count) losses, clipping
    below 1e-10       the same after AdamW steps

What every case runs is in support/async_pipeline.py, what is right in support/async_reference.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.async_pipeline import run
from support.async_reference import (
    MISTAKES,
    UNEVEN,
    AsyncCase,
    agree,
    assert_exact,
    make_batch,
    make_model,
    replay,
    uses,
)
from support.grids import one_in
from torch import Tensor, nn
from torch.func import functional_call

pytestmark = pytest.mark.slow  # about a minute; `make check` leaves it to `make test`

OPTIMIZERS = ("sgd", "adamw", "adamw-foreach", "adamw-fused")
RULES: dict[str, dict[str, Any]] = {
    "2bw": {"schedule": "2bw"},
    "pipedream": {"schedule": "pipedream"},
    "pipedream-k2": {"schedule": "pipedream", "update_every": 2},
    "pipedream-kM": {"schedule": "pipedream", "update_every": 4},
    "vertical": {"schedule": "pipedream", "vertical_sync": True},
    "vertical-k2": {"schedule": "pipedream", "update_every": 2, "vertical_sync": True},
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
ONE_OF_EACH = {name: RULES[name] for name in ("2bw", "pipedream", "vertical-k2")}
one_of_each = pytest.mark.parametrize("rule", ONE_OF_EACH.values(), ids=ONE_OF_EACH.keys())


def check(case: AsyncCase) -> None:
    agree(run(case), case)


# --- the rules ---


@pytest.mark.parametrize(("num_ranks", "rule"), one_in(2, (1, 2, 3, 4), RULES))
def test_every_rule_on_every_number_of_ranks(rule: dict[str, Any], num_ranks: int) -> None:
    check(AsyncCase(task="conv-norm", num_ranks=num_ranks, optimizer="momentum", sizes=UNEVEN, **rule))


@pytest.mark.parametrize(("optimizer", "rule"), one_in(2, OPTIMIZERS, ONE_OF_EACH))
def test_every_optimizer(rule: dict[str, Any], optimizer: str) -> None:
    check(AsyncCase(task="conv-norm", num_ranks=4, optimizer=optimizer, **rule))


@pytest.mark.parametrize(("num_ranks", "warmup"), [(2, "eager"), (4, "eager"), (3, (3, 2, 0)), (3, (6, 3, 0))], ids=str)
def test_a_deeper_warmup_changes_no_number(num_ranks: int, warmup: Any) -> None:
    plain = AsyncCase(task="small-gpt", num_ranks=num_ranks, num_microbatches=6, optimizer="adamw", flushes=(4,))
    outcome = run(replace(plain, warmup=warmup))
    assert_exact(outcome, replay(plain))


@pytest.mark.parametrize(
    ("replicas", "optimizer"),
    [((2, 1), "sgd"), ((1, 2), "adamw"), ((2, 2), "momentum"), ((3, 1), "sgd"), ((2, 1), "adamw")],
    ids=str,
)
def test_replicas_change_no_number(replicas: tuple[int, ...], optimizer: str) -> None:
    case = AsyncCase(task="conv-norm", num_ranks=sum(replicas), replicas=replicas, optimizer=optimizer, sizes=UNEVEN)
    check(case)


def test_replicas_of_a_stage_with_dropout() -> None:
    check(AsyncCase(task="small-gpt", num_ranks=4, replicas=(2, 1, 1), num_microbatches=5, flushes=(3,)))


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 1), (2, 2), (3, 2), (4, 3), (3, 8), (2, 7)])
def test_2bw_from_the_fewest_microbatches_on(num_ranks: int, num_microbatches: int) -> None:
    check(AsyncCase(task="conv-norm", num_ranks=num_ranks, num_microbatches=num_microbatches, evals=(4,)))


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


# --- the rest of the replay, shown on a schedule without stale weights ---


@pytest.mark.parametrize("task", ["small-gpt", "small-masked", "small-tied", "masked-stages"])
def test_1f1b(task: str) -> None:
    plain = AsyncCase(task=task, schedule="1f1b", num_ranks=3, optimizer="momentum", sizes=UNEVEN, decay=True)
    check(replace(plain, evals=(2,), flushes=(4,), max_grad_norm=0.05 if task == "small-masked" else None))


def test_1f1b_under_autocast() -> None:
    check(AsyncCase(task="small-gpt", schedule="1f1b", num_ranks=3, autocast=True, optimizer="adamw"))


# --- draining in the middle ---


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


@pytest.mark.parametrize(
    ("task", "rule"), one_in(3, ("mlp", "lstm", "masked-stages", "sequential-stages"), ONE_OF_EACH)
)
def test_every_model(task: str, rule: dict[str, Any]) -> None:
    check(AsyncCase(task=task, num_ranks=3, optimizer="adamw", sizes=UNEVEN, flushes=(3,), **rule))


@pytest.mark.parametrize(
    ("task", "recompute", "rule"),
    one_in(3, ("small-gpt", "conv-norm", "lstm"), ("full", "layer", "selective"), ("2bw", "pipedream")),
)
def test_recompute(task: str, recompute: str, rule: str) -> None:
    """The backward runs the forward again: under the version of the microbatch, with its random numbers."""
    check(AsyncCase(task=task, num_ranks=3, recompute=recompute, optimizer="momentum", flushes=(4,), **RULES[rule]))


@pytest.mark.parametrize(("recompute", "rule"), one_in(2, ("none", "full"), ONE_OF_EACH))
def test_batchnorm_and_its_running_statistics(rule: dict[str, Any], recompute: str) -> None:
    sizes = (19, 23, 16, 18, 20, 11)
    check(AsyncCase(task="batchnorm", num_ranks=3, sizes=sizes, recompute=recompute, evals=(3,), **rule))


@pytest.mark.parametrize(("rule", "bounds"), one_in(2, ONE_OF_EACH, [(2, 9), (10, 12)]))
def test_stages_of_the_users_own_cut(rule: dict[str, Any], bounds: tuple[int, ...]) -> None:
    """One by one, and as split_points; stages begin with an activation, a convolution, a LayerNorm."""
    for as_stages in (False, True):
        check(AsyncCase(task="conv-norm", num_ranks=3, bounds=bounds, as_stages=as_stages, optimizer="adamw", **rule))


@one_of_each
def test_stages_with_nothing_to_train(rule: dict[str, Any]) -> None:
    check(AsyncCase(task="mlp", num_ranks=4, bounds=(1, 3, 6), optimizer="momentum", **rule))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_tied_weights_of_the_first_and_last_stage(num_ranks: int, optimizer: str) -> None:
    case = AsyncCase(task="small-tied", num_ranks=num_ranks, optimizer=optimizer, sizes=UNEVEN, flushes=(4,))
    outcome = run(case)
    agree(outcome, case)
    assert torch.equal(outcome.state["0.weight"], outcome.state["5.weight"])


@pytest.mark.parametrize("task", ["unet", "batchnorm-cnn"])
def test_traced_models(task: str) -> None:
    sizes = (19,) * 6 if task == "batchnorm-cnn" else UNEVEN
    check(AsyncCase(task=task, num_ranks=3, optimizer="momentum", sizes=sizes, flushes=(4,)))


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


@pytest.mark.parametrize(("rule", "optimizer"), [(RULES["2bw"], "adamw"), (RULES["pipedream-kM"], "sgd")], ids=str)
def test_losses_given_as_sum_and_count(rule: dict[str, Any], optimizer: str) -> None:
    check(AsyncCase(task="small-masked", num_ranks=3, optimizer=optimizer, sizes=UNEVEN, evals=(4,), **rule))


@pytest.mark.parametrize(
    ("task", "optimizer"),
    [("conv-norm", "sgd"), ("conv-norm", "adamw"), ("small-tied", "adamw"), ("small-masked", "sgd")],
)
def test_max_grad_norm(task: str, optimizer: str) -> None:
    case = AsyncCase(task=task, num_ranks=3, optimizer=optimizer, max_grad_norm=0.05, sizes=UNEVEN, flushes=(2,))
    assert min(replay(case).grad_norms) > 0.05
    check(case)


def test_gradients_below_max_grad_norm_are_left_alone() -> None:
    free = AsyncCase(task="conv-norm", num_ranks=3, optimizer="momentum")
    clipped = run(replace(free, max_grad_norm=1e6))
    clipped.grad_norms = []
    assert_exact(clipped, replay(free))


@one_of_each
def test_learning_rate_scheduler(rule: dict[str, Any]) -> None:
    check(AsyncCase(task="conv-norm", num_ranks=3, optimizer="momentum", decay=True, flushes=(1,), **rule))


def test_learning_rate_scheduler_and_clipping() -> None:
    check(AsyncCase(task="small-gpt", num_ranks=4, decay=True, max_grad_norm=0.1, evals=(2,)))


# --- tests of the tests: a wrong mechanism is seen ---


@pytest.mark.nightly
@each_rule
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str, rule: dict[str, Any]) -> None:
    assert_seen(AsyncCase(task="conv-norm", num_ranks=3, sizes=(11,) * 5, **rule), mistake)


@pytest.mark.nightly
@one_of_each
@pytest.mark.parametrize("mistake", ["newest", "overwritten"])
@pytest.mark.parametrize("task", ["small-gpt", "lstm"])
def test_a_mistake_is_seen_on_other_models(task: str, mistake: str, rule: dict[str, Any]) -> None:
    """Not "rebound": Linear and LSTM keep views of their weights, whatever `.data` points at in the backward."""
    assert_seen(AsyncCase(task=task, num_ranks=3, sizes=(11,) * 5, **rule), mistake)


def assert_seen(case: AsyncCase, mistake: str) -> None:
    with pytest.raises(AssertionError, match="differ by more than"):
        assert_exact(replay(case, mistake), replay(case), tolerance=1e-7)


@pytest.mark.nightly
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_an_outcome_of_the_pipeline_is_no_other_rules(recompute: str) -> None:
    """The rules differ from each other, and so do the outcomes."""
    cases = [AsyncCase(task="conv-norm", num_ranks=3, **rule) for rule in RULES.values()]
    for case in cases:
        outcome = run(replace(case, recompute=recompute))
        for other in cases:
            if other is not case:
                with pytest.raises(AssertionError, match="differ by more than"):
                    assert_exact(outcome, replay(other), tolerance=1e-7)


@pytest.mark.nightly
def test_every_rule_is_another() -> None:
    for one, other in itertools.combinations(RULES.values(), 2):
        found, expected = (replay(AsyncCase(task="conv-norm", num_ranks=3, **rule)) for rule in (one, other))
        with pytest.raises(AssertionError, match="differ by more than"):
            assert_exact(found, expected, tolerance=1e-7)


def test_agreement_sees_the_last_bit() -> None:
    case = AsyncCase(task="conv-norm", optimizer="momentum")
    outcome = replay.__wrapped__(case)
    assert_exact(outcome, replay(case))
    weight = outcome.state["0.weight"]
    weight[0, 0, 0] = weight[0, 0, 0].nextafter(torch.tensor(1e9))
    with pytest.raises(AssertionError, match=r"state: 1 of 18 differ .* 0\.weight by"):
        assert_exact(outcome, replay(case))


# --- tests of the reference ---


def versions(case: AsyncCase, stage: int) -> list[int]:
    return [row[stage].right for row in uses(case)]


def test_versions_by_hand() -> None:
    """P=3 and a flush after six microbatches. k=1: the first stage is two updates behind, the last none."""
    case = AsyncCase(
        task="conv-norm", schedule="pipedream", num_ranks=3, num_microbatches=2, sizes=(11,) * 5, flushes=(2,)
    )
    assert versions(case, 0) == [0, 0, 0, 1, 2, 3, 6, 6, 6, 7]
    assert versions(case, 1) == [0, 0, 1, 2, 3, 4, 6, 6, 7, 8]
    assert versions(case, 2) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [row[0].newest for row in uses(case)] == list(range(10))
    every_other = replace(case, update_every=2)
    assert versions(every_other, 0) == [0, 0, 0, 0, 1, 1, 3, 3, 3, 3]
    assert versions(every_other, 2) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    vertical = replace(case, vertical_sync=True)
    assert versions(vertical, 2) == versions(vertical, 0) == versions(case, 0)
    doubled = replace(case, schedule="2bw", sizes=(11,) * 4, flushes=(1,))
    assert versions(doubled, 0) == versions(doubled, 2) == [0, 0, 0, 0, 1, 1, 2, 2]


def losses_by_hand(case: AsyncCase, weights: list[dict[str, Tensor]], t: int, v: int) -> tuple[float, list[Tensor]]:
    """Loss and gradients of batch t at version v, in one piece."""
    inputs, target = make_batch(case, t, case.sizes[t])
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights[v].items()}
    loss = nn.functional.mse_loss(functional_call(make_model(case), leaves, inputs), target)
    return loss.item(), list(torch.autograd.grad(loss, list(leaves.values())))


def test_2bw_is_gradient_descent_with_gradients_of_the_version_before() -> None:
    """W(t+1) = W(t) - 0.1 * gradient of batch t at W(t-1), without microbatches, modules or optimizers."""
    case = AsyncCase(task="conv-norm", sizes=UNEVEN)
    weights = [{name: p.detach() for name, p in make_model(case).named_parameters()}]
    losses = {}
    for t in range(len(case.sizes)):
        losses[t], gradients = losses_by_hand(case, weights, t, max(t - 1, 0))
        weights.append({name: w - 0.1 * g for (name, w), g in zip(weights[t].items(), gradients, strict=True)})
    expected = replay(case)
    assert losses == pytest.approx(expected.losses, abs=1e-12)
    assert all(torch.allclose(weights[-1][name], expected.state[name], rtol=0, atol=1e-12) for name in weights[-1])


def test_pipedream_on_one_rank_is_ordinary_training() -> None:
    """No warm-up, no stale weights: each microbatch is a batch of its own."""
    case = AsyncCase(
        task="conv-norm", schedule="pipedream", num_ranks=1, num_microbatches=1, optimizer="adamw", sizes=UNEVEN
    )
    model = make_model(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = {}
    for t, size in enumerate(case.sizes):
        (x,), y = make_batch(case, t, size)
        loss = nn.functional.mse_loss(model(x), y)
        losses[t] = loss.item()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert losses == replay(case).losses
    assert all(torch.equal(tensor, replay(case).state[name]) for name, tensor in model.state_dict().items())


def test_pipedream_on_two_ranks_by_hand() -> None:
    """Two stages, each with its own program and its own weights; only activations and gradients go between them."""
    case = AsyncCase(task="conv-norm", schedule="pipedream", num_ranks=2, num_microbatches=1, bounds=(6,))
    model = make_model(case)
    assert isinstance(model, nn.Sequential)
    first, last = model[:6], model[6:]
    kept: dict[int, tuple[dict[str, Tensor], Tensor]] = {}
    arrived: dict[int, Tensor] = {}

    def step(stage: nn.Module, leaves: dict[str, Tensor], gradients: tuple[Tensor, ...]) -> None:
        with torch.no_grad():
            for name, gradient in zip(leaves, gradients, strict=True):
                stage.get_parameter(name).sub_(gradient, alpha=0.1)

    def leaves_of(stage: nn.Module) -> dict[str, Tensor]:
        return {name: p.detach().clone().requires_grad_() for name, p in stage.named_parameters()}

    def forward(i: int) -> None:
        (x,), _ = make_batch(case, i, case.sizes[i])
        leaves = leaves_of(first)
        kept[i] = (leaves, functional_call(first, leaves, (x,)))

    def last_stage(i: int) -> None:
        _, y = make_batch(case, i, case.sizes[i])
        leaves, entry = leaves_of(last), kept[i][1].detach().requires_grad_()
        loss = nn.functional.mse_loss(functional_call(last, leaves, (entry,)), y)
        gradients = torch.autograd.grad(loss, [entry, *leaves.values()])
        arrived[i] = gradients[0]
        step(last, leaves, gradients[1:])

    def backward(i: int) -> None:
        leaves, output = kept[i]
        step(first, leaves, torch.autograd.grad(output, list(leaves.values()), arrived[i]))

    num_batches = len(case.sizes)
    for i in range(num_batches + 1):
        if i < num_batches:
            forward(i)
            last_stage(i)
        if i > 0:
            backward(i - 1)
    expected = replay(case).state
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("task", ["small-gpt", "lstm", "small-tied", "masked-stages"])
def test_every_parameter_learns(task: str) -> None:
    case = AsyncCase(task=task, num_ranks=3, sizes=(19,) * 8)
    before = make_model(case).state_dict()
    assert not [name for name, tensor in replay(case).state.items() if torch.equal(tensor, before[name])]
