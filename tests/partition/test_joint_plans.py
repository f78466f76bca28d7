"""`plan(search="joint")`: a found schedule is a plan like any other: kept, read back, within memory, compared."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from support.inside import simulated_simulated as simulated

from stagewright.partition import Cluster, DeviceKind, GivenStage, Level, Node, Plan, Profile, evaluate, plan
from stagewright.schedules import Op, ScheduleError, build, check

SIZES = (2.0, 1.0, 3.0, 1.0, 1.0, 2.5, 1.0, 0.5, 4.0)
CLUSTER = Cluster.parse("3:net=1MB/s@10ms")
ALONE: dict[str, Any] = {"global_batch": 6, "data_sizes": (1,), "pipeline_sizes": (3,), "recompute": ("none",)}


def hybrid(**fields: Any) -> Profile:
    """Unequal layers; I and W together take 1.1 times as long as B."""
    nodes = [
        Node(
            name=f"n{i}",
            **{
                "forward_seconds": size,
                "backward_seconds": 2 * size,
                "input_grad_seconds": 1.2 * size,
                "weight_grad_seconds": size,
                "update_seconds": 0.1 * size,
                "activation_bytes": 1e5,
                "stash_bytes": 1e6 * size,
                "parameter_bytes": 1e6,
                **fields,
            },
        )
        for i, size in enumerate(SIZES)
    ]
    return Profile(nodes=nodes, microbatch_size=1, action_seconds=0.01, around_seconds=0.5, max_grad_norm=1.0)


def jointly(profile: Profile | None = None, cluster: Cluster = CLUSTER, **options: Any) -> Plan:
    return plan(profile or hybrid(), cluster, **(ALONE | {"search": "joint", "seconds": 0.4} | options))


@pytest.mark.thorough
def test_it_beats_named_schedules_and_is_read_back_as_it_was_found() -> None:
    found, named = jointly(), plan(hybrid(), CLUSTER, **ALONE)
    assert found.schedule == "auto"
    assert found.simulated_step_time < 0.97 * named.simulated_step_time
    read = Plan.from_json(found.to_json())
    assert read == found
    schedule = found.build_schedule()
    assert read.build_schedule() == schedule
    check(schedule)
    assert simulated(read).timeline.batch_seconds == found.simulated_step_time
    given = evaluate(hybrid(), CLUSTER, found.stages, num_microbatches=6, schedule=schedule)
    assert (given.simulated_step_time, given.memory_bytes) == (found.simulated_step_time, found.memory_bytes)
    assert (given.order, given.schedule) == (found.order, "auto")
    assert [name for stage in found.stages for name in stage.nodes] == [node.name for node in hybrid().nodes]
    assert [stage.ranks for stage in found.stages] == [*schedule.owners]
    less = 1 - found.simulated_step_time / named.simulated_step_time
    assert f"{less:.2%} less than the best named schedule, pipe 3" in " ".join(found.explain().split())
    assert found.runners_up[0].simulated_step_time == named.simulated_step_time


@pytest.mark.thorough
def test_memory_is_that_of_the_found_order() -> None:
    """Activations alone: what each rank holds, counted along its program."""
    found = jointly(hybrid(parameter_bytes=0.0, activation_bytes=0.0))
    schedule, signs = found.build_schedule(), {Op.F: 1, Op.W: -1, Op.B: -1}
    stash = [sum(SIZES[int(name[1:])] * 1e6 for name in stage.nodes) for stage in found.stages]
    for rank, program in enumerate(schedule.programs):
        held = (signs.get(action.op, 0) * stash[action.stage] for action in program)
        assert found.memory[rank].total == pytest.approx(max(accumulate(held)))


@pytest.mark.thorough
def test_a_limit_is_kept() -> None:
    """What is found within it depends on the seconds of the search, but is no slower than a named schedule."""
    most = max(jointly().memory_bytes.values())
    for part in (1.0, 0.8, 0.6):
        found = jointly(memory_limit=part * most)
        assert max(found.memory_bytes.values()) <= part * most
        assert any(note.startswith("joint search: ") for note in found.notes)
        named = plan(hybrid(), CLUSTER, **ALONE, memory_limit=part * most)
        assert (found.simulated_step_time or 0.0) <= (named.simulated_step_time or 0.0)
    with pytest.raises(ValueError, match="nothing fits the memory"):
        jointly(memory_limit=0.1 * most)


def test_where_no_named_schedule_fits_a_found_one_may() -> None:
    """1F1B holds two microbatches on the first rank; one after the other they fit."""
    nodes = [Node(name=n, forward_seconds=1, backward_seconds=2, stash_bytes=100.0) for n in "ab"]
    options: dict[str, Any] = {"global_batch": 4, "memory_limit": 150.0, "schedules": ("1f1b",), "seconds": 0.2}
    with pytest.raises(ValueError, match="nothing fits the memory"):
        jointly(Profile(nodes=nodes), Cluster.from_levels([(2, 1e9)]), search="named", **options, pipeline_sizes=(2,))
    found = jointly(Profile(nodes=nodes), Cluster.from_levels([(2, 1e9)]), **options, pipeline_sizes=(2,))
    assert (found.schedule, max(found.memory_bytes.values())) == ("auto", 100.0)
    assert any(note.endswith("no named schedule fits the memory") for note in found.notes)


def test_a_given_schedule_is_that_of_its_stages() -> None:
    stages, schedule = [GivenStage([f"n{i}" for i in range(9)], [0])], build("1f1b", num_ranks=1, num_microbatches=2)
    given = evaluate(hybrid(), CLUSTER, stages, num_microbatches=2, schedule=schedule)
    named = evaluate(hybrid(), CLUSTER, stages, num_microbatches=2)
    assert given.simulated_step_time == named.simulated_step_time
    for wrong, M in ((schedule, 3), (build("1f1b", num_ranks=2, num_microbatches=2), 2), ("auto", 2)):
        with pytest.raises(ValueError, match=r"^schedule"):
            evaluate(hybrid(), CLUSTER, stages, num_microbatches=M, schedule=wrong)


@pytest.mark.thorough
def test_where_a_named_schedule_is_better_it_is_taken() -> None:
    """Four equal layers on free links: replicas have no bubble."""
    nodes = [Node(name=n, forward_seconds=1, backward_seconds=2) for n in "abcd"]
    found = plan(Profile(nodes=nodes), Cluster.parse("4:net=1000GB/s"), global_batch=8, search="joint", seconds=0.2)
    assert (found.replicas, found.schedule) == ((4,), "1f1b")
    assert "more than the best named schedule" in " ".join(found.explain().split())
    assert any(each.label.startswith("pipe 4, joint search") for each in found.runners_up)


def test_what_a_joint_search_does_not_know_is_refused_by_name() -> None:
    ends = [(0, 1), (0, 2), (1, 3), (2, 3), *((i, i + 1) for i in range(3, 8))]
    graph = replace(hybrid(), edges=[(f"n{i}", f"n{j}") for i, j in ends])
    first = Node(name="n0", forward_seconds=0, backward_seconds=0)
    still = replace(hybrid(), nodes=[first, *hybrid().nodes[1:]])
    kinds = tuple(DeviceKind(name=name, speed=speed) for name, speed in (("slow", 1.0), ("fast", 2.0)))
    levels = (Level(name="host", size=1, bandwidth=1e9), Level(name="net", size=3, bandwidth=1e9))
    unlike = Cluster(levels=levels, kinds=kinds, nodes=("slow", "fast", "fast"))
    for profile, options, said in (
        (graph, {}, "search='joint' with a graph of 9 nodes: expected a chain"),
        (None, {"data_sizes": (3,), "pipeline_sizes": None}, "data_sizes=3: expected 1 among them"),
        (None, {"pipeline_sizes": (2,)}, "pipeline_sizes=2: expected 3 among them"),
        (None, {"recompute": ("full",)}, "recompute=full: expected 'none'"),
        (None, {"cluster": Cluster.parse("10:net=1GB/s"), "pipeline_sizes": None}, "10 devices: expected at most 9"),
        (still, {"cluster": Cluster.parse("9:net=1GB/s"), "pipeline_sizes": None}, "9 devices: expected at most 8"),
        (hybrid(weight_grad_seconds=0.0), {}, "none with weight_grad_seconds above 0: expected one of each"),
        (hybrid(input_grad_seconds=0.0), {}, "no node with input_grad_seconds above 0"),
        (None, {"global_batch": 30_000}, "30,000 microbatches or more on 3 devices: expected at most 6,666"),
        (None, {"cluster": unlike}, "devices of several kinds"),
        (None, {"search": "jointly"}, "search='jointly'"),
    ):
        with pytest.raises(ValueError, match=said):
            jointly(profile, **options)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_an_order_of_its_own_belongs_to_its_plan() -> None:
    record = json.loads(jointly(seconds=0.1).to_json())
    assert record["schedule"] == "auto"
    for wrong, said in (
        ({"order": []}, "order of 0 ranks"),
        ({"order": record["order"][:2]}, "order of 2 ranks"),
        ({"num_microbatches": None}, "num_microbatches=None"),
    ):
        with pytest.raises(ValueError, match=said):
            Plan.from_json(json.dumps(record | wrong))
    lost = [record["order"][0].rsplit(" ", 1)[0], *record["order"][1:]]
    with pytest.raises(ScheduleError):
        Plan.from_json(json.dumps(record | {"order": lost})).build_schedule()
