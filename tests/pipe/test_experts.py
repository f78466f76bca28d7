"""Expert groups: a pipeline whose members hold different experts makes what one plain process makes of all batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import Pool
from torch import Tensor, nn

from stagewright import Mesh, PipelineModule

WIDTH, NUMBER = 6, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Listed(nn.Module):
    """Experts in a list, of which only those with tokens are called; no token goes to the last one."""

    def __init__(self, number: int = NUMBER, *, top: int = 2) -> None:
        super().__init__()
        self.gate, self.top = nn.Linear(WIDTH, number, bias=False), top
        self.experts = nn.ModuleList(Expert() for _ in range(number))

    def choose(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(tokens).softmax(-1)
        last = torch.arange(len(self.experts)) == len(self.experts) - 1
        weights, chosen = scores.masked_fill(last, 0.0).topk(self.top)
        return weights, chosen

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.choose(tokens)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token):
                out = out.index_add(0, token, weights[token, place, None] * expert(tokens[token]))
        return x + out.view_as(x)


class Weights(nn.Module):
    """Stacked weights of experts."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.num_experts = number
        self.up = nn.Parameter(torch.randn(number, 8, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(number, WIDTH, 8) / 3)

    def forward(self, hidden: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for number in range(self.num_experts):
            token, place = torch.where(numbers == number)
            if len(token):
                made = F.linear(F.gelu(F.linear(hidden[token], self.up[number])), self.down[number])
                out = out.index_add(0, token, made * weights[token, place, None])
        return out


class Stacked(Listed):
    def __init__(self, number: int = NUMBER, *, top: int = 2) -> None:
        super().__init__(1, top=top)
        self.gate, self.experts = nn.Linear(WIDTH, number, bias=False), Weights(number)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(tokens).softmax(-1).topk(self.top)
        out: Tensor = self.experts(tokens, chosen, weights).view_as(x)
        return x + out


def model(*layers: nn.Module) -> nn.Sequential:
    """A dense layer is among those of experts."""
    torch.manual_seed(0)
    own = layers or (Listed(), nn.Linear(WIDTH, WIDTH), Stacked(), Listed())
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, WIDTH), *own, nn.Linear(WIDTH, 2)).double()
    for parameter in whole.parameters():
        parameter.data = torch.randn_like(parameter) / 2
    return whole


def batch(replica: int, step: int, samples: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(samples, 5, 3, generator=generator, dtype=torch.float64), torch.randn(
        samples, 5, 2, generator=generator, dtype=torch.float64
    )


def _plain(steps: int, replicas: int, *, delay: int = 0, max_norm: float | None = 1.0) -> tuple[list[float], Any]:
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    losses, versions = [], [{k: v.clone() for k, v in plain.state_dict().items()}] * (delay + 1)
    for step in range(steps):
        newest = {k: v.clone() for k, v in plain.state_dict().items()}
        plain.load_state_dict(versions[-1 - delay])
        whole = [torch.cat(x) for x in zip(*(batch(r, step) for r in range(replicas)), strict=True)]
        loss = F.mse_loss(plain(whole[0]), whole[1])
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        plain.load_state_dict(newest)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        optimizer.step()
        versions.append({k: v.clone() for k, v in plain.state_dict().items()})
    return losses, plain


def _trained(options: dict[str, Any], mesh: dict[str, Any], folder: str = "") -> list[float]:
    """Of three steps: differences of losses, weights, evaluation and outputs from those of one plain process."""
    delay = int(options.get("schedule") == "2bw")
    with PipelineModule(
        model(),
        mesh=Mesh(**mesh),
        num_microbatches=2,
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        max_grad_norm=1.0,
        verify=True,
        **options,
    ) as pipe:
        replica, count = pipe.replica
        expected, plain = _plain(3, count, delay=delay)
        results = [pipe.train_step(*batch(replica, step)) for step in range(3)] + pipe.flush()
        found = [result.loss for result in results if result.loss is not None]
        differences = [abs(one - other) for one, other in zip(found, expected, strict=True)]
        state = pipe.full_state_dict()
        differences += [float((state[name] - x).abs().max()) for name, x in plain.state_dict().items()]
        plain.load_state_dict(state)
        x, y = batch(replica, 3)
        whole = [torch.cat(x) for x in zip(*(batch(r, 3) for r in range(count)), strict=True)]
        loss = pipe.eval_step(x, y).loss
        differences.append(abs((math.nan if loss is None else loss) - F.mse_loss(plain(whole[0]), whole[1]).item()))
        output = pipe.predict(x)
        if output is not None:
            assert isinstance(output, Tensor)
            differences.append((output - plain(x)).abs().max().item())
        if folder:
            pipe.save(folder)
        return differences


@pytest.mark.gloo
def test_an_expert_group_trains_evaluates_and_predicts_as_one_process(gloo: Pool) -> None:
    for differences in gloo.run(_trained, ranks=4, args=({"schedule": "1f1b"}, {"pipe": 2, "expert": 2})):
        assert max(differences) < 1e-10


@pytest.mark.gloo
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        ({"schedule": "interleaved", "num_chunks": 2}, {"pipe": 2, "expert": 2}),
        ({"schedule": "zb-h1"}, {"pipe": 2, "expert": 2, "order": ("expert", "pipe", "data", "tensor")}),
        ({"schedule": "1f1b", "recompute": "full"}, {"pipe": 2, "expert": 2}),
        ({"schedule": "2bw"}, {"pipe": 2, "expert": 2}),
        ({"schedule": "1f1b"}, {"pipe": 1, "expert": 2, "data": 2}),
        ({"schedule": "2bw"}, {"pipe": 1, "expert": 2, "data": 2}),
        ({"schedule": "gpipe"}, {"pipe": 1, "expert": 4}),
    ],
    ids=lambda each: "-".join(map(str, each.values())),
)
def test_with_schedules_and_data_replicas(gloo: Pool, options: dict[str, Any], mesh: dict[str, Any]) -> None:
    for differences in gloo.run(_trained, ranks=4, args=(options, mesh)):
        assert max(differences) < 1e-10
