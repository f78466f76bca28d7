"""Auxiliary losses, as of routers: what a loss reads past the output is refused. Those in the output: test_fuzz.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.failing import Told, told
from support.small import WIDTH, X, Y, make
from torch import Tensor, nn

X64, Y64 = X.double(), Y.double()
SINK: list[Tensor] = []


class Block(nn.Module):
    """A layer whose auxiliary loss is what its second weight makes of the input; a unit, whose own code runs."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.layer = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 3)
        self.router = nn.Parameter(torch.randn(2, WIDTH, dtype=torch.float64))
        self.keep = keep
        self.aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        aux = F.linear(x, self.router).square().mean()
        h = torch.tanh(F.linear(x, self.layer))
        if self.keep == "attribute":
            self.aux = aux
        elif self.keep == "list":
            self.aux = [aux]
        else:
            SINK.append(aux)
        return h


class Looped(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


PLACES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (lambda model: sum(block.aux for block in model), "reads 'aux' of module '0'"),
    "list": (lambda model: sum(sum(block.aux) for block in model), "reads 'aux' of module '0'"),
    "global": (lambda model: sum(SINK), "reads a list, which an earlier stage sets"),
}


def past_the_output(place: str, options: dict[str, Any]) -> Told:
    read, _ = PLACES[place]
    model: Any = Looped(Block(place) for _ in range(4))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + (sum(SINK) if place == "global" else read(model))

    pipe = make(model=model, loss_fn=loss, example_inputs=None, **options)
    return told(lambda: (pipe.forward_backward if "optimizer" in options else pipe.train_step)(X64, Y64))


@pytest.fixture(autouse=True)
def _empty_sink() -> Iterator[None]:
    yield
    SINK.clear()


@pytest.mark.thorough(but=["{'optimizer': None}-list"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [{"optimizer": None}, {}, {"schedule": "2bw"}, {"recompute": "full"}], ids=str)
def test_what_an_earlier_stage_leaves_behind_is_refused(place: str, options: dict[str, Any]) -> None:
    found = past_the_output(place, options)
    assert found.kind == "ValueError"
    assert PLACES[place][1] in found.text


def test_a_list_that_a_loss_empties_holds_no_fake_tensors() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        found = F.mse_loss(output, target) + sum(SINK)
        counts.append(len(SINK))
        SINK.clear()
        return found

    counts: list[int] = []
    model = nn.Sequential(*[Block("global") for _ in range(4)])
    make(model=model, loss_fn=loss, example_inputs=None, mesh={"pipe": 1}).train_step(X64, Y64)
    assert counts == [4] * 4


@pytest.mark.thorough(but=["{}"])
@pytest.mark.parametrize("options", [{}, {"schedule": "2bw"}, {"mesh": {"pipe": 1}}], ids=str)
def test_what_the_last_stage_leaves_behind_may_be_read(options: dict[str, Any]) -> None:
    """And what a stage leaves behind may stay there."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block("attribute") for _ in range(4)])
    pipe = make(
        model=model, loss_fn=lambda output, y: F.mse_loss(output, y) + model[3].aux, example_inputs=None, **options
    )
    losses = [result.loss for result in [pipe.train_step(X64, Y64), *pipe.flush()] if result.loss is not None]
    torch.manual_seed(0)
    plain = nn.Sequential(*[Block("attribute") for _ in range(4)])
    found = [
        F.mse_loss(plain(x), y).item() + plain[3].aux.item() for x, y in zip(X64.split(2), Y64.split(2), strict=True)
    ]
    assert losses[-1] == pytest.approx(sum(found) / 4, abs=1e-14)


def append(aux: Tensor) -> None:
    SINK.append(aux)


class Opened(nn.Module):
    """A block of two layers, so that a cut into more stages than there are blocks records its own code."""

    def __init__(self, keep: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.table: dict[str, Tensor] = {}
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.keep(self, h.square().mean())
        return self.second(torch.tanh(h))


KEPT: dict[str, tuple[Callable[[Any, Tensor], object], Callable[[Any], Any]]] = {
    "attribute": (lambda block, aux: setattr(block, "aux", aux), lambda model: sum(block.aux for block in model)),
    "dict": (lambda block, aux: block.table.update(v=aux), lambda model: sum(b.table["v"] for b in model)),
    "function": (lambda block, aux: SINK.append(aux), lambda model: sum(SINK)),
    "helper": (lambda block, aux: append(aux), lambda model: sum(SINK)),
}


@pytest.mark.filterwarnings("ignore:.*does so once, while the model is recorded")
@pytest.mark.thorough(but=["attribute"])
@pytest.mark.parametrize("place", KEPT)
def test_what_recorded_code_leaves_behind_once_is_refused(place: str) -> None:
    keep, read = KEPT[place]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + (read(model) if is_read else 0.0)

    for is_read in (True, False):
        torch.manual_seed(0)
        model: Any = Looped(Opened(keep) for _ in range(2))
        pipe = make(model=model, loss_fn=loss, example_inputs=None, mesh={"pipe": 4})
        pipe.build(X64, Y64)
        SINK.clear()  # as a loop does in front of each step
        if is_read:
            with pytest.raises(ValueError, match="or code between modules, which runs once"):
                pipe.train_step(X64, Y64)
            continue
        torch.manual_seed(0)
        plain = Looped(Opened(keep) for _ in range(2))
        assert pipe.train_step(X64, Y64).loss == pytest.approx(F.mse_loss(plain(X64), Y64).item(), abs=1e-14)


def test_a_loss_that_differentiates_by_an_output_of_an_earlier_stage_is_refused() -> None:
    """A bug: a gradient penalty lost what goes through the stages before the last one, without a word."""

    class Penalised(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            x = x.detach().requires_grad_()
            return super().forward(x) + x, x

    def penalty(output: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(output[0].sum(), output[1], create_graph=True)
        return F.mse_loss(output[0], y) + slope.square().mean()

    model = Penalised(*(nn.Linear(WIDTH, WIDTH).double() for _ in range(2)))
    pipe = make(model=model, loss_fn=penalty, example_inputs=None, mesh={"pipe": 2})
    with pytest.raises(ValueError, match="loss_fn differentiates by one of several outputs"):
        pipe.train_step(X64, Y64)
    alone = make(model=model, loss_fn=penalty, example_inputs=None, mesh={"pipe": 1}, num_microbatches=1)
    assert alone.forward_backward(X64, Y64).loss == pytest.approx(penalty(model(X64), Y64).item(), rel=1e-13)
