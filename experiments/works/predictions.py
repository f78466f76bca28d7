"""Accuracy of plans made from measurements.

A run is one of `stagewright train --plan auto` in its own processes: profile, links, plan, order, trials, then planned
steps. Cases differ in `run`, so that each is a job.

    step, planned / measured    the plan's step (the middle of its range) over the median step of rank 0, without the
                                first ones
    step, tried / measured      likewise, a batch in the plan's trial
    step, untried / measured    likewise, the plan's step as predicted by the profile alone, before the trial
    work, planned / measured    likewise, F + B of a microbatch over all stages, by the run's own actions
    step, simulated / measured  simulated from the run's own costs and spread: the remaining error is not the plan's
    share of steps within ...   of the range predicted from the spread of the run's own durations
    bubble                      in the middle of the plan's range, and measured
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from ..jobs.case import Case
from ..jobs.figure import Figure, How
from .ranges import WITHIN

if TYPE_CHECKING:
    from ...partition.plans.plan import Plan
    from ...pipe import PipelineModule
    from ...pipe.results import StepResult

STEP = "step, planned / measured"
TRIED = "step, tried / measured"
UNTRIED = "step, untried / measured"
_WARM_UP = 4  # steps
_STEPS = 20
_SLEEPING_STEPS = 12
_GATHERED = 5  # steps for the bubble


def trained(case: Case, repetitions: int) -> Iterator[Figure]:
    """The default GPT of `train`, with its data, optimizer and clipping; `replicas`: "any", or the number of them."""
    from ...cli.train.options import TrainOptions
    from ...cli.train.pipeline import make_pipe
    from ...cli.train.task import make_task
    from ...pipe.auto.layout import TRIALS, plan_here
    from ..measure.sides import TIMEOUT

    options = TrainOptions(plan="auto", ranks=case.count("ranks"), batch=16, verify=False, steps=_WARM_UP + _STEPS)
    task = make_task(options)
    batches = task.batches()
    first = next(batches)
    (inputs, target), loss_fn = first.parted(task.loss_for(first)), task.loss_for(first)
    assert isinstance(inputs, tuple)
    restrictions = {} if case.get("replicas") == "any" else {"data_sizes": (case.count("replicas"),)}
    plan, untried = plan_here(
        task.make_model(),
        (inputs, target),
        num_microbatches=None,
        timeout=TIMEOUT,
        trials=TRIALS,
        restrictions=restrictions,
        loss_fn=loss_fn,
        optimizer=task.optimizer,
        max_grad_norm=options.clip,
    )
    pipe = make_pipe(options, plan, task, task.make_model(), first)

    def step() -> StepResult:
        return pipe.train_step(*next(batches).args)

    yield from _ran(case, plan, pipe, step, untried=untried, steps=_STEPS, how=How.MEASURED)
    del repetitions


def sleeping(case: Case, repetitions: int) -> Iterator[Figure]:
    """Layers that sleep for unequal times, three per rank."""
    from ...pipe.auto.layout import TRIALS
    from ..measure.models import sleeping_layers
    from ..measure.sides import OurSide
    from .bench_plans import plan_by_measuring

    del repetitions
    ranks = case.count("ranks")
    problem = sleeping_layers(3 * ranks, 2 * ranks)
    plan, untried = plan_by_measuring(problem, num_microbatches=2 * ranks, trials=TRIALS, data_sizes=(1,))
    side = OurSide.of_model(problem, schedule=plan)
    yield from _ran(case, plan, side.pipe, side.step, untried=untried, steps=_SLEEPING_STEPS, how=How.EMULATED)


def _ran(
    case: Case, plan: Plan, pipe: PipelineModule, step: Callable[[], StepResult], *, untried: Plan, steps: int, how: How
) -> Iterator[Figure]:
    from ...partition.plans.as_text import CHOSEN
    from ...schedules import Op, simulate, simulate_spread

    for _ in range(_WARM_UP):
        step()
    pipe.measured_costs()  # measures the link's latency, while little is in flight
    pipe.forget_measurements()
    seconds, bubbles, spans = [], [], []
    for number in range(steps):
        began = time.perf_counter()
        result = step()
        seconds.append(time.perf_counter() - began)
        timeline = result.timeline()
        spans.append(timeline.batch_seconds)
        if number % max(1, steps // _GATHERED) == 0:
            bubbles.append(timeline.bubble)
    costs, spread, took = pipe.measured_costs(), pipe.measured_spread(), median(seconds)
    table = costs.free_of_overhead.table(num_stages=pipe.schedule.num_stages)
    work = sum(table.means(Op.F)) + sum(table.means(Op.B))
    planned = sum(plan.seconds(Op.F)) + sum(plan.seconds(Op.B))
    note = next((each.removeprefix(CHOSEN) for each in plan.notes if each.startswith(CHOSEN)), "")
    pipe.close()

    def figure(name: str, value: float, unit: str = "ratio", how: How = how) -> Figure:
        return Figure(case=case, name=name, value=value, unit=unit, how=how, note=note)

    step_planned, bubble_planned = _expected(plan)
    taken = None if spread is None else simulate_spread(pipe.schedule, costs, spread)
    simulated = simulate(pipe.schedule, costs).batch_seconds if taken is None else taken.median
    yield figure(STEP, step_planned / took)
    yield figure(UNTRIED, _expected(untried)[0] / took)
    if plan.tried_seconds is not None:
        yield figure(TRIED, plan.tried_seconds / took)
    yield figure("work, planned / measured", planned / work)
    yield figure("step, simulated / measured", simulated / took)
    if taken is not None:
        yield figure(WITHIN, taken.holds(spans), "fraction")
    yield figure("step", took, "s")
    yield figure("step", step_planned, "s", How.SIMULATED)
    yield figure("bubble", median(bubbles), "fraction")
    yield figure("bubble", bubble_planned, "fraction", How.SIMULATED)


def _expected(plan: Plan) -> tuple[float, float]:
    from ...partition.plans.as_schedule import expected

    step = expected(plan)
    assert step is not None
    return step


def findings(figures: Sequence[Figure]) -> list[str]:
    """By kind of run the errors of planned steps, of trials and of untried plans: median and worst of the runs; and the
    plans."""
    by_kind: dict[Case, dict[str, list[Figure]]] = defaultdict(lambda: defaultdict(list))
    for figure in figures:
        if figure.name in (STEP, TRIED, UNTRIED):
            by_kind[figure.case.only(key for key in figure.case if key != "run")][figure.name].append(figure)
    said = []
    for kind, own in by_kind.items():
        plans = "; ".join(dict.fromkeys(figure.note for figure in own[STEP]))
        tried = f"; steps of their trials {_off(own[TRIED])}" if own[TRIED] else ""
        alone = f"; by the profile alone {_off(own[UNTRIED])}" if own[UNTRIED] else ""
        said.append(f"{kind}: planned steps are {_off(own[STEP])}{tried}{alone}. Plans: {plans}.")
    return said


def _off(figures: Sequence[Figure]) -> str:
    off = [figure.value - 1 for figure in figures]
    return f"{median(map(abs, off)):.1%} off (median of {len(off)} runs), {max(off, key=abs):+.1%} at worst"
