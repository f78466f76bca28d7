"""A tied GPT that tensor groups divide, its batches, and a pipeline over it."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.pipeline import assembled

WIDTH, HEADS, LENGTH, WORDS = 8, 4, 6, 12


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Block(nn.Module):
    """Attention with separate projections and an MLP, as most transformers have them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + F.dropout(self.o(mixed.transpose(1, 2).flatten(2)), dropout)
        return x + F.dropout(self.mlp(x), dropout)


class Model(nn.Module):
    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


WORDS_ALONE: dict[str, Any] = {
    **{f"blocks.*.{name}": "column" for name in ("q", "k", "v", "mlp.up")},
    **{f"blocks.*.{name}": "row" for name in ("o", "mlp.down")},
}


def make_model(seed: int = 0, **options: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**options).double()


def make_batch(seed: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(0, WORDS, (size, LENGTH), generator=generator) for _ in range(2))
    return x, y


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
make_pipe = partial(assembled, num_microbatches=4, loss_fn=loss_fn, optimizer=sgd, max_grad_norm=0.7)
