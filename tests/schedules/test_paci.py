"""PACI: one version of the weights, and a bound on the updates between a forward and its backward."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.inside import GroupStep, Sharing, count_in_flight

from stagewright.schedules import Action, Op, Schedule, ScheduleError, build, check, lower

from .random_schedules import by_hand


@pytest.mark.thorough(but=["1-1"])
@pytest.mark.parametrize("P", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("M", [1, 4, 6])
def test_one_version_and_the_published_bound(P: int, M: int) -> None:
    """Rank r crosses at most ceil((P - 1 - r) / K) updates: 0 or 1 for K >= P - 1. Nothing is stashed."""
    for every in (k for k in range(1, M + 1) if M % k == 0):
        schedule = build("paci", num_ranks=P, num_microbatches=M, update_every=every)
        report = check(schedule)
        assert report.peak_versions == (1,) * P
        assert [rank.versions for rank in count_in_flight(schedule)] == [1] * P
        assert report.drift == report.staleness == tuple(-(-(P - 1 - rank) // every) for rank in range(P))
        assert report.peak_activations == tuple(P - rank for rank in range(P))
        for rank, program in enumerate(schedule.programs):
            assert crossed(program) == report.drift[rank]
        other = build("pipedream", num_ranks=P, num_microbatches=M, update_every=every)
        assert schedule.programs == other.programs  # the same order: the rule alone differs
        assert check(other).drift == (0,) * P


def crossed(program: Sequence[Action]) -> int:
    """The most updates between a forward and its backward, by walking from one to the other."""
    most = 0
    for at, action in enumerate(program):
        if action.op is Op.F:
            behind = program[at : program.index(action._replace(op=Op.B))]
            most = max(most, sum(each.op is Op.U for each in behind))
    return most


def test_replicas_share_the_bound() -> None:
    """Each of two replicas adds half of a group: with two in flight there, one update of K=2 may be between."""
    report = check(build("paci", num_ranks=4, num_microbatches=4, replicas=(2, 1, 1), update_every=2))
    assert (report.drift, report.peak_versions) == ((1, 1, 1, 0), (1, 1, 1, 1))


def one_version(program: str, batches: int = 2, microbatches: int = 2) -> Schedule:
    return by_hand(program, microbatches=microbatches, batches=batches, rule="one-version")


@pytest.mark.parametrize(
    ("program", "drift"),
    [
        ("0F0 0F1 0B0 0B1 0U0 0F2 0F3 0B2 0B3 0U1", 0),
        ("0F0 0B0 0F1 0F2 0B1 0U0 0B2 0F3 0B3 0U1", 1),
        ("0F0 0I0 0F1 0F2 0I1 0W0 0W1 0U0 0I2 0W2 0F3 0I3 0W3 0U1", 1),
        ("0F0 0F1 0I0 0I1 0W0 0W1 0U0 0F2 0I2 0F3 0I3 0W2 0W3 0U1", 0),
    ],
)
def test_drift_by_hand(program: str, drift: int) -> None:
    assert check(one_version(program)).drift == (drift,)


def test_weight_gradients_read_no_weights() -> None:
    """0W1 runs behind 0U0, on what 0I1 has kept."""
    schedule = one_version("0F0 0I0 0W0 0F1 0I1 0U0 0W1 0U1", batches=2, microbatches=1)
    assert check(schedule).drift == (0,)


def test_an_update_put_off_breaks_the_bound() -> None:
    """Two in flight, an update a microbatch: one update between a forward and its backward, never two."""
    good = "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0F3 0B2 0U2 0B3 0U3"
    assert check(one_version(good, batches=4, microbatches=1)).drift == (1,)
    late = "0F0 0F1 0B0 0B1 0F2 0F3 0U0 0U1 0B2 0U2 0B3 0U3"
    with pytest.raises(
        ScheduleError,
        match=r"2 updates are between 0F2 and its backward on rank 0, and the rule 'one-version' allows 1: with 2 "
        r"in flight, an update after each 1 of the others\. Move updates \(U\) of stage 0",
    ):
        check(one_version(late, batches=4, microbatches=1))


def test_parts_of_weights_are_whole_before_a_backward_reads_them() -> None:
    """Replicas that update a part each: in the drain, too, where no forward stands between U and the next backward."""
    schedule = build("paci", num_ranks=4, num_microbatches=4, replicas=(2, 1, 1), update_every=2)
    lowered = lower(schedule, sharing=Sharing(loss=True, sums=((0, 1),), parts=((0, 1),)))
    for program in lowered.programs[:2]:
        pending = 0
        for step in program.steps:
            if isinstance(step, Action) and step.op is Op.U:
                pending += 1
            elif isinstance(step, GroupStep) and step.op is Op.UNSHARD:
                pending -= 1
            elif isinstance(step, Action):
                assert not pending, f"{step} on rank {program.rank} reads weights of which a part is old"
        assert not pending
