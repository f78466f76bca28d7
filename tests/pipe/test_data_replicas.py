"""mesh={"pipe": P, "data": D}: replicas of the whole pipeline, and of single stages, against one process in float64.

Over processes each replica passes a batch of its own; in one process the one batch is shared out.
"""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import small
from support.alone import near, train_alone
from support.async_pipeline import run
from support.async_reference import UNEVEN, AsyncCase, agree
from support.inside import on_ranks, replicate
from support.plain import batch
from support.pool import Pool
from torch import Tensor, nn

from stagewright.pipe import PipelineModule
from stagewright.schedules import ScheduleError, build, check

WIDTH = 6
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved", "looped-bfs")


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]).double()


def masked(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count) over the targets above -0.5."""
    mask = target > -0.5
    return F.mse_loss(output, target, reduction="none")[mask].sum(), mask.sum()


SIZES = ((6, 6), (7, 4), (3, 9))  # samples of each replica, by step


def own_batch(replica: int, step: int) -> tuple[Tensor, Tensor]:
    return batch(10 * replica + step, samples=SIZES[step][replica])


def run_own(loss_fn: Any) -> tuple[list[float | None], dict[str, Tensor], Any, Any]:
    """A rank that passes its own replica's batches: losses, weights, and an evaluation's loss and output."""
    replica = torch.distributed.get_rank() % 2
    options = {"mesh": {"pipe": 2, "data": 2}, "num_microbatches": 3, "optimizer": momentum, "timeout": 120.0}
    pipe = small.make(model=make_model(), schedule="1f1b", loss_fn=loss_fn, example_inputs=None, **options)
    losses = [pipe.train_step(*own_batch(replica, step)).loss for step in range(3)]
    evaluation = pipe.eval_step(*own_batch(replica, 0))
    state = pipe.full_state_dict()
    pipe.close()
    return losses, state, evaluation.loss, evaluation.output


@pytest.mark.thorough
@pytest.mark.parametrize("loss_fn", [F.mse_loss, masked], ids=["mean", "sum-and-count"])
def test_batches_of_different_sizes_count_by_their_samples(gloo: Pool, loss_fn: Any) -> None:
    """After a first batch of equal sizes; the first one tells all ranks the shapes."""
    answers = gloo.run(run_own, ranks=4, args=(loss_fn,))
    parts = [[own_batch(replica, step) for replica in range(2)] for step in range(3)]
    batches = [tuple(torch.cat(column) for column in zip(*both, strict=True)) for both in parts]
    model = make_model()
    wanted = train_alone(model, batches, momentum, loss_fn=loss_fn)
    loss = loss_fn(model(batches[0][0]), batches[0][1])
    evaluated = (loss[0] / loss[1] if isinstance(loss, tuple) else loss).item()
    for rank, (losses, found, eval_loss, output) in enumerate(answers):
        assert losses == answers[0][0]
        near([losses, found, eval_loss], [wanted.losses, wanted.state, evaluated])
        if rank >= 2:  # the last stage
            near(output, model(own_batch(rank % 2, 0)[0]).detach())


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
    for first, second in ((1, 3), (3, 1)):
        moved = on_ranks(one, [first, second, 0], num_ranks=4)
        check(moved)
        assert moved.owners == ((first, second), (0,))
        assert moved.programs[2] == ()
    with pytest.raises(ScheduleError, match=r"expected as many different ones from 0 to 1"):
        on_ranks(one, [0, 1, 2], num_ranks=2)


SAMPLES, M, D, STEPS = 16, 4, 2, 3


def averaging() -> nn.Sequential:
    """Running statistics are means over all microbatches so far."""
    torch.manual_seed(0)
    return nn.Sequential(
        *[part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None))]
    ).double()


def spectral() -> nn.Sequential:
    """Each forward goes one step of the power iteration on, whatever it is given."""
    torch.manual_seed(0)
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(*[norm(nn.Linear(WIDTH, WIDTH)) for _ in range(4)]).double()


def plain(model: nn.Module, order: list[int]) -> dict[str, Tensor]:
    """State after batches whose D M microbatches ran forwards in this order."""
    optimizer = small.sgd(model.parameters())
    for step in range(STEPS):
        parts = list(zip(*(each.tensor_split(D * M) for each in batch(step, samples=SAMPLES)), strict=True))
        losses = {k: F.mse_loss(model(parts[k][0]), parts[k][1]) / (D * M) for k in order}
        for k in range(D * M):
            losses[k].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def piped(model: nn.Module, *, replica: int | None = None, **options: Any) -> tuple[dict[str, Tensor], ...]:
    """(full state, this process's); each process passes its own replica's microbatches, k = replica mod D."""
    pipe = small.make(model=model, **{"mesh": {"pipe": 2, "data": D}, "example_inputs": None} | options)
    for step in range(STEPS):
        given = batch(step, samples=SAMPLES)
        if replica is not None:
            given = tuple(torch.cat(each.tensor_split(D * M)[replica::D]) for each in given)  # type: ignore[assignment]
        pipe.train_step(*given)
    found = pipe.full_state_dict(), pipe.state_dict()
    pipe.close()
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_in_one_process_replicas_share_them(schedule: str) -> None:
    near(piped(averaging(), schedule=schedule)[0], plain(averaging(), list(range(D * M))))


def test_what_one_forward_leaves_for_the_next_follows_the_order_in_which_they_run() -> None:
    """Replica after replica: each forward of one is ahead of those of the next."""
    mine = piped(spectral(), schedule="gpipe")[0]
    near(mine, plain(spectral(), [*range(0, D * M, D), *range(1, D * M, D)]))
    in_order = plain(spectral(), list(range(D * M)))
    assert max(float((mine[name] - value).abs().max()) for name, value in in_order.items()) > 1e-5


def piped_here() -> tuple[dict[str, Tensor], ...]:
    return piped(averaging(), replica=torch.distributed.get_rank() % D, mesh={"pipe": 1, "data": D})


@pytest.mark.thorough
def test_over_processes_each_replica_has_its_own(gloo: Pool) -> None:
    """Weights are one process's, since a microbatch is normalised by itself; statistics are of the own microbatches."""
    wanted = plain(averaging(), list(range(D * M)))
    statistics = []
    for replica, (full, own) in enumerate(gloo.run(piped_here, ranks=D)):
        near(full, {name: value for name, value in wanted.items() if "running" not in name and "num" not in name})
        assert int(own["1.num_batches_tracked"]) == STEPS * M
        assert torch.equal(full["1.running_mean"], own["1.running_mean"]) == (replica == 0)
        statistics.append(own["1.running_mean"])
    together = torch.stack(statistics).mean(0)  # equal numbers of microbatches: the mean of both means is all's
    near(together, wanted["1.running_mean"])


LAYOUTS = [(2, 1), (1, 2), (3, 1), (1, 3), (2, 1, 1), (2, 2)]


@pytest.mark.thorough(but=["replicas4-1"])
@pytest.mark.parametrize(
    ("replicas", "num_microbatches"), [(each, m) for i, each in enumerate(LAYOUTS) for m in ((1, 6), (2, 5))[i % 2]]
)
def test_gradients_of_uneven_replicas_in_one_process(replicas: tuple[int, ...], num_microbatches: int) -> None:
    """M need not be a multiple of the replicas; with M=1 some have nothing to do."""
    check(build("1f1b", num_ranks=sum(replicas), num_microbatches=num_microbatches, replicas=replicas))
    options: dict[str, Any] = {"task": "conv-norm", "optimizer": "momentum", "sizes": UNEVEN[:4], "schedule": "1f1b"}
    one = AsyncCase(num_ranks=sum(replicas), replicas=replicas, num_microbatches=num_microbatches, **options)
    agree(run(one), one)


def _replicas_that_start_apart() -> list[float]:
    torch.manual_seed(torch.distributed.get_rank() == 1)  # the second replica of the first stage makes other weights
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    schedule = build("1f1b", num_ranks=3, num_microbatches=4, replicas=(2, 1))
    pipe: PipelineModule = small.make(model=model, schedule=schedule, num_microbatches=None, mesh=None)
    for _ in range(3):
        pipe.train_step(small.X, small.Y)
    return [float(value.detach().double().sum()) for value in pipe.state_dict().values()]


@pytest.mark.thorough
def test_replicas_begin_with_the_weights_of_the_first_one_and_stay_equal(gloo: Pool) -> None:
    first, second, _ = gloo.run(_replicas_that_start_apart, ranks=3)
    assert first == second
