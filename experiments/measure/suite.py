"""The five models of `bench suite`, small enough for a core each, and their batches: random, always the same.

gpt        tokens -> embedding -> blocks -> head
lstm       source -> encoder; target -> decoder, from the encoder's last states, attending to its outputs -> head
cnn        convolutions over all pixels first, wide linear layers last: `convolutions`
unet       levels down, levels up, each with the skip of its level: the first skip spans all stages
moe        as gpt, with experts in place of the feed-forward
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..training.corpus import loss_fn
from ..training.gpt import Attention, Embedding, GPTConfig, Head
from .models import WholeProblem, adamw, gpt_problem, image_problem, seeded

_VOCABULARY = 256
_IMAGE = 64


class Task(NamedTuple):
    """A model with its data. unit, per_sample: what is counted, and how many of it are in a sample."""

    problem: WholeProblem
    unit: str
    per_sample: int


class Seq2Seq(nn.Module):
    """LSTMs with dot-product attention (Luong et al., 2015): tokens [B, 2 T], source and target, -> logits [B, T, 256]."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.source, self.target = (nn.Embedding(_VOCABULARY, width) for _ in range(2))
        self.encoder, self.decoder = (
            nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers)) for _ in range(2)
        )
        self.head = nn.Linear(2 * width, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        source, target = tokens.chunk(2, dim=1)
        memory, hidden, states = self.source(source), self.target(target), []
        for layer in self.encoder:
            memory, state = layer(memory)
            states.append(state)
        for layer, state in zip(self.decoder, states, strict=True):
            hidden, _ = layer(hidden, state)
        attended = F.scaled_dot_product_attention(hidden, memory, memory)
        out: Tensor = self.head(torch.cat((hidden, attended), dim=-1))
        return out


def _double(inputs: int, outputs: int) -> nn.Sequential:
    sizes = ((inputs, outputs), (outputs, outputs))
    layers = [(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.ReLU()) for a, b in sizes]
    return nn.Sequential(*(layer for each in layers for layer in each))


class UNet(nn.Module):
    """Images [B, 3, S, S] -> the same; S a multiple of 2^levels (Ronneberger et al., 2015)."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(_double(w, w) for w in widths[:-1])
        self.deeper = nn.ModuleList(nn.Conv2d(w, 2 * w, 2, stride=2) for w in widths[:-1])
        self.middle = _double(widths[-1], widths[-1])
        self.higher = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(_double(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        hidden, skips = self.stem(images), []
        for level, deeper in zip(self.down, self.deeper, strict=True):
            skips.append(level(hidden))
            hidden = deeper(skips[-1])
        hidden = self.middle(hidden)
        for higher, level in zip(self.higher, self.up, strict=True):
            hidden = level(torch.cat((higher(hidden), skips.pop()), dim=1))
        out: Tensor = self.head(hidden)
        return out


class Experts(nn.Module):
    """A feed-forward of E experts, each of which takes the 2 N / E of N tokens that want it most (Zhou et al., 2022)."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * (2 * width) ** -0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = self.norm(hidden).flatten(0, 1)  # [N, D]
        gates = self.router(flat).softmax(dim=-1).t()  # [E, N]
        gate, token = gates.topk(2 * gates.shape[1] // gates.shape[0])
        made = F.gelu(flat[token] @ self.up) @ self.down * gate.unsqueeze(-1)  # [E, 2 N / E, D]
        return hidden + torch.zeros_like(flat).index_add(0, token.flatten(), made.flatten(0, 1)).view_as(hidden)


class Attended(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(config.width), Attention(config)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.attention(self.norm(hidden))
        return out


def _mixture(config: GPTConfig, experts: int) -> nn.Sequential:
    blocks = [each for _ in range(config.layers) for each in (Attended(config), Experts(config.width, experts))]
    return nn.Sequential(Embedding(config), *blocks, Head(config))


def _problem(make: Callable[[], nn.Module], inputs: Tensor, target: Tensor, loss: Callable[..., Any]) -> WholeProblem:
    return WholeProblem(make_model=lambda: seeded(make), inputs=inputs, target=target, loss_fn=loss, optimizer=adamw)


def _gpt(batch: int) -> Task:
    return Task(gpt_problem(GPTConfig(layers=6, width=192, length=64), batch=batch), "tokens/s", 64)


def _lstm(batch: int) -> Task:
    tokens = torch.randint(_VOCABULARY, (batch, 64))
    return Task(_problem(lambda: Seq2Seq(192, 2), tokens, tokens[:, 32:], loss_fn), "tokens/s", 32)


def _cnn(batch: int) -> Task:
    return Task(image_problem(_IMAGE, batch=batch), "images/s", 1)


def _unet(batch: int) -> Task:
    images = torch.randn(batch, 3, _IMAGE, _IMAGE)
    return Task(_problem(lambda: UNet(16, 3), images, torch.randn_like(images), F.mse_loss), "images/s", 1)


def _moe(batch: int) -> Task:
    config = GPTConfig(layers=4, width=128, length=64)
    tokens = torch.randint(_VOCABULARY, (batch, config.length))
    return Task(_problem(lambda: _mixture(config, 8), tokens, tokens, loss_fn), "tokens/s", config.length)


TASKS: dict[str, Callable[[int], Task]] = {"gpt": _gpt, "lstm": _lstm, "cnn": _cnn, "unet": _unet, "moe": _moe}
