"""The peak that a plan predicts beside memory over time under its own schedule."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from stagewright.partition import Cluster, MemoryUse, Node, Plan, Profile, plan
from stagewright.schedules import Costs, MemoryCurve, MemoryPart, Op, Schedule, memory_curves, simulate

KEPT = {
    MemoryPart.WEIGHTS: "parameters",
    MemoryPart.GRADIENTS: "gradients",
    MemoryPart.OPTIMIZER: "optimizer",
    MemoryPart.BUFFERS: "buffers",
    MemoryPart.ACTIVATIONS: "activations",
    MemoryPart.WORKSPACE: "workspace",
}


def uneven(size: int, *, stash: float = 1) -> Profile:
    return Profile(
        nodes=tuple(
            Node(
                name=f"n{at}",
                forward_seconds=1,
                backward_seconds=2,
                activation_bytes=100 + 7 * at,
                parameter_bytes=1000 + 30 * at,
                buffer_bytes=3,
                stash_bytes=stash * (900 - 40 * at),
                workspace_bytes=50 + at,
            )
            for at in range(size)
        ),
        optimizer_ratio=2.0,
        microbatch_size=1,
    )


def planned(schedule: str, *, stash: float = 1, **options: object) -> Plan:
    given: dict[str, object] = {"global_batch": 12, "schedules": (schedule,), "pipeline_sizes": (4,), **options}
    return plan(uneven(16, stash=stash), Cluster.from_levels([(4, 1e15)]), **given)  # type: ignore[arg-type]


def curves_of(found: Plan) -> tuple[Schedule, tuple[MemoryCurve, ...]]:
    schedule = found.build_schedule()
    costs = Costs(forward=found.seconds(Op.F), backward=found.seconds(Op.B), update=1.0)
    return schedule, memory_curves(simulate(schedule, costs), found.stage_bytes)


def total(parts: Mapping[MemoryPart, float]) -> float:
    return sum(size for part, size in parts.items() if part is not MemoryPart.MESSAGES)


def without_messages(use: MemoryUse) -> float:
    return use.total - use.communication


@pytest.mark.thorough(but=["full-gpipe"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pipedream", "2bw"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_stage_a_rank_is_predicted_to_the_byte(schedule: str, recompute: str) -> None:
    """Messages apart: of those that a plan adds up some are never there at once, or when all else is most.

    Under gpipe gradients that were sent behind the last forward pile up, since nothing comes back that proves their
    receipt: more messages than predicted, while at least as many bytes of activations go.
    """
    found = planned(schedule, recompute=(recompute,))
    for rank, curve in enumerate(curves_of(found)[1]):
        said = found.memory[rank]
        at = max(range(len(curve.times)), key=lambda n: total({part: v[n] for part, v in curve.parts.items()}))
        parts = {part: values[at] for part, values in curve.parts.items()}
        assert total(parts) == without_messages(said)
        assert {name: parts.get(part, 0.0) for part, name in KEPT.items()} == {
            name: getattr(said, name) for name in KEPT.values()
        }
        widest = max(each.output for each in found.stage_bytes)
        most = max(curve.parts[MemoryPart.MESSAGES])
        assert curve.peak <= said.total
        if schedule == "gpipe":
            assert said.total <= curve.peak + said.communication
        else:
            assert most <= said.communication <= most + 4 * widest
            assert said.total <= curve.peak + 4 * widest


@pytest.mark.thorough(but=["interleaved"])
@pytest.mark.parametrize("schedule", ["interleaved", "looped-bfs", "hanayo", "zb-v"])
def test_several_stages_a_rank_are_never_more_than_predicted(schedule: str) -> None:
    """A plan adds the largest workspace of the rank's stages to its fullest moment; it may run at another one."""
    found = planned(schedule, chunk_sizes=(2,), global_batch=16)
    for rank, curve in enumerate(curves_of(found)[1]):
        said = found.memory[rank]
        most = max(total({part: v[n] for part, v in curve.parts.items()}) for n in range(len(curve.times)))
        spaces = [
            each.workspace for each, at in zip(found.stage_bytes, found.stages, strict=True) if at.ranks == (rank,)
        ]
        assert most <= without_messages(said) <= most + max(spaces)
        assert curve.peak <= said.total


@pytest.mark.thorough(but=["0.9-1f1b"])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize("stash", [0.9, 10])
def test_replicas_with_a_divided_optimizer(schedule: str, stash: float) -> None:
    """Behind a flush gradients are summed when no activations are left; without one, beside those of the next batch."""
    found = planned(schedule, pipeline_sizes=(2,), data_sizes=(2,), optimizer_sharding=("full",), stash=stash)
    assert {stage.optimizer_shards for stage in found.stages} == {2}
    for rank, curve in enumerate(curves_of(found)[1]):
        said, summing = found.memory[rank], found.stage_bytes[rank // 2].summing
        most = max(total({part: v[n] for part, v in curve.parts.items()}) for n in range(len(curve.times)))
        is_behind = schedule == "1f1b" and stash < 1
        if is_behind:
            kept = said.parameters + said.gradients + said.optimizer + said.buffers
            assert without_messages(said) == kept < most < kept + summing
        else:
            assert most == without_messages(said)
        assert (said.communication >= summing) == (is_behind or schedule == "2bw")
        assert curve.peak <= said.total


def test_plans_keep_what_the_curves_need() -> None:
    found = planned("1f1b", memory_limit=50_000.0)
    assert found.memory_limits == dict.fromkeys(range(4), 50_000.0)
    again = Plan.from_json(found.to_json())
    assert again == found
    assert again.stage_bytes == found.stage_bytes
    assert len(again.stage_bytes) == 4
    roomy = planned("1f1b")
    assert roomy.memory_limits == {}
