"""Plans that are given: what the planner said of its own, and what nobody planned."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.partition import Cluster, DeviceKind, GivenStage, Node, Plan, Profile, evaluate, plan

from .test_planner_brute_force import CLUSTERS, chains

NODES = tuple(
    Node(name=name, forward_seconds=1, backward_seconds=2, stash_bytes=10, parameter_bytes=4, activation_bytes=2)
    for name in "abcd"
)
PROFILE = Profile(nodes=NODES, microbatch_size=1)


def again(profile: Profile, cluster: Cluster, found: Plan, **options: Any) -> Plan:
    """The plan without a word of what was found about it."""
    assert found.num_microbatches is not None
    assert found.schedule is not None
    return evaluate(
        profile,
        cluster,
        [GivenStage(s.nodes, s.ranks, s.tensor, s.recompute, s.optimizer_shards) for s in found.stages],
        num_microbatches=found.num_microbatches,
        schedule=found.schedule,
        **options,
    )


@settings(max_examples=40, deadline=None)
@given(
    profile=chains(),
    cluster=CLUSTERS,
    batch=st.integers(1, 8),
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved", "2bw", "zb-v"]),
    tight=st.floats(0.3, 1.0),
)
def test_a_plan_that_is_given_costs_what_the_planner_said(
    profile: Profile, cluster: Cluster, batch: int, schedule: str, tight: float
) -> None:
    """Unequal replicas, divided optimizers and recomputed stages among them; so do the runners-up."""
    others: list[Plan] = []
    options: dict[str, Any] = {"global_batch": batch, "schedules": ("1f1b", schedule), "chunk_sizes": (2,)}
    best = plan(profile, cluster, on_runners_up=others.extend, **options)
    limit = tight * max(best.memory_bytes) + 1e-6
    with suppress(ValueError):  # nothing fits
        others.append(plan(profile, cluster, memory_limit=limit, **options))
    for each in (best, *others):
        same = again(profile, cluster, each)
        assert same.simulated_step_time == pytest.approx(each.simulated_step_time, rel=1e-9)
        assert same.memory_bytes == pytest.approx(each.memory_bytes)
        assert same.predicted_step_time == pytest.approx(each.predicted_step_time)
        assert same.bubble == pytest.approx(each.bubble, abs=1e-9)


def test_what_waits_on_the_host_and_what_exceeds_the_memory() -> None:
    kind = DeviceKind(name="card", host_bandwidth=100.0)
    cluster = replace(Cluster.parse("2:net=1GB/s"), kinds=(kind,), nodes=("card",))
    stages = [GivenStage("ab", [0], recompute="offload"), GivenStage("cd", [1], recompute="layer:1")]
    sizes: dict[str, Any] = {"num_microbatches": 8, "schedule": "gpipe"}
    found = evaluate(PROFILE, cluster, stages, memory_limit=1e6, **sizes)
    assert [stage.recompute for stage in found.stages] == ["offload", "layer:1"]
    assert not any("more than there are" in note for note in found.notes)
    plain = evaluate(PROFILE, cluster, [GivenStage("ab", [0]), GivenStage("cd", [1])], **sizes)
    assert found.memory_bytes[0] < plain.memory_bytes[0]
    over = evaluate(PROFILE, cluster, plain.stages, memory_limit=plain.memory_bytes[0] - 1, **sizes)
    assert over.simulated_step_time == plain.simulated_step_time
    assert "on rank 0 it takes 1 bytes more than there are" in over.notes


def test_ranks_of_another_order_take_other_links() -> None:
    """Stages that lie two hosts apart pay for the slow link twice, where neighbours pay once."""
    cluster = Cluster.from_levels([(2, 1000.0), (2, 1.0)])
    one, other = (
        evaluate(PROFILE, cluster, [GivenStage(n, [r]) for n, r in zip("abcd", order, strict=True)], num_microbatches=1)
        for order in ((0, 1, 2, 3), (0, 2, 1, 3))
    )
    assert one.simulated_step_time == pytest.approx(12 + 2 * (2 * 2 / 1000 + 2 / 1))
    assert other.simulated_step_time == pytest.approx(12 + 2 * (3 * 2 / 1))


@pytest.mark.parametrize(
    ("stages", "options", "message"),
    [
        ([("abc", [0])], {}, r"nodes of the stages: \['d'\]: expected each node of the profile once"),
        ([("abcd", [0]), ("d", [1])], {}, r"nodes of the stages: \['d'\]"),
        ([("ac", [0]), ("bd", [1])], {}, "stage 0 ends where the graph has no cut"),
        ([("ab", [0, 1]), ("cd", [1])], {}, "expected some of 0 to 3 a place, each once"),
        ([("ab", [0]), ("cd", [4])], {}, "expected some of 0 to 3 a place, each once"),
        ([("ab", [0]), ("c", [1]), ("d", [0])], {}, "3 stages on 2 places"),
        (
            [("a", [0]), ("b", [0]), ("c", [1]), ("d", [1])],
            {"schedule": "interleaved"},
            r"expected places \[0, 1, 0, 1",
        ),
        ([("ab", [0, 1, 2], 2), ("cd", [3])], {}, "3 ranks with tensor=2: expected a multiple"),
        ([("ab", [0], 1, "half"), ("cd", [1])], {}, "recompute='half'"),
        ([("ab", [0, 1], 1, "none", 3), ("cd", [2])], {}, "optimizer_shards=3: expected 1, or its 2 replicas"),
        ([("ab", [0]), ("cd", [1])], {"schedule": "chimera"}, "schedule='chimera'"),
        ([("ab", [0]), ("cd", [1])], {"num_microbatches": 0}, "num_microbatches"),
        (
            [("ab", [0]), ("cd", [1])],
            {"microbatch_size": 2},
            "microbatch_size=2: expected one of the profiles' sizes, 1",
        ),
        ([("abcd", [0])], {"memory_limit": -1.0}, "memory_limit"),
        ([], {}, "ranks of the stages"),
        ([("ab", [0]), ("cd", [1])], {"schedule": "seq1f1b"}, r"slice_lengths=\(\) under 'seq1f1b'"),
        ([("ab", [0]), ("cd", [1])], {"slice_lengths": (4, 4)}, r"slice_lengths=\(4, 4\) under '1f1b'"),
        ([("ab", [0], 1, "offload"), ("cd", [1])], {}, "recompute='offload': expected a cluster with"),
        ([("ab", [0], 1, "selective"), ("cd", [1])], {}, "recompute='selective': the profile has no figures"),
    ],
)
def test_mistakes(stages: list[tuple[Any, ...]], options: dict[str, Any], message: str) -> None:
    settings = {"num_microbatches": 4} | options
    with pytest.raises(ValueError, match=message):
        evaluate(PROFILE, Cluster.parse("4:net=1GB/s"), [GivenStage(*each) for each in stages], **settings)
