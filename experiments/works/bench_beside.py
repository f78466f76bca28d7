"""Work in parallel with training: all-reduces of gradients over a slow wire, and checkpoints.

overlap        all-reduces during the following backwards, and after all of them
checkpoints    a step without a checkpoint, with one written during training, and with a blocking save
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ...cli.train.gpt import GPTConfig
from ...cli.train.pipeline import first
from ...pipe import PipelineModule
from ...pipe.build import Pipeline
from ...pipe.update.flush import FlushUpdate
from ...schedules import Collective, Costs, Schedule, simulate
from ...schedules.program import Step
from ..jobs.case import Case
from ..jobs.figure import Figure, How, Target, repeated
from ..measure.models import TINY_WIDTH, SleepingStage, drop_gradients, gpt_problem
from ..measure.sides import OurSide
from ..measure.timing import compared, foretold, in_turn, say, timed, typical

NUM_PIPE, NUM_DATA, NUM_CHUNKS, NUM_MICROBATCHES = 2, 2, 2, 4
FORWARD, BACKWARD = 0.010, 0.020  # of one stage action [s]
STAGE_BYTES = 1_000_000  # of gradients
BANDWIDTH = 25e6  # of the wire [bytes/s]: 200 Mbit/s
OVERHEAD = 0.035  # share of training for checkpoints at an automatic interval
MICROBATCHES, BATCH = 8, 16
_WARM_UP_STEPS = 3


def overlap(case: Case, repetitions: int) -> Iterator[Figure]:
    """Share of a step saved by overlapped all-reduces, and the simulator's error for both sides.

    Emulated: stages sleep, and each all-reduce occupies this process's wire in turn for bytes / `BANDWIDTH` after the
    real one over gloo. Two data replicas of two ranks with two stages each:

        overlapped  2B 2B ... 0B 0B      0U 2U        the all-reduce of stage 2 overlaps the backwards of stage 0
        sums             [ 2 ]     [ 0 ]
        after       2B 2B ... 0B 0B           0U 2U   both follow all backwards
        sums                       [ 2 ][ 0 ]
    """
    overlapped, after = _Side(), _Side()
    after.put_sums_after()
    sides = {"overlapped": overlapped, "after": after}
    for side in sides.values():
        for _ in range(_WARM_UP_STEPS):
            timed(side.step)
        side.pipe.measured_costs()  # measures the link's latency, while nothing is in flight
        side.pipe.forget_measurements()
    runs = {name: partial(timed, side.step) for name, side in sides.items()}
    seconds = in_turn(case.text("case"), runs, repetitions=repetitions)
    costs = {name: side.pipe.measured_costs() for name, side in sides.items()}
    schedule = overlapped.pipe.schedule
    for side in sides.values():
        side.pipe.close()
    predicted = {
        "overlapped": simulate(schedule, costs["overlapped"]).makespan,
        "after": predicted_after(schedule, replace(costs["after"], reduce_grad=costs["overlapped"].reduce_grad)),
    }
    shown = Case.of({"case": case.text("case"), "run": "interleaved V=2, 2 x 2 ranks, slow wire"})
    yield from foretold(seconds, predicted, case=shown, what="sums", slack=1.02)


def predicted_after(schedule: Schedule, costs: Costs) -> float:
    """Makespan if each rank reduces the gradients of its stages one after the other, after all its actions [s]."""
    timeline = simulate(schedule, replace(costs, reduce_grad=0.0))
    sums = costs.table(num_stages=schedule.num_stages).reduce_grad
    ends = [trace.compute[-1].end for trace in timeline.ranks]
    begin = [max(ends[rank] for rank in schedule.owners[stages[0]]) for stages in schedule.placement]
    return max(at + sum(sums[s] for s in stages) for at, stages in zip(begin, schedule.placement, strict=True))


class _Ballast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sleeps = SleepingStage(FORWARD, BACKWARD)
        self.ballast = nn.Parameter(torch.zeros(STAGE_BYTES // 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.sleeps(x) + self.ballast[:TINY_WIDTH]
        return out


class _Side:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._batch = [torch.randn(NUM_MICROBATCHES, TINY_WIDTH, generator=generator) for _ in range(2)]
        self.pipe = PipelineModule(
            [_Ballast() for _ in range(NUM_PIPE * NUM_CHUNKS)],
            schedule="interleaved",
            num_chunks=NUM_CHUNKS,
            num_microbatches=NUM_MICROBATCHES,
            mesh={"pipe": NUM_PIPE, "data": NUM_DATA},
            loss_fn=F.mse_loss,
            example_inputs=(self._batch[0],),
            verify=False,
        )
        self._built = self.pipe._building.built("the bench")
        _Wire(self._built)

    def step(self) -> None:
        self.pipe.forward_backward(*self._batch)
        drop_gradients(self.pipe.parameters())

    def put_sums_after(self) -> None:
        """Make the programs of all ranks begin their all-reduces after everything else."""
        update = self._built.training._update
        assert isinstance(update, FlushUpdate)
        programs = [replace(each, steps=sums_last(each.steps)) for each in update._programs.programs]
        update._programs = replace(update._programs)
        vars(update._programs)["programs"] = programs  # else derived from the schedule


def sums_last(steps: Sequence[Step]) -> tuple[Step, ...]:
    sums = [step for step in steps if isinstance(step, Collective)]
    return (*(step for step in steps if not isinstance(step, Collective)), *sums)


class _Wire:
    """Replaces a pipeline's `begin_all_reduce` by one over a slow wire, in order."""

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


def checkpoints(case: Case, repetitions: int) -> Iterator[Figure]:
    """Time that a checkpoint adds to its steps, in parallel or blocking, and the overhead of an automatic interval.

    A GPT with AdamW on two ranks, `layers` of `width`, `length`; in each repetition the same `steps` run without
    checkpoints, with one written in parallel, and with a blocking one. Then `auto_steps` with an automatic interval.
    """
    size = GPTConfig(length=case.count("length"), layers=case.count("layers"), width=case.count("width"))
    steps, name = case.count("steps"), case.text("case")
    with _shared_folder() as folder:
        side = OurSide.of_model(gpt_problem(size, batch=BATCH), schedule="1f1b", num_microbatches=MICROBATCHES)
        pipe, step = side.pipe, side.step
        for _ in range(_WARM_UP_STEPS):
            step()
        saver = pipe.checkpointer(folder / "beside", every=steps)

        def plain() -> None:
            for _ in range(steps):
                step()

        def blocking() -> None:
            plain()
            pipe.save(folder / "blocking")

        def beside() -> None:
            for _ in range(steps):
                step()
                saver.step()  # the first step begins one
            saver.wait()

        beside()  # the first one allocates memory that later ones reuse
        sides = {"without": plain, "blocking": blocking, "beside": beside}
        runs = {side: partial(timed, run) for side, run in sides.items()}
        seconds = in_turn(name, runs, repetitions=repetitions)
        saver.close()
        shares, every = [], []
        for repetition in range(repetitions):
            with pipe.checkpointer(folder / "auto", every="auto", overhead=OVERHEAD) as saver:
                for _ in range(case.count("auto_steps")):
                    step()
                    saver.step()
            shares.append(0.0 if saver.overhead is None else saver.overhead)
            every.append(saver.every)
            say(f"{name}: auto {repetition + 1}/{repetitions}: {shares[-1]:.1%}, one in {every[-1]} steps")
        num_bytes = saver.records[-1].num_bytes
        pipe.close()
    shown = Case.of({"case": name, "run": f"GPT, AdamW, {num_bytes / 1e6:.1f} MB a rank"})
    yield from compared(
        (seconds["beside"], seconds["blocking"]),
        case=shown,
        name=f"{steps} steps, checkpoint beside / blocking",
        how=How.MEASURED,
        target=Target(limit=1.0),
        note=f", without one {typical(seconds['without'])}",
    )
    yield from repeated(
        shares,
        case=shown,
        name="share of the time, interval found for 3.5%",
        unit="ratio",
        how=How.MEASURED,
        target=Target(limit=OVERHEAD),
        note=f"one in {', '.join(map(str, every))} steps at the end",
    )


@contextmanager
def _shared_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="stagewright-bench-") as own:
        yield Path(first(own))
        dist.barrier()
