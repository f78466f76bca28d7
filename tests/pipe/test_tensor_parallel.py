"""mesh={"tensor": T}, tensor_parallel=: equal to one process in float64; what is refused; failures of one rank."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.alone import near, train_piped
from support.inside import Sequence, peers_in_parts
from support.parts import GIVEN, Parts
from support.plain import batch
from support.pool import Pool
from support.small import sgd
from support.tensor_models import WIDTH, WORDS_ALONE, make_batch, make_model, make_pipe
from support.uneven import NODES, plan_of, stage
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.utils.checkpoint import checkpoint

from stagewright import Mesh, PipelineModule
from stagewright.comm import MeshPlace, PipelineError, ProcessGroupTransport, ProcessMesh, World
from stagewright.partition import Plan

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


def train(options: dict[str, Any], dropout: float = 0.0) -> dict[str, Any]:
    """Three steps, an evaluation of a smaller batch; others than a stage's first process have other weights."""
    left, at = dist.get_rank(), dict[str, int]()
    for axis in reversed(options.get("order", ("pipe", "data", "tensor"))):
        left, at[axis] = divmod(left, options["mesh"].get(axis, 1))
    is_first = at["data"] == at["tensor"] == 0
    settings = {"tensor_parallel": WORDS_ALONE} | options
    with make_pipe(make_model(0 if is_first else dist.get_rank(), dropout=dropout), **settings) as pipe:
        replica = pipe._building.replica[0]
        pipe.build(*make_batch(replica))
        first = pipe.full_state_dict()
        results = [
            pipe.train_step(*batch) for batch in (make_batch(10 * step + replica) for step in range(3))
        ] + pipe.flush()
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


PIPE_TENSOR = {"pipe": 2, "tensor": 2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"mesh": {"pipe": 1, "tensor": 2}, "schedule": "1f1b", "tensor_parallel": TORCHS}),
    "pipe-tensor": (4, {"mesh": PIPE_TENSOR, "schedule": "1f1b", "tensor_parallel": TORCHS, "verify": True}),
    "interleaved": (4, {"mesh": PIPE_TENSOR, "schedule": "interleaved", "order": ODD}),
    "data-tensor": (4, {"mesh": {"pipe": 1, "data": 2, "tensor": 2}, "schedule": "gpipe", "data_parallel": "fsdp"}),
    "2bw": (4, {"mesh": PIPE_TENSOR, "schedule": "2bw", "recompute": "full"}),
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
    left_out = ("tensor_parallel", "order", "sends", "data_parallel")
    settings = {key: value for key, value in options.items() if key not in left_out}
    alone = make_pipe(model, **settings | {"mesh": {"pipe": options["mesh"]["pipe"], "data": data}})
    results = []
    for step in range(3):
        columns = zip(*(make_batch(10 * step + replica) for replica in range(data)), strict=True)
        parts = (zip(*(x.tensor_split(4) for x in column), strict=True) for column in columns)
        results.append(alone.train_step(*(torch.cat([part for group in each for part in group]) for each in parts)))
    results += alone.flush()
    known = {one.loss_step: one for one in results if one.loss is not None}
    losses, norms = [known[step].loss for step in range(3)], [known[step].grad_norm for step in range(3)]
    wanted = {"losses": losses, "norms": norms, "state": alone.full_state_dict()}
    for answer in answers:
        near(answer, wanted)
        near(answer["state"], answers[0]["state"], atol=0.0)
        assert answer["stages"] == alone.stage_num_parameters
    if data == 1:
        near(answers[0]["eval"], alone.eval_step(*make_batch(0, size=5)).loss)
    held = sum(answer["held"] for answer in answers) / len(answers)
    whole = sum(p.numel() for p in model.parameters()) / options["mesh"]["pipe"]
    assert held < 0.7 * whole


def in_turn(call: Callable[[Any], Any], arguments: tuple[Any, ...]) -> list[Any]:
    return [call(argument) for argument in arguments]


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


@pytest.mark.thorough
def test_masks_are_the_same_where_activations_are_and_others_where_they_are_divided(gloo: Pool) -> None:
    again = ("full", {"blocks.*.mlp": "full", "blocks.*.o": "full"})
    (one, *runs), (other, *_) = gloo.run(in_turn, ranks=2, args=(drop, ("none", *again)))
    assert all(torch.equal(a, b) for a, b in zip(one["whole"], other["whole"], strict=True))
    for a, b in zip(one["divided"], other["divided"], strict=True):
        assert 0.3 < float((a == 0).double().mean()) < 0.7
        assert 0.3 < float(((a == 0) == (b == 0)).double().mean()) < 0.7
    assert len(runs) == 2
    for run in (other, *runs):
        near(run["state"], one["state"], atol=0.0)


def count_bytes(sends: str) -> tuple[dict[str, int], Any]:
    """Bytes that this process sends in a step, by kind of message, and the state behind it."""
    counted: dict[str, int] = {}
    send = ProcessGroupTransport.send

    def counting(self: Any, message: Any, peer: int, tensors: Any, specs: Any) -> None:
        counted[message.kind.name] = counted.get(message.kind.name, 0) + sum(x.nbytes for x in tensors)
        send(self, message, peer, tensors, specs)

    options: dict[str, Any] = {"schedule": "interleaved", "tensor_parallel": WORDS_ALONE, "sends": sends}
    with (
        mock.patch.object(ProcessGroupTransport, "send", counting),
        make_pipe(make_model(), mesh={"pipe": 2, "tensor": 2}, **options) as pipe,
    ):
        for step in range(2):
            pipe.train_step(*make_batch(step, size=7))
        return counted, pipe.full_state_dict()


@pytest.mark.thorough
def test_sends_in_parts_carry_half_of_what_both_members_hold(gloo: Pool) -> None:
    for (all_of_it, state), (half, same) in gloo.run(in_turn, ranks=4, args=(count_bytes, ("whole", "parts"))):
        assert half["ACT"] * 2 == all_of_it["ACT"] > 0
        assert half["GRAD"] * 2 == all_of_it["GRAD"] > 0
        assert half.get("LOSS") == all_of_it.get("LOSS")
        near(same, state, atol=0.0)


def cut_in_between() -> list[Any]:
    """A chain that is cut between a column and its row, and behind a skip of what is divided."""
    torch.manual_seed(5)
    chain = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH), nn.Tanh()).double()
    divided = {"0": "column", "2": "row"} if dist.is_initialized() else None
    mesh, options = {"pipe": 2, "tensor": 2 if divided else 1}, {"sends": "parts", "cut": ["2"], "loss_fn": F.mse_loss}
    found = train_piped(make_pipe(chain, mesh=mesh, tensor_parallel=divided, **options), [batch(1, WIDTH)] * 3)
    return [found.losses, found.state]


def test_a_part_at_the_end_of_a_stage_travels_as_it_is(gloo: Pool) -> None:
    wanted = cut_in_between()
    for found in gloo.run(cut_in_between, ranks=4):
        near(found, wanted)


def test_parts_go_between_hosts() -> None:
    place = MeshPlace(world=World(rank=0, size=8), mesh=ProcessMesh(pipe=4, tensor=2))

    def peers(hosts: str, sends: str = "auto") -> Any:
        collectives: Any = SimpleNamespace(gather=lambda mine, what: list(hosts))
        return peers_in_parts(sends, place, collectives)

    assert peers("aaaabbbb") == {2, 3}
    assert peers("aabbbccc") == {1, 3}
    assert peers("abababab") == frozenset()
    assert peers("", "parts") == {1, 2, 3}
    with pytest.raises(ValueError, match="sends='half': expected one of 'auto', 'parts', 'whole'"):
        make_pipe(make_model(), sends="half")


def train_a_plan(plan: Plan) -> tuple[list[float | None], dict[str, Tensor], int]:
    """A plan that splits tensors, by what "auto" finds; all processes pass the same batch."""
    pipe = make_pipe(make_model(), num_microbatches=None, plan=plan, optimizer=sgd)
    losses, _, state = train_piped(pipe, map(make_batch, range(3)))
    return losses, state, sum(p.numel() for p in pipe.parameters())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("processes", "ranks"),
    [(4, ((2, 3), (0, 1))), pytest.param(8, ((2, 3, 4, 5, 6, 7), (0, 1)), marks=pytest.mark.nightly)],
    ids=["4", "8"],
)
def test_a_plan_that_splits_tensors_runs(gloo: Pool, processes: int, ranks: tuple[tuple[int, ...], ...]) -> None:
    """Three replicas of two processes, and one, on eight of them."""
    plan = plan_of(*(stage(nodes, *own, tensor=2) for nodes, own in zip(NODES[2], ranks, strict=True)))
    wanted = train_piped(make_pipe(make_model(), mesh={"pipe": 2}, optimizer=sgd), map(make_batch, range(3)))
    for losses, state, size in gloo.run(train_a_plan, ranks=processes, args=(plan,)):
        near([losses, state], [wanted.losses, wanted.state])
        assert size < sum(p.numel() for p in make_model().parameters()) / 2


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


HELD_BY_MUON = r"optimizer Muon holds '0.weight', which a group divides, .*: it needs whole .*separable = 'elements' of"


def partial_gradients() -> list[str]:
    """Told: a whole weight between a column and its row; a model divided before; an optimizer of whole weights; and
    what no such group can be made of."""
    told = []
    chain = [nn.Linear(WIDTH, 12), nn.PReLU(), nn.Linear(12, WIDTH, bias=False)]
    x = torch.ones(8, WIDTH, dtype=torch.float64)
    for schedule in ("1f1b", "2bw"):
        torch.manual_seed(5)
        model = nn.Sequential(*(type(each)(*args) for each, args in zip(chain, CHAIN, strict=True))).double()
        options: dict[str, Any] = {"tensor_parallel": {"0": "column", "2": "row"}, "loss_fn": F.mse_loss}
        pipe = make_pipe(model, mesh={"tensor": 2}, schedule=schedule, **options)
        with pytest.raises(ValueError, match="the members of a tensor group hold whole") as error:
            [pipe.train_step(x, x) for _ in range(3)]
        told.append(str(error.value))
        with pytest.raises(ValueError, match="divided over a group already") as error:
            make_pipe(model, mesh={"tensor": 2}, schedule=schedule, **options).build(x, x)
        told.append(str(error.value))
    model = nn.Sequential(nn.Linear(WIDTH, 12, bias=False), nn.Linear(12, WIDTH, bias=False)).double()
    options = {"mesh": {"tensor": 2}, "tensor_parallel": {"0": "column", "1": "row"}, "loss_fn": F.mse_loss}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="begins 2 stages, the schedule has 1"):
        make_pipe(model, cut=["1"], **options).build(x, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match=HELD_BY_MUON) as error:
        make_pipe(model, optimizer=lambda p: torch.optim.Muon(p, lr=0.1), **options).build(x, x)
    told.append(str(error.value))
    for options, said in (
        ({"tensor_parallel": None}, "a tensor group of 2 processes without tensor_parallel="),
        ({"mesh": {"tensor": 3}}, 'mesh={"tensor": 3} on 2 processes: expected a size that divides 2'),
    ):
        with pytest.raises(ValueError, match=said):
            make_pipe(make_model(), **{"mesh": {"tensor": 2}, "tensor_parallel": WORDS_ALONE} | options)
    model = make_model()
    with make_pipe(model, mesh={"tensor": 2}, tensor_parallel=WORDS_ALONE) as pipe:
        pipe.build(*make_batch(0))
        with pytest.raises(ValueError, match="whose weights a group divides"):
            model.state_dict()
    return told


CHAIN: list[tuple[Any, ...]] = [(WIDTH, 12), (), (12, WIDTH)]


def test_what_would_drift_apart_is_told(gloo: Pool) -> None:
    for told in gloo.run(partial_gradients, ranks=2):
        assert "the gradient of '1.weight'" in told[0]
        assert "the gradient of '1.weight'" in told[2]


def lose_a_member(hook: str) -> tuple[str, tuple[int, ...]]:
    """The second member of the second rank's group fails in its forward, or backward."""
    model = make_model()
    pipe = make_pipe(model, mesh={"pipe": 2, "tensor": 2}, tensor_parallel=WORDS_ALONE, timeout=8.0)
    pipe.build(*make_batch(0))
    if dist.get_rank() == 3:
        getattr(model.blocks[1].mlp, hook)(lambda *_: 1 / 0)
    with pytest.raises((PipelineError, ZeroDivisionError)) as told:
        pipe.train_step(*make_batch(0))
    return str(told.value), getattr(told.value, "peers", ())


@pytest.mark.thorough
@pytest.mark.parametrize(("op", "hook"), [("F", "register_forward_pre_hook"), ("B", "register_full_backward_pre_hook")])
def test_a_lost_member_is_named(gloo: Pool, op: str, hook: str) -> None:
    """By the other member, which waits for it in a module, and by those who wait for that one."""
    told = gloo.run(lose_a_member, ranks=4, args=(hook,))
    assert told[3][0] == "division by zero"
    assert told[2][1] == (3,)
    place = (
        rf"in a divided module, 'blocks\.1\.mlp\.\w+', together with process 3 \(rank 1, tensor 1\) .*, in 1{op}0; last"
    )
    assert re.search(place, told[2][0]), told[2][0]
    for text, _ in told[:3]:
        assert "cause: process 3 (rank 1, tensor 1) failed: ZeroDivisionError: division by zero" in text


def differ() -> list[str]:
    """The second rank's group divides the MLPs alone; and its second member passes another batch."""
    mlps = {name: style for name, style in WORDS_ALONE.items() if "mlp" in name}
    divided, mesh = WORDS_ALONE if dist.get_rank() < 2 else mlps, {"pipe": 2, "tensor": 2}
    with pytest.raises(ValueError, match="divided modules") as modules:
        make_pipe(make_model(), mesh=mesh, tensor_parallel=divided).build(*make_batch(0))
    pipe = make_pipe(make_model(), mesh=mesh, tensor_parallel=WORDS_ALONE)
    pipe.build(*make_batch(0))
    with pytest.raises((ValueError, PipelineError), match="passed other inputs") as inputs:
        pipe.train_step(*make_batch(int(dist.get_rank() == 3)))
    return [str(modules.value), str(inputs.value)]


@pytest.mark.thorough
def test_all_ranks_divide_alike_and_a_tensor_group_passes_one_batch(gloo: Pool) -> None:
    modules, inputs = zip(*gloo.run(differ, ranks=4), strict=True)
    assert all("tensor=4 divided modules" in told for told in modules)
    for member in (2, 3):
        assert "(rank 1, tensor 1) passed other inputs to step 0 than process 2 (rank 1, tensor 0)" in inputs[member]


class Mixes(Parts, dim=GIVEN):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(self.dim)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_modules_that_mix_positions_are_not_cut_by_positions(dim: int) -> None:
    """One that looks back alone gives the first positions as they are."""
    style = Sequence(dim=dim)
    with pytest.raises(ValueError, match="cannot be cut by 'sequence'"):
        style.check("m", Mixes(dim), 2)
    for module in (nn.LayerNorm(6), nn.Linear(6, 5), nn.Dropout(0.5)):
        style.check("m", module, 2)


class _Block(
    Parts,
    up=lambda: nn.Linear(4, 8),
    down=lambda: nn.Linear(8, 4),
    part=GIVEN,
    reentrant=GIVEN,
    masks=list[torch.Tensor],
):
    """`part`: the code under the checkpoint: all of it, or what begins or ends within the divided region."""

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        out = F.dropout(x, 0.5, self.training)
        self.masks.append(out.detach() == 0)
        return out

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        return self._dropped(self.up(x))

    def _last(self, x: torch.Tensor) -> torch.Tensor:
        return self._dropped(self.down(self._dropped(x)))

    def _all(self, x: torch.Tensor) -> torch.Tensor:
        return self._last(self._first(x))

    def _again(self, part: str, x: torch.Tensor) -> torch.Tensor:
        run = getattr(self, f"_{part}")
        return checkpoint(run, x, use_reentrant=self.reentrant) if self.part == part else run(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self._again("all", x) if self.part == "all" else self._again("last", self._again("first", x)))


def _masks(part: str, reentrant: bool) -> list[int]:
    """Numbers of equal masks, of each mask of a batch in two blocks, whose order is that of time."""
    torch.manual_seed(0)
    blocks = [_Block(part, reentrant=reentrant) for _ in range(2)]
    styles = {f"{i}.{key}": style for i in (1, 2) for key, style in (("up", "column"), ("down", "row"))}
    mesh = Mesh(pipe=1, tensor=2, tensor_parallel=styles)
    model = nn.Sequential(nn.Linear(4, 4), *blocks).double()
    with PipelineModule(model, mesh=mesh, num_microbatches=2, loss_fn=F.mse_loss) as pipe:
        x, y = torch.randn(2, 32, 4, dtype=torch.float64)
        pipe.build(x, y)
        for block in blocks:
            block.masks.clear()
        pipe.forward_backward(x, y)
    masks = [mask for block in blocks for mask in block.masks]
    return [sum(torch.equal(one, other) for other in masks) for one in masks]


@pytest.mark.thorough(but=["all-True"])
@pytest.mark.parametrize(("part", "reentrant"), [("all", False), ("all", True), ("last", False)])
def test_a_checkpoint_draws_the_same_masks(gloo: Pool, part: str, reentrant: bool) -> None:
    for found in gloo.run(_masks, ranks=2, args=(part, reentrant)):
        again = len(found) - 12  # 3 masks, 2 blocks, 2 microbatches; a checkpoint stops at what it needs last
        assert again > 0
        assert found.count(2) == 2 * again
        assert found.count(1) == 12 - again
