"""Cuts, of sequences and of graphs, against all subsets; of S = P V stages: every way, neighbours, level ranks."""

import math
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import (
    SLACK,
    Cuts,
    MemoryRules,
    Model,
    PlanEvaluator,
    Topology,
    all_cuts,
    all_stages,
    cut_evenly,
    equal_stages,
    even_ends,
    even_stages,
    level_ranks,
    neighbours,
    pipedream_cuts,
    thinned,
)

from stagewright.partition import Cluster, Node, Profile, partition, read_pipedream_profile

from .small import configuration, crossing, down_sets, profiles

WORK = st.lists(st.integers(1, 9), min_size=1, max_size=9)


def chain(work: list[int]) -> Profile:
    return Profile(nodes=tuple(Node(name=f"n{i}", forward_seconds=w, backward_seconds=0) for i, w in enumerate(work)))


@given(work=WORK, stages=st.integers(1, 9), slow=st.integers(0, 2**9 - 1))
def test_least_slowest_stage_and_among_those_the_evenest(work: list[int], stages: int, slow: int) -> None:
    """Stages of which any may be twice as slow as the others."""
    num_stages = min(stages, len(work))
    factor = [2.0 if slow >> stage & 1 else 1.0 for stage in range(num_stages)]
    cuts = all_cuts(chain(work))
    each = np.array(
        [[sum(work[i:j]) if j <= len(work) else np.inf for j in range(i + 1, i + len(cuts))] for i in range(len(cuts))]
    )
    found = even_stages(lambda s: each * factor[s], num_stages, len(cuts))

    def goal(ends: tuple[int, ...]) -> tuple[float, float]:
        costs = [sum(work[a:b]) * factor[s] for s, (a, b) in enumerate(pairwise(ends))]
        return max(costs), sum(cost * cost for cost in costs)

    ends, slowest = found
    assert slowest == pytest.approx(goal(ends)[0])
    every = [(0, *inner, len(work)) for inner in combinations(range(1, len(work)), num_stages - 1)]
    assert goal(ends) == pytest.approx(min(map(goal, every)))
    assert all_stages(cuts.inside, num_stages, limit=1000) == every


@settings(max_examples=40, deadline=None)
@given(
    work=st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=6, max_size=12),
    memory=st.integers(20, 400),
    chunks=st.integers(1, 2),
)
def test_short_stages_alone_say_the_same(work: list[tuple[int, int, int]], memory: int, chunks: int) -> None:
    """Unless they do: then longer ones are looked at, too. With recomputation, memory and slow links."""
    nodes = [
        Node(name=f"n{i}", forward_seconds=w, backward_seconds=w, activation_bytes=a, stash_bytes=a, parameter_bytes=p)
        for i, (w, a, p) in enumerate(work)
    ]
    rules = MemoryRules(optimizer_ratio=2.0, recompute=("none", "full"))
    model = Model(Profile(nodes=tuple(nodes), microbatch_size=1), rules)
    c = configuration(schedule="interleaved" if chunks > 1 else "1f1b", num_chunks=chunks)
    topology = Topology(Cluster.from_levels([(2, 2.0)]), memory_limit=float(memory))
    evaluator = PlanEvaluator(topology, lambda *_: model)
    place, in_flight = evaluator.placement(c), evaluator.schedules.in_flight(c, exact=False)
    every = even_ends({1: model}, place, in_flight, c, reach=len(model.coarse))
    for reach in (1, 2, 4):
        assert even_ends({1: model}, place, in_flight, c, reach=reach) == every


def test_where_no_cut_fits_and_which_stages_are_equal_or_neighbours() -> None:
    cuts = all_cuts(chain([1, 1]))
    assert even_stages(lambda s: np.full((3, 2), np.inf), 2, 3) is None
    assert equal_stages(cuts, 3) is None
    assert all_stages(cuts.inside, 3, limit=9) == []
    assert all_stages(all_cuts(chain([1] * 9)).inside, 4, limit=9) is None
    cuts = all_cuts(chain([1] * 6))
    assert equal_stages(cuts, 3) == (0, 2, 4, 6)
    assert list(neighbours(cuts, (0, 2, 4, 6), reach=1)) == [(0, 1, 4, 6), (0, 3, 4, 6), (0, 2, 3, 6), (0, 2, 5, 6)]


@given(work=WORK.filter(lambda work: len(work) >= 4))
def test_level_ranks_are_never_less_level(work: list[int]) -> None:
    cuts = all_cuts(chain(work))
    ends = equal_stages(cuts, 4)

    def squares(ends: tuple[int, ...]) -> int:
        stages = [sum(work[a:b]) for a, b in pairwise(ends)]
        return sum(sum(stages[p::2]) ** 2 for p in range(2))

    assert squares(level_ranks(cuts, ends, (0, 1, 0, 1))) <= squares(ends)


def test_bad_chunks() -> None:
    cluster = Cluster.from_levels([(2, 1e9)])
    with pytest.raises(ValueError, match="expected a number of microbatches"):
        partition(chain([1, 1]), cluster, schedule="interleaved", num_chunks=2)
    with pytest.raises(ValueError, match="num_chunks=1 with schedule='interleaved': expected at least 2"):
        partition(chain([1, 1]), cluster, schedule="interleaved", num_microbatches=4)
    with pytest.raises(ValueError, match="num_chunks=2 with schedule=None: expected 1, or interleaved or looped-bfs"):
        partition(chain([1, 1]), cluster, num_chunks=2)
    with pytest.raises(ValueError, match="no configuration of a batch of 4 on 2 devices"):
        partition(chain([1, 1]), cluster, schedule="interleaved", num_chunks=3, num_microbatches=4)


DATA = Path(__file__).parents[1] / "data" / "pipedream"
steady = settings(max_examples=150, deadline=None, derandomize=True)


def node(name: str, seconds: float = 1.0, size: float = 1.0) -> Node:
    return Node(name=name, forward_seconds=seconds, backward_seconds=0.0, activation_bytes=size)


def sets_of(cuts: Cuts, profile: Profile) -> list[frozenset[str]]:
    return [frozenset(n.name for n, held in zip(profile.nodes, row, strict=True) if held) for row in cuts.members]


@pytest.mark.thorough
@steady
@given(profiles())
def test_all_cuts_are_all_down_sets(profile: Profile) -> None:
    cuts = all_cuts(profile)
    found, expected = sets_of(cuts, profile), down_sets(profile)
    assert len(set(found)) == len(found)
    assert set(found) <= set(expected)
    free = {n.name for n in profile.nodes if n.seconds + n.activation_bytes + n.stash_bytes + n.parameter_bytes == 0}
    if not free:
        assert set(found) == set(expected)
    assert found[0] == frozenset()
    assert len(found[-1]) == len(profile.nodes)
    for i, a in enumerate(found):
        assert cuts.seconds[i] == pytest.approx(sum(n.seconds for n in profile.nodes if n.name in a))
        assert cuts.crossing[i] == pytest.approx(crossing(profile, a))
        assert [a < b for b in found] == cuts.inside[i].tolist()


def test_a_source_that_costs_nothing_joins_its_first_consumer() -> None:
    profile = Profile(nodes=(node("a"), node("b"), node("flag", 0.0, 0.0)), edges=(("a", "b"), ("flag", "b")))
    assert sets_of(all_cuts(profile), profile) == [frozenset(), {"a"}, {"a", "b", "flag"}]


def test_of_many_cuts_those_with_the_least_bytes_stay() -> None:
    """A chain of eight equal nodes: the empty cut, one in each half of the work, and the whole."""
    sizes = [9, 1, 9, 9, 2, 9, 9, 9]  # bytes of node i cross cut i + 1
    nodes = tuple(node(f"n{i}", size=size) for i, size in enumerate(sizes))
    cuts = all_cuts(Profile(nodes=nodes))
    assert thinned(cuts, 4) == [0, 2, 5, 8]
    assert thinned(cuts, 9) == list(range(9))


def branches(width: int, depth: int, blocks: int) -> Profile:
    """Blocks of parallel branches, as in Inception."""
    nodes, edges, joint = [node("in")], [], "in"
    for block in range(blocks):
        ends = []
        for branch in range(width):
            before = joint
            for step in range(depth):
                name = f"b{block}.{branch}.{step}"
                nodes.append(node(name))
                edges.append((before, name))
                before = name
            ends.append(before)
        joint = f"join{block}"
        nodes.append(node(joint))
        edges += [(end, joint) for end in ends]
    return Profile(nodes=tuple(nodes), edges=tuple(edges))


def test_too_many_cuts_are_taken_in_one_order_and_said_so() -> None:
    profile = branches(width=4, depth=5, blocks=3)  # 6^4 cuts a block
    cuts = all_cuts(profile, limit=2000)
    assert len(cuts) <= 2000
    (note,) = cuts.notes
    assert "more than 2000 cuts: 2 of its stretches" in note
    assert f"leaves {len(cuts)} cuts" in note
    assert set(sets_of(cuts, profile)) <= set(sets_of(all_cuts(profile, limit=10_000), profile))
    assert all_cuts(profile, limit=10_000).notes == ()
    with pytest.raises(ValueError, match="more than 6000 cuts: expected fewer parallel branches for PipeDream's model"):
        pipedream_cuts(branches(width=5, depth=5, blocks=1))


@pytest.mark.parametrize(
    ("model", "states"),
    [("vgg16", 40), ("alexnet", 22), ("gnmt", 99), ("resnet18", 100), ("resnet50", 240), ("squeezenet1_0", 99)],
)
def test_states_of_the_published_profiles(model: str, states: int) -> None:
    assert len(pipedream_cuts(read_pipedream_profile(DATA / f"{model}.txt"))) == states + 1


def test_pipedream_counts_a_fork_until_its_branches_join() -> None:
    edges = (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"))
    profile = Profile(
        nodes=tuple(node(name, size=s) for name, s in zip("abcd", (1, 10, 100, 1000), strict=True)), edges=edges
    )
    assert all_cuts(profile).crossing.tolist() == [0, 1, 11, 101, 110, 0]
    assert pipedream_cuts(profile).crossing.tolist() == [0, 1, 11, 101, 111, 1000]


weights = st.lists(st.integers(0, 20).map(float), min_size=1, max_size=8)


def every_cut(n: int, num_stages: int) -> list[tuple[int, ...]]:
    return [(0, *rest) for rest in combinations(range(1, n), num_stages - 1)]


def heaviest(cut: tuple[int, ...], weights: list[float]) -> float:
    return max(sum(weights[a:b]) for a, b in zip(cut, [*cut[1:], len(weights)], strict=True))


@steady
@given(weights, st.data())
def test_the_heaviest_stage_is_as_light_as_can_be(weights: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(weights)))
    cut = cut_evenly(weights, num_stages=num_stages)
    assert cut in every_cut(len(weights), num_stages)
    best = min(heaviest(other, weights) for other in every_cut(len(weights), num_stages))
    # Each unit has a millionth of the mean more, so that units without weight spread.
    assert heaviest(cut, weights) == pytest.approx(best, rel=1e-5, abs=1e-5)


@steady
@given(weights, st.data())
def test_then_the_fewest_bytes_cross(weights: list[float], data: st.DataObject) -> None:
    n = len(weights)
    num_stages = data.draw(st.integers(1, n))
    crossing = [0.0] + [data.draw(st.sampled_from([0.0, 1.0, 2.0, 5.0, math.inf])) for _ in weights[1:]]
    possible = [cut for cut in every_cut(n, num_stages) if all(crossing[i] < math.inf for i in cut[1:])]
    if not possible:
        with pytest.raises(ValueError, match=f"num_stages={num_stages} for a model of .* units that can be cut apart"):
            cut_evenly(weights, num_stages=num_stages, crossing_bytes=crossing)
        return
    cut = cut_evenly(weights, num_stages=num_stages, crossing_bytes=crossing)
    assert cut in possible
    best = min(heaviest(other, weights) for other in possible)
    assert heaviest(cut, weights) <= SLACK * best + 1e-4
    light = [other for other in possible if heaviest(other, weights) <= SLACK * best - 1e-4]
    assert sum(crossing[i] for i in cut[1:]) <= min(
        (sum(crossing[i] for i in other[1:]) for other in light), default=math.inf
    )


@pytest.mark.parametrize(
    ("n", "num_stages", "crossing", "most"),
    [(3, 4, None, 3), (3, 0, None, 3), (0, 1, None, 0), (4, 3, [0, math.inf, math.inf, 0], 2)],
)
def test_more_stages_than_places(n: int, num_stages: int, crossing: list[float] | None, most: int) -> None:
    with pytest.raises(
        ValueError, match=rf"num_stages={num_stages} for a model of {most} units .* expected 1 to {most}"
    ):
        cut_evenly([1.0] * n, num_stages=num_stages, crossing_bytes=crossing)


@pytest.mark.parametrize(
    ("weights", "crossing"),
    [([1.0, -1.0], None), ([1.0, math.nan], None), ([1.0, 1.0], [0.0, -1.0]), ([1.0, 1.0], [0.0])],
)
def test_no_weights(weights: list[float], crossing: list[float] | None) -> None:
    with pytest.raises(ValueError, match="expected a number of at least 0 for each unit"):
        cut_evenly(weights, num_stages=1, crossing_bytes=crossing)
