"""Bytes on a rank by data structure, counted by hand and along lowered programs."""

from __future__ import annotations

import pytest
from support.inside import LowerSTAGE_KINDS as STAGE_KINDS
from support.inside import Sharing, Transfer, make_stream, receives_ahead

from stagewright.partition import Cluster, MemoryUse, Node, PlanStage, Profile, partition
from stagewright.schedules import Message, build, lower

FREE = 1e15


def chain(size: int, activation_bytes: float = 100) -> Profile:
    return Profile(
        nodes=tuple(
            Node(
                name=f"n{at}",
                forward_seconds=1,
                backward_seconds=2,
                activation_bytes=activation_bytes,
                parameter_bytes=10,
                stash_bytes=1000,
                workspace_bytes=5 + at,
            )
            for at in range(size)
        ),
        optimizer_ratio=2.0,
    )


def stages(num_stages: int, *, schedule: str, num_microbatches: int = 4, size: float = 100) -> tuple[PlanStage, ...]:
    return partition(
        chain(2 * num_stages, size),
        Cluster.from_levels([(num_stages, FREE)]),
        schedule=schedule,
        num_microbatches=num_microbatches,
        straight=True,
    ).stages


def held(stage: PlanStage) -> MemoryUse:
    assert stage.memory is not None
    return stage.memory


def test_memory_of_each_stage_at_the_peak() -> None:
    first, second = stages(2, schedule="1f1b")
    assert (first.nodes, first.in_flight, second.nodes, second.in_flight) == (("n0", "n1"), 2, ("n2", "n3"), 1)
    assert held(first) == MemoryUse(
        parameters=20, gradients=20, optimizer=40, activations=4000, workspace=6 + 100, communication=100 * (4 + 2)
    )
    assert (held(second).activations, held(second).workspace) == (2000, 8 + 100)


def test_versions_of_the_weights_count() -> None:
    assert [held(stage).parameters for stage in stages(2, schedule="pipedream")] == [40, 20]
    assert [held(stage).parameters for stage in stages(2, schedule="2bw")] == [40, 40]
    assert [held(stage).parameters for stage in stages(2, schedule="paci")] == [20, 20]


def test_one_stage_sends_nothing() -> None:
    (only,) = stages(1, schedule="1f1b")
    assert held(only).communication == 0


def peaks(schedule: str, num_stages: int, num_microbatches: int, size: float) -> list[float]:
    """[S] the most bytes of messages that each stage holds at once, by walking through its program, call by call."""
    whole = build(schedule, num_ranks=num_stages, num_microbatches=num_microbatches)
    sharing = Sharing(receives_ahead=receives_ahead(size))
    if whole.is_asynchronous:
        stream = make_stream(whole, sharing=sharing)
        ranks = [[stream.call(rank, batch, first_batch=0) for batch in range(6)] for rank in range(num_stages)]
    else:
        ranks = [[program] for program in lower(whole, sharing=sharing).programs]
    found = []
    for programs in ranks:
        now: dict[Message, float] = {}
        most = 0.0
        for program, step in ((each, step) for each in programs for step in each.steps):
            if isinstance(step, Transfer):
                now[step.message] = size if step.message.kind in STAGE_KINDS else 0.0
                most = max(most, sum(now.values()))
                continue
            for message in program.inputs.get(step, ()):
                for done in (message, *program.proves.get(message, ())):
                    now.pop(done, None)
        found.append(most)
    return found


@pytest.mark.thorough(but=["100-7-2-1f1b"])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "pipedream"])
@pytest.mark.parametrize("num_stages", [2, 3, 4, 6])
@pytest.mark.parametrize("num_microbatches", [7, 17])
@pytest.mark.parametrize("size", [100, 1 << 21, 1e9])
def test_messages_are_those_of_the_lowered_program(
    schedule: str, num_stages: int, num_microbatches: int, size: float
) -> None:
    """To the byte at both ends; in the middle up to two messages that are never there at once. The receives posted
    ahead are all of a batch, eight or four."""
    counted = peaks(schedule, num_stages, num_microbatches, size)
    found = stages(num_stages, schedule=schedule, num_microbatches=num_microbatches, size=size)
    predicted = [held(stage).communication for stage in found]
    assert (predicted[0], predicted[-1]) == (counted[0], counted[-1])
    for most, said in zip(counted, predicted, strict=True):
        assert most <= said <= most + 2 * size
