"""Activations that leave their rank while they wait: checked, timed, counted, written and read."""

from dataclasses import replace
from random import Random

import pytest
from support.inside import PathKind
from support.random_moves import with_random_moves

from stagewright.schedules import (
    Action,
    Costs,
    Link,
    Links,
    Op,
    Schedule,
    ScheduleError,
    StageBytes,
    Timeline,
    attribute_idle,
    build,
    check,
    check_lowered,
    critical_path,
    lower,
    lower_bound,
    memory_curves,
    simulate,
    with_offload,
)

from .random_schedules import FLUSH

FIRST = "0F0 0F1 0OFFLOAD0 0F2 0OFFLOAD1 0RELOAD0 0B0 0RELOAD1 0B1 0B2"
SECOND = "1F0 1B0 1F1 1B1 1F2 1B2"


def two_ranks(first: str = FIRST, second: str = SECOND) -> Schedule:
    programs = tuple(tuple(map(Action.parse, row.split())) for row in (first, second))
    return Schedule(name="by hand", placement=((0,), (1,)), programs=programs, num_microbatches=3)


def test_the_grid_has_a_row_of_moves() -> None:
    assert two_ranks().grid().splitlines() == [
        "rank 0 | F0    F1    F2    B0    .     B1    .     B2",
        "       |             >0    >1,<0       <1",
        "rank 1 | .     F0    B0    F1    B1    F2    B2    .",
    ]


def test_when_moves_begin_and_end_by_hand() -> None:
    """F 1, B 2, 0.5 to the host and 3 back, messages 0.1 + 0.1."""
    links = Links(network=Link(seconds_per_byte=1.0), activation_bytes=0.1)
    timeline = simulate(two_ranks(), Costs(offload=0.5, reload=3.0, latency=0.1), links)
    own, others = ({str(what): (start, end) for what, start, end in rank.moves} for rank in timeline.ranks)
    compute = {str(s.what): s.start for rank in timeline.ranks for s in rank.compute}
    assert own["0OFFLOAD0"] == pytest.approx((2.0, 2.5))  # beside 0F2
    assert own["0OFFLOAD1"] == pytest.approx((3.0, 3.5))
    assert own["0RELOAD0"] == pytest.approx((3.0, 6.0))
    assert own["0RELOAD1"] == pytest.approx((8.0, 11.0))  # behind 0B0
    assert not others
    assert (compute["0B0"], compute["0B1"]) == pytest.approx((6.0, 11.0))
    idle = attribute_idle(timeline)[0]
    assert idle.transfer == pytest.approx(1.8 + 3.0)  # 0B0 for its gradient, at 4.4 there, and its activations; 0B1
    assert idle.unexplained == 0
    assert PathKind.MOVE in critical_path(timeline).by_kind
    assert critical_path(timeline).seconds == pytest.approx(timeline.makespan)
    # In the program's order a move takes no time; in the run 0OFFLOAD1 is under way while 0RELOAD0 has begun.
    assert (check(two_ranks()).peak_activations, timeline.peak_activations) == ((2, 1), (3, 1))
    curves = memory_curves(timeline, [StageBytes(activations=1)] * 2)
    assert [curve.peak for curve in curves] == [3, 1]


def test_ways_back_wait_for_ways_out_and_those_of_one_direction_queue() -> None:
    schedule = two_ranks("0F0 0F1 0OFFLOAD0 0RELOAD0 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    moves = {
        str(what): (start, end) for what, start, end in simulate(schedule, Costs(offload=2, reload=3)).ranks[0].moves
    }
    assert moves == {"0OFFLOAD0": (2.0, 4.0), "0RELOAD0": (2.0, 7.0)}
    schedule = two_ranks("0F0 0F1 0F2 0OFFLOAD0 0OFFLOAD1 0B2 0RELOAD0 0B0 0RELOAD1 0B1", "1F0 1F1 1F2 1B2 1B0 1B1")
    moves = {str(w): (s, e) for w, s, e in simulate(schedule, Costs(offload=[4.0, 0.0], reload=2.0)).ranks[0].moves}
    assert (moves["0OFFLOAD0"], moves["0OFFLOAD1"]) == ((3.0, 7.0), (3.0, 11.0))  # 0B2 runs from 6 to 8
    assert (moves["0RELOAD0"], moves["0RELOAD1"]) == ((8.0, 10.0), (12.0, 14.0))


SIZES = {"num_ranks": 4, "num_microbatches": 8}


PLAIN = [name for name in FLUSH if (built := build(name, **SIZES)).num_slices == 1 and not built.moves_activations]


@pytest.mark.thorough(but=["1f1b"])
@pytest.mark.parametrize("name", PLAIN)
def test_random_moves_of_every_family_run_as_they_are_counted(name: str) -> None:
    """Whoever waits for them is late by no more than they take; where they take nothing nobody is."""
    random = Random(name)
    plain = build(name, **SIZES)
    ops = set()
    for _ in range(3):
        schedule = with_random_moves(random, plain)
        ops |= {action.op for program in schedule.programs for action in program}
        assert schedule.compute_programs == plain.programs
        report = check(schedule)
        check_lowered(lower(schedule))
        assert Schedule.from_json(schedule.to_json()) == schedule
        costs = Costs(forward=1.0, input_grad=1.0, weight_grad=0.7, latency=0.1)
        free = simulate(schedule, costs)
        assert free.makespan >= simulate(plain, costs).makespan - 1e-9
        assert lower_bound(schedule, costs) <= free.makespan + 1e-9
        slow = simulate(
            schedule,
            Costs(forward=1.0, input_grad=1.0, weight_grad=0.7, latency=0.1, offload=0.6, reload=0.9),
            Links(network=Link(seconds_per_byte=1.0), activation_bytes=0.2),
        )
        assert slow.makespan >= free.makespan - 1e-9
        for timeline in (free, slow):
            assert Timeline.from_json(timeline.to_json()) == timeline
            assert critical_path(timeline).seconds == pytest.approx(timeline.makespan)
            assert PathKind.NOT_SEEN not in critical_path(timeline).by_kind
            assert PathKind.UNEXPLAINED not in critical_path(timeline).by_kind
            for idle, rank in zip(attribute_idle(timeline), timeline.ranks, strict=True):
                assert sum(idle) == pytest.approx(timeline.makespan - rank.busy)
                assert idle.unexplained == pytest.approx(0.0, abs=1e-9)
            curves = memory_curves(timeline, [StageBytes(activations=1)] * schedule.num_stages)
            # Where one leaves as another comes, the curve takes the leaving first, and a count goes by the program.
            pairs = list(zip((curve.peak for curve in curves), timeline.peak_activations, strict=True))
            assert all(one == other if timeline is slow else one <= other for one, other in pairs)
            assert all(
                one >= least for one, least in zip(timeline.peak_activations, report.peak_activations, strict=True)
            )
    assert {Op.OFFLOAD, Op.RELOAD} <= ops


FAULTS: dict[str, tuple[str, ...]] = {
    "0RELOAD0 on rank 0, position 4, brings back what never left: expected 0OFFLOAD0": ("0OFFLOAD0 ", ""),
    "0OFFLOAD0 on rank 0, position 2, never comes back: expected 0RELOAD0": ("0RELOAD0 ", ""),
    "0RELOAD0 on rank 0, position 6, comes too late for 0B0, which needs it while": ("0RELOAD0 0B0", "0B0 0RELOAD0"),
    "0OFFLOAD0 on rank 0, position 0, leaves before it is made": ("0F0 0F1 0OFFLOAD0", "0OFFLOAD0 0F0 0F1"),
    "0RELOAD0 on rank 0, position 2, comes back before it has left": (
        "0OFFLOAD0 0F2 0OFFLOAD1 0RELOAD0",
        "0RELOAD0 0F2 0OFFLOAD1 0OFFLOAD0",
    ),
    "0OFFLOAD1 occurs twice: on rank 0, position 4, and on rank 0, position 5": ("0OFFLOAD1", "0OFFLOAD1 0OFFLOAD1"),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_is_named(message: str) -> None:
    with pytest.raises(ScheduleError, match=message.replace("(", r"\(")):
        check(two_ranks(FIRST.replace(*FAULTS[message])))


def test_what_cannot_move() -> None:
    message = "0OFFLOAD0 on rank 1, position 2: microbatch 0 of stage 0 belongs to rank 0"
    with pytest.raises(ScheduleError, match=message):
        check(two_ranks(FIRST.replace("0OFFLOAD0 ", ""), SECOND.replace("1F1", "0OFFLOAD0 1F1")))
    with pytest.raises(ScheduleError, match="which a CSV table cannot say: use to_json"):
        two_ranks().to_csv()
    with pytest.raises(ScheduleError, match="row 1, column 2: 0OFFLOAD0 moves activations, which a CSV table cannot"):
        Schedule.from_csv("0F0,0OFFLOAD0,0RELOAD0,0B0\n")
    asynchronous = build("2bw", num_ranks=2, num_microbatches=2)
    program = asynchronous.programs[0]
    at = program.index(Action.parse("0F0")) + 1
    moved = (*program[:at], Action.parse("0OFFLOAD0"), Action.parse("0RELOAD0"), *program[at:])
    with pytest.raises(
        ScheduleError, match=r"whose batches overlap, moves activations: expected .* in flush schedules"
    ):
        check(replace(asynchronous, programs=(moved, *asynchronous.programs[1:])))
    with pytest.raises(ScheduleError, match="moves activations: expected whole microbatches, since later slices need"):
        check(replace(two_ranks(), num_slices=3, num_microbatches=1))
    forward_only = two_ranks().forward_only()
    assert not forward_only.moves_activations


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


@pytest.mark.thorough(but=["terapipe", "seq-zb-h1"])
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
