"""I and W as actions of their own: gradients equal the plain reference's, and the record is what the schedule says."""

from __future__ import annotations

import pytest
import torch
from support.cases import Layout, agree
from support.matrix import make_case
from support.pipeline import run
from support.reference import reference
from torch import nn

from stagewright import PipelineModule
from stagewright.pipe import StepResult
from stagewright.schedules import Action, Op, Schedule, build, lower, simulate


@pytest.mark.parametrize(
    ("task", "num_microbatches", "recompute"),
    [("mlp", 5, "none"), ("gpt", 3, "layer"), ("tied-gpt", 4, "none"), ("unet", 4, "full")],
)
def test_gradients_equal_the_reference(task: str, num_microbatches: int, recompute: str) -> None:
    layout = Layout(schedule="zb-h1", num_ranks=2, recompute=recompute)
    case = make_case(task, layout, num_microbatches)
    agree(run(case, layout), reference(case), case)


def small_step(num_ranks: int, num_microbatches: int) -> tuple[PipelineModule, StepResult]:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(num_ranks)])
    pipe = PipelineModule(
        model,
        schedule="zb-h1",
        num_microbatches=num_microbatches,
        loss_fn=nn.functional.mse_loss,
        mesh={"pipe": num_ranks},
    )
    return pipe, pipe.forward_backward(torch.randn(8, 4), torch.randn(8, 4))


def test_what_ran_is_what_the_schedule_says() -> None:
    """I and W are recorded one after the other, whether they ran as one or apart; so are their costs."""
    pipe, result = small_step(3, 4)
    timeline = result.timeline()
    schedule = build("zb-h1", num_ranks=3, num_microbatches=4)
    for trace, program in zip(timeline.ranks, schedule.programs, strict=True):
        assert tuple(span.what for span in trace.compute) == program
        ends = [0.0] + [span.end for span in trace.compute]
        assert all(before <= span.start <= span.end for before, span in zip(ends, trace.compute, strict=False))
    costs = pipe.measured_costs()
    assert costs is not None
    table = costs.table(num_stages=3)
    assert all(i > 0 and w > 0 for i, w in zip(table.input_grad, table.weight_grad, strict=True))
    assert simulate(schedule, costs).makespan > 0


def test_i_and_w_run_as_one_where_nobody_waits_for_the_gradient() -> None:
    table = "0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1W0,1F1,1I1,1W1\n"
    lowered = lower(Schedule.from_csv(table))
    assert lowered.programs[0].fused == {Action(0, Op.I, 0), Action(0, Op.I, 1)}
    assert not lowered.programs[1].fused  # its gradient leaves, and W fills the time that it takes
