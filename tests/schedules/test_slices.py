"""Microbatches cut along the sequence: what slices need of each other, who owns them, and how they are said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.inside import Dependencies, replicate

from stagewright.schedules import Action, Op, Schedule, ScheduleError, build, check, check_lowered, lower


def of_text(*programs: str, num_slices: int, num_microbatches: int = 1) -> Schedule:
    return Schedule(
        name="mine",
        placement=tuple((rank,) for rank in range(len(programs))),
        programs=tuple(tuple(map(Action.parse, program.split())) for program in programs),
        num_microbatches=num_microbatches,
        num_slices=num_slices,
    )


def test_needs_of_slices() -> None:
    """Forwards from the first slice on, backwards from the last: of one microbatch, on the same stage, split or not."""
    schedule = of_text("0F0 0F1 0F2 0F3 0B1 0I0 0W0 0I3 0W3 0B2", num_slices=2, num_microbatches=2)
    needs = {str(action): " ".join(map(str, Dependencies(schedule).of(action))) for action in schedule.programs[0]}
    assert [needs[f"0F{index}"] for index in range(4)] == ["", "0F0", "", "0F2"]
    assert [needs["0B1"], needs["0I0"], needs["0I3"], needs["0B2"]] == ["0F1", "0F0 0B1", "0F3", "0F2 0I3"]
    check(schedule)


@pytest.mark.parametrize("wrong", ["0F1 0F0 0B1 0B0", "0F0 0F1 0B0 0B1", "0F0 0F1 0I0 0I1 0W0 0W1"])
def test_slices_in_a_wrong_order(wrong: str) -> None:
    with pytest.raises(ScheduleError, match="deadlock: a cycle of 1 rank"):
        check(of_text(wrong, num_slices=2))
    check(of_text(wrong, num_slices=1, num_microbatches=2))  # as microbatches they need nothing of each other


def test_all_slices_of_a_microbatch_stand_on_its_rank() -> None:
    """Keys and values stay there; so no message goes between slices, and replicas take turns by microbatch."""
    schedule = replicate(build("seq1f1b", num_ranks=2, num_microbatches=2, num_slices=3), 2)
    assert [schedule.owner(0, index) for index in range(12)] == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3
    check(schedule)
    assert check_lowered(lower(schedule)).num_messages == 2 * 12  # an activation and a gradient each


def test_slices_stand_in_json_and_not_in_a_table() -> None:
    schedule = build("seq1f1b", num_ranks=2, num_microbatches=2, num_slices=3)
    assert Schedule.from_json(schedule.to_json()) == schedule
    with pytest.raises(ScheduleError, match=r"has replicas, slices, several batches or updates.*use to_json"):
        schedule.to_csv()
    assert repr(schedule) == "<Schedule seq1f1b: 2 ranks, 2 stages, 2 microbatches, 3 slices each>"
    alone = schedule.forward_only()  # microbatches whole
    check(alone)
    assert (alone.num_slices, alone.programs[1]) == (1, (Action(1, Op.F, 0), Action(1, Op.F, 1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_slices": 0}, "num_slices=0: expected at least 1"),
        ({"num_slices": 2, "num_batches": 2}, "num_slices=2 for 2 batches under the rule 'flush': expected one batch"),
        ({"num_slices": 2, "weight_rule": "2bw"}, "num_slices=2 for 1 batch under the rule '2bw'"),
    ],
)
def test_slices_that_do_not_fit(change: dict[str, object], message: str) -> None:
    schedule = build("gpipe", num_ranks=2, num_microbatches=2)
    with pytest.raises(ScheduleError, match=message):
        replace(schedule, **change)  # type: ignore[arg-type]


def test_slimpipe_needs_a_slice_a_rank() -> None:
    with pytest.raises(ValueError, match="num_slices=3 for schedule 'slimpipe' on 4 ranks: expected at least 4"):
        build("slimpipe", num_ranks=4, num_microbatches=2, num_slices=3)
