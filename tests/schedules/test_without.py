"""Schedules without dead ranks: every microbatch once, on a living owner of its stage, and as fast as bubbles let."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import Sharing, replicate, schedule_without

from stagewright.schedules import Action, Collective, Costs, Op, Schedule, build, check, check_lowered, lower, simulate

FAMILIES: list[tuple[str, dict[str, Any]]] = [("1f1b", {}), ("interleaved", {"num_chunks": 2}), ("zb-h1", {})]
COSTS = Costs(forward=1.0, backward=2.0)


def mesh(name: str, pipe: int, data: int, *, microbatches: int = 4, **options: Any) -> Schedule:
    return replicate(build(name, num_ranks=pipe, num_microbatches=microbatches, **options), data)


def actions_of(schedule: Schedule) -> list[Action]:
    return sorted(action for program in schedule.programs for action in program)


@pytest.mark.thorough
@settings(deadline=None, max_examples=25)
@given(st.data())
def test_every_microbatch_runs_once_on_a_living_holder(data: st.DataObject) -> None:
    name, options = data.draw(st.sampled_from(FAMILIES))
    pipe, replicas = data.draw(st.sampled_from([(2, 2), (2, 3), (4, 2)]))
    whole = mesh(name, pipe, replicas, microbatches=data.draw(st.sampled_from([4, 8])), **options)
    stays = [data.draw(st.integers(0, replicas - 1)) for _ in range(pipe)]  # a replica of each position lives
    mortal = [p * replicas + q for p in range(pipe) for q in range(replicas) if q != stays[p]]
    dead = data.draw(st.sets(st.sampled_from(mortal), min_size=1))
    left = schedule_without(whole, dead)
    check(left)
    sums = tuple(Collective((stage,), Op.REDUCE_GRAD, 0) for stage in range(left.num_stages))
    check_lowered(lower(left, sharing=Sharing(loss=True, collectives=sums)))
    assert actions_of(left) == actions_of(whole)
    for rank, program in enumerate(left.programs):
        assert (program == ()) == (left.placement[rank] == ()) == (rank in dead)
        kept = [action for action in program if whole.owner(action.stage, action.index) == rank]
        assert sorted(kept) == sorted(whole.programs[rank] if rank not in dead else ())  # nobody's microbatch moves
    M, orphans = whole.num_microbatches, set[tuple[int, int]]()
    for stage, ranks in enumerate(whole.owners):
        taken = dict.fromkeys((r for r in ranks if r not in dead), 0)
        for k in range(M):
            if whole.owner(stage, k) in dead:
                taken[left.owner(stage, k)] += 1
                orphans.add((stage, k))
        laps = M / len(left.owners[stage])
        if laps == int(laps):  # as many turns for each
            assert max(taken.values()) == min(taken.values()), (stage, taken)
    assert orphans


def test_the_order_of_one_without_its_peer() -> None:
    left = schedule_without(mesh("1f1b", 2, 2, microbatches=2), [1])
    assert left.grid() == "\n".join(
        [
            "rank 0 | F0 F1 F2 F3 B0 B1 B2 B3",
            "rank 1 | .  .  .  .  .  .  .  .",
            "rank 2 | .  F0 B0 F2 B2 .  .  .",
            "rank 3 | .  .  F1 B1 F3 B3 .  .",
        ]
    )


@pytest.mark.thorough(but=["1f1b-options0"])
@pytest.mark.parametrize(("name", "options"), FAMILIES)
def test_what_one_death_costs(name: str, options: dict[str, Any]) -> None:
    """The others of a stage have M + M / (D - 1) microbatches, rounded up, in the place of M: less slow than that."""
    pipe, data, M = 8, 8, 16
    whole = mesh(name, pipe, data, microbatches=M, **options)
    before = simulate(whole, COSTS).makespan
    one = before / simulate(schedule_without(whole, [3]), COSTS).makespan
    two = before / simulate(schedule_without(whole, [3, data + 4]), COSTS).makespan  # of two positions
    assert M / (M + -(-M // (data - 1))) < one < 1
    assert 1 - 2 / data < two <= one


def test_what_cannot_go_on_is_refused() -> None:
    whole = mesh("1f1b", 2, 2)
    with pytest.raises(ValueError, match=re.escape("stage 1 is on rank 2, 3 only, and none is left")):
        schedule_without(whole, [2, 3])
    with pytest.raises(ValueError, match=re.escape("dead ranks [4]: expected some of 0 to 3")):
        schedule_without(whole, [4])
    with pytest.raises(ValueError, match="batches overlap, or activations move, in it"):
        schedule_without(replicate(build("2bw", num_ranks=2, num_microbatches=2), 2), [1])
    assert schedule_without(whole, []) is whole
