"""The five models of `bench suite`, small enough for a core each, and their batches: random, always the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..training.corpus import loss_fn
from ..training.gpt import Attention, Embedding, GPTConfig, Head
from .models import WholeProblem, adamw, gpt_problem, image_problem, seeded

_SIZE = GPTConfig(layers=4, width=192, length=64)


def make_problem(name: str, batch: int) -> tuple[WholeProblem, str, int]:
    """A problem, what is counted in it, and how many of that are in a sample.

    `gpt`; `lstm`: sequence to sequence; `cnn`: slow layers first, large ones last; `unet`; `moe`: a mixture of experts.
    """
    if name in ("gpt", "cnn"):
        problem = gpt_problem(_SIZE, batch=batch) if name == "gpt" else image_problem(64, batch=batch)
    else:
        makes: dict[str, Callable[[], nn.Module]] = {"lstm": Seq2Seq, "unet": UNet, "moe": _mixture}
        torch.manual_seed(1)
        inputs = torch.randn(batch, 3, 64, 64) if name == "unet" else torch.randint(256, (batch, _SIZE.length))
        problem = WholeProblem(
            make_model=partial(seeded, makes[name]),
            inputs=inputs,
            target=inputs.chunk(2, dim=1)[1] if name == "lstm" else inputs,
            loss_fn=F.mse_loss if name == "unet" else loss_fn,
            optimizer=adamw,
        )
    return (problem, "images/s", 1) if name in ("cnn", "unet") else (problem, "tokens/s", problem.target.shape[1])


class Seq2Seq(nn.Module):
    """Tokens [B, 2 T], sources and targets -> logits [B, T, 256]; LSTMs with attention (Luong et al., 2015)."""

    def __init__(self, width: int = 192, layers: int = 2) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(256, width), nn.Embedding(256, width)
        self.encoder = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.decoder = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(2 * width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        source, target = tokens.chunk(2, dim=1)
        memory, hidden = self.source(source), self.target(target)
        for encode, decode in zip(self.encoder, self.decoder, strict=True):
            memory, state = encode(memory)
            hidden, _ = decode(hidden, state)
        attended = F.scaled_dot_product_attention(hidden, memory, memory)
        out: Tensor = self.head(torch.cat((hidden, attended), dim=-1))
        return out


class UNet(nn.Module):
    """Images -> images, sides multiples of 8; a skip from each level down to the one up (Ronneberger et al., 2015)."""

    def __init__(self, width: int = 16, levels: int = 3) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 1)
        self.down = nn.ModuleList(_convolved(each, each) for each in widths)
        self.deeper = nn.ModuleList(nn.Conv2d(each, 2 * each, 2, stride=2) for each in widths)
        self.higher = nn.ModuleList(nn.ConvTranspose2d(2 * each, each, 2, stride=2) for each in reversed(widths))
        self.up = nn.ModuleList(_convolved(2 * each, each) for each in reversed(widths))

    def forward(self, images: Tensor) -> Tensor:
        hidden, skips = self.stem(images), []
        for level, deeper in zip(self.down, self.deeper, strict=True):
            skips.append(level(hidden))
            hidden = deeper(skips[-1])
        for higher, level in zip(self.higher, self.up, strict=True):
            hidden = level(torch.cat((higher(hidden), skips.pop()), dim=1))
        out: Tensor = self.head(hidden)
        return out


def _convolved(inputs: int, width: int) -> nn.Sequential:
    first, second = nn.Conv2d(inputs, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
    return nn.Sequential(first, nn.GroupNorm(4, width), nn.ReLU(), second, nn.GroupNorm(4, width), nn.ReLU())


class Mixed(nn.Module):
    """Attention, then E experts, each for the 2 N / E of N tokens that want it most (Zhou et al., 2022); [B, T, D]."""

    def __init__(self, config: GPTConfig, experts: int) -> None:
        super().__init__()
        width = config.width
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(config), nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * (2 * width) ** -0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm1(hidden))
        flat = self.norm2(hidden).flatten(0, 1)  # [N, D]
        gates = self.router(flat).softmax(dim=-1).t()  # [E, N]
        gate, token = gates.topk(2 * gates.shape[1] // gates.shape[0])
        made = F.gelu(flat[token] @ self.up) @ self.down * gate.unsqueeze(-1)  # [E, 2 N / E, D]
        return hidden + torch.zeros_like(flat).index_add(0, token.flatten(), made.flatten(0, 1)).view_as(hidden)


def _mixture() -> nn.Sequential:
    return nn.Sequential(Embedding(_SIZE), *(Mixed(_SIZE, 8) for _ in range(_SIZE.layers)), Head(_SIZE))
