"""A plan made by measuring and carried out on the same ranks: its step time, and in fresh processes its memory."""

from __future__ import annotations

import gc
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from ...partition.plans.as_text import describe
from ...partition.plans.plan import Plan
from ...schedules import Op, simulate
from ..host import MemoryMeter
from ..training.gpt import GPTConfig
from .plan_workloads import MemoryKind, PlannedRun
from .records import PlannedMemory, PlannedTimes
from .sides import TIMEOUT, OurSide
from .timing import say, timed
from .whole_models import WholeProblem, gpt_problem, planned_problem

_WARM_UP_STEPS = 2
_MEMORY_STEPS = 4  # the optimizer's state is there from the first on


def plan_by_measuring(problem: WholeProblem, *, num_microbatches: int, **restrictions: Any) -> Plan:
    """The plan of schedule="auto" for a given M and within `restrictions` of the planner's search.

    Collective over the processes; the same plan on each.
    """
    from ...pipe.auto import plan_here  # the profiler and the planner, which other jobs need not load

    plan, _ = plan_here(
        problem.make_model(),
        ((problem.inputs,), problem.target),
        num_microbatches=num_microbatches,
        timeout=TIMEOUT,
        restrictions=restrictions,
        loss_fn=problem.loss_fn,
        optimizer=problem.optimizer,
    )
    return plan


def run_planned(run: PlannedRun, *, repetitions: int, file: Path) -> PlannedTimes:
    """Profile, plan and run. Rank 0 leaves the plan in `file`. Collective over the processes."""
    problem = planned_problem(run)
    say(f"{run.name}: profiling and planning")
    restrictions = {} if run.data_sizes is None else {"data_sizes": run.data_sizes}
    plan = plan_by_measuring(problem, num_microbatches=run.num_microbatches, **restrictions)
    assert plan.simulated_step_time is not None
    if dist.get_rank() == 0:
        file.write_text(plan.to_json(), encoding="utf-8")
    shape = f"{plan.schedule} {describe(plan)}"
    say(f"{run.name}: {shape}")
    side = OurSide.of_model(problem, plan=plan)
    for _ in range(_WARM_UP_STEPS):
        timed(side.step)
    side.pipe.forget_measurements()
    measured, makespans = [], []
    for repetition in range(repetitions):
        measured.append(median(timed(side.step) for _ in range(run.steps)))
        assert side.result is not None
        makespans.append(side.result.timeline().makespan)
        times = f"{measured[-1] * 1e3:.2f} ms, planned {plan.simulated_step_time * 1e3:.2f}"
        say(f"{run.name}: repetition {repetition + 1}/{repetitions}: {times}")
    costs, schedule = side.pipe.measured_costs(), side.pipe.schedule
    table = costs.table(num_stages=schedule.num_stages)
    side.pipe.close()
    return PlannedTimes(
        run=run.name,
        plan=shape,
        predicted=plan.simulated_step_time,
        measured=measured,
        makespans=makespans,
        simulated=simulate(schedule, costs).makespan,
        planned_work=sum(plan.seconds(Op.F)) + sum(plan.seconds(Op.B)),
        measured_work=sum(table.means(Op.F)) + sum(table.means(Op.B)),
    )


def run_memory(run: PlannedRun, kind: MemoryKind, *, file: Path) -> PlannedMemory:
    """Carry out the plan in `file` for a few steps; meant for processes that were started for `kind`.

    What torch loads with its first model, whichever it is, is no part of the plan: a tiny model is run before the meter
    starts. Collective over the processes.
    """
    plan = Plan.load(file)
    say(f"{run.name}: memory {kind}")
    load_everything()
    gc.collect()
    meter = MemoryMeter()
    side = OurSide.of_model(planned_problem(run), plan=plan)
    for _ in range(_MEMORY_STEPS):
        side.step()
    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, meter.peak())
    side.pipe.close()
    predicted = plan.memory_bytes
    return PlannedMemory(
        run=run.name, kind=kind, predicted=[predicted.get(rank, 0.0) for rank in range(len(peaks))], measured=peaks
    )


def load_everything() -> None:
    """A step of a tiny GPT over the same ranks: modules, threads and tables that the first model brings in."""
    tiny = gpt_problem(GPTConfig(layers=dist.get_world_size(), width=16, length=8), batch=4)
    side = OurSide.of_model(tiny, schedule="1f1b", num_microbatches=4)
    side.step()
    side.pipe.close()
