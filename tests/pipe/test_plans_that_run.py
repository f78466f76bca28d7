"""What `plan(runnable=True)` answers can be built, simulated to the step that it says, written, read, and run."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import experts, sliced
from support.alone import near, train_alone, train_piped
from support.inside import layout_of_plan
from support.inside import simulated_simulated as simulated
from support.parts import Parts
from support.plain import batch as numbers
from support.pool import Pool
from support.small import sgd
from support.uneven import plan_of, stage
from torch import Tensor, nn
from torch import distributed as dist

from stagewright.comm import World
from stagewright.partition import Cluster, DeviceKind, Level, Node, Plan, Profile, plan
from stagewright.pipe import Auto, Mesh, PipelineModule
from stagewright.schedules import FAMILIES, build, check, check_lowered, lower

PLANNED = [name for name, each in FAMILIES.items() if each.is_planned]


def profiles(pick: random.Random, sizes: tuple[int, ...], ways: tuple[int, ...]) -> list[Profile]:
    """One model of up to eight nodes, at these microbatch sizes and tensor sizes."""
    count = pick.choice([1, 2, 3, 5, 8])
    figures = [[pick.randint(0, 30) / 10 for _ in range(6)] for _ in range(count)]
    figures[0][0] += 0.1
    edges = list(pairwise(f"n{i}" for i in range(count)))
    if count > 3 and pick.random() < 0.4:
        edges.append(("n0", "n3"))
    tied = ((("n0", f"n{count - 1}"), min(figures[0][3], figures[-1][3]) / 8),) if count > 2 else ()
    tied *= pick.random() < 0.3

    def node(i: int, size: int, tensor: int) -> Node:
        forward, backward, activations, parameters, stash, update = figures[i]
        times = (0.3 + 0.7 * size) / tensor
        return Node(
            name=f"n{i}",
            forward_seconds=forward * times,
            backward_seconds=backward * times,
            activation_bytes=activations * size,
            parameter_bytes=parameters / tensor,
            stash_bytes=stash * size / tensor,
            update_seconds=update / tensor,
            forward_sums=2.0 * (tensor > 1),
            forward_sum_bytes=activations * (tensor > 1),
        )

    return [
        Profile(
            nodes=[node(i, size, tensor) for i in range(count)],
            edges=tuple(edges),
            microbatch_size=size,
            tensor=tensor,
            action_seconds=0.01,
            tied=tied,
        )
        for size in sizes
        for tensor in ways
    ]


def clusters(pick: random.Random) -> Cluster:
    """Nodes of 1 to 7 devices of up to two kinds, on up to three levels; odd numbers, too."""
    sizes = [pick.choice([1, 2, 3, 4, 5, 7]), *(pick.choice([1, 2, 3]) for _ in range(pick.randint(0, 2)))]
    levels = [
        Level(
            name=f"level{at}",
            size=size,
            bandwidth=pick.choice([0.5, 10.0, 1e9]),
            latency=pick.choice([0.0, 0.01]),
            message_seconds=pick.choice([0.0, 0.01]),
            message_bandwidth=pick.choice([None, 1e3]),
        )
        for at, size in enumerate(sizes)
    ]
    limits = pick.choice([None, 40.0, 100.0]), pick.choice([None, 60.0])
    slow = DeviceKind(name="slow", speed=0.5, memory_bytes=limits[1])
    kinds = (DeviceKind(memory_bytes=limits[0]), slow)[: pick.choice([1, 1, 2])]
    num_nodes = 1
    for level in levels[1:]:
        num_nodes *= level.size
    return Cluster(levels=tuple(levels), kinds=kinds, nodes=tuple(pick.choice(kinds).name for _ in range(num_nodes)))


def random_plan(seed: int) -> Plan | None:
    """None where there is none, which the error then says."""
    pick = random.Random(seed)
    sizes, ways = pick.choice([(1,), (1, 2), (2,), (1, 2, 4)]), pick.choice([(1,), (1,), (1, 2), (2,), (1, 3)])
    source, cluster = profiles(pick, sizes, ways), clusters(pick)
    try:
        return plan(
            source,
            cluster,
            global_batch=pick.choice([1, 2, 3, 4, 6, 8, 12]),
            schedules=pick.sample(PLANNED, 2),
            chunk_sizes=(2, 3),
            max_grad_norm=pick.choice([None, 1.0]),
            runnable=True,
            max_simulated=4,
        )
    except ValueError:  # nothing fits, or no size divides the batch
        return None


def prove(found: Plan) -> None:
    """The plan is one that runs."""
    schedule = found.build_schedule()
    check(schedule)
    if schedule.num_ranks <= 24:
        assert check_lowered(lower(schedule)).held is None
    again = Plan.from_json(found.to_json())
    assert again == found
    assert found.simulated_step_time == pytest.approx(simulated(again).timeline.batch_seconds, rel=1e-9)
    assert found.explain()
    layout = layout_of_plan(found, World(rank=0, size=found.num_devices), num_microbatches=None)
    assert layout.place.mesh.num_processes == found.num_devices


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*devices stay idle")
@pytest.mark.parametrize(
    ("first", "count"), [(5000, 15), *(pytest.param(at, 250, marks=pytest.mark.nightly) for at in range(0, 2000, 250))]
)
def test_plans_are_carried_out(first: int, count: int) -> None:
    made = [found for seed in range(first, first + count) if (found := random_plan(seed)) is not None]
    assert len(made) > count // 3
    for found in made:
        prove(found)


def model(*tensors: int) -> list[Profile]:
    """Four nodes that a larger T makes faster."""
    return [
        Profile(
            nodes=[Node(name=n, forward_seconds=1 / t, backward_seconds=2 / t, parameter_bytes=1 / t) for n in "abcd"],
            microbatch_size=1,
            tensor=t,
        )
        for t in tensors
    ]


def test_tensor_groups_that_leave_a_device_over() -> None:
    """Five devices: T=2 on four of them is a plan, but none of the runtime, whose mesh has no place for the fifth."""
    five = Cluster.from_levels([(5, 1e9)])
    only = plan(model(1, 2), five, global_batch=2, tensor_sizes=(2,))
    schedule = only.build_schedule()
    assert (only.tensor, schedule.num_ranks) == (2, 2)
    assert simulated(only).timeline.batch_seconds == pytest.approx(only.simulated_step_time)
    with pytest.raises(ValueError, match=r"groups of 2 of its 5 ranks, which leaves 1 in no group: expected a number"):
        layout_of_plan(only, World(rank=0, size=5), num_microbatches=None)
    with pytest.raises(ValueError, match=r"of a batch of 2 on 5 devices.*; or runnable=False, where"):
        plan(model(1, 2), five, global_batch=2, tensor_sizes=(2,), runnable=True)
    found = plan(model(1, 2), five, global_batch=2, runnable=True)
    assert sorted(map(len, found.tensor_groups)) == [1, 2, 2]
    assert layout_of_plan(found, World(rank=0, size=5), num_microbatches=None).place.mesh.num_processes == 5
    prove(plan(model(1, 2), Cluster.from_levels([(6, 1e9)]), global_batch=2, tensor_sizes=(2,), runnable=True))


def test_streams_leave_no_device_idle() -> None:
    """Four nodes on five devices: the runtime has no ranks without work where batches overlap."""
    five = Cluster.from_levels([(5, 1e9)])
    options = {"global_batch": 12, "schedules": "2bw", "data_sizes": (1,)}
    idle = plan(model(1), five, **options)  # type: ignore[arg-type]
    assert len({rank for stage in idle.stages for rank in stage.ranks}) == 4
    with pytest.raises(ValueError, match=r"idle under the asynchronous schedule '2bw': .* \(plan\(runnable=True\)\)"):
        layout_of_plan(idle, World(rank=0, size=5), num_microbatches=None)
    with pytest.raises(ValueError, match=r"of a batch of 12 on 5 devices.*; or runnable=False, where"):
        plan(model(1), five, runnable=True, **options)  # type: ignore[arg-type]
    prove(plan(model(1), five, global_batch=60, schedules=("2bw", "1f1b"), runnable=True))


def test_tensor_groups_stand_in_a_row_where_nodes_are_moved() -> None:
    """Nodes of five, slow ones in between: groups of two over both ends of a node would not be neighbours."""
    kinds = (DeviceKind(), DeviceKind(name="slow", speed=0.5))
    levels = (Level(name="in", size=5, bandwidth=1e9), Level(name="out", size=4, bandwidth=1e9))
    cluster = Cluster(levels=levels, kinds=kinds, nodes=("slow", "device", "slow", "device"))
    for batch in (2, 8):
        prove(plan(model(1, 2), cluster, global_batch=batch, tensor_sizes=(2,), runnable=True))


WIDTH, DEPTH = 6, 9
X, Y = numbers(0, WIDTH)
BYTES = 8 * WIDTH * (WIDTH + 1)
SECONDS = (2.0, 1.0, 3.0, 1.0, 1.0, 2.5, 1.0, 0.5, 4.0)
NODES = [
    Node(name=str(i), forward_seconds=s, backward_seconds=2 * s, parameter_bytes=BYTES) for i, s in enumerate(SECONDS)
]
PROFILE = Profile(nodes=NODES, microbatch_size=2)


def make_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]).double()


def joint_plan() -> Plan:
    """With unequal numbers of stages on its three ranks, for layers that take as long as SECONDS says."""
    found = plan(PROFILE, Cluster.parse("3:net=1GB/s"), global_batch=8, data_sizes=(1,), search="joint", seconds=0.5)
    assert found.schedule == "auto"
    return found


def chunked_plan(data: int) -> Plan:
    """With two stages on each of two ranks a replica, in an order for what they take."""
    sizes: dict[str, Any] = {"pipeline_sizes": (2,), "data_sizes": (data,), "chunk_sizes": (2,)}
    cluster, profile = Cluster.parse(f"{2 * data}:net=1GB/s@0.5s"), replace(PROFILE, microbatch_size=2 // data)
    found = plan(profile, cluster, global_batch=8, schedules="interleaved", runnable=True, **sizes)
    assert (found.schedule, len(found.order)) == ("interleaved", 2)
    named = build("interleaved", num_ranks=2, num_microbatches=4, num_chunks=2)
    assert [" ".join(map(str, program)) for program in named.programs] != [*found.order]
    return found


def trained(schedule: Plan | Auto, mesh: dict[str, int] | None = None) -> tuple[dict[str, Tensor], Plan]:
    pipe = PipelineModule(make_model(), schedule=schedule, mesh=mesh, loss_fn=F.mse_loss, optimizer=sgd, timeout=120.0)
    state = train_piped(pipe, [(X, Y)] * 2).state
    assert pipe.plan is not None
    return state, pipe.plan


@pytest.mark.thorough
def test_a_found_plan_in_one_process() -> None:
    found = joint_plan()
    state, ran = trained(found)
    near(state, train_alone(make_model(), [(X, Y)] * 2, sgd).state)
    assert ran == found


@pytest.mark.parametrize("data", [1, 2])
def test_chunks_run_in_the_order_of_their_plan(gloo: Pool, data: int) -> None:
    found, wanted = chunked_plan(data), train_alone(make_model(), [(X, Y)] * 2, sgd).state
    for state, ran in gloo.run(trained, ranks=2 * data, args=(found,)):
        near(state, wanted)
        assert ran == found


@pytest.mark.thorough
def test_auto_searches_jointly(gloo: Pool) -> None:
    auto = Auto(search="joint", seconds=0.5, trials=0)
    answers = [*gloo.run(trained, ranks=2, args=(auto, {"pipe": 2})), trained(auto, {"pipe": 4})]
    wanted = train_alone(make_model(), [(X, Y)] * 2, sgd).state
    for state, ran in answers:
        near(state, wanted)
        assert any(note.startswith("joint search: ") for note in ran.notes)


STEPS = 3


def _plan(
    schedule: str, nodes: list[str], rows: list[list[int]], *, chunks: int, sizes: dict[str, int], **of: Any
) -> Plan:
    stages = [stage(each, *rows[at % len(rows)], **{"tensor": 1, **of}) for at, each in enumerate(nodes)]
    return plan_of(*stages, num_chunks=chunks, schedule=schedule, **sizes)


def _trained(
    plan: Plan, model: Callable[[], nn.Module], loss_fn: Any, batch: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[PipelineModule, float]:
    """A pipeline after its steps, in which all ranks pass the same batch, and the largest difference of a loss, a
    weight, or an evaluation in two microbatches."""
    plain, optimizer = model(), partial(torch.optim.AdamW, lr=0.05)
    delay, batches = int(plan.schedule == "2bw"), map(batch, range(STEPS))
    expected = train_alone(plain, batches, optimizer, loss_fn=loss_fn, delay=delay, clip=1.0).losses
    options = {"loss_fn": loss_fn, "optimizer": optimizer, "max_grad_norm": 1.0, "verify": True}
    is_divided = plan.tensor > plan.context and plan.expert > 1
    mesh = {"mesh": Mesh(tensor_parallel="auto")} if is_divided else {}
    pipe = PipelineModule(model(), schedule=plan, **mesh, **options)  # type: ignore[arg-type]
    results = [pipe.train_step(*batch(step)) for step in range(STEPS)] + pipe.flush()
    found = [result.loss for result in results if result.loss is not None]
    differences = [abs(one - other) for one, other in zip(found, expected, strict=True)]
    state = pipe.full_state_dict()
    differences += [float((state[name] - x).abs().max()) for name, x in plain.state_dict().items()]
    x, y = batch(STEPS, 3)
    plain.load_state_dict(state)
    differences.append(abs((pipe.eval_step(x, y).loss or 0.0) - loss_fn(plain(x), y).item()))
    return pipe, max(differences)


def _over_experts(schedule: str, rows: list[list[int]], overlaps: bool = False, **of: Any) -> float:
    nodes, chunks = (["0 1", "2", "3 4", "5"], 2) if schedule == "interleaved" else (["0 1 2", "3 4 5"], 1)
    sizes = {"expert": 2, "overlaps": overlaps, "num_microbatches": 8 if overlaps else 4}  # fewer make no pair
    plan = _plan(schedule, nodes, rows, chunks=chunks, sizes=sizes, **of)
    pipe, difference = _trained(plan, experts.model, F.mse_loss, lambda step, n=9: experts.batch(0, step, n))
    assert bool(pipe.schedule.overlapped) == overlaps
    with pipe, pytest.raises(ValueError, match="a batch of 1 samples over 2 members of an expert group: expected 2"):
        pipe.eval_step(*experts.batch(0, STEPS, 1))
    return difference


class _Dense(Parts, up=lambda: nn.Linear(experts.WIDTH, 8), down=lambda: nn.Linear(8, experts.WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def _dense_among() -> nn.Module:
    """A tensor group divides the dense layers; each of its members holds its experts whole."""
    return experts.model(experts.Listed(), _Dense(), experts.Stacked(), _Dense())


def _over_tensors(schedule: str, rows: list[list[int]], nodes: list[str], context: int = 1, **of: Any) -> float:
    axes = {"expert": 2, "context": context, "num_microbatches": 4}
    plan = _plan(schedule, nodes, rows, chunks=1, sizes=axes, tensor=2 * context, **of)
    pipe, difference = _trained(plan, _dense_among, F.mse_loss, lambda step, n=9: experts.batch(0, step, n, length=8))
    with pipe:
        whole = dict(_dense_among().named_parameters())
        sizes = {whole[name].numel() // x.numel() for name, x in pipe.named_parameters() if "3.experts." in name}
        assert sizes <= {2}  # halves of stacked experts, not quarters
        if plan.stages[0].optimizer_shards > 1:  # four ranks alike, two with the same experts
            used = [(name, x.numel()) for name, x in pipe.named_parameters() if "1.experts.3." not in name]
            held = sum(number / (2 if ".experts." in name else 4) for name, number in used)
            states = [state["exp_avg"] for each in pipe.optimizers for state in each.state.values()]
            more = torch.tensor(held - sum(x.numel() for x in states))
            dist.all_reduce(more)
            assert more == 0
    return difference


def _over_both(rows: list[list[int]], **of: Any) -> float:
    """Every member has a part of the sequences of its own replica's microbatches, and one half of the experts."""
    sizes = {"context": 2, "expert": 2, "num_microbatches": 4}
    plan = _plan("1f1b", ["0 1 2 3 4 5"], rows, chunks=1, sizes=sizes, tensor=2, **of)
    batch = partial(experts.batch, length=8)
    pipe, difference = _trained(plan, experts.model, F.mse_loss, lambda step, n=9: batch(0, step, n))
    with pipe:
        assert (pipe.schedule.num_microbatches, pipe.schedule.owners) == (8, ((0, 2, 1, 3),))  # parts are innermost
    return difference


def _over_sequences(schedule: str, rows: list[list[int]], **of: Any) -> float:
    nodes = ["0 1", "2 3"] if len(rows) == 2 else ["0 1 2 3"]
    plan = _plan(schedule, nodes, rows, chunks=1, sizes={"context": 2}, **{"tensor": 2, **of})

    def batch(step: int, samples: int = 9) -> tuple[Tensor, Tensor]:
        tokens, targets = sliced.batch(samples + step)
        return tokens[step:], targets[step:]

    pipe, difference = _trained(plan, sliced.chain, sliced.mean_loss, batch)
    with pipe:
        assert (pipe.schedule.num_ranks, pipe.schedule.num_microbatches) == (2 * 4 // plan.tensor, 2 * 4)
        assert pipe.replica == (0, 1)
    return difference


DIVIDED = [
    (_over_experts, ("1f1b", [[0, 1], [2, 3]]), {}),
    (_over_experts, ("1f1b", [[0, 2], [1, 3]]), {"recompute": "full", "optimizer_shards": 2}),
    (_over_experts, ("interleaved", [[0, 1], [2, 3]]), {}),
    (_over_experts, ("interleaved", [[0, 1], [2, 3]]), {"overlaps": True}),
    (_over_experts, ("2bw", [[0, 2], [1, 3]]), {}),
    (_over_both, ([[0, 1, 2, 3]],), {}),
    (_over_both, ([[0, 1, 2, 3]],), {"recompute": "full", "optimizer_shards": 2}),
    (_over_sequences, ("1f1b", [[0, 1], [2, 3]]), {"recompute": "full"}),
    (_over_sequences, ("2bw", [[0, 1], [2, 3]]), {}),
    (_over_sequences, ("1f1b", [[0, 1, 2, 3]]), {"optimizer_shards": 2}),
    (_over_sequences, ("gpipe", [[0, 1, 2, 3]]), {"tensor": 4}),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("args", "of"),
    [
        (("1f1b", [[0, 1, 2, 3], [4, 5, 6, 7]], ["0 1 2", "3 4 5"]), {}),
        (("2bw", [[0, 1, 2, 3]], ["0 1 2 3 4 5"]), {}),
        (("1f1b", [[*range(8)]], ["0 1 2 3 4 5"]), {"context": 2, "optimizer_shards": 2, "recompute": "full"}),
    ],
)
def test_a_plan_divides_experts_over_replicas_with_tensor_ranks(
    gloo: Pool, args: tuple[Any, ...], of: dict[str, Any]
) -> None:
    """Which was refused, since formulas divided each expert over tensor ranks, and the runtime has it whole."""
    ranks = sum(map(len, args[1]))
    assert max(gloo.run(_over_tensors, ranks=ranks, args=args, kwargs=of)) < 1e-10


@pytest.mark.thorough(but=["_over_experts-args1-of1"])
@pytest.mark.parametrize(("run", "args", "of"), DIVIDED)
def test_a_plan_divides_experts_and_sequences(gloo: Pool, run: Any, args: tuple[Any, ...], of: dict[str, Any]) -> None:
    assert max(gloo.run(run, ranks=4, args=args, kwargs=of)) < (1e-12 if run is _over_sequences else 1e-10)
