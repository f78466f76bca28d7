"""Tensor groups on a mesh: planes, orders of axes, one batch per group; what is refused, and failures of one rank."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.inside import Sequence
from support.parts import GIVEN, Parts
from support.pool import Pool
from support.tensor_models import WIDTH, WORDS_ALONE, make_batch, make_model, make_pipe
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stagewright import Mesh, PipelineModule
from stagewright.comm import PipelineError


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
    with pytest.raises(ValueError, match=r"optimizer Muon holds '0.weight', which a group divides") as error:
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


def lose_a_member() -> tuple[str, tuple[int, ...]]:
    """The second member of the second rank's group fails in its forward."""
    model = make_model()
    pipe = make_pipe(model, mesh={"pipe": 2, "tensor": 2}, tensor_parallel=WORDS_ALONE, timeout=8.0)
    pipe.build(*make_batch(0))
    if dist.get_rank() == 3:
        model.blocks[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises((PipelineError, ZeroDivisionError)) as told:
        pipe.train_step(*make_batch(0))
    return str(told.value), getattr(told.value, "peers", ())


@pytest.mark.thorough
def test_a_lost_member_is_named(gloo: Pool) -> None:
    """By the other member, which waits for it in a module, and by those who wait for that one."""
    told = gloo.run(lose_a_member, ranks=4)
    assert told[3][0] == "division by zero"
    assert told[2][1] == (3,)
    place = r"in a divided module, 'blocks\.1\.mlp\.\w+', together with process 3 \(rank 1, tensor 1\) .*, in 1F0; last"
    assert re.search(place, told[2][0]), told[2][0]
    for text, _ in told[:3]:
        assert "cause: process 3 (rank 1, tensor 1) failed: ZeroDivisionError: division by zero" in text


def differ() -> str:
    """The second rank's group divides the MLPs alone."""
    mlps = {name: style for name, style in WORDS_ALONE.items() if "mlp" in name}
    divided = WORDS_ALONE if dist.get_rank() < 2 else mlps
    with pytest.raises(ValueError, match="divided modules") as told:
        make_pipe(make_model(), mesh={"pipe": 2, "tensor": 2}, tensor_parallel=divided).build(*make_batch(0))
    return str(told.value)


@pytest.mark.thorough
def test_all_ranks_divide_alike(gloo: Pool) -> None:
    assert all("tensor=4 divided modules" in told for told in gloo.run(differ, ranks=4))


def pass_other_inputs() -> str:
    """The second member of the second rank's group passes another batch."""
    pipe = make_pipe(make_model(), mesh={"pipe": 2, "tensor": 2}, tensor_parallel=WORDS_ALONE)
    pipe.build(*make_batch(0))
    with pytest.raises((ValueError, PipelineError), match="passed other inputs") as told:
        pipe.train_step(*make_batch(int(dist.get_rank() == 3)))
    return str(told.value)


@pytest.mark.thorough
def test_a_tensor_group_passes_one_batch(gloo: Pool) -> None:
    told = gloo.run(pass_other_inputs, ranks=4)
    for member in (2, 3):
        assert "(rank 1, tensor 1) passed other inputs to step 0 than process 2 (rank 1, tensor 0)" in told[member]


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


class _Block(nn.Module):
    """`part`: the code under the checkpoint: all of it, or what begins or ends within the divided region."""

    def __init__(self, part: str, *, reentrant: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.part, self.reentrant = part, reentrant
        self.masks: list[torch.Tensor] = []

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
        found: torch.Tensor = checkpoint(run, x, use_reentrant=self.reentrant) if self.part == part else run(x)
        return found

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


@pytest.mark.thorough
@pytest.mark.parametrize(("part", "reentrant"), [("all", False), ("all", True), ("last", False)])
def test_a_checkpoint_draws_the_same_masks(gloo: Pool, part: str, reentrant: bool) -> None:
    for found in gloo.run(_masks, ranks=2, args=(part, reentrant)):
        again = len(found) - 12  # 3 masks, 2 blocks, 2 microbatches; a checkpoint stops at what it needs last
        assert again > 0
        assert found.count(2) == 2 * again
        assert found.count(1) == 12 - again
