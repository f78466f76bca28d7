"""Which optimizers may be divided over data replicas, what "zero1" and "fsdp" refuse, and the bytes that they send."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support import small
from support.alone import near
from support.failing import refusal
from support.inside import Topology, separable
from support.parts import Parts
from support.pool import Pool
from support.records import records
from support.sharded import X, Y, even, halved, sgd
from support.small import layers, make
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from stagewright.comm import Collectives
from stagewright.partition import Cluster
from stagewright.pipe import Mesh, PipelineModule


def refused(mistakes: list[dict[str, Any]]) -> list[str]:
    given: dict[str, Any] = {"optimizer": sgd, "mesh": {"pipe": 1, "data": 2}, "example_inputs": (X,)}
    given |= {"loss_fn": F.mse_loss, "timeout": 120.0, "num_microbatches": 2}
    return [refusal(lambda own=own: PipelineModule(even(), **records(**given | own))) for own in mistakes]


class Together(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_div_(gradients, torch.stack(torch._foreach_norm(gradients)).norm())
        return super().step(closure)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    (
        {"data_parallel": "zero1", "optimizer": Together},
        "optimizer Together is not known to update each parameter indep",
    ),
    ({"data_parallel": "fsdp", "schedule": "2bw"}, "data_parallel='fsdp' under the asynchronous schedule '2bw'"),
    ({"data_parallel": "fsdp", "optimizer": None}, "data_parallel='fsdp' without an optimizer"),
]


def test_refused(gloo: Pool) -> None:
    for told in gloo.run(refused, ranks=2, args=([options for options, _ in MISTAKES],)):
        for text, (_, message) in zip(told, MISTAKES, strict=True):
            assert text.startswith(message)
        assert "expected data_parallel='replicate', or Together.separable = 'e" in told[0]


class OwnAdam(torch.optim.AdamW):
    """A user's own, which says what it may be given."""

    separable = "elements"


class OwnMuon(torch.optim.Muon):
    separable = "parameters"


class Odd(torch.optim.SGD):
    separable = True


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda ps: torch.optim.SGD(ps, lr=0.0), "elements"),
        (lambda ps: OwnAdam(ps, lr=0.0), "elements"),
        (torch.optim.Adafactor, "parameters"),
        (lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2]), "parameters"),
        (lambda ps: OwnMuon([p for p in ps if p.dim() == 2]), "parameters"),
    ],
)
def test_what_an_optimizer_may_be_given(make: Any, kind: str) -> None:
    optimizer = make(list(even().parameters()))
    halved(optimizer)  # puts a step of its own in the optimizer's place
    assert separable(optimizer) == kind


def test_an_optimizer_with_another_word_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Odd\.separable = True: expected 'elements', 'parameters', or no such attri"):
        separable(Odd(even().parameters(), lr=0.1))


def stepped_by_hand() -> list[str]:
    """A rank's error of each optimizer; behind zero_grad nothing is left for its step, or for the next train_step."""
    mesh = Mesh(pipe=1, data=2, data_parallel="zero1")
    pipe = PipelineModule(even(), mesh=mesh, loss_fn=F.mse_loss, optimizer=sgd, num_microbatches=2, timeout=120.0)
    pipe.forward_backward(X, Y)
    told = []
    for optimizer in pipe.optimizers:
        told.append(refusal(optimizer.step))
        optimizer.zero_grad()
        optimizer.step()
    assert all(p.grad is None for p in pipe.parameters())
    pipe.forward_backward(X, Y)  # stays, and counts
    pipe.train_step(X, Y)
    state = pipe.full_state_dict()
    pipe.close()
    model = even()
    (2 * F.mse_loss(model(X), Y)).backward()
    sgd(list(model.parameters())).step()
    near(state, model.state_dict())
    return told


def test_an_optimizer_of_parts_that_is_stepped_by_hand_is_refused(gloo: Pool) -> None:
    for told in gloo.run(stepped_by_hand, ranks=2):
        assert len(told) == 1
        assert "optimizer SGD is stepped by hand, and holds a part of '0.weight'" in told[0]
        assert "expected pipe.train_step(...)" in told[0]


RANKS, WIDTH = 3, 6


def sent() -> list[int]:
    """By exchange of one batch, bytes that this rank sends to others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
    pipe = PipelineModule(
        model,
        mesh=Mesh(pipe=1, data=RANKS, data_parallel="zero1"),
        num_microbatches=1,
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.Adam,
    )
    found, plain = [], Collectives.exchange

    def counted(self: Collectives, parts: Sequence[Sequence[Tensor]], *args: Any, **more: Any) -> Callable[[], Any]:
        others = [part for rank, part in enumerate(parts) if rank != self.rank]
        found.append(sum(piece.nbytes for part in others for piece in part))
        return plain(self, parts, *args, **more)

    with mock.patch.object(Collectives, "exchange", counted):
        pipe.train_step(torch.ones(3, WIDTH).double(), torch.zeros(3, WIDTH).double())
    pipe.close()
    return found


@pytest.mark.thorough
def test_plans_count_the_bytes_that_are_sent(gloo: Pool) -> None:
    """Gradients and then weights, a third of them from each of three ranks to each of the others."""
    weights, bandwidth = 8 * 2 * (WIDTH * WIDTH + WIDTH), 1e3
    parts = Topology(Cluster.from_levels([(RANKS, bandwidth)])).exchange(range(RANKS))
    for found in gloo.run(sent, ranks=RANKS):
        assert found == [pytest.approx(parts.seconds(weights) * bandwidth)] * 2


def _by_hand(average: nn.Module, model: nn.Module) -> None:
    for mean, now in zip(average.parameters(), model.parameters(), strict=True):
        mean.data.mul_(0.9).add_(now.data, alpha=0.1)


USES: dict[str, Callable[[nn.Module, nn.Module], object]] = {
    "clip": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "norm of weights": lambda model, _: [float(p.detach().norm()) for p in model.parameters()],
    "all weights": lambda model, _: torch.cat([p.data.flatten() for p in model.parameters()]),
    "on the host": lambda model, _: [p.detach().numpy() for p in model.parameters()],
    "pickled": lambda model, _: [p.__reduce_ex__(2) for p in model.parameters()],
    "forward": lambda model, _: model(small.X),
    "by hand": lambda model, before: _by_hand(before, model),
    "AveragedModel": lambda model, before: AveragedModel(before).update_parameters(model),
    "own optimizer": lambda model, _: Together(model.parameters(), lr=0.1).step(),
}


def _norm_by_hand(model: nn.Module) -> str:
    """What a norm of all gradients, taken twice, is told: once."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            sum(float(p.grad.norm()) ** 2 for p in model.parameters() if p.grad is not None)
    (warned,) = told
    assert warned.filename == __file__
    return str(warned.message)


def uses() -> tuple[dict[str, str], Mapping[str, torch.Tensor]]:
    """What each use says; and the weights behind two steps of the user's own optimizer over all parameters."""
    torch.manual_seed(0)
    model = layers()
    before = copy.deepcopy(model)
    pipe = make(model=model, optimizer=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    told: dict[str, str] = {}
    for _ in range(2):
        optimizer.zero_grad()
        pipe.forward_backward(small.X, small.Y)
        pipe.clip_grad_norm_(0.1)
        if pipe.world.distributed and not told:
            for name, use in USES.items():
                try:
                    told[name] = f"returned {use(model, before)!r:.60}"
                except ValueError as error:
                    told[name] = str(error)
            told["norm by hand"] = _norm_by_hand(model)
        optimizer.step()
    state = pipe.full_state_dict()
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    AveragedModel(model).update_parameters(model)  # of what this process holds
    assert [p.shape for p in copy.deepcopy(model).parameters()] == [p.shape for p in before.parameters()]
    return told, state


def test_each_use_answers_by_name(gloo: Pool) -> None:
    """torch's clip_grad_norm_ took one stage's norm in silence; the rest were raw errors of meta tensors."""
    _, expected = uses()
    for rank, (told, state) in enumerate(gloo.run(uses, ranks=2)):
        assert list(told) == [*USES, "norm by hand"]
        said = told.pop("own optimizer")
        assert said.startswith("the step of optimizer Together computes something over several parameters")
        for name, text in told.items():
            assert f"is held by rank {1 - rank}, and this process has no values of it" in text, (name, text)
        near(state, expected, atol=1e-5, rtol=1.3e-6)


def averaged() -> dict[str, torch.Tensor]:
    """Weights of the recipe of docs/guides/optimizers.md behind three steps."""
    average: dict[str, torch.Tensor] = {}

    def keep(record: object) -> None:
        for name, weight in pipe.state_dict().items():
            if weight.requires_grad:
                average.setdefault(name, weight.detach().clone()).lerp_(weight.detach(), 0.1)

    torch.manual_seed(0)
    pipe = make(model=layers(), on_step=keep)
    for _ in range(3):
        pipe.train_step(small.X, small.Y)
    now = {name: weight.detach().clone() for name, weight in pipe.state_dict().items()}
    pipe.load_state_dict(pipe.full_state_dict() | average)  # with what other ranks hold
    state = {name: weight.clone() for name, weight in pipe.full_state_dict().items()}
    pipe.load_state_dict(now)  # this rank's alone
    near(pipe.state_dict(), now, atol=0.0)
    pipe.train_step(small.X, small.Y)
    return state


@pytest.mark.thorough
def test_an_average_of_the_weights(gloo: Pool) -> None:
    torch.manual_seed(0)
    model = layers()
    plain = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = small.sgd(list(model.parameters()))
    for _ in range(3):
        F.mse_loss(model(small.X), small.Y).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.update_parameters(model)
    for state in [averaged(), *gloo.run(averaged, ranks=2)]:
        near(state, dict(plain.module.named_parameters()), atol=1e-5, rtol=1.3e-6)


class Scaled(
    Parts, scale=lambda: nn.Parameter(torch.ones(6)), layers=lambda: nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
):
    """Computes its own loss; between its layers it reads a parameter of its own in two places."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        h = x * self.scale
        for layer in self.layers[:2]:
            h = layer(h)
        memory = h
        for layer in self.layers[2:]:
            h = layer(h + memory * self.scale)
        return h if labels is None else {"loss": F.mse_loss(h, labels), "out": h}


def predicted() -> tuple[str, float]:
    torch.manual_seed(0)
    pipe = make(model=Scaled(), mesh={"pipe": 3}, loss_fn="model", example_inputs=None)
    pipe.train_step(x=small.X, labels=small.Y)
    return refusal(lambda: pipe.predict(small.X)), pipe.train_step(x=small.X, labels=small.Y).loss


def test_weights_that_arguments_move_to_another_stage_are_refused_everywhere(gloo: Pool) -> None:
    """One rank raised an error alone, and the others waited for it."""
    (said, loss), *others = gloo.run(predicted, ranks=3)
    assert said.startswith("with these arguments stage 1 computes with 'scale', which another holds: expected")
    assert others == [(said, loss)] * 2
