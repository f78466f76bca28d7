"""Styles: how a module's weights are divided over the processes of a tensor group, and the messages between them.

                 x, the same everywhere ─┬──────────────────────┐
    member 0     Column: x W[:, left]    │    member 1          Column: x W[:, right]
                    │ own half of heads / hidden                   │
                 Row: h W[top, :]        │                      Row: h W[bottom, :]
                    └───────────── sum, + bias once ───────────────┘

A style is a `torch.distributed.tensor.parallel.ParallelStyle`: parallelize_module takes it. Unlike torch's own it
leaves plain local tensors in the module, on the user's Parameter objects, since weight versions, sums over replicas
and optimizers handle plain tensors; and DTensor's dispatch takes a small MLP's step from 0.19 to 1.30 ms (CPU, no
messages).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

from ...partition.model.linear_loss import LinearCrossEntropy
from ...partition.profiler.passes import NOT_BY_SAMPLES
from .shard import Shard, chunk
from .style import Style, StyleError, not_divided, numbers_of, shard_of
from .tensor_group import TensorGroup, enter, gather, leave, split


def is_conv1d(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def is_linear(module: nn.Module) -> bool:
    """Whether it is a Conv1D, or computes the same as a torch.nn.Linear (a subclass with its own forward is tried)."""
    if isinstance(module, LinearCrossEntropy):
        return False
    if not isinstance(module, nn.Linear) or type(module).forward is nn.Linear.forward:
        return isinstance(module, nn.Linear) or is_conv1d(module)
    weight, has_others = module.weight, {name for name, _ in module.named_parameters()} - {"weight", "bias"}
    x = torch.linspace(-1, 1, module.in_features, dtype=weight.dtype, device=weight.device)
    try:
        return not has_others and torch.allclose(module.forward(x), F.linear(x, weight, module.bias), rtol=1e-2)
    except (RuntimeError, TypeError):
        return False


def sizes_of(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a Linear, of a Conv1D of transformers or an Embedding; None for any other module."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if is_conv1d(module):
        weight = module.get_parameter("weight")
        return weight.shape[0], weight.shape[1]
    return None


class Column(Style):
    """Each member computes its part of the outputs from whole inputs: output columns of x W.

    Arguments:
        blocks: equal blocks of the outputs that are divided separately: 3 for [q | k | v].
        gather_output: whether each member gets all outputs, instead of its own; a LinearCrossEntropy's loss is that of
            all outputs, none of which are gathered.
        shared: outputs after the blocks that all members get, such as one key and value for all heads.
    """

    def __init__(self, *, blocks: int = 1, gather_output: bool = False, shared: int = 0) -> None:
        super().__init__()
        self.blocks = blocks
        self.gather_output = gather_output
        self.shared = shared

    def describe(self) -> str:
        shared = f", {self.shared} shared" * (self.shared > 0) + ", gathered" * self.gather_output
        return "column" + (f" x{self.blocks}" if self.blocks > 1 else "") + shared

    def widths(self, outputs: int) -> list[int]:
        return [(outputs - self.shared) // self.blocks] * self.blocks + [self.shared] * (self.shared > 0)

    def part(self, outputs: torch.Tensor, *, index: int, count: int) -> torch.Tensor:
        blocks = torch.split(outputs, self.widths(outputs.shape[-1]), -1)
        return torch.cat([b.chunk(count, -1)[index] for b in blocks[: self.blocks]] + [*blocks[self.blocks :]], -1)

    def check(self, name: str, module: nn.Module, count: int) -> None:
        sizes = _sizes(name, module, "column")
        if isinstance(module, LinearCrossEntropy) and (self.blocks > 1 or self.shared or not self.gather_output):
            raise StyleError(
                f"module {name!r} is a LinearCrossEntropy: expected 'column' or Column(gather_output=True)"
            )
        if (sizes[1] - self.shared) % (self.blocks * count) or self.shared % count:
            what = f" in {self.blocks} blocks" if self.blocks > 1 else ""
            raise StyleError(not_divided(name, "outputs" + what, sizes[1], count, self.blocks * count))
        if self.gather_output and self.blocks > 1:
            raise StyleError(f"module {name!r}: blocks={self.blocks} are not gathered: expected gather_output=False")
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            raise StyleError(f"module {name!r} has max_norm={module.max_norm}: expected none, for a row is divided")

    def shards(self, module: nn.Module, *, index: int, count: int) -> dict[str, Shard]:
        dim = 0 if isinstance(module, nn.Linear) else 1
        blocks = self.widths(module.get_parameter("weight").shape[dim])
        found = {"weight": shard_of(module, "weight", dim, index=index, count=count, blocks=blocks)}
        if module._parameters.get("bias") is not None:
            found["bias"] = shard_of(module, "bias", 0, index=index, count=count, blocks=blocks)
        return found

    def attributes(self, module: nn.Module, count: int) -> dict[str, Any]:
        return numbers_of(module, ("out_features", "nf", "embedding_dim"), count)

    def forward(self, module: nn.Module, plain: type[nn.Module], group: TensorGroup, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(module, nn.Embedding):
            args, kwargs = _first(args, kwargs, lambda x: enter(x, group))
        if isinstance(module, LinearCrossEntropy) and (args[1:] or (kwargs.get("target"),))[0] is not None:
            group.region(False)
            return plain.forward(module, *args, members=group, **kwargs)
        whole = self.gather_output or isinstance(module, nn.Embedding)
        out = plain.forward(module, *args, **kwargs)
        if self.shared:
            own, part = out.tensor_split([-self.shared // group.count], dim=-1)
            return torch.cat([own, enter(gather(part, group, dim=-1), group)], dim=-1)  # all share in its gradient
        return gather(out, group, dim=-1) if whole else out


class Row(Style):
    """Each member multiplies its part of the inputs with its rows of W; the products are summed, the bias added once.

    Of an Embedding: each member has its part of the vocabulary, and gives zeros for the other tokens. `split_input`:
    whether each member gets all inputs, and uses its own."""

    def __init__(self, *, split_input: bool = False) -> None:
        super().__init__()
        self.split_input = split_input

    def describe(self) -> str:
        return "row" + (", split" if self.split_input else "")

    def check(self, name: str, module: nn.Module, count: int) -> None:
        sizes = _sizes(name, module, "row")
        if isinstance(module, nn.Embedding):
            if module.max_norm is not None or module.scale_grad_by_freq:
                raise StyleError(f"module {name!r} has max_norm or scale_grad_by_freq: expected an Embedding without")
            if -(-sizes[0] // count) * (count - 1) >= sizes[0]:
                raise StyleError(f"module {name!r} has {sizes[0]} rows: expected rows for each of {count} tensor ranks")
            return
        if sizes[0] % count:
            raise StyleError(not_divided(name, "inputs", sizes[0], count, count))
        if not is_linear(module):
            raise StyleError(
                f"module {name!r} ({type(module).__name__}) has its own forward: expected a plain torch.nn.Linear for "
                f"'row', whose bias is added once"
            )

    def shards(self, module: nn.Module, *, index: int, count: int) -> dict[str, Shard]:
        dim = 1 if isinstance(module, nn.Linear) else 0
        return {"weight": shard_of(module, "weight", dim, index=index, count=count)}

    def attributes(self, module: nn.Module, count: int) -> dict[str, Any]:
        return numbers_of(module, ("in_features", "nx"), count)

    def forward(self, module: nn.Module, plain: type[nn.Module], group: TensorGroup, *args: Any, **kwargs: Any) -> Any:
        if isinstance(module, nn.Embedding):
            return _vocabulary_parallel(module, group, *args, **kwargs)
        if self.split_input:
            args, kwargs = _first(args, kwargs, lambda x: split(x, group, dim=-1))
        x = args[0] if args else next(iter(kwargs.values()))
        weight, bias = module.weight, module.bias
        out = F.linear(x, weight) if isinstance(module, nn.Linear) else x @ weight  # type: ignore[arg-type]
        out = leave(out, group)
        return out if bias is None else out + bias  # type: ignore[operator]


class Sequence(Style):
    """Each member computes its part of the positions, with whole weights, from all inputs, and gathers all outputs.

    For modules that compute each position independently: norms, dropout, a Linear. Gradients of the weights are
    summed. `dim`: of the positions."""

    def __init__(self, *, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def check(self, name: str, module: nn.Module, count: int) -> None:
        batch_norms = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)
        own = list(module.children())
        if own or isinstance(module, batch_norms) or not _is_by_position(module, self.dim):
            raise StyleError(
                f"module {name!r} ({type(module).__name__}) cannot be cut by 'sequence': expected a module that "
                f"computes each position independently, such as a LayerNorm, RMSNorm or Dropout"
            )

    def forward(self, module: nn.Module, plain: type[nn.Module], group: TensorGroup, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _first(args, kwargs, lambda x: split(x, group, dim=self.dim))
        with _gradients_summed(module, group):
            out = plain.forward(module, *args, **kwargs)
        return gather(out, group, dim=self.dim)


class Samples(Style):
    """Each member computes its part of a microbatch's samples, with whole weights; gradients of the weights are summed.

    For modules with few weights compared with their activations, such as convolutions before large linear layers
    (Krizhevsky 2014, arXiv 1404.5997). All tensors among the arguments and results have the samples along dimension 0.

    Arguments:
        split_input: whether each member gets all samples, and uses its own.
        gather_output: whether each member gets all results, instead of its own.
    """

    def __init__(self, *, split_input: bool = True, gather_output: bool = True) -> None:
        super().__init__()
        self.split_input, self.gather_output = split_input, gather_output

    def describe(self) -> str:
        return "samples" + ", own come in" * (not self.split_input) + ", own go on" * (not self.gather_output)

    def check(self, name: str, module: nn.Module, count: int) -> None:
        for inner, each in module.named_modules():
            if isinstance(each, NOT_BY_SAMPLES):
                why = "keeps its weights in a list" if isinstance(each, nn.RNNBase) else "has all samples in its mean"
                raise StyleError(
                    f"module {f'{name}.{inner}'.strip('.')!r} ({type(each).__name__}) {why}, and cannot be cut by "
                    f"'samples': expected modules that compute each sample independently, such as convolutions"
                )

    def forward(self, module: nn.Module, plain: type[nn.Module], group: TensorGroup, *args: Any, **kwargs: Any) -> Any:
        group.region(True)
        if self.split_input:
            args, kwargs = tree_map_only(torch.Tensor, lambda x: split(x, group, dim=0), (args, kwargs))
        with ExitStack() as stack:
            for each in module.modules():
                stack.enter_context(_gradients_summed(each, group))
            value = plain.forward(module, *args, **kwargs)
        if not self.gather_output:
            return value
        return tree_map_only(torch.Tensor, lambda x: gather(x, group, dim=0), value)


class SummedGradients(Style):
    """A whole module between a column and a row, such as a norm of each head: gradients of its weights are summed."""

    def describe(self) -> str:
        return "whole, gradients summed"

    def forward(self, module: nn.Module, plain: type[nn.Module], group: TensorGroup, *args: Any, **kwargs: Any) -> Any:
        with _gradients_summed(module, group):
            return plain.forward(module, *args, **kwargs)


class Local(Style):
    """A module whose children are cut, and whose own forward reads their sizes, which become the local ones.

    Arguments:
        divided: attributes: num_heads=8 becomes 4 for two members. Parameters, along dimension 0.
        fixed: attributes that get these values.
        per_head: arguments by keyword: (dimension of [..., heads], heads), of which each member uses its own.
        unread: positions of returned values that are not read; they become None, being those of a member's heads.
    """

    def __init__(
        self,
        *divided: str,
        fixed: Mapping[str, Any] = MappingProxyType({}),
        per_head: Mapping[str, tuple[int, int]] = MappingProxyType({}),
        unread: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.divided, self.fixed, self.per_head, self.unread = divided, fixed, per_head, unread

    def describe(self) -> str:
        names = [f"{name}/t" for name in (*self.divided, *self.per_head)]
        return f"local {', '.join(names + [f'{name}={value}' for name, value in self.fixed.items()])}"

    def check(self, name: str, module: nn.Module, count: int) -> None:
        for attribute in self.divided:
            value = getattr(module, attribute, None)
            value = len(value) if isinstance(value, nn.Parameter) else value
            if isinstance(value, bool) or not isinstance(value, int):
                raise StyleError(f"module {name!r} has {attribute}={value!r}: expected its own whole number")
            if value % count:
                raise StyleError(not_divided(name, attribute, value, count, count))

    def shards(self, module: nn.Module, *, index: int, count: int) -> dict[str, Shard]:
        own = [key for key in self.divided if key in module._parameters]
        return {key: shard_of(module, key, 0, index=index, count=count) for key in own}

    def attributes(self, module: nn.Module, count: int) -> dict[str, Any]:
        return {**numbers_of(module, self.divided, count), **self.fixed}

    def forward(self, module: nn.Module, plain: type[nn.Module], group: TensorGroup, *args: Any, **kwargs: Any) -> Any:
        for key, (dim, heads) in self.per_head.items():
            x = kwargs.get(key)
            if isinstance(x, torch.Tensor) and x.shape[dim] % heads == 0:  # else one for all heads
                each = torch.unflatten(enter(x, group), dim, (-1, heads)).chunk(group.count, dim + 1)[group.index]
                kwargs[key] = each.flatten(dim, dim + 1)
        value = plain.forward(module, *args, **kwargs)
        return tuple(None if at in self.unread else x for at, x in enumerate(value)) if self.unread else value


class Summed(Style):
    """A module whose outputs are summed over the members."""

    def forward(self, module: nn.Module, plain: type[nn.Module], group: TensorGroup, *args: Any, **kwargs: Any) -> Any:
        return leave(plain.forward(module, *args, **kwargs), group)


class SharedKey(Style):
    """The projection to [latent | rotary key] of latent attention: all heads use the key (`width` outputs)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def describe(self) -> str:
        return "whole, shared key"

    def forward(self, module: nn.Module, plain: type[nn.Module], group: TensorGroup, *args: Any, **kwargs: Any) -> Any:
        """The plain forward; the gradient of the key is the sum of all members'."""
        out: torch.Tensor = plain.forward(module, *args, **kwargs)
        latent, key = out[..., : -self.width], out[..., -self.width :]
        return torch.cat([latent, enter(key, group)], dim=-1)


def _sizes(name: str, module: nn.Module, word: str) -> tuple[int, int]:
    sizes = sizes_of(module)
    if sizes is None:
        raise StyleError(
            f"module {name!r} ({type(module).__name__}) cannot be cut by {word!r}: expected a torch.nn.Linear, a "
            f"torch.nn.Embedding or a Conv1D of transformers, or a style of your own"
        )
    return sizes


def _first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    key = next(iter(kwargs))
    return args, {**kwargs, key: change(kwargs[key])}


@contextmanager
def _gradients_summed(module: nn.Module, group: TensorGroup) -> Iterator[None]:
    """Context in which the module's own parameters get the sum of all members' gradients. An attribute of the instance
    hides its parameter of that name; the parameter stays in its table, where weight versions and hooks find it."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    for name in names:
        module.__dict__[name] = enter(module.get_parameter(name), group)
    try:
        yield
    finally:
        for name in names:
            module.__dict__.pop(name, None)


def _is_by_position(module: nn.Module, dim: int) -> bool:
    """Whether each output depends only on the input at its position along `dim`, tried on random numbers: the first two
    of four positions give the same alone, and in reverse order all give the same in reverse order."""
    widths = {p.shape[-1] for p in module.parameters(recurse=False)} or {6}
    if len(widths) > 1 and not isinstance(module, nn.Linear):
        return False
    shape = [2] * max(2, dim + 1) + [module.in_features if isinstance(module, nn.Linear) else widths.pop()]
    shape[dim] = 4
    like = next(module.parameters(recurse=False), torch.empty(()))
    was_training = module.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            module.train(False)
            x = torch.rand(shape, dtype=like.dtype).to(like.device)
            whole, part, reverse = module(x), module(x.narrow(dim, 0, 2)), module(x.flip(dim)).flip(dim)
        first = whole.narrow(dim, 0, 2)
        return bool(
            whole.shape[:-1] == x.shape[:-1]
            and torch.allclose(first, part, atol=1e-5)
            and torch.allclose(whole, reverse, atol=1e-5)
        )
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return False
    finally:
        module.train(was_training)


def _vocabulary_parallel(module: nn.Embedding, group: TensorGroup, tokens: torch.Tensor) -> torch.Tensor:
    size = module.weight.shape[0]
    first, _ = chunk(module.num_embeddings, index=group.index, count=group.count)
    local = tokens - first
    outside = (local < 0) | (local >= size)
    padding = module.padding_idx
    own_padding = None if padding is None or not first <= padding < first + size else padding - first
    found = F.embedding(local.masked_fill(outside, 0), module.weight, own_padding, sparse=module.sparse)
    return leave(found.masked_fill(outside.unsqueeze(-1), 0.0), group)
