"""Background work in the waits of steps: the share of them that it fills, and what steps take with it and without."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ...schedules import Action, Costs, Op, Schedule, attribute_idle, simulate, with_fill
from ..jobs.case import Case
from ..jobs.figure import Figure, How, repeated
from ..measure.equal_stages import costs_of, schedule_of

_TIMES = 3.0  # actions as long as this many of `equal_stages`: what disturbs a machine is a smaller part
_PIECE = 0.007  # [s]
_ROW = 6  # batches in a row
_SHARE, _RATIO = "filled", "batch, filled / plain"
_EVALUATED = ("batch, evaluation in waits / alone", "batch, evaluation in front / alone")
_WHERE = ("in front of the first action", "between actions", "behind the last action")


def _costs(schedule: Schedule) -> Costs:
    factors = [_TIMES / schedule.num_slices] * schedule.batch_indices
    return replace(costs_of(schedule), index_factors=factors, fill=_PIECE)


def simulated(case: Case, repetitions: int) -> Iterator[Figure]:
    """The bubble of a case, the share of the idle time that pieces fill, and which parts of it lie where."""
    del repetitions
    schedule = schedule_of(case)
    costs = _costs(schedule)
    plain, filled = simulate(schedule, costs), simulate(with_fill(schedule, costs), costs)
    idle = sum(each.seconds for each in attribute_idle(filled))
    where = dict.fromkeys(_WHERE, 0.0)
    for rank in filled.ranks:
        for what, start, end in rank.moves:
            if what.op is Op.FILL:
                is_first, is_last = start < rank.compute[0].start, start >= rank.compute[-1].end
                where[_WHERE[0 if is_first else 2 if is_last else 1]] += end - start
    shares = {"bubble": plain.bubble, _SHARE: sum(where.values()) / idle} | {at: s / idle for at, s in where.items()}
    for name, share in shares.items():
        yield Figure(case=case, name=name, value=share, unit="fraction", how=How.SIMULATED)
    ratio = filled.batch_seconds / plain.batch_seconds
    yield Figure(case=case, name=_RATIO, value=ratio, unit="ratio", how=How.SIMULATED)


def _pipeline(schedule: Schedule) -> tuple[Any, tuple[Any, Any]]:
    """A pipeline over the processes of this job whose work is next to nothing, and a batch."""
    import torch
    import torch.nn.functional as F

    from ...pipe import PipelineModule
    from ..measure.models import Workload, make_problem

    S, M = schedule.num_stages, schedule.num_microbatches
    problem = make_problem(Workload(model="tiny", schedule="1f1b", num_ranks=S, num_microbatches=M))
    pipe = PipelineModule(
        problem.stages,
        schedule=schedule,
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-6),
        max_grad_norm=1e9,
        example_inputs=(problem.inputs,),
        verify=False,
    )
    return pipe, (problem.inputs, problem.target)


def emulated(case: Case, repetitions: int) -> Iterator[Figure]:
    """Rows of batches whose actions sleep, by turns with background work that sleeps and without; on all ranks.

    The share is that of the idle time of the rows without it.
    """
    import torch
    import torch.distributed as dist

    from ..measure.models import sleep_until
    from ..measure.sleeping import ours_asleep
    from ..measure.timing import in_turn, ratios, slowest

    schedule = schedule_of(case)
    table = _costs(schedule).table(num_stages=schedule.num_stages, num_indices=schedule.num_microbatches)
    pipe, batch = _pipeline(schedule)
    numbers: list[float] = []  # of pieces of all ranks, a row each

    def row(is_filled: bool) -> float:
        goes_on = is_filled

        def naps() -> Iterator[Callable[[], object]]:
            while goes_on:
                yield lambda: sleep_until(time.perf_counter() + _PIECE)

        work = pipe.fill(naps(), name="naps", seconds=_PIECE)
        with ours_asleep(table):
            pipe.train_step(*batch)
            began, before = time.perf_counter(), work.num_done
            for _ in range(_ROW):
                pipe.train_step(*batch)
            taken = (time.perf_counter() - began) / _ROW
        number = torch.tensor(float(work.num_done - before) / _ROW)
        dist.all_reduce(number)
        numbers.extend([float(number)] * is_filled)
        goes_on = False
        work.finish()
        return slowest(taken)

    row(True)  # groups connect, and what waits are like is known
    numbers.clear()
    runs = {"plain": lambda: row(False), "filled": lambda: row(True)}
    times = in_turn(str(case), runs, repetitions=repetitions)
    busy = sum(rank.busy for rank in simulate(schedule, _costs(schedule)).ranks)
    waits = [schedule.num_ranks * taken - busy for taken in times["plain"]]
    shares = [number * _PIECE / wait for number, wait in zip(numbers, waits, strict=True)]
    yield from repeated(shares, case=case, name=_SHARE, unit="fraction", how=How.EMULATED)
    yield from repeated(ratios(times["filled"], times["plain"]), case=case, name=_RATIO, unit="ratio", how=How.EMULATED)
    pipe.close()


def evaluated(case: Case, repetitions: int) -> Iterator[Figure]:
    """Rows of batches, by turns alone, with an evaluation in the waits of each, and with one in front of each; as
    `emulated`. An evaluation has the case's `evaluated` microbatches, whose forwards sleep as those that train."""
    from unittest.mock import patch

    from ...pipe.run.worker import EvaluationWorker
    from ..measure.models import sleep_until
    from ..measure.sleeping import ours_asleep
    from ..measure.timing import in_turn, ratios, slowest

    schedule = schedule_of(case)
    table = _costs(schedule).table(num_stages=schedule.num_stages, num_indices=schedule.num_microbatches)
    pipe, batch = _pipeline(schedule)
    few = [each[: case.count("evaluated")] for each in batch]
    run = EvaluationWorker.run

    def slow(worker: EvaluationWorker, action: Action) -> None:
        end = time.perf_counter() + table.of(action.op, action.stage, action.index)
        run(worker, action)
        sleep_until(end)

    def row(evaluate: Callable[..., object] | None) -> float:
        with ours_asleep(table), patch.object(EvaluationWorker, "run", slow):
            for number in range(_ROW + 1):
                if number == 1:
                    began = time.perf_counter()
                if evaluate is not None:
                    evaluate(*few)
                pipe.train_step(*batch)
            return slowest((time.perf_counter() - began) / _ROW)

    row(pipe.fill_eval)  # groups connect, and what waits are like is known
    waits, front = _EVALUATED
    runs = {"": partial(row, None), waits: partial(row, pipe.fill_eval), front: partial(row, pipe.eval_step)}
    times = in_turn(str(case), runs, repetitions=repetitions)
    for name in _EVALUATED:
        found = ratios(times[name], times[""])
        yield from repeated(found, case=case, name=name, unit="ratio", how=How.EMULATED)
    pipe.close()
