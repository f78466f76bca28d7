"""Which optimizers may be divided over data replicas, what "zero1" and "fsdp" refuse, and the bytes that they send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.inside import Topology, separable
from support.pool import Pool
from support.records import records
from support.sharded import X, Y, even, halved, sgd
from torch import Tensor, nn

from stagewright.comm import Collectives
from stagewright.partition import Cluster
from stagewright.pipe import Mesh, PipelineModule


def refused(mistakes: list[dict[str, Any]]) -> list[str]:
    told = []
    for options in mistakes:
        given: dict[str, Any] = {"optimizer": sgd, "mesh": {"pipe": 1, "data": 2}, "example_inputs": (X,)} | options
        with pytest.raises(ValueError, match="xpected") as error:
            PipelineModule(even(), **records(loss_fn=F.mse_loss, timeout=120.0, num_microbatches=2, **given))
        told.append(str(error.value))
    return told


class Together(torch.optim.SGD):
    """An optimizer that looks at all of its parameters at once."""

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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            Together,
            r"Together is not known to update .* expected data_parallel='replicate', or Together\.separable = 'e",
        ),
        (Odd, r"Odd\.separable = True: expected 'elements', 'parameters', or no such attribute"),
    ],
)
def test_an_optimizer_that_is_not_known_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        separable(make(list(even().parameters())))


def stepped_by_hand(data_parallel: str) -> list[str]:
    """A rank's error of each optimizer; behind zero_grad nothing is left for its step, or for the next train_step."""
    mesh = {"pipe": 1, "data": 2}
    options: Any = {"loss_fn": F.mse_loss, "optimizer": sgd, "mesh": mesh, "num_microbatches": 2, "timeout": 120.0}
    pipe = PipelineModule(even(), **records(data_parallel=data_parallel, **options))
    pipe.forward_backward(X, Y)
    told = []
    for optimizer in pipe.optimizers:
        with pytest.raises(ValueError, match="is stepped by hand") as found:
            optimizer.step()
        told.append(str(found.value))
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
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)
    return told


@pytest.mark.thorough
def test_an_optimizer_of_parts_that_is_stepped_by_hand_is_refused(gloo: Pool) -> None:
    for told in gloo.run(stepped_by_hand, ranks=2, args=("zero1",)):
        assert len(told) == 1
        assert "optimizer SGD is stepped by hand, and holds a part of '0.weight'" in told[0]
        assert "expected pipe.train_step(...)" in told[0]


RANKS, WIDTH = 3, 6


def sent(kind: str) -> list[int]:
    """By exchange of one batch, bytes that this rank sends to others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
    pipe = PipelineModule(
        model,
        mesh=Mesh(pipe=1, data=RANKS, data_parallel=kind),
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
    for found in gloo.run(sent, ranks=RANKS, args=("zero1",)):
        assert found == [pytest.approx(parts.seconds(weights) * bandwidth)] * 2
