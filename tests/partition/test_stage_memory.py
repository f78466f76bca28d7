"""Bytes on a rank: by data structure, counted by hand and along lowered programs, over time, and beside tensors.

A plan that takes just as many bytes as there are fits; one byte in a million less, and it does not.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, pairwise
from random import Random
from typing import Any

import pytest
from support.inside import LowerSTAGE_KINDS as STAGE_KINDS
from support.inside import Sharing, Transfer, make_stream, receives_ahead

from stagewright.partition import (
    Cluster,
    GivenStage,
    MemoryUse,
    Node,
    Plan,
    PlanStage,
    Profile,
    evaluate,
    partition,
    plan,
)
from stagewright.schedules import (
    Costs,
    MemoryCurve,
    MemoryPart,
    Message,
    Op,
    Schedule,
    build,
    lower,
    memory_curves,
    simulate,
)

from . import small

FREE = 1e15


def chain(size: int, activation_bytes: float = 100) -> Profile:
    alike = small.chain(size, activation_bytes=activation_bytes, parameter_bytes=10, stash_bytes=1000)
    nodes = [replace(node, workspace_bytes=5 + at) for at, node in enumerate(alike.nodes)]
    return replace(alike, nodes=nodes, optimizer_ratio=2.0)


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


def planned(device: str, memory: str, **options: Any) -> Plan:
    profile = replace(small.chain(2, parameter_bytes=1e8, stash_bytes=1e8, activation_bytes=8), device=device)
    cluster = Cluster.parse(f"2:net=1GB/s:{memory}")
    options |= {"pipeline_sizes": (2,), "data_sizes": (1,)}
    return plan(profile, cluster, global_batch=4, **options)


def test_a_plan_leaves_what_is_certain_to_be_kept_beside_tensors() -> None:
    """To the byte: CUDA's context; malloc keeps nothing for certain."""
    only: dict[str, Any] = {"schedules": "1f1b", "recompute": "none"}
    tensors = max(planned("cuda", "10GB", **only).memory_bytes.values())
    gpus = dict.fromkeys(("cuda", "cuda:0", "NVIDIA L4", "A100-80GB"), 300e6)
    for device, beside in (gpus | dict.fromkeys(("cpu", "device", "tpu"), 0.0)).items():
        fits = planned(device, f"{(tensors + beside) / 1e9}GB", **only)
        assert fits.memory_limits[0] == pytest.approx(tensors + beside)  # all of the device's
        with pytest.raises(ValueError, match=r"nothing fits the memory: .* bytes") as error:
            planned(device, f"{(tensors + beside - 10) / 1e9}GB", **only)
        assert ("(300,000,000 of them besides tensors, for the device's context)" in str(error.value)) == (beside > 0)


BELOW = 1 - 1e-6


def by_plan(profile: Profile, cluster: Cluster, M: int, limit: float, *, straight: bool = False) -> Plan:
    data = (1,) if straight else None
    free: dict[str, Any] = {"recompute": ("none",), "optimizer_sharding": ("none",), "schedules": "1f1b"}
    return plan(profile, cluster, global_batch=M, memory_limit=limit, data_sizes=data, **free)


def by_partition(profile: Profile, cluster: Cluster, M: int, limit: float, *, straight: bool = False) -> Plan:
    return partition(profile, cluster, num_microbatches=M, memory_limit=limit, straight=straight)


PLANNERS = (by_plan, by_partition)


@pytest.mark.parametrize(("devices", "M", "needed"), [(1, 1, 80.0), (1, 4, 90.0), (2, 1, 40.0), (2, 4, 50.0)])
def test_eighty_bytes_fit_in_eighty(devices: int, M: int, needed: float) -> None:
    """Two nodes of 10 bytes of weights, with gradients and twice as much of the optimizer; 5 bytes of each microbatch.

    The first backward's gradients come while its microbatch is still there: after a batch of one 4 x 20 bytes, before
    the last of several backwards 10 more; of two stages each half.
    """
    profile, cluster = small.chain("ab", parameter_bytes=10.0, stash_bytes=5.0), Cluster.from_levels([(devices, 1e9)])
    stages = [GivenStage("ab", [0])] if devices == 1 else [GivenStage("a", [0]), GivenStage("b", [1])]
    for part, over in ((1.0, False), (BELOW, True)):
        given = evaluate(profile, cluster, stages, num_microbatches=M, memory_limit=needed * part)
        assert max(given.memory_bytes.values()) == needed
        assert any("bytes more than there are" in note for note in given.notes) == over
    for planned in PLANNERS:
        assert max(planned(profile, cluster, M, needed).memory_bytes.values()) == needed
        with pytest.raises(ValueError, match=f"needs {needed:.0f} bytes of {needed - 1:.0f}, 1 too many"):
            planned(profile, cluster, M, needed * BELOW)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_at_every_edge_the_fastest_that_fits_is_found(seed: int) -> None:
    """Against all cuts of four nodes into stages of one device each, at each of their peaks and just below it."""
    rng = Random(seed)
    nodes = [
        Node(
            name=name,
            forward_seconds=rng.choice([1, 2, 3]),
            backward_seconds=rng.choice([2, 4]),
            activation_bytes=rng.choice([0.0, 0.3]),
            parameter_bytes=rng.choice([0.1, 7.3, 10.0]),
            stash_bytes=rng.choice([0.0, 0.7, 5.0]),
            workspace_bytes=rng.choice([0.0, 2.0]),
        )
        for name in "abcd"
    ]
    M, devices = rng.choice([1, 3, 6]), 3
    profile, cluster = Profile(nodes=nodes, microbatch_size=1), Cluster.from_levels([(devices, 1e9)])
    every = []
    for inner in (each for number in range(devices) for each in combinations(range(1, 4), number)):
        stages = [GivenStage("abcd"[a:b], [p]) for p, (a, b) in enumerate(pairwise((0, *inner, 4)))]
        given = evaluate(profile, cluster, stages, num_microbatches=M)
        every.append((max(given.memory_bytes.values()), given.simulated_step_time or 0.0))
    for limit in (part * peak for peak, _ in every for part in (1.0, BELOW)):
        fitting = [seconds for peak, seconds in every if peak <= limit * (1 + 1e-12)]
        for planned in PLANNERS:
            if not fitting:
                with pytest.raises(ValueError, match="nothing fits the memory"):
                    planned(profile, cluster, M, limit, straight=True)
                continue
            found = planned(profile, cluster, M, limit, straight=True)
            assert found.simulated_step_time == pytest.approx(min(fitting), rel=1e-9)
            assert max(found.memory_bytes.values()) <= limit * (1 + 1e-12)


@pytest.mark.thorough(but=["zb-v-2-8-30"])
@pytest.mark.parametrize(
    ("schedule", "chunks", "M", "number"), [("zb-v", 2, 8, 30), ("dualpipe-v", 2, 8, 30), ("interleaved-zb", 5, 4, 40)]
)
def test_a_limit_of_what_the_best_plan_takes_makes_none_slower(schedule: str, chunks: int, M: int, number: int) -> None:
    """Under a V the first of two stages holds nearly all that its rank does, which is more than half of the limit.
    Cuts of many chunks are moved past some that do not fit."""
    profile = unequal(0 if chunks > 2 else 1, number, longest=4.0 if chunks > 2 else 2.5)
    options: dict[str, Any] = {"global_batch": M, "schedules": (schedule,), "chunk_sizes": (chunks,)}
    options |= {"pipeline_sizes": (4,)}
    free = plan(profile, Cluster.parse("4:net=1000GB/s"), **options)
    most = max(free.memory_bytes.values())
    bound = plan(profile, Cluster.parse("4:net=1000GB/s"), memory_limit=most, **options)
    assert max(bound.memory_bytes.values()) <= most
    assert (bound.simulated_step_time or 0.0) <= (free.simulated_step_time or 0.0)


def unequal(seed: int, number: int, *, longest: float) -> Profile:
    rng, sizes = Random(seed), [1.0, 1.5, 2.5, longest]
    nodes = [
        Node(name=f"n{i}", forward_seconds=s, backward_seconds=2 * s, stash_bytes=1.0)
        for i in range(number)
        for s in [rng.choice(sizes[: 3 + (longest > 2.5)])]
    ]
    return Profile(nodes=nodes, microbatch_size=1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("schedule", "seed", "limit"), [("zb-v", 2, None), ("zb-v", 3, 12.0), ("interleaved-zb", 0, None)]
)
def test_no_cut_under_the_named_order_beats_one_with_an_order_for_its_costs(
    schedule: str, seed: int, limit: float | None
) -> None:
    """Against all cuts in its own order; and its order on all cuts with one moved to the next place."""
    profile, cluster, M = unequal(seed, 11, longest=4.0), Cluster.parse("3:net=1000GB/s"), 6
    sizes: dict[str, Any] = {"pipeline_sizes": (3,), "data_sizes": (1,), "chunk_sizes": (2,), "memory_limit": limit}
    found = plan(profile, cluster, global_batch=M, schedules=schedule, **sizes)
    own, S = found.build_schedule(), len(found.stages)
    assert found.order
    assert found.simulated_step_time == pytest.approx(
        evaluate(profile, cluster, found.stages, num_microbatches=M, schedule=own).simulated_step_time
    )
    names, ends = [node.name for node in profile.nodes], [0]
    for stage in found.stages:
        ends.append(ends[-1] + len(stage.nodes))
    assert max(found.memory_bytes.values()) <= (limit or 1e9)

    def seconds(inner: tuple[int, ...], order: Any) -> float:
        cuts = pairwise((0, *inner, len(names)))
        stages = [GivenStage(names[a:b], found.stages[s].ranks) for s, (a, b) in enumerate(cuts)]
        given = evaluate(profile, cluster, stages, num_microbatches=M, schedule=order)
        return 1e9 if max(given.memory_bytes.values()) > (limit or 1e9) else given.simulated_step_time or 0.0

    best = (found.simulated_step_time or 0.0) * (1 - 1e-9)
    assert best < min(seconds(inner, schedule) for inner in combinations(range(1, len(names)), S - 1))
    near = ((*ends[1:s], ends[s] + step, *ends[s + 1 : -1]) for s in range(1, S) for step in (-1, 1))
    assert best < min(seconds(inner, own) for inner in near if sorted({0, *inner, 11}) == [0, *inner, 11])


KEPT = {
    MemoryPart.WEIGHTS: "parameters",
    MemoryPart.GRADIENTS: "gradients",
    MemoryPart.OPTIMIZER: "optimizer",
    MemoryPart.BUFFERS: "buffers",
    MemoryPart.ACTIVATIONS: "activations",
    MemoryPart.WORKSPACE: "workspace",
}


def uneven(size: int, *, stash: float = 1) -> Profile:
    nodes = [
        replace(
            node,
            activation_bytes=100 + 7 * at,
            parameter_bytes=1000 + 30 * at,
            stash_bytes=stash * (900 - 40 * at),
            workspace_bytes=50 + at,
        )
        for at, node in enumerate(small.chain(size, buffer_bytes=3).nodes)
    ]
    return Profile(nodes=nodes, optimizer_ratio=2.0, microbatch_size=1)


def planned_curves(schedule: str, *, stash: float = 1, **options: object) -> Plan:
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


@pytest.mark.thorough(but=["none-gpipe"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pipedream", "2bw"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_stage_a_rank_is_predicted_to_the_byte(schedule: str, recompute: str) -> None:
    """Messages apart: of those that a plan adds up some are never there at once, or when all else is most.

    Under gpipe gradients that were sent behind the last forward pile up, since nothing comes back that proves their
    receipt: more messages than predicted, while at least as many bytes of activations go.
    """
    found = planned_curves(schedule, recompute=(recompute,))
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
    found = planned_curves(schedule, chunk_sizes=(2,), global_batch=16)
    for rank, curve in enumerate(curves_of(found)[1]):
        said = found.memory[rank]
        most = max(total({part: v[n] for part, v in curve.parts.items()}) for n in range(len(curve.times)))
        spaces = [
            each.workspace for each, at in zip(found.stage_bytes, found.stages, strict=True) if at.ranks == (rank,)
        ]
        assert most <= without_messages(said) <= most + max(spaces)
        assert curve.peak <= said.total


def as_a_rank_holds(found: Plan, schedule: Schedule, rank: int) -> float:
    """The most bytes along the rank's program: outputs wait until their own backward, receives are all posted."""
    own, stages, edge = schedule.placement[rank], found.stage_bytes, schedule.num_stages
    kept = sum(stages[s].weights + stages[s].optimizer + stages[s].buffers for s in own)
    into = {s: stages[s - 1].output if s and s - 1 not in own else 0.0 for s in own}
    out = {s: stages[s].output if s + 1 not in own and s + 1 < edge else 0.0 for s in own}
    held = kept + schedule.num_microbatches * sum(into[s] + out[s] for s in own)
    most, left = held, dict.fromkeys(own, schedule.num_microbatches)
    for s, op, _ in schedule.programs[rank]:
        if op is Op.F:
            held += stages[s].activations + out[s] - into[s]
            most = max(most, held)
        elif op is Op.B:
            most = max(most, held + stages[s].workspace + stages[s].again - out[s])  # its gradient came before
            held -= stages[s].activations + 2 * out[s]
            held += stages[s].gradients if left[s] == schedule.num_microbatches else 0.0
            left[s] -= 1
    return most


@pytest.mark.parametrize("weight", [1e-3, 1, 100])
@pytest.mark.parametrize("stash", [0.1, 1, 10])
def test_messages_of_chunks_count_when_all_else_is_most(stash: float, weight: float) -> None:
    """They counted as if all were there then: up to 24% too much."""
    cluster, options = Cluster.from_levels([(4, FREE)]), {"global_batch": 8, "recompute": "none"}
    for schedule, P, V in (("interleaved", 2, 4), ("interleaved", 4, 2), ("looped-bfs", 2, 2), ("hanayo", 4, 2)):
        nodes = [replace(each, parameter_bytes=weight * each.parameter_bytes) for each in uneven(16, stash=stash).nodes]
        nodes = [replace(each, stash_bytes=each.stash_bytes + 200) for each in nodes]  # with what enters them
        found = plan(
            replace(uneven(16), nodes=tuple(nodes)),
            cluster,
            **{**options, "schedules": schedule, "chunk_sizes": (V,), "pipeline_sizes": (P,), "data_sizes": (1,)},
        )
        for rank in range(P):
            most, said = as_a_rank_holds(found, found.build_schedule(), rank), found.memory[rank]
            assert most * (1 - 1e-9) <= said.total
            assert said.total <= 1.12 * most or schedule != "interleaved"  # of others, gradients that were sent pile up


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize("stash", [0.9, 10])
def test_replicas_with_a_divided_optimizer(schedule: str, stash: float) -> None:
    """Behind a flush gradients are summed when no activations are left; without one, beside those of the next batch."""
    found = planned_curves(schedule, pipeline_sizes=(2,), data_sizes=(2,), optimizer_sharding=("full",), stash=stash)
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
