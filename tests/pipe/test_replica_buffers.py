"""Data replicas against one process, float64: sums of gradients, losses, and buffers that a forward changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.async_pipeline import run
from support.async_reference import UNEVEN, AsyncCase, agree
from support.pool import Pool
from support.records import records
from support.small import X, Y, make, sgd
from torch import Tensor, nn

from stagewright.pipe import PipelineModule
from stagewright.schedules import build, check

WIDTH, SAMPLES, M, D, STEPS = 6, 16, 4, 2, 3


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


def batch(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    x, y = (torch.randn(SAMPLES, WIDTH, generator=made, dtype=torch.float64) for _ in range(2))
    return x, y


def plain(model: nn.Module, order: list[int]) -> dict[str, Tensor]:
    """State after batches whose D M microbatches ran forwards in this order."""
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        parts = list(zip(*(each.tensor_split(D * M) for each in batch(step)), strict=True))
        losses = {k: F.mse_loss(model(parts[k][0]), parts[k][1]) / (D * M) for k in order}
        for k in range(D * M):
            losses[k].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def piped(model: nn.Module, *, replica: int | None = None, **options: Any) -> tuple[dict[str, Tensor], ...]:
    """(full state, this process's); each process passes its own replica's microbatches, k = replica mod D."""
    settings: dict[str, Any] = {"mesh": {"pipe": 2, "data": D}, "loss_fn": F.mse_loss, "num_microbatches": M}
    pipe = PipelineModule(model, **records(optimizer=sgd, **(settings | options)))
    for step in range(STEPS):
        given = batch(step)
        if replica is not None:
            given = tuple(torch.cat(each.tensor_split(D * M)[replica::D]) for each in given)  # type: ignore[assignment]
        pipe.train_step(*given)
    found = pipe.full_state_dict(), pipe.state_dict()
    pipe.close()
    return found


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_in_one_process_replicas_share_them(schedule: str) -> None:
    same(piped(averaging(), schedule=schedule)[0], plain(averaging(), list(range(D * M))))


def test_what_one_forward_leaves_for_the_next_follows_the_order_in_which_they_run() -> None:
    """Replica after replica: each forward of one is ahead of those of the next."""
    mine = piped(spectral(), schedule="gpipe")[0]
    same(mine, plain(spectral(), [*range(0, D * M, D), *range(1, D * M, D)]))
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
        same(full, {name: value for name, value in wanted.items() if "running" not in name and "num" not in name})
        assert int(own["1.num_batches_tracked"]) == STEPS * M
        assert torch.equal(full["1.running_mean"], own["1.running_mean"]) == (replica == 0)
        statistics.append(own["1.running_mean"])
    together = torch.stack(statistics).mean(0)  # equal numbers of microbatches: the mean of both means is all's
    torch.testing.assert_close(together, wanted["1.running_mean"], rtol=0, atol=1e-12)


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
