"""The chain that determines a timeline's end, against the graph of all actions.

Changes between two timelines, and who straggles: exact sums, planted faults, and noise that trips nothing.
"""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inside import WAITS, PathKind
from support.sizes import fitting

from stagewright.schedules import (
    FAMILIES,
    Action,
    AllReduce,
    Change,
    Collective,
    Costs,
    CriticalPath,
    Link,
    Links,
    Message,
    Op,
    RankTrace,
    Schedule,
    Span,
    Timeline,
    attribute_idle,
    build,
    compare,
    critical_path,
    find_stragglers,
    simulate,
)

from .random_schedules import by_hand, paused, schedules_with_costs, steady, window_of
from .reference import graph, latency_between, seconds


def check_tiles(timeline: Timeline) -> CriticalPath:
    """The steps lie end to end from the first start to the last end."""
    path = critical_path(timeline)
    assert path.steps[0].start == timeline.start
    assert path.steps[-1].end == timeline.end
    assert all(before.end == after.start for before, after in pairwise(path.steps))
    assert all(step.end >= step.start for step in path.steps)
    assert path.seconds == timeline.makespan
    assert sum(path.by_kind.values()) == pytest.approx(timeline.makespan)
    assert sum(path.by_link.values()) == pytest.approx(path.by_kind.get(PathKind.MESSAGE, 0.0))
    for step in path.steps:
        assert (step.what is None) == (step.kind in WAITS)
        assert (step.sender is None) == (step.kind is not PathKind.MESSAGE)
    return path


@pytest.mark.thorough
@steady
@given(schedules_with_costs())
def test_every_step_is_what_the_next_one_waited_for(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    path = check_tiles(simulate(schedule, costs))
    dag = graph(schedule)
    actions = [(step.rank, step.what) for step in path.steps if isinstance(step.what, Action) and step.what.op != "U"]
    assert not path.by_kind.keys() & WAITS
    for before, node in pairwise(actions):
        assert dag.has_edge(before, node)
    delays = [latency_between(schedule, costs.latency, *edge) for edge in pairwise(actions) if edge[0][0] != edge[1][0]]
    updates = path.by_kind.get(PathKind.UPDATE, 0.0)
    assert sum(seconds(costs, action) for _, action in actions) + sum(delays) + updates == path.seconds


@pytest.mark.thorough(but=["zb-h2"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_with_their_epilogue(name: str) -> None:
    P, M = fitting(name, 3, 6)
    schedule = build(name, num_ranks=P, num_microbatches=M)
    norm = 0.75 if schedule.has_epilogue else None
    path = check_tiles(simulate(schedule, Costs(forward=1.0, latency=0.25, update=0.5, norm=norm)))
    assert path.by_kind.get(PathKind.BEFORE_UPDATE, 0.0) == (norm or 0.0)
    assert path.steps[-1].kind is PathKind.UPDATE


def test_a_slow_rank_is_the_path() -> None:
    """
    rank 0 | 0F0 | 0F1 |       | 0B0 |       | 0B1 |
    rank 1 |     |  1F0 | 1B0   |  1F1 | 1B1  |          latency 1
    """
    costs = Costs(forward=[1.0, 3.0], backward=[1.0, 3.0], latency=1.0)
    path = check_tiles(simulate(by_hand("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", microbatches=2), costs))
    assert [str(s.what) if isinstance(s.what, Action) else (s.sender, s.rank) for s in path.steps] == [
        *("0F0", (0, 1), "1F0", "1B0", "1F1", "1B1", (1, 0), "0B1")
    ]
    assert path.by_kind == {PathKind.BACKWARD: 7.0, PathKind.FORWARD: 7.0, PathKind.MESSAGE: 2.0}
    assert path.by_link == {(0, 1): 1.0, (1, 0): 1.0}
    assert path.by_rank == {1: 12.0, 0: 2.0}


def test_sums_and_gathers_over_replicas() -> None:
    """Stage 1 on two ranks: the sum of its gradients, and the weights that are gathered behind the update."""
    schedule = build("1f1b", num_ranks=3, num_microbatches=4, replicas=(1, 2))
    links = Links(
        network=Link(latency=0.25), sums=(AllReduce(stage=1, seconds=8.0, gather=4.0, ways=((1, 2), (2, 1))),)
    )
    path = check_tiles(simulate(schedule, Costs(forward=1.0, update=0.5), links))
    assert [step.kind for step in path.steps[-3:]] == [PathKind.SUM, PathKind.UPDATE, PathKind.GATHER]
    assert path.by_sum == {(1,): 8.0}
    assert path.by_kind[PathKind.GATHER] == 4.0
    with_norm = check_tiles(simulate(schedule, Costs(forward=1.0, update=0.5, norm=1.0), links))
    assert [step.kind for step in with_norm.steps[-4:-1]] == [PathKind.SUM, PathKind.BEFORE_UPDATE, PathKind.UPDATE]
    each = AllReduce(stage=1, seconds=0.0, gather=30.0, unshards=True, ways=((1, 2), (2, 1)))
    path = check_tiles(simulate(schedule, Costs(forward=1.0), Links(network=Link(), sums=(each,))))
    assert path.steps[0].kind is PathKind.GATHER
    assert path.by_kind[PathKind.GATHER] == 30.0


@pytest.mark.parametrize("gather", [0.0, 6.0])
def test_streams_wait_for_sums_and_gathers(gather: float) -> None:
    schedule = build("2bw", num_ranks=3, num_microbatches=4, replicas=(1, 2), num_batches=4)
    links = Links(network=Link(), sums=(AllReduce(stage=1, seconds=6.0, gather=gather, ways=((1, 2), (2, 1))),))
    path = check_tiles(simulate(schedule, Costs(forward=1.0, update=0.5), links))
    assert path.by_kind[PathKind.SUM] > 0
    assert (PathKind.GATHER in path.by_kind) == (gather > 0)
    assert not path.by_kind.keys() & WAITS


@pytest.mark.thorough
@steady
@given(schedules_with_costs(), st.data())
def test_measured_timelines_are_tiled_too(case: tuple[Schedule, Costs], data: st.DataObject) -> None:
    """Pauses anywhere, clocks that disagree, messages that were not seen, a rank whose record is missing."""
    timeline = simulate(*case)
    ranks = [
        replace(trace, comm=tuple(span for span in trace.comm if data.draw(st.booleans())))
        for trace in data.draw(paused(timeline))
    ]
    if data.draw(st.booleans()):
        ranks[data.draw(st.integers(0, len(ranks) - 1))] = RankTrace(compute=())
    measured = replace(timeline, ranks=tuple(ranks), measured=True)
    if any(rank.compute for rank in ranks):
        check_tiles(measured)
    else:
        assert critical_path(measured).steps == ()


def test_a_window_of_a_stream_says_what_it_has_not_seen() -> None:
    schedule = build("2bw", num_ranks=3, num_microbatches=4, num_batches=6)
    path = check_tiles(window_of(simulate(schedule, Costs(forward=1.0, latency=0.5, update=0.5)), 2, 4))
    assert path.by_kind.get(PathKind.UNEXPLAINED, 0.0) == 0.0


def test_a_pause_is_a_wait_of_the_rank_that_paused() -> None:
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=2), Costs(forward=1.0))
    last, first = timeline.ranks[1].compute[-1], timeline.ranks[0].compute
    ranks = (
        RankTrace(compute=(*first[:-1], first[-1]._replace(start=last.end + 3, end=last.end + 5))),
        timeline.ranks[1],
    )
    path = check_tiles(replace(timeline, ranks=ranks, measured=True))
    wait = next(step for step in path.steps if step.kind is PathKind.UNEXPLAINED)
    assert (wait.rank, wait.seconds) == (0, 3.0)


def test_an_update_does_not_wait_for_what_ends_later() -> None:
    """No norm: rank 0 pauses and updates long, while rank 1 still computes."""
    timeline = simulate(by_hand("0F0 0B0", "1F0 1B0", microbatches=1), Costs(forward=1.0, backward=1.0, update=1.0))
    first, second = (list(rank.compute) for rank in timeline.ranks)
    first[-1] = first[-1]._replace(start=4.5, end=9.0)
    second[-2:] = [second[-2]._replace(end=5.0), second[-1]._replace(start=5.0, end=6.0)]
    ranks = (RankTrace(compute=tuple(first)), RankTrace(compute=tuple(second)))
    path = check_tiles(replace(timeline, ranks=ranks, measured=True))
    assert [(step.rank, step.kind, step.seconds) for step in path.steps[-3:]] == [
        (0, PathKind.BACKWARD, 1.0),
        (0, PathKind.BEFORE_UPDATE, 0.5),
        (0, PathKind.UPDATE, 4.5),
    ]


def test_everything_at_no_cost_ends() -> None:
    schedule = build("interleaved", num_ranks=3, num_microbatches=6)
    nothing = simulate(schedule, Costs(forward=0.0, backward=0.0, norm=0.0))
    assert check_tiles(nothing).seconds == 0.0
    assert {type(step.what) for step in critical_path(nothing).steps} <= {Action, Message, Collective, type(None)}


def seconds_of(changes: tuple[Change, ...]) -> dict[str, float]:
    return {change.name: change.seconds for change in changes if change.seconds}


def noisy(clean: Timeline, *, spread: float, seed: int, slow: dict[int, float] | None = None) -> Timeline:
    """A measurement: each action takes its cost times lognormal noise, those of a slow rank more; messages likewise."""
    draw = random.Random(seed)
    ranks = []
    for rank, trace in enumerate(clean.ranks):
        factor = (slow or {}).get(rank, 1.0)
        now, spans = 0.0, []
        for what, start, end in trace.compute:
            now = max(now, start)
            took = (end - start) * factor * draw.lognormvariate(0.0, spread)
            spans.append(Span(what, now, now + took))
            now += took
        comm = [
            Span(message, made, made + (there - made) * draw.lognormvariate(0.0, spread))
            for message, made, there in trace.comm
        ]
        ranks.append(RankTrace(compute=tuple(spans), comm=tuple(comm)))
    return replace(clean, ranks=tuple(ranks), measured=True)


@pytest.mark.thorough
@steady
@given(schedules_with_costs(), schedules_with_costs())
def test_changes_add_up_for_any_two(one: tuple[Schedule, Costs], other: tuple[Schedule, Costs]) -> None:
    """Timelines with other numbers of ranks, stages and microbatches compare as well; nothing is an error."""
    before, after = simulate(*one), simulate(*other)
    found = compare(before, after)
    for changes in (found.causes, found.path, *(rank for rank in found.ranks if rank)):
        assert sum(change.before for change in changes) == pytest.approx(before.makespan)
        assert sum(change.after for change in changes) == pytest.approx(after.makespan)
        assert sum(change.seconds for change in changes) == pytest.approx(found.makespan.seconds, abs=1e-9)
    assert (found.ranks == ()) == (len(before.ranks) != len(after.ranks))
    if before.schedule.placement != after.schedule.placement:
        assert found.departures == ()
        assert any("no action is compared" in note for note in found.notes)
    for rank, changes in enumerate(found.ranks):
        assert {c.name: c.before for c in changes} == {
            "compute": before.ranks[rank].busy,
            **attribute_idle(before)[rank]._asdict(),
        }


def test_the_action_or_optimizer_that_departs_most_comes_first() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=4)
    before, after = (simulate(schedule, Costs(forward=1.0, update=update, norm=0.5)) for update in (0.5, 2.0))
    found = compare(before, after)
    assert seconds_of(found.causes) == {"update": 1.5}
    assert seconds_of(found.path) == {"update": 1.5}
    assert found.largest_cause.name == "update"
    back = compare(after, before)
    assert back.largest_cause == Change("update", found.largest_cause.after, found.largest_cause.before)
    # Two optimizer steps departed; no forward and no backward.
    assert {each.action.op for each in found.departures if each.seconds} == {Op.U}
    timeline = simulate(build("gpipe", num_ranks=2, num_microbatches=3), Costs(forward=1.0))
    trace = timeline.ranks[1].compute
    late = [*trace[:4], *(span._replace(start=span.start + 5, end=span.end + 5) for span in trace[4:])]
    late[3] = trace[3]._replace(end=trace[3].end + 5)
    after = replace(timeline, ranks=(timeline.ranks[0], RankTrace(compute=tuple(late))), measured=True)
    found = compare(timeline, after)
    assert (found.departures[0].action, found.departures[0].rank, found.departures[0].seconds) == (trace[3].what, 1, 5)
    assert all(each.seconds == 0 for each in found.departures[1:])


@pytest.mark.thorough(but=["gpipe", "paci", "seq-zb-h1"])
@pytest.mark.parametrize("name", FAMILIES)
def test_other_schedules_are_compared_as_far_as_they_can_be(name: str) -> None:
    P, M = fitting(name, 3, 6)
    before = simulate(build("1f1b", num_ranks=P, num_microbatches=M), Costs(forward=1.0))
    after = simulate(build(name, num_ranks=P, num_microbatches=M), Costs(forward=1.0))
    found = compare(before, after)
    assert len(found.ranks) == P
    if name == "interleaved":
        assert "stages are on other ranks (3 stages on 3 ranks before, 6 stages on 3 ranks after)" in found.notes[0]
    if name == "zb-h1":
        assert "18 actions in both, 18 only before, 36 only after" in found.notes[0]
        assert {each.action.op for each in found.departures} == {Op.F}
    if name == "2bw":
        batches = after.schedule.num_batches
        assert f"1 batch in view before and {batches} after" in found.notes[-1]
        assert found.makespan.after == pytest.approx(after.makespan / batches)
        busy = sum(rank.busy for rank in after.ranks) / 3
        assert found.causes[0] == ("compute", pytest.approx(18.0), pytest.approx(busy / batches))
        for parts in (found.causes, found.path, *found.ranks):
            assert sum(each.after for each in parts) == pytest.approx(found.makespan.after)
            assert sum(each.before for each in parts) == pytest.approx(before.makespan)
        assert found.per_batch


def test_a_missing_rank_is_told_and_not_counted() -> None:
    timeline = simulate(build("1f1b", num_ranks=3, num_microbatches=6), Costs(forward=1.0))
    ranks = (RankTrace(compute=()), *timeline.ranks[1:])
    found = compare(timeline, replace(timeline, ranks=ranks, missing=(0,), measured=True))
    assert found.ranks[0] == ()
    assert "nothing was recorded of rank 0 after" in found.notes[-1]
    assert sum(change.after for change in found.causes) == pytest.approx(found.makespan.after)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 8)])
def test_noise_names_nobody(ranks: int, microbatches: int) -> None:
    costs = Costs(forward=1.0, latency=0.5)
    schedule = build("1f1b", num_ranks=ranks, num_microbatches=microbatches)
    clean = simulate(schedule, costs)
    tripped = []
    for spread in (0.05, 0.2, 0.4):
        for seed in range(12):
            measured, other = (noisy(clean, spread=spread, seed=number) for number in (seed, seed + 1000))
            for expected in (None, clean, other):
                tripped += find_stragglers(measured, expected=expected)
    assert tripped == []


@pytest.mark.parametrize("against", ["peers", "prediction", "run"])
def test_a_slow_rank_is_named_in_noise(against: str) -> None:
    clean = simulate(build("1f1b", num_ranks=4, num_microbatches=8), Costs(forward=1.0, latency=0.5))
    expected = {"peers": None, "prediction": clean, "run": noisy(clean, spread=0.1, seed=9)}
    for seed in range(20):
        (found,) = find_stragglers(noisy(clean, spread=0.1, seed=seed, slow={2: 1.6}), expected=expected[against])
        assert found.name == "rank 2"
        assert found.ratio == pytest.approx(1.6, rel=0.15)
        # 8 microbatches of 3 s took 1.6 times that.
        assert found.seconds == pytest.approx(0.6 * 24, rel=0.3)


def test_a_slow_link_is_named_where_it_costs_something() -> None:
    schedule = build("1f1b", num_ranks=4, num_microbatches=8)
    usual = Costs(forward=1.0, latency=0.5)
    slow = replace(usual, latency=[0.5, 2.0, 0.5, 0.5])  # both messages of stage 1: to stage 2, and back to 0
    timeline = simulate(schedule, slow)
    assert {each.name for each in find_stragglers(timeline)} == {"link 1 -> 2", "link 1 -> 0"}
    against = find_stragglers(timeline, expected=simulate(schedule, usual))
    assert {each.name for each in against} == {"link 1 -> 2", "link 1 -> 0"}
    for each in against:
        assert (each.ratio, each.seconds) == (pytest.approx(4.0), pytest.approx(8 * 1.5))
    # Clocks that may be further apart than that prove nothing.
    unsure = replace(timeline, clock_error=(1.0, 1.0, 0.0, 0.0), measured=True)
    assert {each.name for each in find_stragglers(unsure)} == {"link 1 -> 2"}
    usual, slow = (simulate(schedule, Costs(forward=1.0, latency=[0.0001, each, 0.0, 0.0])) for each in (0.0001, 0.01))
    assert find_stragglers(slow, expected=usual) == ()
    found = compare(simulate(schedule, Costs(forward=1.0)), simulate(schedule, Costs(forward=3.0)))
    assert found.stragglers == ()
    assert found.largest_cause.name == "compute"


@given(st.integers(0, 10_000))
@steady
def test_a_few_slow_actions_make_no_straggler(seed: int) -> None:
    """A pause of the machine in three actions of a rank of 16 is none of the rank's."""
    clean = simulate(build("1f1b", num_ranks=4, num_microbatches=8), Costs(forward=1.0))
    measured = noisy(clean, spread=0.1, seed=seed)
    spans = list(measured.ranks[1].compute)
    for at in random.Random(seed).sample(range(len(spans)), 3):
        spans[at] = spans[at]._replace(end=spans[at].end + 50)
    ranks = (measured.ranks[0], RankTrace(compute=tuple(spans)), *measured.ranks[2:])
    assert find_stragglers(replace(measured, ranks=ranks)) == ()
