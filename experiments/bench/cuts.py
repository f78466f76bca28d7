"""One uneven model, cut by equal layers, by equal parameters and by profile, under the same schedule in turn."""

from __future__ import annotations

from statistics import median

from .model_side import ModelSide, plan_by_measuring
from .plan_workloads import Contest, CutBy
from .records import CutTimes
from .timing import say, timed
from .whole_models import contest_problem

SCHEDULE = "1f1b"

_WARM_UP_STEPS = 2


def run_contest(contest: Contest, *, repetitions: int) -> CutTimes:
    """All contestants in turn, repetition by repetition. Collective over the processes."""
    problem = contest_problem(contest)
    say(f"{contest.name}: profiling and planning")
    plan = plan_by_measuring(
        problem,
        num_microbatches=contest.num_microbatches,
        schedules=(SCHEDULE,),
        pipeline_sizes=(contest.num_ranks,),
        data_sizes=(1,),
        recompute=("none",),
    )
    assert plan.simulated_step_time is not None
    by_hand = {"schedule": SCHEDULE, "num_microbatches": contest.num_microbatches}
    sides = {
        CutBy.LAYERS: ModelSide(problem, split_points=[contest.layers_cut], **by_hand),
        CutBy.PARAMETERS: ModelSide(problem, **by_hand),
        CutBy.PROFILE: ModelSide(problem, plan=plan),
    }
    for _ in range(_WARM_UP_STEPS):
        for side in sides.values():
            timed(side.step)
        _check_same_work(contest, sides)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repetition in range(repetitions):
        for name, side in sides.items():
            seconds[name].append(median(timed(side.step) for _ in range(contest.steps)))
        shown = ", ".join(f"{name} {values[-1] * 1e3:.2f} ms" for name, values in seconds.items())
        say(f"{contest.name}: repetition {repetition + 1}/{repetitions}: {shown}")
    cuts: dict[str, str] = {name: " | ".join(side.pipe.stage_names) for name, side in sides.items()}
    for side in sides.values():
        side.pipe.close()
    return CutTimes(contest=contest.name, cuts=cuts, seconds=seconds, predicted=plan.simulated_step_time)


def _check_same_work(contest: Contest, sides: dict[CutBy, ModelSide]) -> None:
    losses = {name: side.loss for name, side in sides.items() if side.loss is not None}
    first = losses[CutBy.PROFILE]
    for name, loss in losses.items():
        if abs(loss - first) > 1e-4 * max(1.0, abs(first)):
            raise RuntimeError(f"{contest.name}: the loss is {loss} by {name}, {first} by profile: not the same work")
