"""Models that take keywords and return more than tensors, and a batch for each."""

import copy
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

N, T, WIDTH, CLASSES, IGNORED = 7, 5, 6, 9, -100
Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    logits: Any
    extra: Any = None


class Tagger(nn.Module):
    """Embeds tokens, adds a bias for each position and each sample, and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(
        self,
        tokens: Tensor,  # [N, T], or [T, N] where flipped
        mask: Tensor | None = None,  # [N, T]
        *,
        positions: Tensor | None = None,  # [T, WIDTH]
        pair: Pair | None = None,  # left: [N, T], right: [T]
        scale: float = 1.0,
        flipped: bool = False,
    ) -> Output:
        h = self.embed(tokens.transpose(0, 1) if flipped else tokens)
        if positions is not None:
            h = h + positions
        if pair is not None:
            h = h * (pair.left + pair.right).unsqueeze(-1)
        for block in self.blocks:
            h = torch.tanh(block(h)) * scale
        if mask is not None:
            h = h * mask.unsqueeze(-1)
        return Output(self.head(h), {"hidden": h, "tokens": h.transpose(0, 1), "text": "kept", "none": None})


def with_twin(make: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """A model in float64, and its copy for one plain process."""
    torch.manual_seed(0)
    model = make().double()
    return model, copy.deepcopy(model)


def loss_of(output: Output, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


TOKENS = torch.randint(CLASSES, (N, T), generator=torch.Generator().manual_seed(1))
TARGET = torch.randint(CLASSES, (N, T), generator=torch.Generator().manual_seed(2))
MASK, POSITIONS = draw(N, T), draw(T, WIDTH, seed=3)


WORDS = torch.randint(CLASSES, (6, T), generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(CLASSES, (6, T), generator=torch.Generator().manual_seed(2))
for row in range(6):
    LABELS[row, row:] = IGNORED  # the first row has none: a microbatch of its own under M=6


class Language(nn.Module):
    """Returns its mean loss over labels; `shifts` as a causal language model does, `returns` in which form."""

    def __init__(self, *, shifts: bool = False, returns: str = "dict") -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.shifts, self.returns = shifts, returns

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        h = self.embed(tokens)
        for block in self.blocks:
            h = torch.tanh(block(h))
        logits = self.head(h)
        if labels is None:
            return {"loss": None, "logits": logits} if self.returns == "dict" else (logits,)
        seen, wanted = (logits[:, :-1], labels[:, 1:]) if self.shifts else (logits, labels)
        loss = F.cross_entropy(seen.reshape(-1, CLASSES), wanted.reshape(-1), ignore_index=IGNORED)
        if self.returns == "alone":
            return loss
        return {"loss": loss, "logits": logits} if self.returns == "dict" else (loss, logits)


def loss_in(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else output["loss"] if isinstance(output, dict) else output[0]
    assert isinstance(found, Tensor)
    return found


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": CLASSES, "n_positions": 32}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off)).double()


def in_float64(logits: Tensor, labels: Tensor, vocab_size: int, **others: Any) -> Tensor:
    """transformers' loss for causal language models, which computes in float32, in float64."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1), ignore_index=IGNORED)
