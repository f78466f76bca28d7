"""Experts over a slow link: a backward that runs together with the forward before it, and after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...pipe import PipelineModule
from ...pipe.shards.exchanges import Exchanges
from ...schedules import Costs, Schedule, build, simulate, with_overlap
from ..jobs.case import Case
from ..jobs.figure import Figure
from ..measure.models import TINY_WIDTH, SleepingStage, drop_gradients, sleep_until
from ..measure.timing import foretold, in_turn, timed

NUM_EXPERTS = 2  # one a member
LAYERS = 2  # of a stage, each with two exchanges in its forward and two in its backward
DENSE, EXPERT = (0.012, 0.024), (0.008, 0.016)  # of a layer, forward and backward [s]
EXCHANGE = 0.010  # [s]
_WARM_UP_STEPS = 2


def exchanges(case: Case, repetitions: int) -> Iterator[Figure]:
    """Share of a step saved where exchanges of one microbatch hide behind compute of another, and the simulator's error
    for both sides.

    Emulated: layers and experts sleep, and each all-to-all occupies this process's link in turn for `EXCHANGE` seconds
    from when it began. P ranks of two members, DualPipeV over 2 P stages, of `microbatches`.
    """
    num_pipe, number = case.count("ranks") // NUM_EXPERTS, case.count("microbatches")
    together = with_overlap(build("dualpipe-v", num_ranks=num_pipe, num_microbatches=number))
    schedules = {"together": together, "apart": replace(together, overlapped=())}
    sides = {name: _Side(schedule, num_pipe) for name, schedule in schedules.items()}
    for side in sides.values():
        for _ in range(_WARM_UP_STEPS):
            timed(side.step)
    runs = {name: partial(timed, side.step) for name, side in sides.items()}
    with slow_link():
        seconds = in_turn(case.text("case"), runs, repetitions=repetitions)
    for side in sides.values():
        side.pipe.close()
    predicted = {name: simulate(schedule, costs()).makespan for name, schedule in schedules.items()}
    shown = Case.of({"case": case.text("case"), "run": f"dualpipe-v, {num_pipe} x {NUM_EXPERTS} ranks, slow link"})
    yield from foretold(seconds, predicted, case=shown, what="pairs", slack=1.05)


def costs() -> Costs:
    """Costs of a stage. A sleeping backward is all I."""
    exchange = 2 * LAYERS * EXCHANGE
    forward, backward = (LAYERS * (dense + expert) + exchange for dense, expert in zip(DENSE, EXPERT, strict=True))
    return Costs(
        forward=forward,
        input_grad=backward,
        weight_grad=0.0,
        forward_exchange=exchange,
        backward_exchange=exchange,
    )


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = SleepingStage(*DENSE)
        self.experts = nn.ModuleList(SleepingStage(*EXPERT) for _ in range(NUM_EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.dense(x).view(-1, TINY_WIDTH)
        made = [expert(tokens[number::NUM_EXPERTS]) for number, expert in enumerate(self.experts)]
        return torch.stack(made, 1).view_as(x)


class _Side:
    def __init__(self, schedule: Schedule, num_pipe: int) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = schedule.num_microbatches, NUM_EXPERTS, TINY_WIDTH
        self._batch = [torch.randn(shape, generator=generator) for _ in range(2)]
        self.pipe = PipelineModule(
            nn.Sequential(*(_Layer() for _ in range(LAYERS * schedule.num_stages))),
            schedule=schedule,
            cut=[str(LAYERS * stage) for stage in range(1, schedule.num_stages)],
            mesh={"pipe": num_pipe, "expert": NUM_EXPERTS},
            loss_fn=F.mse_loss,
            example_inputs=(self._batch[0],),
            verify=False,
        )

    def step(self) -> None:
        self.pipe.forward_backward(*self._batch)
        drop_gradients(self.pipe.parameters())


@contextmanager
def slow_link() -> Iterator[None]:
    """Context in which all-to-alls of this process take their turn on a slow link."""
    link, through = _Link(), Exchanges.through
    with patch.object(Exchanges, "through", lambda own, begin: through(own, lambda: link.begin(begin))):
        yield


class _Link:
    """Carries one all-to-all of a process at a time."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def begin(self, begin: Callable[[], Any]) -> _Carried:
        begun = begin()
        self._free_at = max(self._free_at, time.perf_counter()) + EXCHANGE
        return _Carried(begun, self._free_at)


class _Carried:
    def __init__(self, begun: Any, there: float) -> None:
        self._begun, self._there = begun, there

    def wait(self) -> None:
        self._begun.wait()
        sleep_until(self._there)
