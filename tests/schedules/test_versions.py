"""Weight versions: derived from the updates in the program, then compared with the rule."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inside import RULES, derive_versions

from stagewright.schedules import Schedule, ScheduleError, check

from .random_schedules import by_hand, schedules, steady, with_updates

# PipeDream-2BW: P=2, M=2, three batches. Batch t runs on version max(t-1, 0), so the update of batch t stands just
# before the first forward of batch t+2 (or at the end), whenever its gradients were complete.
RANK_0 = "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0U0 0F4 0B3 0F5 0B4 0B5 0U1 0U2"
RANK_1 = "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1U0 1F4 1B4 1F5 1B5 1U1 1U2"


def two_bw(rank_0: str = RANK_0, rank_1: str = RANK_1) -> Schedule:
    return by_hand(rank_0, rank_1, microbatches=2, batches=3, rule="2bw")


def test_2bw() -> None:
    schedule = two_bw()
    versions = derive_versions(schedule)
    assert {(stage, k): version for (stage, k), version in versions.used.items() if version} == {
        (stage, k): 1 for stage in (0, 1) for k in (4, 5)
    }
    # At 0U0 the backward of microbatch 3 is still to come, on version 0; rank 1 has none in flight at its updates.
    assert check(schedule).peak_versions == versions.peak_live == (2, 1)
    assert check(schedule).peak_activations == (2, 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param(
            "1U0 1F4 1B4",
            "1F4 1B4 1U0",
            "1F4 comes after 0 updates of stage 1, so its newest weight version is 0, but the rule '2bw' asks for "
            r"version 1: move an update \(U\) of stage 1 on rank 1",
            id="update-too-late",
        ),
        pytest.param(
            "0F4 0B3 0F5 0B4 0B5 0U1 0U2",
            "0F4 0F5 0U1 0B3 0B4 0B5 0U2",
            "0B3 on rank 0, position 11, adds to the gradient that 0U1, which comes before it, has used",
            id="update-before-its-gradients",
        ),
        pytest.param("0U1 0U2", "0U1 0U2 0U3", r"0U3 .* is update 3 .* each of the 3 batches", id="surplus"),
        pytest.param("1U1 1U2", "1U1", "missing: 1U2 on rank 1; expected an update for each batch", id="missing"),
        pytest.param("0U0", "", "0U1 on rank 0, position 12, is update 0 of the stage", id="first-missing"),
    ],
)
def test_2bw_gone_wrong(old: str, new: str, message: str) -> None:
    """What is right and what is wrong, wherever updates stand: test_pipedream.py. Here is what is said."""
    assert (old in RANK_0) != (old in RANK_1)
    with pytest.raises(ScheduleError, match=message):
        check(two_bw(RANK_0.replace(old, new), RANK_1.replace(old, new)))


def test_a_claim_is_no_proof() -> None:
    """2BW is no flush; a flush may run as 2BW, which then keeps the old version for one batch more."""
    flush = by_hand("0F0 0B0 0U0 0F1 0B1 0U1", microbatches=1, batches=2)
    assert check(flush).peak_versions == (1,)
    assert check(replace(flush, weight_rule="2bw")).peak_versions == (2,)
    with pytest.raises(ScheduleError, match=r"0F1 comes after 0 updates .* rule 'flush' asks for version 1"):
        check(by_hand("0F0 0B0 0F1 0B1 0U0 0U1", microbatches=1, batches=2))
    with pytest.raises(ScheduleError, match=r"0F2 comes after 0 updates .* rule 'flush' asks for version 1"):
        check(replace(two_bw(), weight_rule="flush"))


@pytest.mark.parametrize(
    ("program", "batches", "rule", "message"),
    [
        ("0F0 0B0 0U0", 1, "3bw", "weight_rule='3bw' of schedule 'by hand': expected one of flush, 2bw"),
        ("0F0 0B0 0U0", 1, "flush", "0U0 on rank 0: a flush schedule of one batch holds no U"),
        ("0F0 0B0 0F1 0B1", 2, "flush", "missing: 0U0 on rank 0"),
        ("0F0 0B0 0F1 0B1", 2, "2bw", "missing: 0U0 on rank 0"),
    ],
)
def test_updates_that_do_not_fit_the_rule(program: str, batches: int, rule: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(by_hand(program, microbatches=1, batches=batches, rule=rule))


def test_replicas_update_each() -> None:
    placement = [[0], [0]]
    good = by_hand("0F0 0B0 0U0 0F2 0B2 0U1", "0F1 0B1 0U0 0F3 0B3 0U1", microbatches=2, batches=2, placement=placement)
    assert check(good).peak_versions == (1, 1)
    bad = by_hand("0F0 0B0 0U0 0F2 0B2 0U1", "0F1 0B1 0U0 0F3 0B3", microbatches=2, batches=2, placement=placement)
    with pytest.raises(ScheduleError, match="missing: 0U1 on rank 1"):
        check(bad)


@pytest.mark.parametrize(
    ("program", "peak"),
    [
        ("0F0 0U0 0F1 0U1 0B0 0B1", 3),  # both batches on version 0, and 2 is the newest
        ("0F0 0U0 0B0 0F1 0B1 0U1", 2),
        ("0F0 0I0 0U0 0W0 0F1 0I1 0W1 0U1", 2),  # alive until W
        ("0F0 0F1 0U0 0U1 0B0 0B1", 3),  # version 1 is between the one in use and the newest
        ("0F0 0B0 0F1 0B1 0U0 0U1", 1),
    ],
)
def test_live_versions(program: str, peak: int) -> None:
    schedule = by_hand(program, microbatches=1, batches=2, rule="2bw")
    assert derive_versions(schedule).peak_live == (peak,)


def test_each_stage_of_a_rank_has_its_own_versions() -> None:
    program = "0F0 1F0 1B0 1U0 0B0 0U0"
    schedule = by_hand(program, microbatches=1, placement=[[0, 1]])
    assert derive_versions(schedule).peak_live == (1,)
    schedule = by_hand("0F0 1F0 1U0 0B0 0U0 1B0", microbatches=1, placement=[[0, 1]])
    assert derive_versions(schedule).peak_live == (2,)


@pytest.mark.thorough
@steady
@given(schedules(forward_only=False), st.integers(2, 3))
def test_batch_after_batch_is_a_flush(schedule: Schedule, batches: int) -> None:
    """Any schedule, repeated, with the updates of each rank behind each batch: versions as the flush rule asks."""
    M = schedule.num_microbatches
    several = with_updates(schedule, batches)
    report = check(several)
    assert report.peak_versions == (1,) * schedule.num_ranks
    assert report.peak_activations == check(schedule).peak_activations
    assert report.num_actions == batches * check(schedule).num_actions
    used = derive_versions(several).used
    assert all(version == k // M for (_, k), version in used.items())


@pytest.mark.parametrize(
    ("name", "kept", "updates"),
    [
        ("flush", [1, 1], 1),
        ("2bw", [2, 2], 1),
        ("stashing", [1, 5], 2),
        ("vertical-sync", [1, 5], 2),
        ("one-version", [1, 1], 1),
    ],
)
def test_what_planners_and_runtimes_ask_of_a_rule(name: str, kept: list[int], updates: int) -> None:
    rule = RULES[name]
    assert rule.name == name
    assert [rule.versions_kept(in_use) for in_use in (1, 5)] == kept
    assert rule.updates_per_batch(12, (2, 3, 1)) == updates  # each replica adds to each update
    assert rule.is_asynchronous == (name != "flush")
    assert (rule.why_no_norm is None) == (rule.why_no_ties is None) == (name in ("flush", "2bw"))
