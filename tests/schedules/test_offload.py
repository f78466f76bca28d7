"""Activations on hosts, as a transformation places them."""

from __future__ import annotations

import pytest

from stagewright.schedules import Costs, Op, ScheduleError, build, check, check_lowered, lower, simulate, with_offload

from .builders import FLUSH


@pytest.mark.thorough
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


@pytest.mark.thorough(but=["terapipe"])
@pytest.mark.parametrize("name", FLUSH)
def test_any_flush_schedule_can_be_offloaded(name: str) -> None:
    plain = build(name, num_ranks=4, num_microbatches=8)
    if plain.num_slices > 1:
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
