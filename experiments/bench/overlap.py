"""Sums of shared gradients beside the backwards that follow, and behind all of them: what a step takes.

Emulated: stages sleep, and a sum holds this process's wire, one after the other, for its bytes over `BANDWIDTH` behind
the real all-reduce over gloo. Two data replicas of two ranks with two stages each:

    beside    2B 2B ... 0B 0B      0U 2U        the sum of stage 2 is through when the backwards of stage 0 are
    sums           [ 2 ]     [ 0 ]
    behind    2B 2B ... 0B 0B           0U 2U   both come after them
    sums                     [ 2 ][ 0 ]
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...pipe import PipelineModule
from ...pipe.build import Pipeline
from ...schedules import Collective, Costs, Schedule, simulate
from .models import TINY_WIDTH, SleepingStage, drop_gradients
from .records import OverlapTimes
from .timing import in_turn, timed
from .workloads import OVERLAP

NUM_PIPE, NUM_DATA, NUM_CHUNKS, NUM_MICROBATCHES = 2, 2, 2, 4
FORWARD, BACKWARD = 0.010, 0.020  # of one stage action [s]
STAGE_BYTES = 1_000_000  # of gradients
BANDWIDTH = 25e6  # of the wire [bytes/s]: 200 Mbit/s
_WARM_UP_STEPS = 2


def run_overlap(*, repetitions: int) -> OverlapTimes:
    """Both sides in turn, repetition by repetition. Collective over the processes."""
    beside, behind = _Side(), _Side()
    behind.put_sums_behind()
    sides = {"beside": beside, "behind": behind}
    for side in sides.values():
        for _ in range(_WARM_UP_STEPS):
            timed(side.step)
        side.pipe.measured_costs()  # the link's latency, while nothing is under way
        side.pipe.forget_measurements()
    runs = {name: partial(timed, side.step) for name, side in sides.items()}
    seconds = in_turn(OVERLAP, runs, repetitions=repetitions)
    costs = {name: side.pipe.measured_costs() for name, side in sides.items()}
    schedule = beside.pipe.schedule
    for side in sides.values():
        side.pipe.close()
    return OverlapTimes(
        seconds=seconds,
        predicted={
            "beside": simulate(schedule, costs["beside"]).makespan,
            "behind": predicted_behind(schedule, replace(costs["behind"], reduce_grad=costs["beside"].reduce_grad)),
        },
    )


def predicted_behind(schedule: Schedule, costs: Costs) -> float:
    """Makespan where each rank sums the gradients of its stages one after the other, behind all its actions [s]."""
    timeline = simulate(schedule, replace(costs, reduce_grad=0.0))
    sums = costs.table(num_stages=schedule.num_stages).reduce_grad
    ends = [trace.compute[-1].end for trace in timeline.ranks]
    begin = [max(ends[rank] for rank in schedule.owners[stages[0]]) for stages in schedule.placement]
    return max(at + sum(sums[s] for s in stages) for at, stages in zip(begin, schedule.placement, strict=True))


class _Ballast(nn.Module):
    """A stage that sleeps, with as many weights as make STAGE_BYTES of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeps = SleepingStage(FORWARD, BACKWARD)
        self.ballast = nn.Parameter(torch.zeros(STAGE_BYTES // 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.sleeps(x) + self.ballast[:TINY_WIDTH]
        return out


class _Side:
    """A pipeline of its own."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._batch = [torch.randn(NUM_MICROBATCHES, TINY_WIDTH, generator=generator) for _ in range(2)]
        self.pipe = PipelineModule(
            stages=[_Ballast() for _ in range(NUM_PIPE * NUM_CHUNKS)],
            schedule="interleaved",
            num_chunks=NUM_CHUNKS,
            num_microbatches=NUM_MICROBATCHES,
            mesh={"pipe": NUM_PIPE, "data": NUM_DATA},
            loss_fn=F.mse_loss,
            example_inputs=(self._batch[0],),
        )
        _Wire(self._built)

    @property
    def _built(self) -> Pipeline:
        return self.pipe._building.built("the bench")

    def step(self) -> None:
        """One batch, its gradients summed."""
        self.pipe.forward_backward(*self._batch)
        drop_gradients(self.pipe.parameters())

    def put_sums_behind(self) -> None:
        """Let the programs of all ranks begin their sums behind everything else."""
        update = self._built.training._update
        programs = update._programs  # type: ignore[attr-defined]
        setattr(update, "_programs", [replace(each, steps=sums_last(each.steps)) for each in programs])  # noqa: B010


def sums_last(steps: Sequence[object]) -> tuple[object, ...]:
    """The steps of a program, collectives behind all others."""
    sums = [step for step in steps if isinstance(step, Collective)]
    return (*(step for step in steps if not isinstance(step, Collective)), *sums)


class _Wire:
    """Takes the place of a pipeline's `begin_all_reduce`: what is begun goes over one slow wire, in order."""

    def __init__(self, built: Pipeline) -> None:
        collectives = built.training._collectives
        self._begin = collectives.begin_all_reduce
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._carry, daemon=True).start()
        setattr(collectives, "begin_all_reduce", self._begin_slowly)  # noqa: B010

    def _begin_slowly(
        self, tensor: Tensor, *, what: str, ranks: Sequence[int], on_through: Callable[[], None] | None = None
    ) -> Callable[[], None]:
        wait = self._begin(tensor, what=what, ranks=ranks)
        through = threading.Event()

        def carry() -> None:
            wait()
            time.sleep(tensor.nbytes / BANDWIDTH)
            if on_through is not None:
                on_through()
            through.set()

        self._queue.put(carry)
        return lambda: None if through.wait(60.0) else _lost(what)

    def _carry(self) -> None:
        while True:
            self._queue.get()()


def _lost(what: str) -> None:
    raise RuntimeError(f"{what}: not through within 60 s")
