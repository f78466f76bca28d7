"""The event simulator: the epilogue, and what it refuses. Against a slow simulator: test_links.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagewright.schedules import (
    Action,
    Costs,
    Op,
    ScheduleError,
    Span,
    build,
    lower_bound,
    simulate,
)

from .random_schedules import by_hand

# --- the epilogue ---

FB_U = Costs(forward=1.0, backward=2.0, update=[0.5, 1.0, 0.25, 2.0])


def test_a_norm_counts_behind_no_update() -> None:
    """It was left out where updates cost nothing, while the lower bound counted it."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=2)
    costs = Costs(forward=1.0, backward=2.0, norm=0.5)
    timeline = simulate(schedule, costs)
    assert timeline.makespan == lower_bound(schedule, costs) == 9.5
    assert [trace.compute[-1] for trace in timeline.ranks] == [Span(Action(s, Op.U, 0), 9.5, 9.5) for s in (0, 1)]


@pytest.mark.parametrize("costs", [FB_U, Costs(update=1.0, norm=1.0)])
def test_an_evaluation_has_no_epilogue(costs: Costs) -> None:
    schedule = build("1f1b", num_ranks=4, num_microbatches=3).forward_only()
    assert all(s.what.op is Op.F for trace in simulate(schedule, costs).ranks for s in trace.compute)  # type: ignore[union-attr]


# --- what it refuses ---


def test_a_deadlock() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 never gets what 0B0 needs: the schedule deadlocks; check\(sched"):
        simulate(by_hand("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", microbatches=2), Costs())


def test_communication_in_a_compute_order() -> None:
    program = (Action(0, Op.REDUCE_GRAD, 0),)
    with pytest.raises(ScheduleError, match="runs REDUCE_GRAD of stage 0, which has no cost: expected F B I W U"):
        simulate(replace(by_hand("0F0 0B0", microbatches=1), programs=(program,)), Costs())
