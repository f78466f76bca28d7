"""One uneven model, cut by equal layers, by equal parameters and by profile, under the same schedule in turn."""

from __future__ import annotations

from functools import partial
from statistics import median

from .plan_workloads import CutBy, CutContest
from .planned import plan_by_measuring
from .records import CutTimes
from .sides import OurSide, check_same_work
from .timing import in_turn, say, timed
from .whole_models import contest_problem

SCHEDULE = "1f1b"

_WARM_UP_STEPS = 2


def run_contest(contest: CutContest, *, repetitions: int) -> CutTimes:
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
        CutBy.LAYERS: OurSide.of_model(problem, split_points=[contest.layers_cut], **by_hand),
        CutBy.PARAMETERS: OurSide.of_model(problem, **by_hand),
        CutBy.PROFILE: OurSide.of_model(problem, plan=plan),
    }
    for _ in range(_WARM_UP_STEPS):
        for side in sides.values():
            timed(side.step)
        check_same_work(contest.name, {cut_by: side.loss for cut_by, side in sides.items()})

    def repeat(side: OurSide) -> float:
        return median(timed(side.step) for _ in range(contest.steps))

    runs = {cut_by.value: partial(repeat, side) for cut_by, side in sides.items()}
    seconds = in_turn(contest.name, runs, repetitions=repetitions)
    cuts: dict[str, str] = {cut_by: " | ".join(side.pipe.stage_names) for cut_by, side in sides.items()}
    for side in sides.values():
        side.pipe.close()
    return CutTimes(contest=contest.name, cuts=cuts, seconds=seconds, predicted=plan.simulated_step_time)
