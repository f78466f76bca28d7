"""Plans, with orders and found schedules among them: JSON, the table, and what is refused."""

import json
import math
import re
from dataclasses import replace
from itertools import accumulate, combinations, product
from random import Random
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import OrderEvaluator, PlanSearch, Request, order_for
from support.inside import simulated_simulated as simulated

from stagewright.partition import (
    Cluster,
    DeviceKind,
    GivenStage,
    Level,
    MemoryUse,
    Node,
    Plan,
    PlanStage,
    Profile,
    RunnerUp,
    evaluate,
    plan,
)
from stagewright.schedules import Costs, Link, Links, Op, ScheduleError, build, check, simulate

from . import small


def stage(nodes: str, *ranks: int) -> PlanStage:
    return PlanStage(
        nodes=tuple(nodes),
        ranks=ranks,
        step_seconds=0.002,
        memory=MemoryUse(parameters=0.5e9, gradients=0.5e9, optimizer=1e9),
        in_flight=2,
    )


PLAN = Plan(
    stages=(stage("ab", 0, 1, 2), stage("c", 3)),
    num_devices=5,
    costs=Costs(forward=0.001, backward=0.002),
    cost_model="default",
    schedule="1f1b",
    num_microbatches=8,
    bottleneck=0.002,
    bound=0.001,
    simulated_step_time=0.03,
    simulated_bubble=0.25,
    runners_up=(RunnerUp(replicas=(4, 1), num_nodes=(1, 2), bottleneck=0.003, simulated_step_time=0.045),),
    notes=("a note",),
)


def test_json_there_and_back() -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN
    bare = replace(PLAN, schedule=None, num_microbatches=None, simulated_step_time=None, simulated_bubble=None)
    assert Plan.from_json(bare.to_json()) == bare
    assert bare.bubble == pytest.approx(1 - 0.006 / 0.008)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stages": []}, r"q\.json: plan without stages"),
        ({"stages": [{"nodes": ["a"]}]}, r"q\.json: stages\[0\]: ranks: missing"),
        ({"num_devices": 3}, r"q\.json: rank 3 on 3 devices: expected 0 to 2"),
        ({"cost_model": "mine"}, r"q\.json: cost_model: 'mine': expected one of default, pipedream"),
        ({"bottleneck": None}, r"q\.json: bottleneck: None: expected a finite number"),
        ({"schedule": 3}, r"q\.json: schedule: 3: expected text or null"),
        ({"notes": "x"}, r"q\.json: notes: 'x': expected a list"),
        ({"speed": 1}, r"q\.json: unknown field speed"),
        ({"version": 9}, r"q\.json: version: 9: expected 3"),
    ],
)
def test_bad_json(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_json(json.dumps({**json.loads(PLAN.to_json()), **fields}), source="q.json")


def test_bad_plans() -> None:
    with pytest.raises(ValueError, match="node 'a' is listed twice in the plan"):
        replace(PLAN, stages=(stage("ab", 0), stage("ca", 1)))
    with pytest.raises(ValueError, match="rank 0 is listed twice in the plan"):
        replace(PLAN, stages=(stage("ab", 0), stage("c", 0)))
    with pytest.raises(ValueError, match="expected at least one of each"):
        stage("", 0)


def test_ranks_of_the_schedule_are_tensor_groups() -> None:
    """2 replicas of 2, and 1 of 2; ranks 6 and 7 are idle."""
    stages = (replace(stage("ab", 2, 3, 4, 5), tensor=2), replace(stage("c", 0, 1), tensor=2))
    schedule = replace(PLAN, stages=stages, num_devices=8, schedule="1f1b", num_microbatches=4).build_schedule()
    assert schedule.owners == ((1, 2), (0,))
    assert schedule.num_ranks == 4
    assert schedule.programs[3] == ()


def test_stages_with_tensor_sizes_of_their_own() -> None:
    """On ranks 3 to 5, on 0 to 1, on 7; ranks 2 and 6 are idle, each a group alone."""
    stages = (replace(stage("a", 3, 4, 5), tensor=3), replace(stage("b", 0, 1), tensor=2), stage("c", 7))
    uneven = replace(PLAN, stages=stages, num_devices=8, schedule="1f1b", num_microbatches=4)
    assert uneven.tensor_groups == ((0, 1), (2,), (3, 4, 5), (6,), (7,))
    schedule = uneven.build_schedule()
    assert (schedule.owners, schedule.num_ranks) == (((2,), (0,), (4,)), 5)
    assert uneven.by_group(dict(enumerate("abcdefgh"))) == ("a", "c", "d", "g", "h")  # type: ignore[arg-type]
    assert Plan.from_json(uneven.to_json()) == uneven
    lines = uneven.explain().splitlines()
    assert "tensors over 3-2-1" in " ".join(lines)
    assert "a, tensor 3" in lines[2] + lines[3] + lines[4]
    with pytest.raises(
        ValueError, match=r"over the ranks \(3, 5, 4\): expected groups of 3 in a row, such as \(3, 4, 5"
    ):
        _ = replace(uneven, stages=(replace(stages[0], ranks=(3, 5, 4)), *stages[1:])).tensor_groups
    with pytest.raises(ValueError, match=r"of another chunk, on .* with tensor=2: expected the same ranks in the same"):
        replace(PLAN, stages=(stages[1], stage("c", 0, 1)), num_chunks=2)
    record = json.loads(uneven.to_json())
    record["stages"][0]["tensor"] = 1.5
    with pytest.raises(ValueError, match=r"q\.json: stages\[0\]: tensor: 1\.5"):
        Plan.from_json(json.dumps(record), source="q.json")


def test_explain_shows_the_choice_first_and_folds_long_tables() -> None:
    split = replace(stage("ab", 0, 1, 2, 3), tensor=2, optimizer_shards=2, memory=MemoryUse(parameters=5e6))
    lines = replace(PLAN, stages=(split,), notes=("chosen: pipe 1 x data 2", "a note")).explain().splitlines()
    assert lines[0] == "pipe 1 x data 2"
    assert lines[4].endswith("    memory")
    assert lines[5].endswith("   5.00 MB")
    assert lines[6] == "       a .. b, tensor 2, shards 2"
    assert [line for line in lines if line.startswith("note: ")] == ["note: a note"]
    chunks = replace(PLAN, stages=(stage("a", 0), stage("b", 0)), num_chunks=2)
    assert "its slowest rank takes" in " ".join(chunks.explain().split())
    stages = tuple(replace(stage("x", rank), nodes=(f"n{rank}",), in_flight=rank + 1) for rank in range(25))
    lines = replace(PLAN, stages=stages, num_devices=25).explain().splitlines()
    rows = [line for line in lines if re.search(r" n\d+$", line)]
    assert [int(row.split()[0]) for row in rows] == [*range(8), *range(17, 25)]
    assert "  ... 9 more stages, in the plan's JSON ..." in lines


def test_numbers_beyond_all_floats() -> None:
    record = {**json.loads(PLAN.to_json()), "bound": 10**400}
    with pytest.raises(ValueError, match=r"q\.json: bound: 1000.*\.\.\. \(401 characters\): expected a finite number"):
        Plan.from_json(json.dumps(record), source="q.json")
    with pytest.raises(ValueError, match=r"q\.json: .*expected one JSON object"):
        Plan.from_json('{"bound": 1' + "0" * 5000 + "}", source="q.json")


SIZES = (2.0, 1.0, 3.0, 1.0, 1.0, 2.5, 1.0, 0.5, 4.0)
CLUSTER = Cluster.parse("3:net=1MB/s@10ms")
ALONE: dict[str, Any] = {"global_batch": 6, "data_sizes": (1,), "pipeline_sizes": (3,), "recompute": ("none",)}


def hybrid(**fields: Any) -> Profile:
    """Unequal layers; I and W together take 1.1 times as long as B."""
    seconds = {"forward": 1, "backward": 2, "input_grad": 1.2, "weight_grad": 1, "update": 0.1}
    usual = {"activation_bytes": 1e5, "parameter_bytes": 1e6}
    nodes = []
    for i, size in enumerate(SIZES):
        own = {f"{name}_seconds": each * size for name, each in seconds.items()}
        nodes.append(Node(name=f"n{i}", **usual | own | {"stash_bytes": 1e6 * size} | fields))
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
def test_a_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found within it depends on the seconds of the search, but is no slower than a named schedule."""
    monkeypatch.setattr(f"{plan.__module__}.JOINT_SECONDS", 0.4)
    most = max(jointly().memory_bytes.values())
    for part in (1.0, 0.8, 0.6):
        found = jointly(memory_limit=part * most, seconds=None)
        assert max(found.memory_bytes.values()) <= part * most
        assert any(note.startswith("joint search: ") for note in found.notes)
        for schedules in (("1f1b", "interleaved"), ("zb-v", "interleaved-zb")):
            named = plan(hybrid(), CLUSTER, **ALONE | {"schedules": schedules}, memory_limit=part * most)
            assert (found.simulated_step_time or 0.0) <= (named.simulated_step_time or 0.0)
    with pytest.raises(ValueError, match="nothing fits the memory"):
        jointly(memory_limit=0.1 * most)


def test_seconds_limit_also_what_a_joint_search_starts_from(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, made = list[float | None](), PlanSearch.__init__
    monkeypatch.setattr(PlanSearch, "__init__", lambda *a, **k: (limits.append(k.get("seconds")), made(*a, **k))[1])
    jointly(seconds=0.5)
    assert limits[0] == 0.5
    assert all(limit is not None and limit <= 0.5 for limit in limits)


def test_where_no_named_schedule_fits_a_found_one_may() -> None:
    """1F1B holds two microbatches on the first rank; one after the other they fit."""
    nodes = [Node(name=n, forward_seconds=1, backward_seconds=2, stash_bytes=100.0) for n in "ab"]
    options: dict[str, Any] = {"global_batch": 4, "memory_limit": 150.0, "schedules": ("1f1b",), "seconds": 0.2}
    with pytest.raises(ValueError, match="nothing fits the memory"):
        jointly(Profile(nodes=nodes), Cluster.from_levels([(2, 1e9)]), search="named", **options, pipeline_sizes=(2,))
    split: dict[str, Any] = options | {"search": "named", "schedules": ("zb-h1",), "pipeline_sizes": (2,)}
    ordered = jointly(Profile(nodes=nodes), Cluster.from_levels([(2, 1e9)]), **split)
    assert (ordered.schedule, max(ordered.memory_bytes.values()), bool(ordered.order)) == ("zb-h1", 100.0, True)
    assert ordered.exhibit().name == "plan of zb-h1, ordered for its costs"  # "plan of auto"
    with pytest.raises(ValueError, match=r"nothing fits the memory: .* needs 100 bytes of 99, 1 too many"):
        jointly(Profile(nodes=nodes), Cluster.from_levels([(2, 1e9)]), **split | {"memory_limit": 99.0})
    found = jointly(Profile(nodes=nodes), Cluster.from_levels([(2, 1e9)]), **options, pipeline_sizes=(2,))
    assert (found.schedule, max(found.memory_bytes.values())) == ("auto", 100.0)
    assert found.exhibit().name == "plan of joint search"
    assert any(note.endswith("no named schedule fits the memory") for note in found.notes)


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=6, max_size=9),
    name=st.sampled_from(["interleaved", "looped-bfs", "hanayo"]),
    devices=st.sampled_from([(3, 1), (2, 2)]),
    part=st.sampled_from([None, 1.0, 1.3]),
)
def test_chunks_with_whole_backwards_run_in_orders_for_their_costs(
    sizes: list[float], name: str, devices: tuple[int, int], part: float | None
) -> None:
    """Never slower than as named, within the memory; the cuts stay."""
    nodes = [replace(hybrid().nodes[0], name=f"n{i}", forward_seconds=n, stash_bytes=1e6) for i, n in enumerate(sizes)]
    profile, cluster = replace(hybrid(), nodes=nodes, edges=None), Cluster.parse(f"{math.prod(devices)}:net=1MB/s@10ms")
    options: dict[str, Any] = ALONE | {"schedules": name, "chunk_sizes": (2,), "global_batch": 12}
    options |= {"pipeline_sizes": devices[:1], "data_sizes": devices[1:]}
    with mock.patch.object(PlanSearch, "with_orders", lambda _, found: found):
        named = plan(profile, cluster, **options)
    limit = None if part is None else part * max(named.memory_bytes.values())
    found = plan(profile, cluster, memory_limit=limit, **options)
    assert found.searched.least * (1 - 1e-9) <= found.simulated_step_time <= named.simulated_step_time
    assert max(found.memory_bytes.values()) <= (limit or math.inf)
    assert (found.schedule, [each.nodes for each in found.stages]) == (name, [each.nodes for each in named.stages])
    check(schedule := found.build_schedule())
    assert {action.op for program in schedule.programs for action in program} == {Op.F, Op.B}
    assert simulated(Plan.from_json(found.to_json())).timeline.batch_seconds == pytest.approx(found.simulated_step_time)
    if found.order:
        assert f"{name} V=2, ordered for its costs" in " ".join(found.explain().split())
        again = evaluate(profile, cluster, found.stages, num_microbatches=12, schedule=schedule)
        assert again.memory_bytes == found.memory_bytes


@pytest.mark.parametrize("seed", [30, 69, 78, 153])
def test_no_order_of_whole_backwards_takes_less(seed: int) -> None:
    """Two microbatches pass four stages on two ranks: 70 orders of each. The named one takes 3% to 12% more."""
    random, named = Random(seed), build("interleaved", num_ranks=2, num_microbatches=2, num_chunks=2)
    forward, held = [random.uniform(0.3, 4) for _ in range(4)], [random.uniform(0.5, 2) for _ in range(4)]
    costs = Costs(forward=forward, backward=[random.uniform(1, 2.5) * f for f in forward])
    links = Links(network=Link(latency=random.choice([0.0, 0.3, 1.0])))
    sizes: dict[str, Any] = {"num_microbatches": 2, "placement": named.placement, "costs": costs}
    evaluator, every = OrderEvaluator(Request(activations=held, links=links, **sizes).problem()), list[Any]()
    evaluator.limits = tuple(peak + 1e-9 for peak in evaluator.peaks(evaluator.orders(named)))
    for own in named.placement:
        way = [evaluator.code(op, s, 0) for op, row in ((Op.F, own), (Op.B, own[::-1])) for s in row]
        rows = ((iter([c + 1 for c in way]), iter(way), first) for first in combinations(range(8), 4))
        every.append([[next(two[at in first]) for at in range(8)] for *two, first in rows])
    value, found = order_for([named], costs, links, held, [0.0, 0.0])
    least = min(evaluator.value(orders) for orders in product(*every) if evaluator.fits(orders))
    assert value == simulate(found, costs, links).makespan == pytest.approx(least)
    assert value < 0.99 * simulate(named, costs, links).makespan


def test_a_given_schedule_is_that_of_its_stages() -> None:
    stages, schedule = [GivenStage([f"n{i}" for i in range(9)], [0])], build("1f1b", num_ranks=1, num_microbatches=2)
    given = evaluate(hybrid(), CLUSTER, stages, num_microbatches=2, schedule=schedule)
    named = evaluate(hybrid(), CLUSTER, stages, num_microbatches=2)
    assert given.simulated_step_time == named.simulated_step_time
    halves = [GivenStage([f"n{i}" for i in range(5)], [0, 2]), GivenStage([f"n{i}" for i in range(5, 9)], [1, 3])]
    cluster, sizes = Cluster.parse("4:net=1GB/s"), {"num_microbatches": 6}
    named = evaluate(hybrid(), cluster, halves, schedule="zb-h1", **sizes)
    order = named.build_schedule()
    given = evaluate(hybrid(), cluster, halves, schedule=order, **sizes)
    assert (given.simulated_step_time, given.memory) == (named.simulated_step_time, named.memory)
    assert given.build_schedule().programs == order.programs
    other = replace(order, programs=(*order.programs[:3], order.programs[3][::-1]))
    with pytest.raises(ValueError, match=r"^schedule=.* in one order on all replicas"):
        evaluate(hybrid(), cluster, halves, schedule=other, **sizes)
    for wrong, M in ((schedule, 3), (build("1f1b", num_ranks=2, num_microbatches=2), 2), ("auto", 2)):
        with pytest.raises(ValueError, match=r"^schedule"):
            evaluate(hybrid(), CLUSTER, stages, num_microbatches=M, schedule=wrong)


@pytest.mark.thorough
def test_where_a_named_schedule_is_better_it_is_taken() -> None:
    """Four equal layers on free links: replicas have no bubble."""
    found = plan(small.chain(4), Cluster.parse("4:net=1000GB/s"), global_batch=8, search="joint", seconds=0.2)
    assert (found.replicas, found.schedule) == ((4,), "1f1b")
    assert "more than the best named schedule" in " ".join(found.explain().split())
    assert any(each.label.startswith("pipe 4, joint search") for each in found.runners_up)
    seconds = {"forward_seconds": 1.0, "backward_seconds": 2.0, "input_grad_seconds": 1.0, "weight_grad_seconds": 1.0}
    whole = Profile(nodes=[Node(name="a", **seconds)])  # no message has a size
    assert plan(whole, Cluster.parse("1:net=1GB/s"), global_batch=4, search="joint").simulated_step_time == 12


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
