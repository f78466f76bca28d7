"""Background work in the waits of steps: the share of them that it fills, and what steps take with it and without."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from ...schedules import Costs, attribute_idle, simulate, with_fill
from ..jobs.case import Case
from ..jobs.figure import Figure, How, repeated
from ..measure.equal_stages import costs_of, schedule_of

_TIMES = 3.0  # actions as long as this many of `equal_stages`: what disturbs a machine is a smaller part
_PIECE = 0.007  # [s]
_ROW = 6  # batches in a row
_SHARE, _RATIO = "filled", "batch, filled / plain"


def _costs(case: Case) -> Costs:
    plain = costs_of(schedule_of(case))
    return replace(plain, index_factors=[_TIMES] * case.count("microbatches"), fill=_PIECE)


def simulated(case: Case, repetitions: int) -> Iterator[Figure]:
    """The bubble of a case, and the share of the idle time that pieces fill."""
    del repetitions
    schedule, costs = schedule_of(case), _costs(case)
    plain, filled = simulate(schedule, costs), simulate(with_fill(schedule, costs), costs)
    idle = attribute_idle(filled)
    yield Figure(case=case, name="bubble", value=plain.bubble, unit="fraction", how=How.SIMULATED)
    share = sum(each.fill for each in idle) / sum(each.seconds for each in idle)
    yield Figure(case=case, name=_SHARE, value=share, unit="fraction", how=How.SIMULATED)
    ratio = filled.batch_seconds / plain.batch_seconds
    yield Figure(case=case, name=_RATIO, value=ratio, unit="ratio", how=How.SIMULATED)


def emulated(case: Case, repetitions: int) -> Iterator[Figure]:
    """Rows of batches whose actions sleep, by turns with background work that sleeps and without; on all ranks.

    The share is that of the idle time of the rows without it.
    """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from ...pipe import PipelineModule
    from ..measure.models import Workload, make_problem, sleep_until
    from ..measure.sleeping import ours_asleep
    from ..measure.timing import in_turn, ratios, slowest

    schedule = schedule_of(case)
    S, M = schedule.num_stages, schedule.num_microbatches
    table = _costs(case).table(num_stages=S, num_indices=M)
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
    numbers: list[float] = []  # of pieces of all ranks, a row each

    def row(is_filled: bool) -> float:
        goes_on = is_filled

        def naps() -> Iterator[Callable[[], object]]:
            while goes_on:
                yield lambda: sleep_until(time.perf_counter() + _PIECE)

        work = pipe.fill(naps(), name="naps", seconds=_PIECE)
        with ours_asleep(table):
            pipe.train_step(problem.inputs, problem.target)
            began, before = time.perf_counter(), work.num_done
            for _ in range(_ROW):
                pipe.train_step(problem.inputs, problem.target)
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
    busy = sum(rank.busy for rank in simulate(schedule, _costs(case)).ranks)
    waits = [schedule.num_ranks * taken - busy for taken in times["plain"]]
    shares = [number * _PIECE / wait for number, wait in zip(numbers, waits, strict=True)]
    yield from repeated(shares, case=case, name=_SHARE, unit="fraction", how=How.EMULATED)
    yield from repeated(ratios(times["filled"], times["plain"]), case=case, name=_RATIO, unit="ratio", how=How.EMULATED)
    pipe.close()
