"""mesh={"pipe": P, "data": D}: replicas of the whole pipeline, against one process in float64.

Over processes each replica passes a batch of its own; in one process the one batch is shared out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import train_alone
from support.inside import on_ranks, replicate
from support.pool import Pool
from support.records import records
from torch import Tensor, nn

from stagewright.pipe import PipelineModule
from stagewright.schedules import ScheduleError, build, check

WIDTH = 6
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved", "looped-bfs")


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]).double()


def make_batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(size, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def masked(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count) over the targets above -0.5."""
    mask = target > -0.5
    return F.mse_loss(output, target, reduction="none")[mask].sum(), mask.sum()


def mean_of(loss_fn: Any, output: Tensor, target: Tensor) -> Tensor:
    loss = loss_fn(output, target)
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss


def make_pipe(model: nn.Module, *, num_data: int = 2, **options: Any) -> PipelineModule:
    settings: dict[str, Any] = {
        "num_microbatches": 3,
        "mesh": {"pipe": 2, "data": num_data},
        "loss_fn": F.mse_loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "timeout": 120.0,
    }
    return PipelineModule(model, **records(**(settings | options)))


def trained_alone(batches: list[tuple[Tensor, ...]], loss_fn: Any) -> tuple[dict[str, Tensor], list[float]]:
    """The same training in one process, each batch whole."""
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    losses, _, state = train_alone(make_model(), batches, optimizer, loss_fn=loss_fn)
    return state, losses


def assert_equal_states(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


@pytest.mark.thorough(but=["gpipe-sum-and-count"])
@pytest.mark.parametrize("loss_fn", [F.mse_loss, masked], ids=["mean", "sum-and-count"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_in_one_process_the_batch_is_shared_out(name: str, loss_fn: Any) -> None:
    batches = [make_batch(seed, 13) for seed in range(3)]
    pipe = make_pipe(make_model(), schedule=name, loss_fn=loss_fn)
    losses = [pipe.train_step(*batch).loss for batch in batches]
    state, wanted = trained_alone(batches, loss_fn)
    assert losses == pytest.approx(wanted, abs=1e-12)
    assert_equal_states(pipe.full_state_dict(), state)
    assert pipe.num_ranks == 4
    assert pipe.schedule.num_microbatches == 6


UNEVEN = ((6, 6), (7, 4), (3, 9))  # samples of each replica, by step


def own_batch(replica: int, step: int) -> tuple[Tensor, Tensor]:
    return make_batch(10 * replica + step, UNEVEN[step][replica])


def run_own(loss_fn: Any) -> tuple[list[float | None], dict[str, Tensor], Any, Any]:
    """A rank that passes its own replica's batches: losses, weights, and an evaluation's loss and output."""
    replica = torch.distributed.get_rank() % 2
    pipe = make_pipe(make_model(), schedule="1f1b", loss_fn=loss_fn)
    losses = [pipe.train_step(*own_batch(replica, step)).loss for step in range(3)]
    evaluation = pipe.eval_step(*own_batch(replica, 0))
    state = pipe.full_state_dict()
    pipe.close()
    return losses, state, evaluation.loss, evaluation.output


@pytest.mark.thorough(but=["mean"])
@pytest.mark.parametrize("loss_fn", [F.mse_loss, masked], ids=["mean", "sum-and-count"])
def test_batches_of_different_sizes_count_by_their_samples(gloo: Pool, loss_fn: Any) -> None:
    """After a first batch of equal sizes; the first one tells all ranks the shapes."""
    answers = gloo.run(run_own, ranks=4, args=(loss_fn,))
    parts = [[own_batch(replica, step) for replica in range(2)] for step in range(3)]
    batches = [tuple(torch.cat(column) for column in zip(*both, strict=True)) for both in parts]
    state, wanted = trained_alone(batches, loss_fn)
    model = make_model()
    model.load_state_dict(state)
    evaluated = float(mean_of(loss_fn, model(batches[0][0]), batches[0][1]).detach())
    for rank, (losses, found, eval_loss, output) in enumerate(answers):
        assert losses == pytest.approx(wanted, abs=1e-12)
        assert losses == answers[0][0]
        assert_equal_states(found, state)
        assert eval_loss == pytest.approx(evaluated, abs=1e-12)
        if rank >= 2:  # the last stage
            torch.testing.assert_close(output, model(own_batch(rank % 2, 0)[0]), rtol=0, atol=1e-12)


@pytest.mark.thorough(but=["gpipe-2", "pipedream-2"])
@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("name", [*SCHEDULES, "2bw", "pipedream"])
def test_replicated_schedules_are_sound(name: str, num_replicas: int) -> None:
    one = build(name, num_ranks=3, num_microbatches=6)
    many = replicate(one, num_replicas)
    check(many)
    assert many.num_ranks == 3 * num_replicas
    twice = replicate(many, 2)
    check(twice)
    assert twice == replicate(one, num_replicas * 2)


def test_a_schedule_on_other_ranks() -> None:
    one = build("1f1b", num_ranks=3, num_microbatches=2, replicas=(2, 1))
    moved = on_ranks(one, [1, 3, 0], num_ranks=4)
    check(moved)
    assert moved.owners == ((1, 3), (0,))
    assert moved.programs[2] == ()
    turned = on_ranks(one, [3, 1, 0], num_ranks=4)
    check(turned)
    assert turned.owners == ((3, 1), (0,))
    with pytest.raises(ScheduleError, match=r"expected as many different ones from 0 to 1"):
        on_ranks(one, [0, 1, 2], num_ranks=2)
