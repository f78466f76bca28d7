"""Bugs that were there once, one test each, but for those that a test elsewhere shows."""

import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import Pool
from support.pool_worker import serve
from support.small import WIDTH, X, Y, layers, make
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stagewright.schedules import Schedule, build, check


class RaisesOnce(nn.Module):
    """In its third real forward."""

    countdown = 3

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:  # shapes are inferred on tensors of another type
            self.countdown -= 1
            if self.countdown == 0:
                raise KeyError("once")
        return x


@pytest.mark.parametrize("schedule", ["gpipe", "eager-1f1b"])
def test_a_failed_batch_leaves_no_messages_to_the_next_one(schedule: str) -> None:
    """In one process the messages of a batch that failed stayed in the mailbox, under the names of the next one's.

    The next batch then computed with them: no error, another loss or other gradients.
    """
    model = layers()
    clean = make(model=model, optimizer=None).forward_backward(X, Y).loss
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    pipe = make(model=nn.Sequential(*model, RaisesOnce()), optimizer=None, schedule=schedule)
    with pytest.raises(KeyError):
        pipe.forward_backward(X + 1.0, Y)
    assert pipe.forward_backward(X, Y).loss == pytest.approx(clean, abs=1e-6)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_an_in_place_operation_on_the_models_input_runs_once(recompute: str) -> None:
    """The first stage changed the user's batch, and under recomputation a second time before its backward."""

    class AddOne(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1.0)

    model = layers()
    clean = make(model=model, optimizer=None)
    clean.forward_backward(X + 1.0, Y)
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    x = X.clone()
    pipe = make(model=nn.Sequential(AddOne(), *model), optimizer=None, recompute=recompute)
    pipe.forward_backward(x, Y)
    pipe.eval_step(x, Y)
    assert torch.equal(x, X)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": lambda parameters: None}, "optimizer= returned NoneType"),
        (
            {"loss_fn": lambda output, target: F.mse_loss(output.detach(), target)},
            "does not depend on the model's output",
        ),
        ({"schedule": Schedule.from_csv("0F0,\n,1F0\n"), "num_microbatches": None}, "has no backward"),
    ],
)
def test_a_step_that_trains_nothing_is_an_error(options: dict[str, Any], message: str) -> None:
    """Each of these ran, gave a loss, and left the parameters as they were."""
    with pytest.raises(ValueError, match=message):
        make(**options).train_step(X, Y)


def test_a_count_of_nan_is_an_error() -> None:
    """nan stood for "no count" between the ranks: one rank divided by it, the others took the sum for a mean."""
    with pytest.raises(ValueError, match="counts of step 0 add up to nan"):
        make(loss_fn=lambda output, target: (output.sum(), float("nan"))).train_step(X, Y)


@pytest.mark.parametrize("num_microbatches", [8, 9, 10, 16])
@pytest.mark.parametrize("warmup", ["plain", "eager"])
def test_replicas_of_2bw_with_odd_batches_do_not_deadlock(num_microbatches: int, warmup: str) -> None:
    """A replica's next microbatch may be further away than R where R does not divide M: counted in its own
    microbatches, its warm-up waited for forwards that the first stage makes behind a backward that waits for it."""
    check(build("2bw", num_ranks=8, num_microbatches=num_microbatches, replicas=(1, 6, 1), warmup=warmup))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


def _train_unused(schedule: str) -> float:
    torch.manual_seed(0)
    model = Unused()
    before = model.extra.weight.detach().clone()
    pipe = make(
        model=model,
        schedule=schedule,
        mesh={"pipe": 2, "data": 2},
        num_microbatches=2,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5),
    )
    for _ in range(3):
        pipe.train_step(X, Y)
    after = pipe.full_state_dict()["extra.weight"]
    pipe.close()
    return float((after - before).abs().max())


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_replicas_do_not_train_what_got_no_gradient(gloo: Pool, schedule: str) -> None:
    """The sum over replicas made zeros of missing gradients, and weight decay pulled at parameters nobody uses."""
    assert gloo.run(_train_unused, ranks=4, args=(schedule,)) == [0.0] * 4


def test_autocast_may_be_on_in_one_call_and_off_in_another() -> None:
    """Shapes and types were remembered without it: "was bfloat16 when shapes were inferred"."""
    pipe = make()
    with torch.autocast("cpu", torch.bfloat16):
        pipe.train_step(X, Y)
    assert pipe.eval_step(X, Y).loss is not None
    pipe.train_step(X, Y)


def _one_replica_passes_a_bad_batch() -> str:
    replica = torch.distributed.get_rank() % 2
    pipe = make(mesh={"pipe": 1, "data": 2}, num_microbatches=4, timeout=120.0)
    pipe.train_step(X, Y)
    try:
        for _ in range(2):
            pipe.train_step(X[:2] if replica else X, Y[:2] if replica else Y)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


@pytest.mark.thorough
def test_a_batch_refused_on_one_replica_stops_the_others(gloo: Pool) -> None:
    """The others paired its next batch with this one, and trained on."""
    for answer in gloo.run(_one_replica_passes_a_bad_batch, ranks=2):
        assert "a batch of 2 samples for 4 microbatches" in answer


class _Branches(nn.Module):
    """Values decide, behind a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList([nn.Bilinear(WIDTH, WIDTH, WIDTH), _Branch(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        first, middle, last = self.blocks
        h: Tensor = last(middle(first(x, x * self.scale) * self.scale))
        return h


class _Branch(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else -x


def test_a_unit_that_reads_values_behind_a_parameter_of_the_models_own() -> None:
    """The parameter stayed a fake where the others had made-up values: "cannot take ... DataDependentOutput"."""
    assert make(model=_Branches()).train_step(X, Y).loss is not None


class _Checkpointed(nn.Module):
    """Units within torch.utils.checkpoint, in recorded code."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_a_drain_that_begins_with_a_checkpoints_second_run_leaves_the_users_random_state() -> None:
    """What was kept and put back was the state within the checkpoint."""
    pipe = make(model=_Checkpointed(), schedule="pipedream", mesh={"pipe": 3})
    before = torch.get_rng_state()
    pipe.train_step(X, Y)
    pipe.flush()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_worker_of_the_pool_ends_with_the_tests_though_it_is_in_the_middle_of_something() -> None:
    """Its case went on for hours after the process of the tests was killed. Here it looks for a store that never is."""
    ours, theirs = multiprocessing.Pipe()
    worker = os.fork()
    if not worker:
        ours.close()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's own would go on here with the tests
        signal.alarm(200)  # less than the store's patience
        try:
            serve(theirs, os.devnull, 1)
        finally:
            os._exit(1)
    theirs.close()
    ours.close()
    assert os.waitpid(worker, 0) == (worker, 0)
