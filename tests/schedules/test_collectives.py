"""Sums of shared gradients in programs: where they stand, that ranks agree on their order, what they cost."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from support.inside import Lowered, Sharing, Step, place_collectives, replicate

from stagewright.schedules import (
    Action,
    Collective,
    Costs,
    Op,
    Schedule,
    ScheduleError,
    Span,
    build,
    check_lowered,
    lower,
    lower_bound,
    simulate,
)

from .random_schedules import by_hand, schedules, steady


def total(*stages: int) -> Collective:
    return Collective(stages, Op.REDUCE_GRAD, 0)


def lowered(schedule: Schedule, *sums: Collective) -> Lowered:
    return lower(schedule, sharing=Sharing(collectives=sums))


def work(made: Lowered, rank: int) -> str:
    return " ".join(str(step) for step in made.programs[rank].steps if isinstance(step, Action | Collective))


def test_its_gradient_leaves_first() -> None:
    """The stage before waits for that; for the sum no stage does yet. In halves it waits for the last W."""
    schedule = build("1f1b", num_ranks=3, num_microbatches=2, replicas=(1, 2))
    steps = lowered(schedule, total(1)).programs[2].steps
    assert " ".join(map(str, steps)) == "1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD0"
    halves = by_hand("0F0 0F1 0I0 0I1 0W1 0W0", microbatches=2)
    assert work(lowered(halves, total(0)), 0) == "0F0 0F1 0I0 0I1 0W1 0W0 0REDUCE_GRAD0"


def test_sums_and_gathers_are_placed_one_stage_ahead() -> None:
    """The forward of the other replica waits for the weights, and the sum for its backward."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=1, replicas=(2,))
    wanted = [Collective((0,), op, 0) for op in (Op.REDUCE_GRAD, Op.UNSHARD)]
    placed = place_collectives(schedule, wanted)
    assert [[str(each) for _, each in own] for own in placed] == [["0UNSHARD0", "0REDUCE_GRAD0"]] * 2
    assert placed[0][0][0] == 0
    # Those of a rank's second stage come while its first one runs.
    schedule = build("interleaved", num_ranks=2, num_microbatches=2, num_chunks=2)
    placed = place_collectives(schedule, [Collective((stage,), Op.UNSHARD, 0) for stage in range(4)])
    assert [[(at, str(each)) for at, each in own] for own in placed] == [
        [(0, "0UNSHARD0"), (0, "2UNSHARD0")],
        [(0, "1UNSHARD0"), (0, "3UNSHARD0")],
    ]


def test_tied_weights_are_summed_in_one_order_behind_the_last_of_their_stages() -> None:
    schedule = build("interleaved", num_ranks=2, num_microbatches=2, num_chunks=2)
    made = lowered(schedule, total(0, 2, 3))
    assert work(made, 0).endswith("0B0 0B1 0+2+3REDUCE_GRAD0")
    assert work(made, 1).endswith("3B1 0+2+3REDUCE_GRAD0 1B0 1B1")
    # Rank 0 is through with stage 2 first and rank 1 with stage 3: 1+2 and 0+3 are ready in opposite orders.
    made = lowered(schedule, total(0, 3), total(1, 2))
    check_lowered(made)
    orders = [[each for each in program.steps if isinstance(each, Collective)] for program in made.programs]
    assert orders[0] == orders[1] == [total(0, 3), total(1, 2)]
    assert work(made, 0).endswith("2B1 0B0 0B1 0+3REDUCE_GRAD0 1+2REDUCE_GRAD0")
    assert work(made, 1).endswith("3B1 0+3REDUCE_GRAD0 1B0 1B1 1+2REDUCE_GRAD0")


def test_collectives_print_and_parse() -> None:
    for text in ("3REDUCE_GRAD0", "0+12REDUCE_GRAD7"):
        assert str(Collective.parse(text)) == text
    for wrong in ("REDUCE_GRAD0", "0+REDUCE_GRAD0", "3F0", "3REDUCE_GRAD", "3-4REDUCE_GRAD0"):
        with pytest.raises(ValueError, match="cannot read the collective"):
            Collective.parse(wrong)


@st.composite
def shared(draw: DrawFn) -> tuple[Schedule, list[Collective]]:
    """A flush schedule, and sums over any sets of its stages."""
    schedule = draw(schedules(forward_only=False))
    stages = st.sets(st.sampled_from(range(schedule.num_stages)), min_size=1).map(lambda each: tuple(sorted(each)))
    return schedule, [total(*each) for each in draw(st.lists(stages, max_size=5, unique=True))]


@pytest.mark.thorough
@steady
@given(shared())
def test_all_ranks_get_through(case: tuple[Schedule, list[Collective]]) -> None:
    """Each rank carries out its sums one after the other, each as soon as all its ranks stand before it."""
    schedule, sums = case
    made = lowered(schedule, *sums)
    check_lowered(made)
    queues = [[each for each in program.steps if isinstance(each, Collective)] for program in made.programs]
    left = {each: {r for r, own in enumerate(schedule.placement) if set(own) & set(each.stages)} for each in sums}
    while left:
        ready = next(each for each, ranks in left.items() if all(queues[r] and queues[r][0] == each for r in ranks))
        for rank in left.pop(ready):
            queues[rank].pop(0)
    assert not any(queues)


def altered(made: Lowered, rank: int, steps: Sequence[Step]) -> Lowered:
    programs = list(made.programs)
    programs[rank] = replace(programs[rank], steps=tuple(steps))
    return replace(made, programs=tuple(programs))


SUM = total(0)
ONCE = "expected it once on each"
BEFORE = "rank 1, step 1: 0REDUCE_GRAD0 comes before 0B1, whose gradient it takes"


@pytest.mark.parametrize(
    ("replicas", "rank", "change", "said"),
    [
        ((2,), 1, lambda s: [s[0], s[2], s[1]], BEFORE),
        ((2,), 0, lambda s: s[:-1], f"0REDUCE_GRAD0 is 0 times on rank 0: {ONCE}"),
        ((2,), 0, lambda s: [*s, SUM], f"0REDUCE_GRAD0 is 2 times on rank 0: {ONCE}"),
        ((2, 1), 2, lambda s: [*s, SUM], f"is 1 times on rank 2: {ONCE} of the ranks 0, 1"),
    ],
    ids=["before its backward", "forgotten", "repeated", "other ranks"],
)  # fmt: skip
def test_a_sum_out_of_its_place(replicas: tuple[int, ...], rank: int, change: Callable[[Any], Any], said: str) -> None:
    made = lowered(build("1f1b", num_ranks=1 + len(replicas), num_microbatches=2, replicas=replicas), SUM)
    with pytest.raises(ScheduleError, match=said):
        check_lowered(altered(made, rank, change(list(made.programs[rank].steps))))


def test_sums_in_opposite_orders_print_the_circle() -> None:
    schedule = build("interleaved", num_ranks=2, num_microbatches=2, num_chunks=2)
    made = lowered(schedule, total(0, 3), total(1, 2))
    *before, first, second = made.programs[0].steps
    with pytest.raises(ScheduleError) as caught:
        check_lowered(altered(made, 0, [*before, second, first]))
    assert sorted(str(caught.value).splitlines()[1:3]) == [
        "  rank 0 begins 1+2REDUCE_GRAD0 before 0+3REDUCE_GRAD0",
        "  rank 1 begins 0+3REDUCE_GRAD0 before 1+2REDUCE_GRAD0",
    ]


def test_a_sum_runs_beside_compute_and_the_update_waits() -> None:
    """
    ranks 0, 1 | 0F 1F 1B 1B 0B 0B .  .  0U 1U      the sum of stage 1 begins at 4 and takes 3, that of stage 0 waits
    together   |             1  1  1  0             for it on the same lane
    """
    schedule = replicate(by_hand("0F0 1F0 1B0 0B0", microbatches=1, placement=[[0, 1]]), 2)
    costs = Costs(forward=1.0, backward=2.0, update=0.5, reduce_grad=[1.0, 3.0])
    timeline = simulate(schedule, costs)
    for trace in timeline.ranks:
        assert [(str(s.what), s.start) for s in trace.compute[4:]] == [("0U0", 8.0), ("1U0", 8.5)]
        assert trace.collectives == (Span(total(1), 4.0, 7.0), Span(total(0), 6.0, 8.0))
    assert lower_bound(schedule, costs) == 7.5  # stage 1 through at 4, its sum and its update
    assert timeline.makespan == 9.0


@pytest.mark.thorough
@steady
@given(schedules(forward_only=False))
def test_the_simulator_begins_sums_where_the_program_does(schedule: Schedule) -> None:
    """Plans are ranked by this simulation, and run by this program."""
    sums = [total(stage) for stage, ranks in enumerate(schedule.owners) if len(ranks) > 1]
    programs = lowered(schedule, *sums).programs
    timeline = simulate(schedule, Costs(forward=1.0, backward=2.0, reduce_grad=1.5))
    for program, trace in zip(programs, timeline.ranks, strict=True):
        ended = {span.what: span.end for span in trace.compute}
        wanted, now = {}, 0.0
        for step in program.steps:
            now = ended.get(step, now) if isinstance(step, Action) else now
            if isinstance(step, Collective):
                wanted[step] = now
        assert {span.what: span.start for span in trace.collectives} == wanted


def test_sums_of_tied_weights_hold_up_the_updates_of_all_their_stages() -> None:
    """Rank 0 begins 0+1 behind 0B0, at 9, and rank 1 behind 1B0, at 7; stage 2 holds none of it."""
    schedule = build("1f1b", num_ranks=3, num_microbatches=1)
    timeline = simulate(schedule, Costs(forward=1.0, backward=2.0, update=0.5, tied=(((0, 1), 4.0),)))
    assert [trace.collectives for trace in timeline.ranks] == [
        (Span(total(0, 1), 9.0, 13.0),),
        (Span(total(0, 1), 7.0, 13.0),),
        (),
    ]
    assert [trace.compute[-1].start for trace in timeline.ranks] == [13.0, 13.0, 5.0]


@pytest.mark.parametrize(
    "tied", [(((1,), 1.0),), (((1, 0), 1.0),), ((0, 1.0),), (((0, 1), -1.0),), 3, (((0, 5), 1.0),)]
)
def test_ties_that_are_none(tied: object) -> None:
    with pytest.raises(ValueError, match="tied="):
        simulate(build("1f1b", num_ranks=2, num_microbatches=1), Costs(tied=tied))  # type: ignore[arg-type]


@pytest.mark.parametrize("M", range(1, 6))
def test_weights_of_an_evaluation_are_gathered_in_one_order(M: int) -> None:
    """Fewer microbatches than owners leave stages of a rank unused; all the same it gives its parts to the others."""
    schedule = replicate(build("chimera", num_ranks=4, num_microbatches=4), 2).forward_only(num_microbatches=M)
    both = tuple(Collective((stage,), op, 0) for stage in range(4) for op in (Op.UNSHARD, Op.RESHARD))
    check_lowered(lower(schedule, sharing=Sharing(loss=True, collectives=both)))


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
@pytest.mark.parametrize("data", [1, 2])
def test_sums_of_two_copies_begin_in_one_order(name: str, data: int) -> None:
    """Behind the last backward of each stage on each rank, without a circle of ranks that wait for each other."""
    schedule = replicate(build(name, num_ranks=4, num_microbatches=8), data)
    sums = tuple(Collective((stage,), Op.REDUCE_GRAD, 0) for stage in range(4))
    lowered = lower(schedule, sharing=Sharing(loss=True, collectives=sums))
    check_lowered(lowered)
    orders = {}
    for program in lowered.programs:
        steps = [step for step in program.steps if isinstance(step, Action | Collective)]
        begun = [step for step in steps if isinstance(step, Collective)]
        assert {step.stages[0] for step in begun} == set(schedule.placement[program.rank])
        assert steps.index(begun[0]) < len(steps) - 2  # the first goes on beside the backwards that follow
        orders.setdefault(schedule.placement[program.rank], set()).add(tuple(begun))
    assert [len(found) for found in orders.values()] == [1, 1]
