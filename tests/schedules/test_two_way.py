"""Bidirectional schedules and DualPipeV: what papers say of them, what they refuse, sums over two copies of a stage."""

from __future__ import annotations

import pytest
from support.inside import Dependencies, Sharing, replicate

from stagewright.schedules import (
    Action,
    Collective,
    Costs,
    Op,
    Schedule,
    build,
    check,
    check_lowered,
    lower,
    simulate,
)

TWO_WAY = ("chimera", "dualpipe")


def seconds_of_pairs(schedule: Schedule, costs: dict[Op, float]) -> float:
    """Makespan where a forward and the whole backward behind it begin together and both end when both are through, as
    DualPipe runs them; the first such pair of a rank where the ways meet or turn is none."""
    pairs, S = [], schedule.num_stages
    for stages, program in zip(schedule.placement, schedule.programs, strict=True):
        middle = {S // 2 - 1, S // 2} == set(stages)
        groups: list[list[Action]] = []
        for action in program:
            joins = groups and action.op is Op.B and [a.op for a in groups[-1]] == [Op.F]
            if joins and middle:
                joins = middle = False
            if joins:
                groups[-1].append(action)
            else:
                groups.append([action])
        pairs.append(groups)
    needs, ends, free = Dependencies(schedule), dict[Action, float](), [0.0] * schedule.num_ranks
    while any(pairs):
        for rank, groups in enumerate(pairs):
            while groups and all(n in ends or n in groups[0] for a in groups[0] for n in needs.of(a)):
                inputs = [ends[n] for a in groups[0] for n in needs.of(a) if n in ends]
                free[rank] = max([free[rank], *inputs]) + sum(costs[a.op] for a in groups[0])
                ends.update(dict.fromkeys(groups.pop(0), free[rank]))
    return max(free)


@pytest.mark.parametrize(("F", "W"), [(1.0, 1.0), (2.0, 1.0), (1.0, 0.25), (3.0, 2.5)])
@pytest.mark.parametrize(("P", "M"), [(2, 4), (4, 8), (4, 14), (8, 20)])
def test_the_published_bubble_of_dualpipe_is_that_of_atomic_pairs(P: int, M: int, F: float, W: float) -> None:
    """(P/2-1)(F&B + B - 3W), and (P-1) times that for the V, F&B = F + B: where F = I. The orders are theirs."""
    costs = {Op.F: F, Op.I: F, Op.W: W, Op.B: F + W}
    for name, steps, chunks in (("dualpipe", P // 2 - 1, 1), ("dualpipe-v", P - 1, 2)):
        schedule = build(name, num_ranks=P, num_microbatches=M)
        both = 2 * F + W
        assert seconds_of_pairs(schedule, costs) == M * chunks * both + steps * (both + F + W - 3 * W)
        one_after_the_other = simulate(schedule, Costs(forward=F, input_grad=F, weight_grad=W)).makespan
        assert one_after_the_other == M * chunks * both + steps * (2 * F - W)


def test_the_published_figure_of_dualpipe() -> None:
    """8 ranks, 20 microbatches: 66 slots, 6 of them idle."""
    assert (
        seconds_of_pairs(build("dualpipe", num_ranks=8, num_microbatches=20), dict.fromkeys(Op, 1.0) | {Op.B: 2.0})
        == 66
    )


@pytest.mark.parametrize(
    ("name", "P", "M", "message"),
    [
        ("chimera", 3, 4, "num_ranks=3 for schedule 'chimera': .* expected an even number of ranks"),
        ("dualpipe", 5, 10, "num_ranks=5 for schedule 'dualpipe': .* expected an even number of ranks"),
        ("dualpipe", 4, 6, r"num_microbatches=6 .* on 4 ranks: .* expected an even number, at least 8 \(2P\)"),
        ("dualpipe", 4, 9, "num_microbatches=9 .* expected an even number"),
        ("dualpipe-v", 4, 7, r"num_microbatches=7 .* 'dualpipe-v' on 4 ranks: expected at least 8 \(2P\)"),
    ],
)
def test_sizes_that_do_not_fit(name: str, P: int, M: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, num_ranks=P, num_microbatches=M)


@pytest.mark.parametrize("P", [2, 4, 6])
def test_chimera_takes_any_number_of_microbatches(P: int) -> None:
    for M in range(1, 3 * P + 1):
        schedule = build("chimera", num_ranks=P, num_microbatches=M)
        check(schedule)
        assert schedule.owners == tuple((s, P - 1 - s) for s in range(P))


@pytest.mark.parametrize("M", range(1, 6))
def test_weights_of_an_evaluation_are_gathered_in_one_order(M: int) -> None:
    """Fewer microbatches than owners leave stages of a rank unused; all the same it gives its parts to the others."""
    schedule = replicate(build("chimera", num_ranks=4, num_microbatches=4), 2).forward_only(num_microbatches=M)
    both = tuple(Collective((stage,), op, 0) for stage in range(4) for op in (Op.UNSHARD, Op.RESHARD))
    check_lowered(lower(schedule, sharing=Sharing(loss=True, collectives=both)))


@pytest.mark.parametrize("name", TWO_WAY)
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
