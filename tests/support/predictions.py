"""A language model that predicts two tokens, with two losses (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stagewright as sw

WIDTH, VOCABULARY, LENGTH, LATER = 8, 48, 6, 0.3


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.gelu(self.up(self.norm(h.cumsum(1) / 4))))


class Model(nn.Module):
    """Loss of the next token + 0.3 of the one after. `heads`: "one" module for both, "tied" ones, or "two"."""

    def __init__(self, heads: str = "one", *, width: int = WIDTH, vocabulary: int = VOCABULARY, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = sw.LinearCrossEntropy(width, vocabulary, **options)
        self.join, self.later = nn.Linear(2 * width, width), Block(width)
        if heads != "one":
            self.later_head = sw.LinearCrossEntropy(width, vocabulary, **options)
        if heads == "tied":
            self.later_head.weight = self.head.weight
        self.heads = heads

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        """tokens [B, T + 1], labels [B, T + 1] -> the loss; without labels logits [B, T, V]."""
        h = self.embed(tokens[:, :-1])
        for block in self.blocks:
            h = block(h)
        if labels is None:
            return self.head(h)
        first = self.head(h, labels[:, :-1])
        h = self.later(self.join(torch.cat([h, self.embed(tokens[:, 1:])], -1)))
        second = self.head if self.heads == "one" else self.later_head
        return first + LATER * second(h, labels[:, 1:])


def plain_loss(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """The same of one process, with all logits."""
    h = model.embed(tokens[:, :-1])
    for block in model.blocks:
        h = block(h)
    heads = model.head, model.head if model.heads == "one" else model.later_head
    later = model.later(model.join(torch.cat([h, model.embed(tokens[:, 1:])], -1)))
    logits = [F.linear(x, head.weight, head.bias) for x, head in zip((h, later), heads, strict=True)]
    wanted = labels[:, :-1], labels[:, 1:]
    losses = [F.cross_entropy(x.flatten(0, 1), y.flatten()) for x, y in zip(logits, wanted, strict=True)]
    return losses[0] + LATER * losses[1]


def make_model(heads: str = "one", **options: Any) -> Model:
    torch.manual_seed(5)
    return Model(heads, **options).double()


def batch(step: int, size: int = 8, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    words = torch.randint(vocabulary, (size, LENGTH + 2), generator=torch.Generator().manual_seed(step))
    return words[:, :-1], words[:, 1:]
