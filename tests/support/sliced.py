"""Small causal models for slices of the sequence, and what one plain process makes of a batch."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagewright import PipelineModule
from support.inside import GPT, GPTConfig
from support.records import records

T, VOCABULARY = 12, 11


def gpt(*, layers: int = 2, dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=VOCABULARY, length=T, layers=layers, width=8, heads=2, dropout=dropout)
    return GPT(config).double()


def chain(**sizes: Any) -> nn.Sequential:
    """The GPT's modules as they follow each other, which cost less to look at."""
    model = gpt(**sizes)
    return nn.Sequential(model.embedding, *model.blocks, model.head)


def batch(samples: int = 4, length: int = T) -> tuple[Tensor, Tensor]:
    """Tokens and targets, [B, T] each."""
    tokens = torch.randint(VOCABULARY, (samples, length + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def counted_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count): targets of 0 do not count."""
    counts = targets != 0
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return (losses * counts).sum(), counts.sum()


@dataclass(frozen=True)
class Made:
    """Loss of a batch, and gradients by name."""

    loss: float
    gradients: dict[str, Tensor]


def plainly(model: nn.Module, loss_fn: Callable[..., Any], *inputs: Any) -> Made:
    model = copy.deepcopy(model)
    *inputs, target = inputs
    loss = loss_fn(model(*inputs), target)
    loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
    loss.backward()
    return Made(loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def piped(pipe: PipelineModule, *inputs: Any) -> Made:
    pipe.build(*inputs)
    for _, parameter in pipe.named_parameters():
        parameter.grad = None
    loss = pipe.forward_backward(*inputs).loss
    assert loss is not None
    return Made(loss, {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None})


def difference(found: Made, expected: Made) -> float:
    pairs = [(found.gradients[name], expected.gradients[name]) for name in found.gradients]
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def of_this_rank(options: Mapping[str, Any]) -> tuple[float, float, set[str]]:
    """Differences of the loss and the gradients on this rank, and the names of these."""
    expected = plainly(chain(), mean_loss, *batch())
    with PipelineModule(chain(), **records(loss_fn=mean_loss, num_microbatches=2, **options)) as pipe:
        piped(pipe, *batch())
        found = piped(pipe, *batch())
    return abs(found.loss - expected.loss), difference(found, expected), set(found.gradients)
