"""Tensor groups of different sizes run programs of their own: what must be alike in them is compared all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.pool import Pool
from support.tensor_models import WIDTH, make_pipe
from support.uneven import in_a_row
from torch import Tensor, nn

from stagewright.comm import PipelineError

DIVIDED = {"up": "column", "down": "row"}


class Ranked(nn.Module):
    """A model that its processes may make otherwise.

    Arguments:
        parts: in the order of its forward.
        scale: of what comes out.
    """

    def __init__(self, parts: str = "one two", scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.one, self.two = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), *_squares(2)
        self.parts, self.scale = parts.split(), scale

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(self.up(x).tanh())
        summands = {name: getattr(self, name)(h) for name in self.parts}
        made: Tensor = (summands["one"] + summands["two"]) * self.scale
        return made


def _squares(count: int) -> list[nn.Linear]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def _train(model: nn.Module, **options: Any) -> list[float | None]:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with make_pipe(model.double(), loss_fn=F.mse_loss, verify=False, **options) as pipe:
        return [pipe.train_step(x, x).loss for _ in range(3)]


def _options(*sizes: int) -> dict[str, Any]:
    nodes = ("up down one two",) if len(sizes) == 1 else ("up down", "one two")
    return {"plan": in_a_row(*sizes, nodes=nodes), "num_microbatches": None, "tensor_parallel": DIVIDED}


def build_alike() -> tuple[str, list[float | None]]:
    is_last = dist.get_rank() == 2
    try:
        _train(Ranked(scale=3.0 if is_last else 2.0), **_options(2, 1))
    except ValueError as error:
        told = str(error)
    return told, _train(Ranked("two one" if is_last else "one two"), **_options(2, 1))


@pytest.mark.thorough
def test_what_a_group_of_another_size_records_otherwise_is_told(gloo: Pool) -> None:
    """Where it is the order alone, all take the same one."""
    plain = _train(Ranked(), mesh={"pipe": 1})
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
    try:
        for _ in range(2):
            pipe.train_step(x, x)
    except (ValueError, PipelineError) as error:
        return str(error)
    return "nothing"


@pytest.mark.thorough(but=["member"])
@pytest.mark.parametrize(("sizes", "rank", "told"), [((2, 1), 1, 0), ((2, 1, 1), 2, 2)], ids=["member", "same size"])
def test_an_attribute_that_changes_in_one_process_is_told(
    gloo: Pool, sizes: tuple[int, ...], rank: int, told: int
) -> None:
    """Among the members of a group, and between groups of one size."""
    assert "runs another forward in step" in gloo.run(change_one, ranks=sum(sizes), args=(sizes, rank))[told]
