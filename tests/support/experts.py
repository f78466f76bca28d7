"""Layers of experts in a list and stacked, a model of both, and a pipeline over it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagewright import PipelineModule
from support.parts import Parts

WIDTH, NUMBER = 6, 4


class Expert(Parts, up=lambda: nn.Linear(WIDTH, 8), down=lambda: nn.Linear(8, WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


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
                made = weights[token, place, None] * expert(tokens[token])
                out = out.index_add(0, token, made.to(out.dtype))  # which autocast changes
        return x + out.view_as(x)


class Weights(nn.Module):
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
        return x + self.experts(tokens, chosen, weights).view_as(x)


class Batch(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(number, *sizes)) for sizes in ((WIDTH, 8), (8, WIDTH)))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.einsum("nrh,nhd->nrd", F.gelu(torch.einsum("nrd,ndh->nrh", rows, self.up)), self.down)


class Batched(Listed):
    """Each expert takes the first tokens that choose it, as many as `capacity`; the others are dropped."""

    def __init__(self, capacity: int = 3) -> None:
        super().__init__(1)
        self.gate, self.experts = nn.Linear(WIDTH, NUMBER, bias=False), Batch(NUMBER)  # type: ignore[assignment]
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        scores, chosen = self.gate(tokens).softmax(-1).max(-1)
        is_own = F.one_hot(chosen, NUMBER)
        place = (is_own.cumsum(0) - 1)[..., None] == torch.arange(self.capacity)
        sent = (is_own[..., None] * place).to(x.dtype)
        made = self.experts(torch.einsum("tnc,td->ncd", sent, tokens))
        return x + torch.einsum("tnc,ncd->td", sent * scores[:, None, None], made).view_as(x)


def model(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    own = layers or (Listed(), nn.Linear(WIDTH, WIDTH), Stacked(), Listed())
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, WIDTH), *own, nn.Linear(WIDTH, 2)).double()
    for parameter in whole.parameters():
        parameter.data = torch.randn_like(parameter) / 2
    return whole


def batch(replica: int, step: int, samples: int = 4, *, length: int = 5) -> tuple[Tensor, Tensor]:
    generator, sizes = torch.Generator().manual_seed(10 * step + replica), (samples, length)
    return torch.randn(*sizes, 3, generator=generator, dtype=torch.float64), torch.randn(
        *sizes, 2, generator=generator, dtype=torch.float64
    )


def pipeline(mesh: Any, **options: Any) -> PipelineModule:
    options = {"num_microbatches": 2, "loss_fn": F.mse_loss, "verify": False, **options}
    return PipelineModule(
        options.pop("model", None) or model(),
        mesh=mesh,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        **options,
    )
