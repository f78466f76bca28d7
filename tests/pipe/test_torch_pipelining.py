"""A script of torch.distributed.pipelining, moved over with few changed lines: equal losses and gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.alone import near
from support.plain import batch
from support.pool import Pool
from support.reference import gradients
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
    pipeline,
)

from stagewright.pipe import PipelineModule

Grads = dict[str, torch.Tensor]

M = 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, 8)
        self.layers = nn.ModuleDict({str(n): nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for n in range(4)})
        self.head = nn.Linear(8, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if self.head is not None else x


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return batch(1, samples=8, out=2)


def stage_module(index: int, num_stages: int) -> nn.Module:
    """As the tutorial of torch.distributed.pipelining makes it: the whole model, and what the stage has not deleted."""
    model, share = Model(), 4 // num_stages
    for number in range(4):
        if number // share != index:
            del model.layers[str(number)]
    if index:
        model.embed = None  # type: ignore[assignment]
    if index < num_stages - 1:
        model.head = None  # type: ignore[assignment]
    return model


def theirs(kind: Any, num_stages: int) -> tuple[float | None, Grads]:
    """Loss, on the rank that has it, and gradients of this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = data()
    stages = [
        PipelineStage(stage_module(index, num_stages), index, num_stages, torch.device("cpu"))
        for index in range(rank, num_stages, size)
    ]
    several = num_stages > size
    schedule = kind(stages if several else stages[0], n_microbatches=M, loss_fn=nn.functional.mse_loss)
    losses: list[torch.Tensor] = []
    inputs = (x,) if rank == 0 else ()
    last = {"target": y, "losses": losses} if rank == size - 1 else {}
    schedule.step(*inputs, **last)
    loss = torch.stack(losses).mean().item() if losses else None
    return loss, {name: x for stage in stages for name, x in gradients(stage.submod).items()}


def ours(kind: Any, num_stages: int) -> tuple[float | None, Grads]:
    """The whole model on each rank, in place of stages; the same schedule, step for step."""
    x, y = data()
    model = Model()
    cut = {f"layers.{number}": SplitPoint.BEGINNING for number in range(4 // num_stages, 4, 4 // num_stages)}
    pipe = PipelineModule(model, cut=cut, schedule=kind, num_microbatches=M, loss_fn=nn.functional.mse_loss)
    loss = pipe.forward_backward(x, y).loss
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the other stages' gradients, which are None here
        return loss, gradients(model)


@pytest.mark.thorough(but=["ScheduleGPipe-2"])
@pytest.mark.parametrize(
    ("kind", "num_stages"),
    [(Schedule1F1B, 2), (ScheduleGPipe, 2), (ScheduleInterleaved1F1B, 4)],
    ids=lambda it: getattr(it, "__name__", it),
)
def test_a_script_that_moves_over_trains_equally(gloo: Pool, kind: Any, num_stages: int) -> None:
    before = gloo.run(theirs, ranks=2, args=(kind, num_stages))
    after = gloo.run(ours, ranks=2, args=(kind, num_stages))
    assert after[0][0] == pytest.approx(before[1][0], abs=1e-14)
    assert after[1][0] == after[0][0]
    for (_, expected), (_, found) in zip(before, after, strict=True):
        assert found.keys() == expected.keys()
        near(found, expected, atol=1e-14)


def train(model: Any, **options: Any) -> float | None:
    settings: dict[str, Any] = {"mesh": {"pipe": 2}, "num_microbatches": M, "loss_fn": nn.functional.mse_loss}
    return PipelineModule(model, **(settings | options)).forward_backward(*data()).loss


def stage(module: nn.Module | None, index: int, num_stages: int) -> Any:
    """A PipelineStage without a process group."""
    made = object.__new__(PipelineStage)
    made.submod, made.stage_index, made.num_stages = module, index, num_stages  # type: ignore[assignment]
    return made


def schedule() -> Any:
    made = object.__new__(ScheduleGPipe)
    made._n_microbatches = 3
    return made


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # torch's own, of its own graphs
def test_what_torch_made_is_taken() -> None:
    """The Pipe of pipeline(), and all PipelineStages, in any order."""
    x, y = data()
    expected = nn.functional.mse_loss(Model()(x), y).item()
    pipe = pipeline(Model(), mb_args=(x[: 8 // M],), split_spec={"layers.2": SplitPoint.BEGINNING})
    stages = [stage(stage_module(index, 2), index, 2) for index in (1, 0)]
    for model in (pipe, stages):
        assert train(model) == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: train(Model(), cut={"layers.1": SplitPoint.END}),
            r"cut=\{'layers.1': SplitPoint.END\}: expected SplitPoint.BEGINNING of the next module",
        ),
        (lambda: train(Model(), cut={"layers.1": 3}), r"cut=\{'layers.1': 3\}: expected SplitPoint.BEGINNING"),
        (
            lambda: train(stage(None, 1, 2)),
            r"PipelineStages \[1\] of 2: expected all of them on every rank, which keeps its own, or the whole model",
        ),
        (
            lambda: train(Model(), schedule=schedule()),
            r"schedule=ScheduleGPipe\(...\): expected its class: schedule=ScheduleGPipe, num_microbatches=3, loss_fn=",
        ),
    ],
)
def test_what_cannot_be_taken_says_what_to_type(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
