"""The chain that determines a timeline's end, against the graph of all actions."""

from __future__ import annotations

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
    Collective,
    Costs,
    CriticalPath,
    Link,
    Links,
    Message,
    RankTrace,
    Schedule,
    Timeline,
    build,
    critical_path,
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


def test_weights_gathered_ahead_of_the_batch() -> None:
    schedule = build("1f1b", num_ranks=3, num_microbatches=4, replicas=(1, 2))
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
