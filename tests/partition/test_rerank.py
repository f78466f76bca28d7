"""Simulation of the candidates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagewright.partition import Cluster, Node, Profile
from stagewright.partition.solver import rerank as rerank_module
from stagewright.partition.solver.antichains import all_cuts
from stagewright.partition.solver.dynamic import Piece, Solution
from stagewright.partition.solver.rerank import Simulated, simulate_solution
from stagewright.partition.solver.stage_costs import Memory, StageCosts
from stagewright.schedules import Costs, build, simulate

CLUSTER = Cluster.parse("4:net=10B/s@1s")
NODES = (
    Node(name="a", forward_seconds=2, backward_seconds=4, activation_bytes=5, parameter_bytes=20),
    Node(name="b", forward_seconds=1, backward_seconds=2, activation_bytes=7),
)


def simulated(
    schedule: str, replicas: tuple[int, int], num_microbatches: int | None, nodes: tuple[Node, ...] = NODES
) -> Simulated | str:
    costs = StageCosts(
        all_cuts(Profile(nodes=nodes)),
        CLUSTER,
        schedule=schedule,
        num_microbatches=num_microbatches,
        memory=Memory(),
    )
    pieces = (
        Piece(first=0, last=1, replicas=replicas[0], devices=sum(replicas)),
        Piece(first=1, last=2, replicas=replicas[1], devices=replicas[1]),
    )
    seconds = max(float(costs.seconds(p.first, p.last, costs.shape(p.replicas, p.devices))) for p in pieces)
    return simulate_solution(
        Solution(pieces=pieces, seconds=seconds, bound=seconds), costs, CLUSTER, Profile(nodes=nodes)
    )


def test_stages_costs_and_messages_reach_the_simulator() -> None:
    found = simulated("1f1b", (1, 1), 4)
    schedule = build("1f1b", num_ranks=2, num_microbatches=4)
    timeline = simulate(schedule, Costs(forward=[2, 1], backward=[4, 2], latency=1 + 5 / 10))
    assert isinstance(found, Simulated)
    assert (found.seconds, found.bubble) == pytest.approx((timeline.makespan, timeline.makespan_bubble))


def test_optimizer_steps_and_memory() -> None:
    """The optimizer's step stands behind the flush; the first rank holds two microbatches, the second one."""
    nodes = tuple(replace(node, update_seconds=3.0, stash_bytes=100.0) for node in NODES)
    plain, found = simulated("1f1b", (1, 1), 4), simulated("1f1b", (1, 1), 4, nodes)
    assert isinstance(plain, Simulated)
    assert isinstance(found, Simulated)
    assert found.seconds == pytest.approx(plain.seconds + 3)
    assert (plain.memory_bytes, found.memory_bytes) == (80.0, 280.0)


def test_replicas_without_a_flush() -> None:
    found = simulated("2bw", (2, 1), 4)
    schedule = build("2bw", num_ranks=3, num_microbatches=4, replicas=(2, 1))
    timeline = simulate(schedule, Costs(forward=[2, 1], backward=[4, 2], latency=1 + 5 / 10))
    assert isinstance(found, Simulated)
    assert found.seconds == pytest.approx(max(timeline.batch_seconds, 4 * 3.0))


def test_what_is_not_simulated_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulated("1f1b", (1, 1), None) == "not simulated: num_microbatches is not given"
    assert "not simulated: num_microbatches=3 with replicas=(2, 1)" in str(simulated("pipedream", (2, 1), 3))
    monkeypatch.setattr(rerank_module, "MAX_ACTIONS", 10)
    assert simulated("1f1b", (1, 1), 4) == "not simulated: more than 10 actions a batch"
