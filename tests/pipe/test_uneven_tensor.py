"""Stages with tensor groups of different sizes: against one plain process; programs are compared."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.alone import near, train_alone, train_piped
from support.failing import refusal
from support.grids import nightly
from support.parts import Parts
from support.pool import Pool
from support.tensor_models import WIDTH, loss_fn, make_batch, make_model, make_pipe
from support.uneven import in_a_row, plan_of, stage
from torch import Tensor, nn

from stagewright.comm import PipelineError
from stagewright.partition import Plan
from stagewright.pipe import PipelineModule

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return OPTIMIZERS["sgd"](parameters)  # type: ignore[no-any-return]


def train(plan: Plan, optimizer: str = "sgd", **options: Any) -> dict[str, Any]:
    with make_pipe(make_model(), num_microbatches=None, plan=plan, optimizer=OPTIMIZERS[optimizer], **options) as pipe:
        results = [pipe.train_step(*make_batch(step)) for step in range(3)]
        return {
            "losses": [one.loss for one in results],
            "norms": [one.grad_norm for one in results],
            "eval": pipe.eval_step(*make_batch(3, size=5)).loss,
            "state": pipe.full_state_dict(),
            "makespan": results[-1].timeline().makespan,
        }


def train_plain(optimizer: str = "sgd") -> dict[str, Any]:
    model = make_model()
    found = train_alone(model, map(make_batch, range(3)), OPTIMIZERS[optimizer], loss_fn=loss_fn, clip=0.7)
    x, y = make_batch(3, size=5)
    return found._asdict() | {"eval": loss_fn(model(x), y).item()}


# The weight of embedding and head is on stages with groups of equal sizes in 1-2-1, and of different ones elsewhere.
CASES: dict[str, tuple[Plan, dict[str, Any]]] = {
    "2-1": (in_a_row(2, 1), {"verify": True}),
    "1-2-1": (in_a_row(1, 2, 1, schedule="zb-h1", num_bytes=(7744.0, 3680.0, 896.0)), {"optimizer": "adam"}),
    "1-1-2": (in_a_row(1, 1, 2), {"sends": "parts"}),
    "2-1-1": (in_a_row(2, 1, 1, schedule="gpipe"), {}),
    "backwards": (plan_of(stage("embed blocks.0", 2, 3), stage("blocks.1", 1), stage("norm head", 0)), {}),
    "idle": (plan_of(stage("embed blocks.0", 0), stage("blocks.1 norm head", 2, 3)), {}),
    "chunks": (
        plan_of(
            stage("embed", 0, 1),
            stage("blocks.0", 2, recompute="full"),
            stage("blocks.1", 0, 1, recompute="selective"),
            stage("norm head", 2),
            num_chunks=2,
            schedule="interleaved",
        ),
        {},
    ),
    "2-2-1": (in_a_row(2, 2, 1), {"sends": "parts"}),
    "replicas": (
        plan_of(stage("embed blocks.0", 0, 1, tensor=1, optimizer_shards=2), stage("blocks.1 norm head", 2, 3)),
        {},
    ),
}
DAILY = ("2-1", "1-2-1", "1-1-2", "replicas")


@pytest.mark.thorough
@pytest.mark.parametrize("case", [case if case in DAILY else nightly(case) for case in CASES])
def test_it_equals_one_process(gloo: Pool, case: str) -> None:
    plan, options = CASES[case]
    wanted = train_plain(options.get("optimizer", "sgd"))
    tolerance = 1e-10 if "optimizer" in options else 1e-12
    for found in gloo.run(train, ranks=plan.num_devices, args=(plan,), kwargs=options):
        near(found, wanted, atol=tolerance)
        assert found["makespan"] > 0.0


def drop(**options: Any) -> PipelineModule:
    """A pipeline over a model that drops out of what all members hold."""
    model = make_model()
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda mlp, _, out: F.dropout(out, 0.5, mlp.training))
    return make_pipe(model, optimizer=OPTIMIZERS["adam"], **options)


def drop_over_plans(folder: str) -> tuple[list[float | None], dict[str, Tensor]]:
    losses = []
    for step, plan in enumerate((in_a_row(2, 1, 1), in_a_row(1, 1, 2), in_a_row(1, 2, 1))):
        with drop(num_microbatches=None, plan=plan) as pipe:
            if step:
                pipe.load(f"{folder}/{step - 1}")
            losses.append(pipe.train_step(*make_batch(step)).loss)
            pipe.save(f"{folder}/{step}")
            state = pipe.full_state_dict()
    return losses, state


@pytest.mark.thorough
def test_masks_are_those_of_one_process_and_checkpoints_go_from_plan_to_plan(gloo: Pool, tmp_path: Path) -> None:
    alone = drop(mesh={"pipe": 1})
    losses = [alone.train_step(*make_batch(step)).loss for step in range(3)]
    for found, state in gloo.run(drop_over_plans, ranks=4, args=(str(tmp_path),)):
        near([found, state], [losses, alone.full_state_dict()], atol=1e-10)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))


class Skips(Parts, first=mlp, middle=mlp, last=mlp, embed=lambda: nn.Embedding(5, WIDTH)):
    """Three MLPs; integers and an activation go past the one in the middle."""

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        h = self.first(x)
        words = words % 5
        return self.last(self.middle(h) + x) + h + self.embed(words)


def skip(options: dict[str, Any]) -> tuple[list[float | None], dict[str, Tensor]]:
    torch.manual_seed(0)
    divided = {f"{mlp}.{i}": word for mlp in ("first", "middle", "last") for i, word in ((0, "column"), (2, "row"))}
    generator = torch.Generator().manual_seed(1)
    parts = {"optimizer": sgd, "loss_fn": F.mse_loss, "tensor_parallel": divided if "plan" in options else None}
    with make_pipe(Skips().double(), **(parts | options)) as pipe:
        losses = []
        for _ in range(3):
            x, y = (torch.randn(8, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
            words = torch.randint(0, 99, (8,), generator=generator)
            losses.append(pipe.train_step(x, words, y).loss)
        return losses, pipe.full_state_dict()


SKIPS = ("first.0 first.2", "middle.0 middle.2", "last.0 last.2 embed")


@pytest.mark.thorough
def test_skips_and_integers(gloo: Pool) -> None:
    wanted = skip({"mesh": {"pipe": 1}})
    options = {"plan": in_a_row(2, 1, 1, nodes=SKIPS), "num_microbatches": None, "verify": True}
    for found in gloo.run(skip, ranks=4, args=(options,)):
        near(found, wanted)


class Heads(nn.Module):
    """Attention in the model's own forward, whose record has the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.o, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        parts = (part(x).view(*x.shape[:2], self.num_heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.last(self.o(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)) + x)


def attend(options: dict[str, Any]) -> tuple[list[float | None], dict[str, Tensor]]:
    torch.manual_seed(0)
    return trained(Heads(), 3, **options)


@pytest.mark.thorough
def test_programs_may_differ_with_the_size_of_the_group(gloo: Pool) -> None:
    wanted = attend({"mesh": {"pipe": 1}})
    options = {"plan": in_a_row(2, 1, nodes=("q k v o", "last")), "num_microbatches": None}
    for found in gloo.run(attend, ranks=3, args=(options,)):
        near(found, wanted)


class Twice(Parts, mlp=mlp, middle=lambda: nn.Linear(WIDTH, WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.middle(self.mlp(x)))


def refuse() -> list[str]:
    told = []
    x = torch.ones(8, WIDTH, dtype=torch.float64)
    columns = {"0": "column", "2": "row"}
    cases: list[tuple[nn.Module, Plan, Any]] = [
        (make_model(), in_a_row(1, 2, schedule="2bw"), None),
        (make_model(), in_a_row(1, 2), {"blocks.*.mlp.upp": "column"}),
        (mlp().double(), in_a_row(2, 1, nodes=("0 1", "2")), columns),
        (
            Twice().double(),
            in_a_row(1, 2, nodes=("mlp.0 mlp.2 middle", "mlp.0#2 mlp.2#2")),
            {f"mlp.{name}": word for name, word in columns.items()},
        ),
    ]
    for model, plan, divided in cases:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        batch = make_batch(0) if not isinstance(model, nn.Sequential | Twice) else (x, x)
        with pytest.raises(ValueError, match="xpected") as error:
            make_pipe(model, num_microbatches=None, plan=plan, tensor_parallel=divided).build(*batch)
        told.append(str(error.value))
        near(model.state_dict(), before, atol=0.0)
    return told


def test_what_is_refused(gloo: Pool) -> None:
    for told in gloo.run(refuse, ranks=3):
        assert "over 1 and 2 ranks under the asynchronous schedule '2bw': expected one size for all stages" in told[0]
        assert "cutting the model failed on process 1 (rank 1, tensor 0)" in told[1]
        assert "'blocks.*.mlp.upp': ...} matches no module" in told[1]
        assert "output 0 of stage 0 (0 .. 1) goes between tensor groups of 2 and 1 processes" in told[2]
        assert "expected a cut where each of them holds the whole tensor, such as between two blocks" in told[2]
        assert "'mlp.0.weight' is divided over a tensor group, and ranks 0 and 1, which hold it, have groups" in told[3]


DIVIDED = {"up": "column", "down": "row"}


class Ranked(nn.Module):
    """A model that its processes may make otherwise: its parts in another order, its output on another scale."""

    def __init__(self, parts: str = "one two", scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.one, self.two = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.parts, self.scale = parts.split(), scale

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(self.up(x).tanh())
        summands = {name: getattr(self, name)(h) for name in self.parts}
        return (summands["one"] + summands["two"]) * self.scale


def trained(model: nn.Module, *sizes: int, **options: Any) -> tuple[list[float | None], dict[str, Tensor]]:
    x = torch.randn(8, *sizes, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with make_pipe(model.double(), loss_fn=F.mse_loss, verify=False, **options) as pipe:
        return [pipe.train_step(x, x).loss for _ in range(3)], pipe.full_state_dict()


def _options(*sizes: int) -> dict[str, Any]:
    nodes = ("up down one two",) if len(sizes) == 1 else ("up down", "one two")
    return {"plan": in_a_row(*sizes, nodes=nodes), "num_microbatches": None, "tensor_parallel": DIVIDED}


def build_alike() -> tuple[str, list[float | None]]:
    is_last = dist.get_rank() == 2
    told = refusal(lambda: trained(Ranked(scale=3.0 if is_last else 2.0), **_options(2, 1)))
    return told, trained(Ranked("two one" if is_last else "one two"), **_options(2, 1))[0]


@pytest.mark.thorough
def test_what_a_group_of_another_size_records_otherwise_is_told(gloo: Pool) -> None:
    """Where it is the order alone, all take the same one."""
    plain, _ = trained(Ranked(), mesh={"pipe": 1})
    for told, losses in gloo.run(build_alike, ranks=3):
        assert "run different programs; the first difference" in told
        assert "2.0" in told
        assert "3.0" in told
        assert losses == pytest.approx(plain, abs=1e-12)


def change_one(sizes: tuple[int, ...], rank: int) -> str:
    model, x = Ranked().double(), torch.ones(8, WIDTH, dtype=torch.float64)
    nodes = ("up down", "one", "two")[: len(sizes)]
    options = _options(*sizes) | ({"plan": in_a_row(*sizes, nodes=nodes)} if len(sizes) > 2 else {})
    pipe = make_pipe(model, loss_fn=F.mse_loss, verify=False, **options)
    pipe.train_step(x, x)
    if dist.get_rank() == rank:
        model.scale = 3.0
    return refusal(lambda: train_piped(pipe, [(x, x)] * 2), ValueError, PipelineError)


@pytest.mark.parametrize(("sizes", "rank", "told"), [((2, 1), 1, 0), ((2, 1, 1), 2, 2)], ids=["member", "same size"])
def test_an_attribute_that_changes_in_one_process_is_told(
    gloo: Pool, sizes: tuple[int, ...], rank: int, told: int
) -> None:
    """Among the members of a group, and between groups of one size."""
    assert "runs another forward in step" in gloo.run(change_one, ranks=sum(sizes), args=(sizes, rank))[told]
