"""`synthesize(placement="any")`: the model cut as each placement has it, at comparable costs, and the best of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import Request

from stagewright.schedules import Costs, Link, Links, MemoryLimitError, build, check, simulate, synthesize

EACH = 40  # orders that a placement has

seconds = st.sampled_from([1.0, 2.0, 3.0, 5.0])


@pytest.mark.thorough
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_it_is_never_worse_than_the_best_placement_alone(data: st.DataObject) -> None:
    """Each placement alone, at costs of chunks made by hand here, with the evaluations that it has among the three."""
    P, M = data.draw(st.integers(2, 3)), data.draw(st.integers(1, 5))

    def drawn() -> list[float]:
        return data.draw(st.lists(seconds, min_size=P, max_size=P))

    forward, input_grad, weight_grad, held = drawn(), drawn(), drawn(), drawn()
    latency = data.draw(st.sampled_from([0.0, 0.5, 2.0]))
    limit = data.draw(st.sampled_from([None, max(held), 2 * max(held)]))
    objective = data.draw(st.sampled_from(["makespan", "span"]))
    many: dict[str, Any] = {"num_ranks": P, "num_microbatches": M, "memory_limit": limit, "objective": objective}
    alone = {}
    for placement, V in (("plain", 1), ("cyclic", 2), ("v", 2)):

        def chunks(rows: list[float], V: int = V) -> list[float]:
            return [each / V for each in rows for _ in range(V)]

        costs = Costs(
            forward=chunks(forward), input_grad=chunks(input_grad), weight_grad=chunks(weight_grad), latency=latency
        )
        try:
            alone[placement] = synthesize(
                **many, costs=costs, placement=placement, activations=chunks(held), evaluations=EACH
            )
        except MemoryLimitError:
            continue
    costs = Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad, latency=latency)
    most = len(alone) * EACH
    found = synthesize(**many, costs=costs, placement="any", activations=held, evaluations=most)
    assert found.value <= min(each.value for each in alone.values())
    assert found.lower_bound == min(each.lower_bound for each in alone.values()) <= found.value * (1 + 1e-12)
    assert {each.placement: each.lower_bound for each in found.placements} == {
        name: each.lower_bound for name, each in alone.items()
    }
    assert found.evaluations <= most + len(alone)
    check(found.schedule)
    timeline = simulate(found.schedule, found.costs)
    assert found.value == getattr(timeline, objective) == found.history[-1].value


def test_pieces_are_joined_or_divided_and_a_placement_that_they_do_not_make_is_left_out() -> None:
    """Two numbers a rank: a plain stage has both; three a rank make no V of two chunks a rank."""
    costs = Costs(forward=[1.0, 2.0, 3.0, 4.0], backward=[2.0, 4.0, 6.0, [8.0, 9.0]], latency=[0.1, 0.2, 0.3, 0.4])
    held, kept = [1.0, 3.0, 2.0, 2.0], [1.0, 0.2, 0.5, 0.5]
    pieces = Request(num_ranks=2, num_microbatches=2, costs=costs, activations=held, kept_share=kept).pieces()
    plain = pieces.stages(2)
    assert plain.costs.forward == (3.0, 7.0)
    assert plain.costs.backward == (6.0, (14.0, 15.0))
    assert plain.costs.latency == (0.2, 0.4)
    assert (plain.activations, plain.kept_share) == ((4.0, 4.0), (0.4, 0.5))
    same = pieces.stages(4)
    assert same.costs == pieces.joined((0, 1, 2, 3, 4)).costs
    assert pieces.stages(3) is None
    thirds = Costs(forward=[1.0] * 6)
    found = synthesize(num_ranks=2, num_microbatches=2, costs=thirds, placement="any", num_chunks=3, evaluations=30)
    assert {each.placement for each in found.placements} == {"plain", "cyclic"}


def test_what_placements_that_cannot_win_leave_goes_to_the_winner() -> None:
    """Long messages leave the plain one alone; its search spends all there is."""
    forward, factors = [2.0, 3.0, 2.0], [1, 3, 1, 2]
    costs = Costs(forward=forward, input_grad=2.0, weight_grad=1.5, latency=15.0, index_factors=factors)
    found = synthesize(num_ranks=3, num_microbatches=4, costs=costs, memory_limit=2, placement="any", evaluations=90)
    assert [each.value is None for each in found.placements] == [False, True, True]
    assert (found.stopped, found.evaluations) == ("evaluations", 90)


def test_a_start_goes_to_its_own_placement() -> None:
    start = build("zb-v", num_ranks=2, num_microbatches=3)
    costs = Costs(forward=2.0, input_grad=2.0, weight_grad=2.0)
    found = synthesize(num_ranks=2, num_microbatches=3, costs=costs, placement="any", start=start, evaluations=1)
    assert found.history[0].source == "given"
    assert found.schedule.placement == ((0, 3), (1, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": None}, "num_ranks=None: expected a whole number"),
        ({"costs": Costs(forward=[1.0, 2.0, 3.0])}, "numbers of 3 pieces for 2 ranks: expected 2, or a multiple"),
        ({"costs": Costs(forward=[1.0] * 4), "activations": [1.0, 1.0]}, "one number, or equally many of each"),
        ({"memory_limit": 0.5}, "expected at least 1"),
        ({"links": Links(network=Link(), activation_bytes=[1.0])}, "activation_bytes with several numbers"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 2, "costs": Costs(), "evaluations": 5}
    with pytest.raises(ValueError, match=message):
        synthesize(**given | options, placement="any")
