"""A small language model, batches of unequal microbatches, and the training of one process on them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagewright import PipelineModule
from support.parts import Parts
from support.pipeline import assembled
from support.small import sgd

D, WORDS, BLOCKS = 8, 11, 3
LENGTHS = (3, 9, 4, 7)


class Block(Parts, qkv=lambda: nn.Linear(D, 3 * D), out=lambda: nn.Linear(D, D)):
    """Attention over the sequence, so that a length is more than so many rows."""

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        return h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(WORDS, D), *(Block() for _ in range(BLOCKS)), nn.Linear(D, WORDS)).double()


def mean_over_words(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), torch.tensor(target.numel())


def make_batch(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def words(k: int, length: int) -> Tensor:
        return torch.randint(WORDS, (1 + k % 2, length), generator=generator)

    return [(words(k, n), words(k, n)) for k, n in enumerate(lengths)]


def make_pipe(**options: Any) -> PipelineModule:
    settings = {"loss_fn": mean_over_words, "optimizer": sgd, "num_microbatches": len(LENGTHS)}
    return assembled(make_model(), **(settings | options))


BATCHES = [make_batch(0), make_batch(1, (8, 2, 5, 5)), make_batch(2, (1, 6, 12, 3))]


def alone(steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """One process, microbatch by microbatch; behind the last batch the first one comes again."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        batch = BATCHES[step % len(BATCHES)]
        optimizer.zero_grad()
        total = sum(target.numel() for _, target in batch)
        loss = 0.0
        for words, target in batch:
            own = mean_over_words(model(words), target)[0]
            own.backward()
            loss += own.item()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= total
        optimizer.step()
        losses.append(loss / total)
    return losses, model.state_dict()


def assert_alone(found: tuple[list[float | None], dict[str, Tensor]], *, atol: float = 1e-13) -> None:
    losses, state = alone()
    assert found[0] == pytest.approx(losses, rel=1e-13)
    for name, value in state.items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=atol)
