"""A case's model, its loss and its batches."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.parts import GIVEN, Parts

from . import reads
from .blocks import BLOCKS, D, Scale, connect, scope
from .cases import Case, Model

WORDS = 7


class Own(nn.Module):
    def __init__(self, kind: Model, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.kind = kind
        self.reads_scale = nn.Parameter(torch.ones(D))
        if kind.inputs == "tokens":
            self.embed = nn.Embedding(WORDS, D)
        self.blocks = nn.ModuleList(blocks)
        if kind.head != "none":
            self.head = nn.Linear(D, WORDS if kind.inputs == "tokens" else D)
        if kind.head == "tied" and kind.inputs == "tokens":
            self.head.weight = self.embed.weight
        reads.prepare(self)

    def forward(
        self,
        x: Any,
        y: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        positions: Any = None,
        labels: Any = None,
        flags: Any = None,
    ) -> Any:
        if isinstance(x, dict):
            x, y = x["first"], x["second"]
        h = self.embed(x) if self.kind.inputs == "tokens" else x
        if positions is not None:
            h = h + positions
        if mask is not None:
            h = h * mask.unsqueeze(-1)
        if flags is not None and flags["mode"] == "double":
            h = h * flags["factors"][0]
        h = h * self.reads_scale
        read, _ = reads.READS[self.kind.reads]
        h = self.through(h, y) * read(self)
        out = self.head(h) if self.kind.head != "none" else h
        if labels is not None:
            return {"loss": F.mse_loss(out, labels), "out": out}
        if self.kind.loss == "outputs":
            return {"out": out, "more": (h * 0.5, [h.mean(-1)])}
        return out

    def middle(self, h: Tensor, i: int, y: Tensor | None) -> Tensor:
        """In front of block i: a second input joins in the middle."""
        return h if y is None or i != len(self.blocks) // 2 else h + y

    def through(self, h: Tensor, y: Tensor | None) -> Tensor:
        for i, block in enumerate(self.blocks):
            h = block(self.middle(h, i, y))
        return h


class Residual(Own):
    def through(self, h: Tensor, y: Tensor | None) -> Tensor:
        for i, block in enumerate(self.blocks):
            h = F.layer_norm(self.middle(h, i, y) + block(h), (D,))
        return h


class Dense(Own):
    def through(self, h: Tensor, y: Tensor | None) -> Tensor:
        results = [h]
        for i, block in enumerate(self.blocks):
            results.append(block(self.middle(torch.stack(results).mean(0), i, y)))
        return results[-1]


class UNet(Own):
    def through(self, h: Tensor, y: Tensor | None) -> Tensor:
        kept, half = [], len(self.blocks) // 2
        for i, block in enumerate(self.blocks):
            if i >= len(self.blocks) - half:
                h = torch.cat([h, kept.pop()], -1).unflatten(-1, (2, D)).sum(-2)
            h = block(self.middle(h, i, y))
            if i < half:
                kept.append(h)
        return h


class Twice(Own):
    def through(self, h: Tensor, y: Tensor | None) -> Tensor:
        return self.blocks[0](super().through(h, y))


class Memory(Own):
    def through(self, h: Tensor, y: Tensor | None) -> Tensor:
        half = len(self.blocks) // 2
        for block in self.blocks[:half]:
            h = block(h)
        memory = h
        for i, block in enumerate(self.blocks[half:], half):
            h = block(self.middle(h, i, y) + memory * self.reads_scale)
        return h


class InPlaceBetween(Own):
    def through(self, h: Tensor, y: Tensor | None) -> Tensor:
        for i, block in enumerate(self.blocks):
            h = block(self.middle(h, i, y)) + 0.0
            h *= 0.9
            h[:, :1] += 0.1
        return h


class CheckpointBetween(Own):
    def through(self, h: Tensor, y: Tensor | None) -> Tensor:
        for i, block in enumerate(self.blocks):
            h = checkpoint(block, self.middle(h, i, y), use_reentrant=False)
        return h


class CustomBetween(Own):
    def through(self, h: Tensor, y: Tensor | None) -> Tensor:
        for i, block in enumerate(self.blocks):
            h = Scale.apply(torch.tanh(block(self.middle(h, i, y))))
        return h


class Sets(Own):
    """Blocks by name in a set of strings: another order in each process. Sums do not depend on it."""

    def through(self, h: Tensor, y: Tensor | None) -> Tensor:
        names = [("sliding", "full", "linear")[i % 3] for i in range(len(self.blocks))]
        masks = {}
        for kind in set(names):
            masks[kind] = (h.detach() > -1).to(h) * len(kind)
        for i, block in enumerate(self.blocks):
            h = block(self.middle(h, i, y)) + 0.01 * masks[names[i]]
        return h


class SetOfBlocks(Own):
    def through(self, h: Tensor, y: Tensor | None) -> Tensor:
        names = {f"branch-{i}": i for i in range(len(self.blocks))}
        results = {}
        for name in set(names):
            results[name] = self.blocks[names[name]](h)
        return torch.stack([results[f"branch-{i}"] for i in range(len(self.blocks))]).sum(0)


class Scopes(Own):
    def through(self, h: Tensor, y: Tensor | None) -> Tensor:
        for i, block in enumerate(self.blocks):
            with scope(i):
                h = block(self.middle(h, i, y))
        return h


class Half(Parts, layers=GIVEN):
    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            h = layer(h)
        return h, h.mean(-1, keepdim=True)


class Halves(Own):
    """Encoder and decoder with loops of their own, which a cut may open; they return tuples."""

    def __init__(self, kind: Model, blocks: list[nn.Module]) -> None:
        super().__init__(kind, blocks)
        del self.blocks
        half = max(1, len(blocks) // 2)
        self.encoder, self.decoder = (Half(nn.ModuleList(own)) for own in (blocks[:half], blocks[half:]))

    @property
    def all_blocks(self) -> list[nn.Module]:
        return [*self.encoder.layers, *self.decoder.layers]

    def through(self, h: Tensor, y: Tensor | None) -> Tensor:
        memory, mean = self.encoder(h)
        if y is not None:
            memory = memory + y
        return self.decoder(memory - mean)[0] + memory


class Chain(nn.Module):
    """Stages that are given one by one, as one module."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        for i, stage in enumerate(stages):
            self.add_module(str(i), stage)

    def forward(self, x: Tensor) -> Any:
        for stage in self.children():
            x = stage(x)
        return x


STYLES: dict[str, type[nn.Module]] = {
    "sequential": nn.Sequential,
    "stages": Chain,
    "loop": Own,
    "residual": Residual,
    "dense": Dense,
    "unet": UNet,
    "twice": Twice,
    "memory": Memory,
    "in-place": InPlaceBetween,
    "checkpoint": CheckpointBetween,
    "custom": CustomBetween,
    "sets": Sets,
    "set-of-blocks": SetOfBlocks,
    "scopes": Scopes,
    "halves": Halves,
}
CHAINS = ("sequential", "stages")


def make_model(case: Case) -> nn.Module:
    """The untrained model, the same at every call."""
    kind = case.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        blocks: list[nn.Module] = []
        for name in kind.blocks:
            blocks.append(blocks[0] if name == "first" else BLOCKS[name]())
        connect(blocks)
        if kind.style not in CHAINS:
            return STYLES[kind.style](kind, blocks).to(case.dtype).train()
        if kind.inputs == "tokens":
            blocks = [nn.Embedding(WORDS, D), *blocks]
        if kind.head != "none":
            blocks = [*blocks, nn.Linear(D, WORDS if kind.inputs == "tokens" else D)]
        if kind.head == "tied" and kind.inputs == "tokens":
            blocks[-1].weight = blocks[0].weight  # type: ignore[assignment]
        if kind.style == "sequential":
            return nn.Sequential(*blocks).to(case.dtype).train()
        S = case.num_stages
        ends = [len(blocks) * s // S for s in range(S + 1)]
        stages = [nn.Sequential(*blocks[a:b]) if b - a != 1 else blocks[a] for a, b in itertools.pairwise(ends)]
        return Chain(stages).to(case.dtype).train()


def blocks_of(model: Any) -> list[Any]:
    if isinstance(model, Halves):
        return model.all_blocks
    if isinstance(model, Own):
        return list(model.blocks)
    return [block for block in units(model) if hasattr(block, "options")]


def first_names(model: nn.Module) -> dict[str, str]:
    firsts: dict[int, str] = {}
    return {name: firsts.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def unit_names(model: Any) -> list[str]:
    by_id = {id(module): name for name, module in model.named_modules()}
    return [by_id[id(unit)] for unit in units(model)]


def units(model: Any) -> list[nn.Module]:
    """The modules at whose entry randomness is seeded."""
    if isinstance(model, nn.Sequential):
        return list(model)
    if isinstance(model, Chain):
        return [unit for stage in model.children() for unit in _members(stage)]
    return [one for one in (getattr(model, "embed", None), *blocks_of(model), getattr(model, "head", None)) if one]


def _members(stage: Any) -> list[nn.Module]:
    """An empty one is a unit itself."""
    return [*stage] if isinstance(stage, nn.Sequential) and len(stage) else [stage]


class LearnedLoss(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out * self.scale, target)


def _sum_and_count(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    counts = (target > -0.5).to(out)
    return ((out - target).pow(2) * counts).sum(), counts.sum()


def _outputs(out: Any, target: Tensor) -> Tensor:
    half, (mean,) = out["more"]
    return F.mse_loss(out["out"], target) + 0.1 * half.pow(2).mean() + 0.1 * mean.abs().mean()


def make_loss(case: Case) -> Any:
    kinds: dict[str, Callable[[], Any]] = {
        "mse": lambda: F.mse_loss,
        "huber": nn.HuberLoss,
        "cross-entropy": lambda: lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten()),
        "sum-count": lambda: _sum_and_count,
        "module": lambda: LearnedLoss(case.dtype),
        "outputs": lambda: _outputs,
        "model": lambda: "model",
    }
    return kinds[case.model.loss]()


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What train_step takes; `shared` names keywords that all microbatches get whole."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor | None
    size: int

    @property
    def positional(self) -> tuple[Any, ...]:
        """With the target as the last one."""
        return self.args if self.target is None else (*self.args, self.target)

    @property
    def whole(self) -> Any:
        """As one value: a tuple, or a dict of keywords."""
        return self.by_name if self.kwargs else self.positional

    @property
    def by_name(self) -> dict[str, Any]:
        names = dict(zip(("x", "y"), self.args, strict=False))
        return names | self.kwargs | ({} if self.target is None else {"target": self.target})

    def part(self, choose: Callable[[Tensor], Tensor]) -> "Batch":
        def chosen(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: chosen(one) for key, one in value.items()}
            return choose(value) if isinstance(value, Tensor) else value

        kwargs = {key: value if key == "positions" else chosen(value) for key, value in self.kwargs.items()}
        args = tuple(chosen(value) for value in self.args)
        target = None if self.target is None else choose(self.target)
        sized = next(value for value in (*args, *kwargs.values()) if value is not None)
        size = next(iter(sized.values())) if isinstance(sized, dict) else sized
        return Batch(args=args, kwargs=kwargs, target=target, size=size.shape[0])

    def cut(self, parts: int) -> list["Batch"]:
        return [self.part(lambda tensor, k=k: torch.tensor_split(tensor, parts)[k]) for k in range(parts)]  # type: ignore[misc]


def make_batch(case: Case, index: int, size: int, length: int) -> "Batch":
    """The batch of a call, the same at every call."""
    kind = case.model
    draw = torch.Generator().manual_seed(1000 * case.seed + index)

    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(case.dtype)

    x = floats(size, length, D)
    words = torch.randint(WORDS, (2, size, length), generator=draw)
    if kind.inputs == "tokens":
        x = words[0]
    width = WORDS if kind.inputs == "tokens" and kind.head != "none" else D
    target: Tensor = words[1] if kind.loss == "cross-entropy" else floats(size, length, width)
    second = floats(size, length, D)
    args: tuple[Any, ...] = (x,)
    kwargs: dict[str, Any] = {}
    if kind.inputs == "pair":
        args = (x, second)
    elif kind.inputs == "dict":
        args = ({"first": x, "second": second},)
    elif kind.inputs == "mask":
        kwargs = {"mask": second[..., 0] > -1}
    elif kind.inputs == "positions":
        kwargs = {"positions": second[0]}
    elif kind.inputs == "flags":
        kwargs = {"flags": {"mode": "double", "factors": [2.0, None]}}
    if kind.loss == "model":
        return Batch(args=(), kwargs={"x": x, **kwargs, "labels": target}, target=None, size=size)
    return Batch(args=args, kwargs=kwargs, target=target, size=size)
