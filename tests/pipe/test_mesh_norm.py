"""The gradient norm and the loss scale's overflow over pipe x data x tensor, tied weights and divided optimizers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.pool import Pool
from support.records import records
from torch import Tensor, nn

from stagewright.pipe import PipelineModule

WIDTH, SAMPLES, M, STEPS = 4, 8, 4, 4
PIPE, DATA = {"pipe": 2, "tensor": 2}, {"data": 2, "tensor": 2}
NORMS = [1.0, 2.0, 3.0, math.inf]
AT = (2, 1)  # the step and the process in which one member's part of a gradient overflows


class _Overflow(torch.autograd.Function):
    """The identity; the gradient is infinite, where it is switched on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: MLP) -> Tensor:
        ctx.is_bad = mlp.is_bad
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * (math.inf if ctx.is_bad else 1.0), None


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.is_bad = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        nothing = _Overflow.apply(self.up(h.detach()), self) * 0.0  # so that the parameters of `up` alone see it
        return x + self.down(torch.tanh(self.up(h) + nothing))


def model() -> nn.Sequential:
    """Ties the bias of the first block's norm to that of the last one, on the other stage."""
    torch.manual_seed(0)
    made = nn.Sequential(*[MLP() for _ in range(4)]).double()
    made[3].norm.bias = made[0].norm.bias
    return made


def batch(step: int) -> tuple[Tensor, Tensor]:
    data = torch.Generator().manual_seed(step)
    x, y = (torch.randn(SAMPLES, WIDTH, generator=data, dtype=torch.float64) for _ in range(2))
    return x, y


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def plain_norms() -> list[float]:
    found = []
    for norm_type in NORMS:
        made = model()
        F.mse_loss(made(batch(0)[0]), batch(0)[1]).backward()
        found.append(nn.utils.clip_grad_norm_(made.parameters(), 1.0, norm_type).item())
    return found


def plain_state(*, delay: int, skipped: int | None) -> tuple[dict[str, Tensor], list[float]]:
    """With clipping, without the update of the step that overflows; norms of the others."""
    made, norms = model(), []
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    versions = [copy.deepcopy(made.state_dict())]
    for step in range(STEPS):
        used = model()
        used.load_state_dict(versions[max(step - delay, 0)])
        F.mse_loss(used(batch(step)[0]), batch(step)[1]).backward()
        if step != skipped:
            for own, leaf in zip(made.parameters(), used.parameters(), strict=True):
                own.grad = leaf.grad
            norms.append(nn.utils.clip_grad_norm_(made.parameters(), 0.1).item())
            optimizer.step()
        versions.append(copy.deepcopy(made.state_dict()))
    return versions[-1], norms


def piped(schedule: str, mesh: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    """One process of the mesh."""
    num_replicas = mesh.get("data", 1)
    replica = dist.get_rank() // 2 % num_replicas
    settings: dict[str, Any] = {
        "mesh": mesh,
        "tensor_parallel": {"*.up": "column", "*.down": "row"},
        "num_microbatches": M // num_replicas,
        "loss_fn": F.mse_loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    }

    def own(step: int) -> list[Tensor]:
        return [each.chunk(num_replicas)[replica] for each in batch(step)]

    norms = []
    if schedule != "2bw":
        pipe = PipelineModule(model(), **records(schedule=schedule, example_inputs=own(0)[:1], **(settings | options)))
        for norm_type in NORMS:
            pipe.forward_backward(*own(0))
            norms.append(pipe.clip_grad_norm_(1e9, norm_type))
            pipe.clip_grad_norm_(norms[-1] / 2, norm_type)
            assert pipe.clip_grad_norm_(1e9, norm_type) == pytest.approx(norms[-1] / 2, rel=1e-4)
            for parameter in pipe.parameters():
                parameter.grad = None
        pipe.close()
    made, own_scaler = model(), None if schedule == "2bw" else scaler()
    pipe = PipelineModule(
        made, **records(schedule=schedule, max_grad_norm=0.1, grad_scaler=own_scaler, **(settings | options))
    )
    results = []
    for step in range(STEPS):
        made[0].is_bad = own_scaler is not None and (step, dist.get_rank()) == AT
        results.append(pipe.train_step(*own(step)))
        made[0].is_bad = False
    results += pipe.flush()
    known = {result.loss_step: result for result in results}
    found = {
        "norms": norms,
        "state": pipe.full_state_dict(),
        "skipped": [known[step].skipped for step in range(STEPS)],
        "grad_norms": [known[step].grad_norm for step in range(STEPS)],
        "scale": None if own_scaler is None else own_scaler.get_scale(),
    }
    pipe.close()
    return found


ZERO1: dict[str, Any] = {"data_parallel": "zero1"}


@pytest.mark.thorough
@pytest.mark.parametrize(("schedule", "mesh", "options"), [("1f1b", DATA, ZERO1), ("2bw", PIPE, {})], ids=str)
def test_four_processes(gloo: Pool, schedule: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    """One tensor member's part of a gradient overflows, in one replica of one stage: nobody updates."""
    check(gloo.run(piped, ranks=4, args=(schedule, mesh, options)), schedule)


def check(answers: list[dict[str, Any]], schedule: str) -> None:
    skipped = None if schedule == "2bw" else AT[0]
    state, norms = plain_state(delay=int(schedule == "2bw"), skipped=skipped)
    for found in answers:
        if found["norms"]:
            assert found["norms"] == pytest.approx(plain_norms(), rel=1e-11)
        assert found["skipped"] == [step == skipped for step in range(STEPS)]
        assert [norm for step, norm in enumerate(found["grad_norms"]) if step != skipped] == pytest.approx(norms)
        if skipped is not None:
            assert not math.isfinite(found["grad_norms"][skipped])
            assert found["scale"] == 1024.0  # grew behind two updates, shrank behind the skipped one
        for name, value in state.items():
            torch.testing.assert_close(found["state"][name], value, rtol=0, atol=1e-11, msg=name)
