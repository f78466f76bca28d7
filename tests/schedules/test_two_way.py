"""Bidirectional schedules and DualPipeV: what papers say of them, what they refuse, sums over two copies of a stage."""

from __future__ import annotations

import pytest
from support.inside import Sharing, replicate

from stagewright.schedules import Action, Collective, Op, build, check, check_lowered, lower

TWO_WAY = ("chimera", "dualpipe")


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
