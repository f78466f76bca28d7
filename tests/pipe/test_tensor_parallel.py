"""mesh={"tensor": T}, tensor_parallel=: gradients and parameters equal one process on the same batch, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.inside import peers_in_parts
from support.pool import Pool
from support.small import sgd
from support.tensor_models import WIDTH, WORDS_ALONE, make_batch, make_model, make_pipe
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

from stagewright.comm import MeshPlace, ProcessGroupTransport, ProcessMesh, World
from stagewright.partition import Plan, PlanStage
from stagewright.schedules import Costs

USUAL, ODD = ("pipe", "data", "tensor"), ("tensor", "pipe", "data")


TORCHS: dict[str, Any] = {
    **{f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v")},
    "blocks.*.o": RowwiseParallel(),
    "blocks.*.mlp": PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
    ),
    "blocks.*.mlp.norm": SequenceParallel(use_local_output=True),
    "blocks.*.mlp.up": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.mlp.down": RowwiseParallel(),
}


def batches_of(replica: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    return (make_batch(10 * step + replica) for step in range(count))


def train(options: dict[str, Any], dropout: float = 0.0) -> dict[str, Any]:
    """Three steps, an evaluation of a smaller batch; others than a stage's first process have other weights."""
    left, at = dist.get_rank(), dict[str, int]()
    for axis in reversed(options.get("order", ("pipe", "data", "tensor"))):
        left, at[axis] = divmod(left, options["mesh"].get(axis, 1))
    is_first = at["data"] == at["tensor"] == 0
    with make_pipe(make_model(0 if is_first else dist.get_rank(), dropout=dropout), **options) as pipe:
        replica = pipe._building.replica[0]
        pipe.build(*make_batch(replica))
        first = pipe.full_state_dict()
        results = [pipe.train_step(*batch) for batch in batches_of(replica, 3)] + pipe.flush()
        known = {one.loss_step: one for one in results if one.loss is not None}
        evaluated = pipe.eval_step(*make_batch(replica, size=5))
        return {
            "first": first,
            "state": pipe.full_state_dict(),
            "losses": [known[step].loss for step in range(3)],
            "norms": [known[step].grad_norm for step in range(3)],
            "eval": evaluated.loss,
            "held": sum(p.numel() for p in pipe.parameters()),
            "whole": {n: p.detach() for n, p in pipe.named_parameters() if "norm" in n},
            "stages": pipe.stage_num_parameters,
        }


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


CASES = {
    "tensor": (2, {"mesh": {"pipe": 1, "tensor": 2}, "schedule": "1f1b", "tensor_parallel": TORCHS}),
    "pipe-tensor": (
        4,
        {"mesh": {"pipe": 2, "tensor": 2}, "schedule": "1f1b", "tensor_parallel": TORCHS, "verify": True},
    ),
    "interleaved": (
        4,
        {"mesh": {"pipe": 2, "tensor": 2}, "schedule": "interleaved", "tensor_parallel": WORDS_ALONE, "order": ODD},
    ),
    "data-tensor": (
        4,
        {
            "mesh": {"pipe": 1, "data": 2, "tensor": 2},
            "schedule": "gpipe",
            "tensor_parallel": WORDS_ALONE,
            "data_parallel": "fsdp",
        },
    ),
    "2bw": (
        4,
        {"mesh": {"pipe": 2, "tensor": 2}, "schedule": "2bw", "tensor_parallel": WORDS_ALONE, "recompute": "full"},
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in ("pipe-tensor", "interleaved", "2bw") else pytest.mark.nightly)
        for case in CASES
    ],
)
def test_it_equals_one_process(gloo: Pool, case: str) -> None:
    processes, options = CASES[case]
    check(gloo.run(train, ranks=processes, args=(options,)), options)


def check(answers: list[dict[str, Any]], options: dict[str, Any]) -> None:
    """The same pipeline in one process, without a tensor axis, from the weights that the processes agreed on."""
    data = options["mesh"].get("data", 1)
    model = make_model()
    model.load_state_dict(answers[0]["first"])
    alone_options = {
        k: v for k, v in options.items() if k not in ("tensor_parallel", "order", "sends", "data_parallel")
    }
    alone = make_pipe(model, **alone_options | {"mesh": {"pipe": options["mesh"]["pipe"], "data": data}})
    results = []
    for step in range(3):
        columns = zip(*(make_batch(10 * step + replica) for replica in range(data)), strict=True)
        mixed = [
            torch.cat([part for group in zip(*(x.tensor_split(4) for x in column), strict=True) for part in group])
            for column in columns
        ]
        results.append(alone.train_step(*mixed))
    results += alone.flush()
    known = {one.loss_step: one for one in results if one.loss is not None}
    wanted = alone.full_state_dict()
    for answer in answers:
        assert answer["losses"] == pytest.approx([known[step].loss for step in range(3)], abs=1e-12)
        assert answer["norms"] == pytest.approx([known[step].grad_norm for step in range(3)], abs=1e-12)
        assert difference(answer["state"], wanted) < 1e-12
        assert difference(answer["state"], answers[0]["state"]) == 0.0
        assert answer["stages"] == alone.stage_num_parameters
    columns = zip(*(make_batch(replica, size=5) for replica in range(data)), strict=True)
    if data == 1:
        assert answers[0]["eval"] == pytest.approx(alone.eval_step(*map(torch.cat, columns)).loss, abs=1e-12)
    held = sum(answer["held"] for answer in answers) / len(answers)
    whole = sum(p.numel() for p in model.parameters()) / options["mesh"]["pipe"]
    assert held < 0.7 * whole


def drop(recompute: Any) -> dict[str, Any]:
    """Masks of one step: what hidden units (divided) and outputs (whole) were dropped, in the first block."""
    model = make_model(dropout=0.5)
    seen: dict[str, list[Tensor]] = {"divided": [], "whole": []}
    model.blocks[0].mlp.down.register_forward_pre_hook(
        lambda _, args: seen["divided"].append(args[0].detach()) if model.training else None
    )
    model.blocks[1].norm.register_forward_pre_hook(
        lambda _, args: seen["whole"].append(args[0].detach()) if model.training else None
    )
    for block in model.blocks:
        block.mlp.up.register_forward_hook(lambda _, args, out: F.dropout(out, 0.5))
    with make_pipe(model, mesh={"tensor": 2}, tensor_parallel=WORDS_ALONE, recompute=recompute) as pipe:
        pipe.train_step(*make_batch(0))
        state = pipe.full_state_dict()
    return {"divided": seen["divided"][:4], "whole": seen["whole"][:4], "state": state}


def drop_each(recomputes: Any) -> list[dict[str, Any]]:
    return [drop(recompute) for recompute in recomputes]


@pytest.mark.thorough
def test_masks_are_the_same_where_activations_are_and_others_where_they_are_divided(gloo: Pool) -> None:
    again = ("full", {"blocks.*.mlp": "full", "blocks.*.o": "full"})
    (one, *runs), (other, *_) = gloo.run(drop_each, ranks=2, args=(("none", *again),))
    assert all(torch.equal(a, b) for a, b in zip(one["whole"], other["whole"], strict=True))
    for a, b in zip(one["divided"], other["divided"], strict=True):
        assert 0.3 < float((a == 0).double().mean()) < 0.7
        assert 0.3 < float(((a == 0) == (b == 0)).double().mean()) < 0.7
    assert difference(one["state"], other["state"]) == 0.0
    assert len(runs) == 2
    assert all(difference(run["state"], one["state"]) == 0.0 for run in runs)


def count_bytes(sends: str) -> tuple[dict[str, int], Any]:
    """Bytes that this process sends in a step, by kind of message, and the state behind it."""
    counted: dict[str, int] = {}
    send = ProcessGroupTransport.send

    def counting(self: Any, message: Any, peer: int, tensors: Any, specs: Any) -> None:
        size = sum(x.numel() * x.element_size() for x in tensors)
        counted[message.kind.name] = counted.get(message.kind.name, 0) + size
        send(self, message, peer, tensors, specs)

    ProcessGroupTransport.send = counting  # type: ignore[method-assign]
    try:
        options: dict[str, Any] = {"schedule": "interleaved", "tensor_parallel": WORDS_ALONE, "sends": sends}
        with make_pipe(make_model(), mesh={"pipe": 2, "tensor": 2}, num_microbatches=4, **options) as pipe:
            for step in range(2):
                pipe.train_step(*make_batch(step, size=7))
            return counted, pipe.full_state_dict()
    finally:
        ProcessGroupTransport.send = send  # type: ignore[method-assign]


def count_both() -> list[Any]:
    return [count_bytes("whole"), count_bytes("parts")]


@pytest.mark.thorough
def test_sends_in_parts_carry_half_of_what_both_members_hold(gloo: Pool) -> None:
    for (all_of_it, state), (half, same) in gloo.run(count_both, ranks=4):
        assert half["ACT"] * 2 == all_of_it["ACT"] > 0
        assert half["GRAD"] * 2 == all_of_it["GRAD"] > 0
        assert half.get("LOSS") == all_of_it.get("LOSS")
        assert difference(same, state) == 0.0


def cut_in_between() -> tuple[list[float | None], dict[str, Tensor]]:
    """A chain that is cut between a column and its row, and behind a skip of what is divided."""
    torch.manual_seed(5)
    chain = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH), nn.Tanh()).double()
    divided = {"0": "column", "2": "row"} if dist.is_initialized() else None
    with make_pipe(
        chain,
        mesh={"pipe": 2, "tensor": 2 if divided else 1},
        tensor_parallel=divided,
        sends="parts",
        cut=["2"],
        loss_fn=F.mse_loss,
    ) as pipe:
        generator = torch.Generator().manual_seed(1)
        x, y = (torch.randn(8, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
        return [pipe.train_step(x, y).loss for _ in range(3)], pipe.full_state_dict()


@pytest.mark.thorough
def test_a_part_at_the_end_of_a_stage_travels_as_it_is(gloo: Pool) -> None:
    losses, state = cut_in_between()
    for found, same in gloo.run(cut_in_between, ranks=4):
        assert found == pytest.approx(losses, abs=1e-12)
        assert difference(same, state) < 1e-12


class Hosts:
    """Collectives whose processes run on these hosts."""

    def __init__(self, hosts: list[str]) -> None:
        self.hosts = hosts

    def gather(self, mine: object, *, what: str) -> list[str]:
        return self.hosts


def test_parts_go_between_hosts() -> None:
    place = MeshPlace(world=World(rank=0, size=8), mesh=ProcessMesh(pipe=4, tensor=2))
    peers = partial(peers_in_parts, "auto", place)
    assert peers(Hosts(["a"] * 4 + ["b"] * 4)) == {2, 3}  # type: ignore[arg-type]
    assert peers(Hosts(["a", "a", "b", "b", "b", "c", "c", "c"])) == {1, 3}  # type: ignore[arg-type]
    assert peers(Hosts(["a", "b"] * 4)) == frozenset()  # type: ignore[arg-type]
    assert peers_in_parts("parts", place, Hosts([])) == {1, 2, 3}  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sends='half': expected one of 'auto', 'parts', 'whole'"):
        make_pipe(make_model(), sends="half")


def train_a_plan(plan: Plan) -> tuple[list[float | None], dict[str, Tensor], tuple[int, ...]]:
    """A plan that splits tensors, by what "auto" finds; all processes pass the same batch."""
    with make_pipe(make_model(), num_microbatches=None, plan=plan, optimizer=sgd) as pipe:
        losses = [pipe.train_step(*make_batch(step)).loss for step in range(3)]
        return losses, pipe.full_state_dict(), tuple(p.numel() for p in pipe.parameters())


def plan_of(*ranks: tuple[int, ...], num_devices: int) -> Plan:
    """Two stages on these ranks, in groups of 2."""
    nodes = (("embed", "blocks.0"), ("blocks.1", "norm", "head"))
    stages = [PlanStage(nodes=n, ranks=r, tensor=2, step_seconds=3.0) for n, r in zip(nodes, ranks, strict=True)]
    return Plan(
        stages=tuple(stages),
        costs=Costs(forward=1.0, backward=2.0),
        num_devices=num_devices,
        cost_model="default",
        bottleneck=3,
        bound=3,
        schedule="1f1b",
        num_microbatches=4,
    )


def check_plan(answers: list[Any]) -> None:
    alone = make_pipe(make_model(), mesh={"pipe": 2}, optimizer=sgd)
    losses, whole = [alone.train_step(*make_batch(step)).loss for step in range(3)], alone.full_state_dict()
    for found, state, sizes in answers:
        assert found == pytest.approx(losses, abs=1e-12)
        assert difference(state, whole) < 1e-12
        assert sum(sizes) < sum(p.numel() for p in make_model().parameters()) / 2


@pytest.mark.thorough
def test_a_plan_that_splits_tensors_runs(gloo: Pool) -> None:
    check_plan(gloo.run(train_a_plan, ranks=4, args=(plan_of((2, 3), (0, 1), num_devices=4),)))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("schedule", "order"),
    [(schedule, order) for schedule in ("1f1b", "interleaved", "2bw") for order in (USUAL, ODD)],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_eight_processes(gloo: Pool, schedule: str, order: tuple[str, ...]) -> None:
    options = {
        "mesh": {"pipe": 2, "data": 2, "tensor": 2},
        "schedule": schedule,
        "tensor_parallel": TORCHS if schedule == "1f1b" else WORDS_ALONE,
        "order": order,
        "sends": "parts",
        "timeout": 120.0,
    }
    check(gloo.run(train, ranks=8, args=(options,)), options)


@pytest.mark.nightly
def test_unequal_replicas_of_tensor_groups(gloo: Pool) -> None:
    """Three replicas of two processes, and one."""
    plan = plan_of((2, 3, 4, 5, 6, 7), (0, 1), num_devices=8)
    check_plan(gloo.run(train_a_plan, ranks=8, args=(plan,)))
