"""Layers of the test models.

Widths are multiples of 8: a slice of a float64 batch then starts on a 64-byte border, where BLAS takes the
same path as for a fresh tensor, so that "difference 0" may be asked for.

Symbols: B samples of a (micro)batch, T positions, D width, C channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.parts import Parts

D = 8  # width
T = 4  # positions
VOCABULARY = 16
DROPOUT = 0.25


class Attend(nn.Module):
    """Causal attention with dropout, one random operation: [B, heads, T, D/heads] three times -> the same."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        dropout = DROPOUT if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)


class Block(nn.Module):
    """A transformer block, LayerNorm first: [B, T, D] -> [B, T, D]."""

    def __init__(self, *, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.attend = Attend()
        self.project = nn.Linear(D, D)
        self.project_dropout = nn.Dropout(DROPOUT)
        self.mlp_norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 2 * D)
        self.down = nn.Linear(2 * D, D)
        self.mlp_dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, D // self.heads).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).split(D, dim=-1)
        )
        mixed = self.attend(q, k, v).transpose(1, 2).reshape(batch, length, D)
        x = x + self.project_dropout(self.project(mixed))
        return x + self.mlp_dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class Embed(nn.Module):
    """Token and position embedding: integers [B, T] -> [B, T, D]. Its buffer stays out of the state dict."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, D)
        self.places = nn.Embedding(T, D)
        self.register_buffer("positions", torch.arange(T), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places(self.positions[: tokens.shape[1]])


class Recurrent(nn.Module):
    """An LSTM that hands on its outputs only: [B, T, D] -> [B, T, D]."""

    def __init__(self, *, num_layers: int = 1) -> None:
        super().__init__()
        dropout = DROPOUT if num_layers > 1 else 0.0
        self.lstm = nn.LSTM(D, D, num_layers, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class DoubleConv(nn.Module):
    """Two convolutions with dropout between them: [B, in, L] -> [B, out, L]."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(num_in, num_out, 3, padding=1)
        self.dropout = nn.Dropout(DROPOUT)
        self.second = nn.Conv1d(num_out, num_out, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.second(self.dropout(F.gelu(self.first(x)))))


class MaskedLayer(
    Parts, linear=lambda: nn.Linear(D, D), places=lambda: nn.Embedding(T + 1, D), dropout=lambda: nn.Dropout(DROPOUT)
):
    """A residual layer that reads two integer tensors: h [B, T, D], mask, positions [B, T] -> [B, T, D]."""

    def forward(self, h: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        update = self.dropout(torch.tanh(self.linear(h) + self.places(positions)))
        return h + update * mask.unsqueeze(-1)
