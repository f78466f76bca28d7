"""Memory of stages at the peak of a schedule, counted by hand."""

from __future__ import annotations

from stagewright.partition import Node, Profile
from stagewright.partition.solver.stage_memory import StageMemory, communication_peaks, crossing, stage_memory

CHAIN = Profile(
    nodes=tuple(
        Node(
            name=name,
            forward_seconds=1,
            backward_seconds=2,
            activation_bytes=100,
            parameter_bytes=10,
            stash_bytes=1000,
            workspace_bytes=workspace,
        )
        for name, workspace in zip("abcd", (5, 6, 7, 8), strict=True)
    ),
    optimizer_ratio=2.0,
)


def memory(num_stages: int, *, schedule: str) -> list[StageMemory]:
    return stage_memory(CHAIN, num_stages=num_stages, schedule=schedule, num_microbatches=4, receives_ahead=4)


def peaks(num_microbatches: int) -> list[float]:
    return communication_peaks([100.0], schedule="1f1b", num_microbatches=num_microbatches, receives_ahead=4)


def test_memory_of_each_stage_at_the_peak() -> None:
    first, second = memory(2, schedule="1f1b")
    assert (first.nodes, first.in_flight, second.nodes, second.in_flight) == ("a .. b", 2, "c .. d", 1)
    assert (first.parameters, first.gradients, first.optimizer_state) == (20, 20, 40)
    assert (first.activations, second.activations) == (4000, 2000)
    assert (first.workspace, second.workspace) == (6, 8)
    assert first.total == 20 + 20 + 40 + 4000 + 6 + first.communication


def test_versions_of_the_weights_count() -> None:
    first, second = memory(2, schedule="pipedream")
    assert (first.parameters, second.parameters) == (40, 20)
    first, second = memory(2, schedule="2bw")
    assert (first.parameters, second.parameters) == (40, 40)


def test_one_stage_sends_nothing() -> None:
    (only,) = memory(1, schedule="1f1b")
    assert only.communication == 0


def test_messages_that_are_held_at_once() -> None:
    """One microbatch, two stages: rank 0 posts the receive of the gradient and sends the activation."""
    first, second = peaks(1)
    assert first == 200
    assert second == 100  # the activation is consumed before the gradient leaves
    many = peaks(64)
    assert many == peaks(32)  # however long the batch


def test_a_skip_crosses_each_cut_that_it_spans() -> None:
    nodes = [
        Node(name=n, forward_seconds=1, backward_seconds=1, activation_bytes=b)
        for n, b in zip("abc", (1, 10, 100), strict=True)
    ]
    profile = Profile(nodes=tuple(nodes), edges=(("a", "b"), ("b", "c"), ("a", "c")))
    assert crossing(profile, {"a": 0, "b": 1, "c": 2}, 3) == [1, 11]
