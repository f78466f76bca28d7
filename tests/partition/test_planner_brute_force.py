"""The planner against everything that can be done by hand, simulated: it is never worse."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import LeastSeconds, MemoryRules, Model, Topology

from stagewright.partition import Cluster, Level, Node, Plan, Profile, plan

from .by_hand import configurations, fitting_recompute, simulate_plan, step
from .small import TENTHS, OverTensors, configuration

CLUSTERS = st.sampled_from(
    [
        Cluster.from_levels([(1, 1.0)]),
        Cluster.from_levels([(3, 5.0)]),
        Cluster.from_levels([(2, 40.0), (2, 5.0)]),
        Cluster(
            levels=(Level(name="in", size=2, bandwidth=30.0, latency=0.1), Level(name="out", size=2, bandwidth=9.0))
        ),
        Cluster(
            levels=(
                Level(name="in", size=3, bandwidth=9.0),
                Level(name="out", size=2, bandwidth=9.0, partial_reduce=0.2),
            )
        ),
        Cluster(
            levels=(
                Level(name="in", size=2, bandwidth=30.0, latency=0.1),
                Level(name="out", size=2, bandwidth=9.0, latency=0.2, reduce_latency=0.4),
            ),
            rings="flat",
        ),
    ]
)


@st.composite
def chains(draw: st.DrawFn) -> Profile:
    nodes = [
        Node(
            name=f"n{i}",
            forward_seconds=draw(TENTHS) + 0.1,
            backward_seconds=draw(TENTHS),
            activation_bytes=draw(TENTHS),
            parameter_bytes=draw(TENTHS),
            stash_bytes=draw(TENTHS),
            update_seconds=draw(TENTHS) / 3,
            runs_again=draw(st.integers(0, 3)) > 0,
            selective_bytes=draw(TENTHS),
            selective_seconds=draw(TENTHS) / 3,
            keep_less_bytes=draw(TENTHS),
            keep_less_seconds=draw(TENTHS) / 3,
        )
        for i in range(draw(st.integers(1, 6)))
    ]
    holders = sorted(draw(st.sets(st.sampled_from(range(len(nodes))), max_size=3)))
    shared = draw(st.sampled_from([0.5, 1.0])) * min((nodes[i].parameter_bytes for i in holders), default=0.0)
    tied = ((tuple(f"n{i}" for i in holders), shared),) if len(holders) > 1 else ()
    return Profile(
        nodes=tuple(nodes),
        microbatch_size=1,
        tied=tied,
        gradient_ratio=draw(st.sampled_from([1.0, 2.0])),
        gather_ratio=draw(st.sampled_from([1.0, 0.5])),
        gathers_ahead=draw(st.booleans()),
    )


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(
    profile=chains(),
    cluster=CLUSTERS,
    batch=st.integers(1, 8),
    sharding=st.sampled_from([("none",), ("full",), ("none", "full")]),
)
def test_never_worse_than_any_configuration(
    profile: Profile, cluster: Cluster, batch: int, sharding: tuple[str, ...]
) -> None:
    """With a choice: than any that divides no optimizer. A search cut short says how much the rest may gain at most."""
    options: dict[str, Any] = {"global_batch": batch, "optimizer_sharding": sharding, "chunk_sizes": (2, 3)}
    found = plan(profile, cluster, **options)
    short = plan(profile, cluster, max_simulated=1, num_runners_up=0, **options)
    hurried = plan(profile, cluster, seconds=0.0, **options)
    assert found.simulated_step_time == pytest.approx(simulate_plan(profile, cluster, found), rel=1e-9)
    assert found.searched.faster_left(found.simulated_step_time) == 0
    for each in configurations(profile, cluster, batch, 3):
        shards = each["data"] if sharding == ("full",) else 1
        least = step(profile, cluster, shards=shards, **each)
        assert found.simulated_step_time <= least * (1 + 1e-8), each
        assert found.searched.least <= bound(profile, cluster, each) <= least * (1 + 1e-8), each
        assert max(promised(short), promised(hurried)) <= least * (1 + 1e-8), each


def promised(found: Plan) -> float:
    """No configuration takes less, so the plan says."""
    left = found.searched.least_left
    return min(found.simulated_step_time, math.inf if left is None else left)


@settings(max_examples=25, deadline=None)
@given(
    profile=chains(),
    cluster=CLUSTERS,
    batch=st.integers(1, 8),
    schedule=st.sampled_from(["hanayo", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v", "interleaved-zb"]),
)
def test_never_worse_where_stages_go_back_and_forth_or_backwards_are_split(
    profile: Profile, cluster: Cluster, batch: int, schedule: str
) -> None:
    """No bound hides what they gain over 1F1B."""
    found = plan(profile, cluster, global_batch=batch, schedules=("1f1b", schedule), chunk_sizes=(2,))
    assert found.simulated_step_time == pytest.approx(simulate_plan(profile, cluster, found), rel=1e-9)
    for each in configurations(profile, cluster, batch, 2, schedule):
        try:
            least = step(profile, cluster, shards=1, **each)
        except ValueError:  # too few microbatches
            continue
        assert found.simulated_step_time <= least * (1 + 1e-8), each
        assert found.searched.least <= bound(profile, cluster, each) <= least * (1 + 1e-8), each


def bound(profile: Profile, cluster: Cluster, each: dict[str, Any]) -> float:
    """Bound that the search knows of a configuration before it is cut."""
    c = configuration(
        num_chunks=(len(each["ends"]) - 1) // each["pipeline"],
        **{name: value for name, value in each.items() if name != "ends"},
    )
    return LeastSeconds(Topology(cluster)).of_configuration(c, Model(profile, MemoryRules(optimizer_ratio=2.0)))


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(
    profile=chains(),
    cluster=st.sampled_from([Cluster.from_levels([(2, 40.0), (2, 5.0)]), Cluster.from_levels([(4, 9.0)])]),
    batch=st.integers(1, 6),
    share=st.floats(0.1, 0.8),
)
def test_what_is_left_out_takes_as_long_as_is_promised_with_tensor_ranks_and_little_memory(
    profile: Profile, cluster: Cluster, batch: int, share: float
) -> None:
    """Each way to cut, place and recompute that fits, simulated here: no promise of a search is above any of them."""
    source = OverTensors(profile, 1.3, sizes=(1, 2))
    limit = share * sum(4 * node.parameter_bytes + 2 * node.stash_bytes for node in profile.nodes) + 0.5
    every = [
        step(shown, cluster, shards=1, recompute=recompute, tensor=tensor, **each)
        for tensor in (1, 2)
        for shown in [source.profile(microbatch_size=1, tensor=tensor)]
        for each in configurations(shown, cluster, batch, 1, tensor=tensor)
        for recompute in fitting_recompute(shown, each, limit, tensor)
    ]
    options: dict[str, Any] = {"global_batch": batch, "memory_limit": limit, "optimizer_sharding": ("none",)}
    options["microbatch_sizes"] = (1,)
    for cut_short in ({}, {"max_simulated": 1, "num_runners_up": 0}, {"seconds": 0.0}):
        try:
            found = plan(source, cluster, **options, **cut_short)
        except ValueError as error:
            assert "nothing fits the memory" in str(error)  # noqa: PT017
            assert not every
            return
        least = min(every, default=math.inf) * (1 + 1e-8)
        assert found.searched.least <= promised(found) <= least
        if not cut_short:
            assert found.simulated_step_time <= least
            assert found.searched.faster_left(found.simulated_step_time) == 0
