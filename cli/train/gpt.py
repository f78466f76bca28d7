"""The example model: a plain GPT over bytes, and the same model as a list of stages cut by hand.

    tokens [B, T] -> Embedding -> Block -> ... -> Block -> Head -> logits [B, T, vocab]
                                  L blocks, pre-norm

Shapes: B sequences, T tokens (at most `length`), D width, H heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...pipe.stage.tokens import positions


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The size of a GPT; the default has 5.1 million parameters.

    Raises ValueError for a size that does not fit.
    """

    vocabulary: int = 256  # number of distinct tokens (256: bytes)
    length: int = 128  # the longest sequence, T
    layers: int = 4  # L >= 1 blocks
    width: int = 320  # D, a multiple of the number of heads
    heads: int | None = None  # H attention heads per block; None: one for each 64 of the width, if that divides it
    dropout: float = 0.0  # probability, after the embedding and at the end of both branches of a block
    tied: bool = False  # whether the head multiplies by the embedding's own weight

    def __post_init__(self) -> None:
        for name in ("vocabulary", "length", "layers", "width", "heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: expected at least 1")
        heads = self.num_heads
        if self.width % heads:
            raise ValueError(
                f"width={self.width} with heads={heads}: expected a width that the heads divide, "
                f"such as {heads * math.ceil(self.width / heads)}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout}: expected a probability from 0 up to 1, without 1")

    @property
    def num_heads(self) -> int:
        if self.heads is not None:
            return self.heads
        return next(h for h in range(max(1, self.width // 64), 0, -1) if self.width % h == 0)


class Embedding(nn.Module):
    """tokens [B, T] int64 -> token + position vectors [B, T, D]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Parameter(torch.empty(config.length, config.width))
        self.dropout = nn.Dropout(config.dropout)
        nn.init.normal_(self.tokens.weight, std=_STD)
        nn.init.normal_(self.positions, std=_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        at = positions(tokens.shape[1], device=tokens.device)  # later ones in later slices of a sequence
        hidden: Tensor = self.dropout(self.tokens(tokens) + self.positions[at])
        return hidden


class Attention(nn.Module):
    """Causal self-attention, [B, T, D] -> [B, T, D]; queries, keys and values from one product."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.qkv = _linear(config.width, 3 * config.width, std=_STD)
        self.out = _linear(config.width, config.width, std=_residual_std(config))

    def forward(self, hidden: Tensor) -> Tensor:
        qkv = self.qkv(hidden).unflatten(-1, (3, self.heads, -1))  # [B, T, 3, H, D/H]
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, T, D/H] each
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """hidden + attention(norm(hidden)), then the same with the feed-forward; [B, T, D] -> [B, T, D]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = _linear(config.width, 4 * config.width, std=_STD)
        self.down = _linear(4 * config.width, config.width, std=_residual_std(config))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.norm1(hidden)))
        inner = F.gelu(self.up(self.norm2(hidden)), approximate="tanh")
        out: Tensor = hidden + self.dropout(self.down(inner))
        return out


class Head(nn.Module):
    """hidden [B, T, D] -> logits [B, T, vocabulary]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.linear = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.normal_(self.linear.weight, std=_STD)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.norm(hidden))
        return logits


class GPT(nn.Module):
    """A decoder-only transformer: tokens int64 [B, T] -> logits [B, T, vocabulary], with T <= config.length.

    Initial weights as in GPT-2 (Radford et al. 2019, section 2.3), from torch's global generator: normal with
    deviation 0.02, smaller by sqrt(2L) for the last weight of each branch into the residual stream.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config)
        if config.tied:
            self.head.linear.weight = self.embedding.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def gpt_stages(config: GPTConfig, num_stages: int) -> list[nn.Sequential]:
    """The same GPT, cut by hand into stages of nearly equal numbers of blocks.

    Chained, the stages compute the same as `GPT(config)` made from the same random state: they hold its
    modules. The embedding is with the first block, the head with the last.

    Raises ValueError for more stages than blocks, and for tied weights (the two ends would share a tensor).
    """
    if not 1 <= num_stages <= config.layers:
        raise ValueError(f"num_stages={num_stages} for {config.layers} layers: expected 1 to {config.layers}")
    if config.tied and num_stages > 1:
        raise ValueError("tied=True with stages cut by hand: expected tied=False, or PipelineModule(GPT(config), ...)")
    model = GPT(config)
    blocks = list(model.blocks)
    bounds = [round(stage * len(blocks) / num_stages) for stage in range(num_stages + 1)]
    cut: list[list[nn.Module]] = [blocks[start:end] for start, end in pairwise(bounds)]
    cut[0].insert(0, model.embedding)
    cut[-1].append(model.head)
    return [nn.Sequential(*modules) for modules in cut]


def sample(
    model: nn.Module, prompt: bytes, *, num_bytes: int, length: int, temperature: float = 0.8, seed: int = 0
) -> bytes:
    """Continue `prompt` by `num_bytes` bytes drawn from the model, which sees the last `length` bytes.

    Draws come from its own generator; the model keeps its mode (train or eval).

    Raises ValueError for an empty prompt and for a temperature that is not above 0.
    """
    if not prompt:
        raise ValueError("prompt is empty: expected at least one byte to continue")
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: expected a number above 0")
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(num_bytes):
                logits = model(torch.tensor([text[-length:]]))[0, -1]  # [vocabulary]
                chances = torch.softmax(logits.float() / temperature, dim=-1)
                text.append(int(torch.multinomial(chances, 1, generator=generator)))
    finally:
        model.train(was_training)
    return bytes(text[len(prompt) :])


_STD = 0.02


def _residual_std(config: GPTConfig) -> float:
    """The sum of 2L branches with this deviation has the variance of one branch."""
    return _STD / math.sqrt(2 * config.layers)


def _linear(width_in: int, width_out: int, *, std: float) -> nn.Linear:
    linear = nn.Linear(width_in, width_out)
    nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
    return linear
