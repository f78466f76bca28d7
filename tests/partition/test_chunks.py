"""Cuts of S = P V stages: the dynamic program, every way, neighbours, level ranks."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import (
    MemoryRules,
    Model,
    PlanEvaluator,
    Topology,
    all_cuts,
    all_stages,
    equal_stages,
    even_ends,
    even_stages,
    level_ranks,
    neighbours,
)

from stagewright.partition import Cluster, Node, Profile, partition

from .small import configuration

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


def test_no_cut_fits() -> None:
    cuts = all_cuts(chain([1, 1]))
    assert even_stages(lambda s: np.full((3, 2), np.inf), 2, 3) is None
    assert equal_stages(cuts, 3) is None
    assert all_stages(cuts.inside, 3, limit=9) == []
    assert all_stages(all_cuts(chain([1] * 9)).inside, 4, limit=9) is None


def test_equal_stages_and_neighbours() -> None:
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
