"""Small float64 models, each with its batches, its loss and the modules at whose entry randomness is seeded.

    chain   nn.Sequential: one path, no ties, so every order of stages adds gradients up in the same order
    traced  any other module: the runtime records the code between its modules
    stages  a list of modules, one a stage: the runtime gets `stages=`

Each of TASKS has at least 12 places to cut (P=4, V=3); SMALL_TASKS are for runs of many batches.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import DROPOUT, VOCABULARY, Block, D, DoubleConv, Embed, MaskedLayer, Recurrent, T

IGNORED = -100  # target of a position that does not count in a (sum, count) loss
Batch = tuple[tuple[Tensor, ...], Any]


def mlp() -> nn.Module:
    """Thirteen places without a parameter among the nineteen: some stages have nothing to optimise."""
    body = [layer for _ in range(6) for layer in (nn.Linear(D, D), nn.GELU(), nn.Dropout(DROPOUT))]
    return nn.Sequential(*body, nn.Linear(D, D))


def gpt() -> nn.Module:
    blocks = [Block() for _ in range(8)]
    return nn.Sequential(Embed(), nn.Dropout(DROPOUT), *blocks, nn.LayerNorm(D), nn.Linear(D, VOCABULARY, bias=False))


def batchnorm() -> nn.Module:
    body = [layer for _ in range(6) for layer in (nn.Linear(D, D), nn.BatchNorm1d(D), nn.Tanh(), nn.Dropout(DROPOUT))]
    return nn.Sequential(*body, nn.Linear(D, D))


def lstm() -> nn.Module:
    body = [layer for _ in range(4) for layer in (Recurrent(), nn.Dropout(DROPOUT))]
    return nn.Sequential(nn.Linear(D, D), *body, Recurrent(num_layers=2), nn.LayerNorm(D), nn.Linear(D, D))


class UNet(nn.Module):
    """Skips from the way down to the way up: the first one spans all stages. [B, 8, 16] -> [B, 8, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(8, 8, 3, padding=1)
        self.down = nn.ModuleList(DoubleConv(8, 8) for _ in range(3))
        self.middle = DoubleConv(8, 8)
        self.up = nn.ModuleList(DoubleConv(16, 8) for _ in range(3))
        self.head = nn.Conv1d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        skips = []
        for level in self.down:
            h = level(h)
            skips.append(h)
            h = F.avg_pool1d(h, 2)
        h = self.middle(h)
        for level in self.up:
            h = F.interpolate(h, scale_factor=2.0)
            h = level(torch.cat((h, skips.pop()), dim=1))
        return self.head(h) + x


class TwoInputs(nn.Module):
    """(x [B, T, D], integers mask [B, T]) -> ([B, T, D], [B, D]).

    Every layer reads the mask and a running count of it: two integer tensors that pass all stages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(D, D)
        self.layers = nn.ModuleList(MaskedLayer() for _ in range(6))
        self.head = nn.Linear(D, D)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        positions = mask.cumsum(1)
        h = self.project(x)
        for layer in self.layers:
            h = layer(h, mask, positions)
        return self.head(h), (h * mask.unsqueeze(-1)).mean(1)


class MaskedStage(nn.Module):
    """A stage of TwoInputs by hand: (h, mask[, positions]) -> (h, mask, positions); the last as TwoInputs."""

    def __init__(self, layers: list[MaskedLayer], *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(D, D) if is_last else None

    def forward(self, h: Tensor, mask: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        if self.is_first:
            positions = mask.cumsum(1)
        assert positions is not None
        for layer in self.layers:
            h = layer(h, mask, positions)
        if self.head is None:
            return h, mask, positions
        return self.head(h), (h * mask.unsqueeze(-1)).mean(1)


def masked_stages(num_stages: int) -> list[nn.Module]:
    layers = [MaskedLayer() for _ in range(12)]
    bounds = [12 * s // num_stages for s in range(num_stages + 1)]
    return [
        MaskedStage(layers[begin:end], is_first=begin == 0, is_last=end == 12)
        for begin, end in itertools.pairwise(bounds)
    ]


def sequential_stages(num_stages: int) -> list[nn.Module]:
    """The mlp as one nn.Sequential a stage, except that single children stand as themselves."""
    children = list(mlp().children())
    bounds = [len(children) * s // num_stages for s in range(num_stages + 1)]
    groups = [children[begin:end] for begin, end in itertools.pairwise(bounds)]
    return [group[0] if len(group) == 1 else nn.Sequential(*group) for group in groups]


class TiedGPT(nn.Module):
    """A GPT whose head is its embedding: the first and the last stage share a weight."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, D)
        self.places = nn.Embedding(T, D)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(T), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embed(tokens) + self.places(self.positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class BatchNormCNN(nn.Module):
    """Convolutions, BatchNorm2d and channel dropout: [B, 8, 4, 4] -> [B, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(6))
        self.dropouts = nn.ModuleList(nn.Dropout2d(DROPOUT) for _ in range(6))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm, dropout in zip(self.convolutions, self.norms, self.dropouts, strict=True):
            x = dropout(torch.tanh(norm(convolution(x))))
        return self.head(x.mean((2, 3)))


def conv_norm() -> nn.Module:
    """Convolutions and LayerNorm, whose backwards show a swapped weight; no random numbers. [B, 8, 16] -> the same."""
    body = [layer for _ in range(4) for layer in (nn.Conv1d(8, 8, 3, padding=1), nn.LayerNorm(16), nn.Tanh())]
    return nn.Sequential(*body, nn.Conv1d(8, 8, 1))


def small_gpt() -> nn.Module:
    blocks = [Block() for _ in range(3)]
    return nn.Sequential(Embed(), nn.Dropout(DROPOUT), *blocks, nn.LayerNorm(D), nn.Linear(D, VOCABULARY, bias=False))


def small_tied() -> nn.Module:
    embedding, head = nn.Embedding(VOCABULARY, D), nn.Linear(D, VOCABULARY, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Dropout(DROPOUT), Block(), Block(), nn.LayerNorm(D), head)


# --- batches: (inputs, target) of `size` samples ---


def vectors(size: int) -> Batch:
    return (torch.randn(size, D),), torch.randn(size, D)


def sequences(size: int) -> Batch:
    return (torch.randn(size, T, D),), torch.randn(size, T, D)


def signals(size: int) -> Batch:
    return (torch.randn(size, 8, 16),), torch.randn(size, 8, 16)


def images(size: int) -> Batch:
    return (torch.randn(size, 8, 4, 4),), torch.randn(size, 8)


def tokens(size: int) -> Batch:
    text = torch.randint(VOCABULARY, (size, T + 1))
    return (text[:, :-1].contiguous(),), text[:, 1:].contiguous()


def masked_tokens(size: int) -> Batch:
    """The first sample has no position that counts: a microbatch of it alone has count 0."""
    inputs, target = tokens(size)
    target = target.masked_fill(torch.rand(size, T) < 0.4, IGNORED)
    target[0] = IGNORED
    target[-1, 0] = 1
    return inputs, target


def pairs(size: int) -> Batch:
    mask = (torch.rand(size, T) < 0.7).long()
    return (torch.randn(size, T, D), mask), (torch.randn(size, T, D), torch.randn(size, D))


def pair_loss(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(output[0], target[0]) + F.mse_loss(output[1], target[1])


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def masked_token_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (target != IGNORED).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model with its data.

    kind: "chain", "traced" or "stages" (see the head of this file).
    make: builds the model; of kind "stages" it takes the number of stages and gives a list.
    batch: samples -> (inputs, target), from the current random state.
    batch_size: samples with which any number of microbatches up to 8 works.
    tied: other name of a parameter -> its first name.
    """

    kind: str
    make: Callable[..., Any]
    batch: Callable[[int], Batch]
    loss: Callable[..., Any] = F.mse_loss
    batch_size: int = 11
    tied: dict[str, str] = field(default_factory=dict)


TASKS: dict[str, Task] = {
    "mlp": Task(kind="chain", make=mlp, batch=vectors),
    "gpt": Task(kind="chain", make=gpt, batch=tokens, loss=token_loss),
    "gpt-masked": Task(kind="chain", make=gpt, batch=masked_tokens, loss=masked_token_loss),
    # BatchNorm refuses a microbatch of one sample.
    "batchnorm": Task(kind="chain", make=batchnorm, batch=vectors, batch_size=19),
    "lstm": Task(kind="chain", make=lstm, batch=sequences),
    "unet": Task(kind="traced", make=UNet, batch=signals),
    "two-inputs": Task(kind="traced", make=TwoInputs, batch=pairs, loss=pair_loss),
    "tied-gpt": Task(kind="traced", make=TiedGPT, batch=tokens, loss=token_loss, tied={"head.weight": "embed.weight"}),
    "batchnorm-cnn": Task(kind="traced", make=BatchNormCNN, batch=images, batch_size=19),
    "masked-stages": Task(kind="stages", make=masked_stages, batch=pairs, loss=pair_loss),
    "sequential-stages": Task(kind="stages", make=sequential_stages, batch=vectors),
}


SMALL_TASKS: dict[str, Task] = {
    "conv-norm": Task(kind="chain", make=conv_norm, batch=signals),
    "small-gpt": Task(kind="chain", make=small_gpt, batch=tokens, loss=token_loss),
    "small-masked": Task(kind="chain", make=small_gpt, batch=masked_tokens, loss=masked_token_loss),
    "small-tied": Task(kind="chain", make=small_tied, batch=tokens, loss=token_loss, tied={"5.weight": "0.weight"}),
}


class Chain(nn.ModuleList):
    """The stages of a list, called one after the other; a tuple becomes the arguments of the next."""

    def forward(self, *values: Any) -> Any:
        for stage in self:
            result = stage(*values)
            values = result if isinstance(result, tuple) else (result,)
        return result


def task_of(name: str) -> Task:
    return TASKS[name] if name in TASKS else SMALL_TASKS[name]


def make_model(name: str, *, num_stages: int | None = None, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The untrained model of a task, the same at every call; stages that are given one by one as a `Chain`."""
    task = task_of(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = Chain(task.make(num_stages)) if task.kind == "stages" else task.make()
    return model.to(dtype)


def make_batch(name: str, *, index: int, size: int, dtype: torch.dtype = torch.float64) -> Batch:
    """Batch `index` of a task with `size` samples, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + index)
        inputs, target = task_of(name).batch(size)

    def convert(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        return value.to(dtype) if value.is_floating_point() else value

    return convert(inputs), convert(target)


def seeded_units(model: nn.Module) -> list[nn.Module]:
    """The modules at whose entry randomness is seeded."""
    if isinstance(model, nn.Sequential):
        return list(model)
    if isinstance(model, Chain):
        return [unit for stage in model for unit in (stage if isinstance(stage, nn.Sequential) else [stage])]
    lists = (nn.ModuleList, nn.Sequential)
    children = list(model.children())
    return [unit for child in children for unit in (child.children() if isinstance(child, lists) else [child])]
