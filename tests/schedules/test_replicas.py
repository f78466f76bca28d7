"""Replicated stages: round-robin microbatches, sums, links that keep their order; without dead ranks."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import Sharing, Transfer, defer_updates, derive_versions, replicate, schedule_without

from stagewright.schedules import (
    Action,
    AllReduce,
    Collective,
    Costs,
    Op,
    Schedule,
    build,
    check,
    check_lowered,
    flushed,
    lower,
    simulate,
)

from .random_schedules import ASYNC
from .reference import FREE, Run
from .test_check import ends

# Stages with as many times the work as they have ranks.
REPLICAS = [(2, 1), (1, 2), (3, 1), (2, 1, 1), (1, 2, 1), (2, 2), (1, 1, 3)]


@pytest.mark.thorough(but=["6-(2, 1)-2bw"])
@pytest.mark.parametrize("name", ASYNC)
@pytest.mark.parametrize("replicas", REPLICAS, ids=str)
@pytest.mark.parametrize("M", [6, 12])
def test_replicas(name: str, replicas: tuple[int, ...], M: int) -> None:
    schedule = build(name, num_ranks=sum(replicas), num_microbatches=M, replicas=replicas)
    check(schedule)
    ranks = iter(range(sum(replicas)))
    owners = tuple(tuple(next(ranks) for _ in range(count)) for count in replicas)
    assert schedule.owners == owners
    for rank, program in enumerate(schedule.programs):
        stage = next(s for s, ranks_of in enumerate(owners) if rank in ranks_of)
        count, replica = replicas[stage], owners[stage].index(rank)
        # M is a multiple of the replicas here, so that round-robin goes on from batch to batch.
        for op in (Op.F, Op.B):
            assert [a.index for a in program if a.op is op] == list(range(replica, schedule.total_indices, count))
    groups = tuple(ranks_of for ranks_of in owners if len(ranks_of) > 1)
    lowered = lower(schedule, sharing=Sharing(loss=True, norm=True, sums=groups))
    check_lowered(lowered)
    assert ends(lowered.programs)
    if name == "pipedream":
        synced = build(name, num_ranks=sum(replicas), num_microbatches=M, replicas=replicas, vertical_sync=True)
        used = derive_versions(synced).used
        assert all(version == used[0, k] for (_, k), version in used.items())
    for program in lowered.programs:
        sent = [step for step in program.steps if isinstance(step, Transfer) and step.is_send]
        for key in {(step.peer, step.message.kind) for step in sent}:
            order = [step.message.index for step in sent if (step.peer, step.message.kind) == key]
            assert order == sorted(set(order)), f"{key} from rank {program.rank}"


def in_proportion(replicas: tuple[int, ...]) -> Costs:
    """Work in proportion to the replicas, as PipeDream's planner makes stages."""
    return Costs(forward=[1.0 * n for n in replicas], backward=[2.0 * n for n in replicas])


# Seconds that replicas wait for each other at each update, where work alone takes 3 s a microbatch: replica q is
# 3q s behind the first. Forwards that the next stage has already fill it where that stage is the last.
WAITS = {(2, 1): 0, (1, 2): 3, (3, 1): 0, (2, 1, 1): 3, (2, 2): 0, (1, 1, 3): 6}


@pytest.mark.parametrize("replicas", WAITS, ids=str)
def test_replicas_share_the_work_and_wait_for_each_other_at_updates(replicas: tuple[int, ...]) -> None:
    """Where updates may wait there is no bubble; else the waits are all of it, once a batch under paci."""
    M = 12
    for name, seconds in (("2bw", 3 * M), ("paci", 3 * M + WAITS[replicas])):
        schedule = build(name, num_ranks=sum(replicas), num_microbatches=M, replicas=replicas)
        timeline = simulate(schedule, in_proportion(replicas))
        assert timeline.batch_seconds == seconds
        assert timeline.bubble == pytest.approx(1 - 3 * M / seconds)


@pytest.mark.parametrize("name", ["pipedream", "paci"])
@pytest.mark.parametrize("replicas", [(2, 1, 1), (1, 2), (2, 3)], ids=str)
def test_updates_wait_for_the_gradients_of_all_replicas_where_their_sum_takes_no_time(
    name: str, replicas: tuple[int, ...]
) -> None:
    """Every action ends when the needs of all say; under equal work and a slower last stage."""
    schedule = build(name, num_ranks=sum(replicas), num_microbatches=6, replicas=replicas, num_batches=3)
    shared, slower = in_proportion(replicas), [1.0 + stage for stage in range(len(replicas))]
    at_once = tuple(AllReduce(stage=stage, seconds=0.0, ways=()) for stage in range(len(replicas)))
    for costs in (shared, Costs(forward=slower, backward=2.0, update=0.5)):
        found = simulate(schedule, costs)
        wanted = Run(schedule, costs, replace(FREE, sums=at_once)).starts
        assert {(rank, what): start for rank, own in enumerate(found.ranks) for what, start, _ in own.compute} == wanted


def test_under_2bw_sums_that_take_no_time_hold_up_no_update() -> None:
    """As the runtime runs it: updates wait until their version is used, behind the backwards of all replicas."""
    for replicas in WAITS:
        for M in (4, 7):
            schedule = defer_updates(build("2bw", num_ranks=sum(replicas), num_microbatches=M, replicas=replicas))
            for forward in (in_proportion(replicas).forward, [1.0 + stage for stage in range(len(replicas))]):
                free, summed = (Costs(forward=forward, backward=2.0, reduce_grad=each) for each in (0.0, 1e-9))
                assert simulate(schedule, free).makespan == pytest.approx(simulate(schedule, summed).makespan)


def test_the_rule_of_pipedream_is_too_shallow_in_front_of_a_slow_stage() -> None:
    """Replicas 1-2-1: F0(k) F1(k) B1(k-2) B0(k-2) F0(k+2) takes 1 + 2 + 4 + 2 seconds for two microbatches, where work
    alone takes 6; the eager warm-up is deep enough."""
    replicas = (1, 2, 1)
    plain, eager = (
        build("2bw", num_ranks=4, num_microbatches=12, replicas=replicas, warmup=warmup)
        for warmup in ("plain", "eager")
    )
    assert simulate(plain, in_proportion(replicas)).batch_seconds == 12 / 2 * 9
    assert simulate(eager, in_proportion(replicas)).batch_seconds == 12 * 3


@pytest.mark.thorough(but=["(2, 1)"])
@pytest.mark.parametrize("replicas", REPLICAS, ids=str)
def test_replicas_under_2bw_with_any_number_of_microbatches(replicas: tuple[int, ...]) -> None:
    for M in range(4, 9):
        for warmup in ("plain", "eager"):
            schedule = build("2bw", num_ranks=sum(replicas), num_microbatches=M, replicas=replicas, warmup=warmup)
            assert max(check(schedule).peak_versions) == 2
            assert check(schedule).staleness == (1,) * sum(replicas)
            check(defer_updates(schedule))


def test_replicas_run_no_further_ahead_than_the_stage_in_front_of_them() -> None:
    """Two microbatches of each of two replicas are four, which the first stage makes behind a backward of theirs."""
    check(build("2bw", num_ranks=3, num_microbatches=4, replicas=(1, 2), warmup=[2, 2]))


def test_a_replica_updates_once_a_group_by_default() -> None:
    schedule = build("pipedream", num_ranks=5, num_microbatches=6, replicas=(2, 3))
    assert (schedule.update_every, schedule.group_size) == (None, 6)  # that is the whole batch
    schedule = build("pipedream", num_ranks=5, num_microbatches=12, replicas=(2, 3))
    assert schedule.update_every == 6
    assert build("pipedream", num_ranks=5, num_microbatches=12, replicas=(2, 3), update_every=12).update_every is None


@pytest.mark.parametrize("name", ["2bw", "paci"])
@pytest.mark.parametrize("replicas", [(2, 1, 1), (3, 1), (1, 2)], ids=str)
def test_behind_a_flush_replicas_wait_for_each_other_where_their_sum_takes_no_time(
    name: str, replicas: tuple[int, ...]
) -> None:
    """Nobody knows the seconds of sums in a measured stream; the first batches still take those of 1F1B."""
    sizes: dict[str, Any] = {"num_ranks": sum(replicas), "num_microbatches": 12, "replicas": replicas}
    costs = Costs(forward=1.0, backward=2.0)
    taken = simulate(flushed(build(name, **sizes)), costs).batch_seconds
    assert taken == simulate(build("1f1b", **sizes), costs).makespan


@pytest.mark.parametrize("name", ["paci", "2bw", "pipedream"])
def test_streams_of_replicas_span_as_many_batches_as_one_pipeline(name: str) -> None:
    """With fewer, their steady state is not in them: a plan on 7 x 3 ranks was simulated to 37 s and said 27 s."""
    alone = build(name, num_ranks=7, num_microbatches=6 if name == "2bw" else 1)
    shared = build(name, num_ranks=21, num_microbatches=3 * alone.num_microbatches, replicas=(3,) * 7)
    assert shared.num_batches == alone.num_batches
    costs = Costs(forward=[8.0, 8.4, 15.8, 4.3, 9.0, 5.6, 12.4], backward=[9.3, 0.0, 7.1, 11.8, 6.8, 15.2, 6.5])
    assert simulate(shared, costs).batch_seconds == pytest.approx(simulate(alone, costs).batch_seconds)


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
