"""Ranks of one pipeline that pass different batches are told; data replicas pass batches of their own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.inside import UNKNOWN, checksum
from support.pool import Pool
from support.records import records
from support.small import sgd
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stagewright.comm import PipelineError
from stagewright.pipe import PipelineModule

SAMPLES = torch.randn(24, 4, generator=torch.Generator().manual_seed(5))


def make_pipe(schedule: str = "1f1b", **options: Any) -> PipelineModule:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    settings: dict[str, Any] = {
        "schedule": schedule,
        "num_microbatches": 4,
        "loss_fn": F.mse_loss,
        "optimizer": sgd,
        "timeout": 120.0,
    }
    return PipelineModule(model, **records(**(settings | options)))


def train_unseeded(schedule: str) -> str:
    """The error of each rank whose loader shuffles by itself, before any loss of it was handed out."""
    pipe = make_pipe(schedule)
    losses = []
    torch.manual_seed(100 + torch.distributed.get_rank())
    loader = DataLoader(TensorDataset(SAMPLES, SAMPLES), batch_size=8, shuffle=True)
    try:
        for batch in loader:
            losses.append(pipe.train_step(*batch).loss)
        pipe.flush()
        pipe.close()
    except (ValueError, PipelineError) as error:
        return f"behind {losses} {error}"
    return "nothing"


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_loader_that_shuffles_by_itself_is_told_on_every_rank(gloo: Pool, schedule: str) -> None:
    for told in gloo.run(train_unseeded, ranks=3, args=(schedule,)):
        assert "behind [] " in told
        assert "passed other inputs to step 0 than rank 2" in told
        assert "shuffle=True" in told
        assert "pipe.loader(dataset, batch_size=...)" in told


def pass_another_target(step: int) -> tuple[str, list[bool]]:
    pipe = make_pipe()
    compared: list[bool] = []
    for number in range(step + 2):  # the last rank, which waits for nobody at the end of a step, is told in the next
        x = SAMPLES[number % 3 * 8 : number % 3 * 8 + 8]
        target = x.flip(0) if number == step and pipe.rank == 0 else x
        try:
            compared.append(pipe.train_step(x, target).is_compared)
        except (ValueError, PipelineError) as error:
            return str(error), compared
    return "nothing", compared


@pytest.mark.thorough
def test_another_target_is_told_with_its_step(gloo: Pool) -> None:
    (first, of_first), (last, of_last) = gloo.run(pass_another_target, ranks=2, args=(2,))
    assert "rank 0 passed other targets to step 2 than rank 1" in first
    assert "passed other targets to step 2" in last
    assert of_first == [True, True]
    assert of_last == [True, False, False]  # its loss of step 2 may be of a target that rank 0 did not pass


def test_shapes_alone_are_refused_where_values_are_read() -> None:
    pipe = make_pipe(mesh={"pipe": 2})
    with pytest.raises(ValueError, match="input 0 is a meta tensor, and a stage of this process reads it"):
        pipe.train_step(SAMPLES[:8].to("meta"), SAMPLES[:8])
    with pytest.raises(ValueError, match="the target is a meta tensor"):
        pipe.train_step(SAMPLES[:8], SAMPLES[:8].to("meta"))


def test_in_one_process_nothing_is_compared_and_nothing_is_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagewright.pipe.batch.reader.checksum", lambda value: time.sleep(100))
    make_pipe(mesh={"pipe": 2}).train_step(SAMPLES[:8], SAMPLES[:8])


def train_from_own_weights(how: str, folder: str) -> str:
    """The error of a rank whose processes made models of their own; how they come to the same weights, if they do."""
    options = {"loss_fn": F.mse_loss, "optimizer": sgd, "timeout": 120.0}
    rank = torch.distributed.get_rank()

    def make(seed: int) -> PipelineModule:
        torch.manual_seed(seed)
        return PipelineModule(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), **options)  # type: ignore[arg-type]

    batch = SAMPLES[:8], SAMPLES[:8]
    if how == "load":
        alike = make(0)
        alike.build(*batch)
        alike.save(folder)
        alike.close()
    with make(rank) as pipe:
        if how == "load":
            pipe.load(folder)
        if how == "load_state_dict":
            pipe.build(*batch)
            torch.manual_seed(0)
            pipe.load_state_dict(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).state_dict())
        try:
            return str(pipe.train_step(*batch).loss)
        except ValueError as error:
            return str(error)


@pytest.mark.thorough(but=["nothing"])
@pytest.mark.parametrize("how", ["nothing", "load", "load_state_dict"])
def test_weights_that_processes_made_each_for_itself_are_told(gloo: Pool, how: str, tmp_path: Path) -> None:
    told = gloo.run(train_from_own_weights, ranks=2, args=(how, str(tmp_path)))
    if how == "nothing":
        expected = "process 1 has made other weights than process 0, first '0.weight', and each stage would begin with"
        assert [each[: len(expected)] for each in told] == [expected] * 2
    else:
        assert told[0] == told[1]
        assert float(told[0]) > 0


BATCHES = {
    "tokens": torch.arange(32 * 512).reshape(32, 512) % 97,
    "images": torch.linspace(0, 1, 16 * 3 * 40 * 40).reshape(16, 3, 40, 40),
    "channels last": torch.linspace(0, 1, 16 * 3 * 40 * 40).reshape(16, 40, 40, 3).permute(0, 3, 1, 2),
    "labels": torch.arange(32),
    "masks": torch.arange(64) % 3 == 0,
    "half": torch.linspace(-1, 1, 50).to(torch.bfloat16),
    "complex": torch.complex(torch.arange(9.0), -torch.arange(9.0)),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_another_order_of_the_samples_is_another_number(batch: torch.Tensor) -> None:
    number = checksum(batch)
    assert number == checksum(batch.clone()) == float(int(number)) < 2**32
    assert checksum(batch.roll(1, 0)) != number
    assert checksum((batch, batch)) != number


def test_a_column_that_is_equal_everywhere_does_not_hide_the_others() -> None:
    tokens = torch.randint(0, 9, (8192, 16), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = 1  # every sample begins alike
    assert checksum(tokens) != checksum(tokens[torch.randperm(8192, generator=torch.Generator().manual_seed(1))])


def test_shapes_and_types_count_and_what_is_no_tensor_does_not() -> None:
    x = torch.zeros(2, 3)
    assert len({checksum(x), checksum(x.T), checksum(x.int()), checksum(torch.zeros(0)), checksum(())}) == 5
    assert checksum((x, "mean")) == checksum((x, "sum")) == checksum(x)
    assert checksum(torch.tensor(3.0)) != checksum(torch.tensor(4.0))
    assert checksum(torch.tensor(3.0).expand(1)) == checksum(torch.tensor([3.0]))  # one element, of stride 0
    assert checksum((torch.zeros(2), torch.zeros(2, device="meta"))) == UNKNOWN
    sparse = torch.eye(3).to_sparse()
    assert checksum(sparse) == checksum(2 * sparse) != checksum(torch.eye(4).to_sparse())
