"""Activations on partners and hosts, as families and transformations place them."""

from __future__ import annotations

from itertools import product

import pytest
from support.inside import NOTHING_SHARED, bpipe, cut_behind_warm_up, most_held

from stagewright.schedules import (
    Action,
    Costs,
    Links,
    Op,
    ScheduleError,
    Way,
    build,
    check,
    check_lowered,
    lower,
    simulate,
    with_offload,
)

from .builders import FLUSH


@pytest.mark.parametrize("backward", [1.0, 2.0, 3.0])
def test_bpipe_takes_as_long_as_1f1b_and_holds_half(backward: float) -> None:
    for ranks, microbatches in product((1, 2, 3, 5, 8, 12), (3, 24)):
        schedule = bpipe(num_ranks=ranks, num_microbatches=microbatches, backward=backward)
        plain = build("1f1b", num_ranks=ranks, num_microbatches=microbatches)
        assert schedule.compute_programs == plain.programs
        assert max(check(schedule).peak_activations) <= most_held(ranks)
        if microbatches > ranks:  # as many as fit
            assert check(schedule).peak_activations[0] == min(ranks, most_held(ranks))
        check_lowered(lower(schedule))
        costs = Costs(forward=1.0, backward=backward)
        for links in (None, Links(network=Way(seconds_per_byte=1.0), lent_bytes=0.9)):
            timeline = simulate(schedule, costs, links)
            assert timeline.makespan == pytest.approx(simulate(plain, costs, links).makespan)
            # While ways take time the ranks that lend keep to the limit, and partners hold up to two more.
            assert max(timeline.peak_activations) <= most_held(ranks) + 2
            assert max(timeline.peak_activations[: ranks // 2], default=0) <= most_held(ranks)


def test_what_bpipe_takes() -> None:
    with pytest.raises(ValueError, match=r"backward=0: expected how many times as long as a forward it takes"):
        bpipe(num_ranks=4, num_microbatches=4, backward=0)


def test_half_of_the_stages_on_the_host_leave_a_quarter() -> None:
    """And nobody waits, while a way takes no longer than a forward."""
    for ranks, chunks, halves in ((4, 2, (1.0, 1.0)), (4, 4, (1.2, 0.6)), (8, 2, (1.0, 0.7)), (8, 4, (1.0, 1.0))):
        times = {"forward": 1.0, "input_grad": halves[0], "weight_grad": halves[1]}
        sizes = {"num_ranks": ranks, "num_microbatches": 4 * ranks, "num_chunks": chunks}
        stays = ranks * chunks
        cases = [
            ("gis", {"group_size": ranks // 2}, stays // 4 + 2),
            ("gis", {}, stays // 2),
            ("interleaved", {}, stays // 2 + 2),
        ]
        for name, options, most in cases:
            plain = build(name, **sizes, **options)
            schedule = with_offload(plain, costs=Costs(**times))
            check(schedule)
            without = simulate(plain, Costs(**times))
            for seconds in (0.5, 1.0):
                timeline = simulate(schedule, Costs(**times, offload=seconds, reload=seconds))
                assert timeline.makespan == pytest.approx(without.makespan)
                assert max(timeline.peak_activations) == most
            longer = simulate(schedule, Costs(**times, offload=1.5, reload=1.5))
            assert longer.makespan > without.makespan * 1.02


@pytest.mark.parametrize("name", FLUSH)
def test_any_flush_schedule_can_be_offloaded(name: str) -> None:
    plain = build(name, num_ranks=4, num_microbatches=8)
    if plain.num_slices > 1 or plain.moves_activations:
        with pytest.raises(ScheduleError):
            check(with_offload(plain, share=1.0))
        return
    peaks = []
    for share in (0.0, 0.5, 1.0):
        schedule = with_offload(plain, share=share)
        report = check(schedule)
        check_lowered(lower(schedule))
        moved = sum(action.op is Op.OFFLOAD for program in schedule.programs for action in program)
        assert moved <= share * plain.num_stages * 8
        peaks.append(max(report.peak_activations))
    assert with_offload(plain, share=0.0) == plain
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("share", [-0.1, 1.5, True, "half"])
def test_a_share_that_is_none(share: object) -> None:
    with pytest.raises(ValueError, match=r"expected a number from 0 to 1"):
        with_offload(build("1f1b", num_ranks=2, num_microbatches=2), share=share)  # type: ignore[arg-type]


def test_a_warm_up_that_may_be_thrown_away_lends_nothing() -> None:
    with pytest.raises(ScheduleError, match=r"lends activations \(0LEND1\): what a partner was told"):
        cut_behind_warm_up(build("bpipe", num_ranks=4, num_microbatches=8), sharing=NOTHING_SHARED)
    kept = cut_behind_warm_up(
        with_offload(build("1f1b", num_ranks=4, num_microbatches=8), share=1.0), sharing=NOTHING_SHARED
    )
    assert all(step.op is Op.F for program in kept.first for step in program.steps if isinstance(step, Action))
