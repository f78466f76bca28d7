"""Costs that are made of what each rank measured."""

from __future__ import annotations

import pytest
from support.inside import Timed, costs_from_medians

from stagewright.schedules import Costs, Op, build, simulate


def made(*by_rank: dict[Timed, float], replicas: tuple[int, ...]) -> Costs:
    schedule = build("1f1b", num_ranks=sum(replicas), num_microbatches=4, replicas=replicas)
    return costs_from_medians(by_rank, {0: 0.25}, schedule=schedule, latency=0.5, norm=None, around=0.0)


def measured(forward: float, backward: float, *, stage: int = 0, **more: float) -> dict[Timed, float]:
    found = {((stage,), Op.F): forward, ((stage,), Op.B): backward}
    return found | {((stage,), Op(op)): seconds for op, seconds in more.items()}


def test_replicas_keep_what_each_of_them_measured() -> None:
    """Ranks 0 and 1 share stage 0, microbatch by microbatch; the sum takes what it took the last of them to come."""
    one, two = measured(1.0, 2.0, U=1.0, REDUCE_GRAD=9.0), measured(3.0, 5.0, U=2.0, REDUCE_GRAD=4.0)
    costs = made(one, two, measured(7.0, 8.0, stage=1), replicas=(2, 1))
    assert costs.forward == ((1.0, 3.0, 1.0, 3.0), 7.0)
    assert costs.backward == ((2.0, 5.0, 2.0, 5.0), 8.0)
    assert (costs.update, costs.reduce_grad) == ((1.5, 0.0), (4.0, 0.0))
    assert (costs.overhead, costs.latency) == ((0.25, 0.0), 0.5)


def test_the_slower_replica_ends_the_step() -> None:
    costs = made(measured(1.0, 2.0), measured(3.0, 5.0), replicas=(2,))
    schedule = build("1f1b", num_ranks=2, num_microbatches=4, replicas=(2,))
    timeline = simulate(schedule, costs)
    assert timeline.makespan == 2 * (3.0 + 5.0) + 4 * 0.25
    assert [trace.busy for trace in timeline.ranks] == [2 * 3.0 + 4 * 0.25, 2 * 8.0 + 4 * 0.25]


def test_equal_replicas_have_one_number() -> None:
    costs = made(measured(1.0, 2.0), measured(1.0, 2.0), replicas=(2,))
    assert (costs.forward, costs.backward) == ((1.0,), (2.0,))


def test_a_replica_that_showed_nothing_takes_what_the_others_do() -> None:
    costs = made(measured(1.0, 2.0), {}, measured(2.0, 4.0), replicas=(3,))
    assert costs.forward == ((1.0, 1.5, 2.0, 1.0),)


def test_halves_of_backwards_by_rank() -> None:
    """Rank 0 ran I and W apart, rank 1 both as one; stage 1 did not split any."""
    apart: dict[Timed, float] = {((0,), Op.F): 1.0, ((0,), Op.I): 2.0, ((0,), Op.W): 3.0}
    costs = made(apart, apart | {((0,), Op.I): 4.0}, measured(1.0, 6.0, stage=1), replicas=(2, 1))
    assert costs.input_grad == ((2.0, 4.0, 2.0, 4.0), 3.0)
    assert costs.weight_grad == (3.0, 3.0)
    assert costs.backward == ((5.0, 7.0, 5.0, 7.0), 6.0)


@pytest.mark.parametrize("op", [Op.F, Op.B])
def test_means_are_over_all_microbatches(op: Op) -> None:
    table = made(measured(1.0, 2.0), measured(3.0, 6.0), measured(5.0, 5.0, stage=1), replicas=(2, 1)).table(
        num_stages=2
    )
    own = {Op.F: (2.25, 5.0), Op.B: (4.25, 5.0)}[op]  # each with 0.25 around it
    assert table.means(op) == own
