"""Processes whose strings hash differently go through a set in other orders, and compute what one process computes."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import near
from support.failing import refusal
from support.grids import nightly, one_in
from support.pool import Pool
from support.records import records
from support.small import sgd
from support.zoo import CHECKING, TORCHVISION, TRANSFORMERS, Batch, Case
from torch import Tensor, nn

from stagewright.pipe import PipelineModule

KINDS = {"red", "green", "blue", "black", "white", "brown"}
WIDTH = 4


class Kinds(nn.Module):
    """Parts called in the order of a set, with masks drawn between them, and used by name; they stand in it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleDict({kind: self.part(kind) for kind in KINDS})

    def part(self, kind: str) -> nn.Module:
        torch.manual_seed(sum(map(ord, kind)))
        return nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        made = {kind: torch.tanh(self.parts[kind](x)) for kind in KINDS}
        return self.last(sum(k * made[kind] for k, kind in enumerate(sorted(KINDS))))


class Summed(Kinds):
    """The order counts: sums are rounded on the way."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(sum(self.parts[kind](self.first(x)) for kind in KINDS))


def chain() -> nn.Module:
    activations = {"red": nn.ReLU, "green": nn.GELU, "blue": nn.ELU, "black": nn.SiLU}
    middle = [activations[kind]() for kind in KINDS if kind in activations]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *middle, nn.Linear(WIDTH, WIDTH))


class Table(nn.Module):
    """A table that each process draws for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = torch.randn(WIDTH, generator=torch.Generator().manual_seed(rank()))

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x) * self.table)


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8 + step % 2 * 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x, torch.ones_like(x)


def trained(mesh: dict[str, int] | None = None) -> tuple[list[str], list[float | None], dict[str, Tensor]]:
    """The order of a set here, the losses, and the weights after three steps."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "optimizer": sgd, "mesh": mesh, "timeout": 100.0}
    pipe = PipelineModule(Kinds().double(), schedule="1f1b", num_microbatches=2, **options)
    losses = [pipe.train_step(*batch(step)).loss for step in range(3)]
    losses.append(pipe.eval_step(*batch(3)).loss)
    state = pipe.full_state_dict()
    pipe.close()
    return list(KINDS), losses, {name: value.clone() for name, value in state.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [None, {"pipe": 1, "data": 2}], ids=["ranks", "replicas"])
def test_processes_with_sets_in_other_orders(gloo: Pool, mesh: dict[str, int] | None) -> None:
    """Sums of gradients and gathered weights go by name; both replicas pass the same batch."""
    _, losses, state = trained()
    (one_order, *one), (other_order, *other) = gloo.run(trained, ranks=2, args=(mesh,))
    assert one_order != other_order
    for its_losses, its_state in (one, other):
        near([its_losses, its_state], [losses, state], rtol=1e-10)
        assert its_state.keys() == state.keys()


def told_of(kind: Callable[[], nn.Module]) -> str:
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_microbatches": 2, "example_inputs": (torch.ones(4, WIDTH),), "timeout": 60}
    return refusal(lambda: PipelineModule(kind(), schedule="1f1b", **options))


@pytest.mark.thorough(but=["Table-mul", "chain-module '1': "])
@pytest.mark.parametrize(("kind", "first"), [(Summed, "parts."), (Table, "mul"), (chain, "module '1': ")])
def test_programs_that_differ_are_told_with_their_first_difference(
    gloo: Pool, kind: Callable[[], nn.Module], first: str
) -> None:
    for told in gloo.run(told_of, ranks=2, args=(kind,)):
        assert told.startswith("rank 0 and rank 1 run different programs"), told
        assert first in told
        assert os.path.basename(__file__) in told or kind is chain
        assert "PYTHONHASHSEED=0" in told


M = 2


def make_pipe(model: nn.Module, *, ranks: int, **options: Any) -> PipelineModule:
    settings = {"schedule": "1f1b", "num_microbatches": M, "loss_fn": "model", "optimizer": sgd, "timeout": 120.0}
    return PipelineModule(model, **records(mesh={"pipe": ranks}, **(settings | options)))


def compare(found: nn.Module | Mapping[str, Any], expected: nn.Module | Mapping[str, Any]) -> None:
    """States, or the gradients of models, relative to the largest element."""
    one, other = (
        {name: p.grad for name, p in each.named_parameters()} if isinstance(each, nn.Module) else each
        for each in (found, expected)
    )
    assert one.keys() == other.keys()
    for name, value in other.items():
        largest = 1.0 if value is None else max(1.0, float(value.abs().max()))
        near(one[name], value, atol=1e-12 * largest, where=name)


def parts(batch: Batch) -> list[Batch]:
    size = len(next(iter(batch.values()))) // M
    return [{key: value[k * size : (k + 1) * size] for key, value in batch.items()} for k in range(M)]


def plain(case: Case, weight: str = "labels") -> tuple[nn.Module, float]:
    """The model with its gradients, and the loss, by microbatches, which weigh as many labels as they have, or samples.

    The packages compute some things in float32 whatever the model is in, and so to other digits in a whole batch.
    """
    model, total = case.make(), 0.0
    counts = [int((each["labels"][..., case.unlabelled :] != -100).sum()) for each in parts(case.batch())]
    for each, count in zip(parts(case.batch()), counts, strict=True):
        loss = model(**each).loss.double() * (1 / M if weight == "samples" else count / sum(counts))
        loss.backward()
        total += loss.item()
    return model, total


@pytest.mark.thorough
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name: str) -> None:
    """A batch with padding, whose microbatches have other numbers of labels: the mean over all labels."""
    pytest.importorskip("transformers")
    case = TRANSFORMERS[name]
    expected, loss = plain(case)
    assert loss == pytest.approx(case.make()(**case.batch()).loss.item(), rel=1e-6)
    counts = {int((each["labels"] != -100).sum()) for each in parts(case.batch())}
    assert len(counts) > 1 or "pixel_values" in case.batch()  # microbatches weigh differently
    model = case.make()
    pipe = make_pipe(model, ranks=2)
    assert pipe.forward_backward(**case.batch()).loss == pytest.approx(loss, rel=1e-13)
    compare(model, expected)

    output = pipe.predict(**case.batch())
    with torch.no_grad():
        whole = expected.eval()(**case.batch())
    assert type(output) is type(whole)
    torch.testing.assert_close(output.logits, whole.logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CHECKING)
def test_checks_and_collected_values(name: str) -> None:
    pytest.importorskip("transformers")
    case, weight = CHECKING[name]
    (expected, total), model = plain(case, weight), case.make()
    pipe = make_pipe(model, ranks=2, loss_weight=weight)
    assert pipe.forward_backward(**case.batch()).loss == pytest.approx(total, rel=1e-13)
    compare(model, expected)


def train(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    case = TRANSFORMERS[name]
    pipe = make_pipe(case.make(), ranks=2)
    loss = pipe.train_step(**case.batch()).loss
    state = pipe.full_state_dict()
    pipe.close()
    assert loss is not None
    return loss, state


@pytest.mark.thorough(but=["mixtral"])
@pytest.mark.parametrize("name", [name if name in ("mixtral", "t5") else nightly(name) for name in TRANSFORMERS])
def test_transformers_over_processes(gloo: Pool, name: str) -> None:
    pytest.importorskip("transformers")
    case = TRANSFORMERS[name]
    expected, loss = plain(case)
    torch.optim.SGD([p for p in expected.parameters() if p.grad is not None], lr=0.1).step()
    for found, state in gloo.run(train, ranks=2, args=(name,)):
        assert found == pytest.approx(loss, rel=1e-13)
        compare(state, expected.state_dict())


def by_microbatch(model: nn.Module, batch: Batch) -> float:
    total = 0.0
    for each in parts(batch):
        target = each.pop("target")
        loss = F.cross_entropy(model(**each), target) / M
        loss.backward()
        total += loss.item()
    return total


@pytest.mark.thorough(but=["swin-3"])
@pytest.mark.parametrize(("name", "ranks"), one_in(2, TORCHVISION.keys(), (2, 3)))
def test_images(name: str, ranks: int) -> None:
    case = TORCHVISION[name]
    expected, model = case.make(), case.make()
    loss = by_microbatch(expected, case.batch())
    pipe = make_pipe(model, ranks=ranks, loss_fn=F.cross_entropy)
    assert pipe.forward_backward(**case.batch()).loss == pytest.approx(loss, rel=1e-13)
    compare(model, expected)
    compare(dict(model.named_buffers()), dict(expected.named_buffers()))
