"""Blocks that can be cut by columns and rows: recognised by what they compute, or by their class.

    x ── column(s) ── body ── row ── ...      all inside one module's forward

A module of Linear children is tried on random numbers: the children's outputs are replaced, the row's input is looked
at. It may be cut where the body of a part of the columns' outputs is that part of the body, for each part; where the
body needs neither weights nor x, whose gradients would be partial sums; and where the columns' outputs go nowhere else.
Attention passes this test once its number of heads is that of the part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ...partition.model.untouched import untouched
from .attention import Heads
from .styles import Column, Local, Row, is_conv1d, sizes_of

HEADS = frozenset(  # names that people give to numbers of heads
    (
        *("num_heads", "num_head", "n_heads", "n_head", "heads", "nhead", "nheads", "num_attention_heads"),
        *("num_query_heads", "num_q_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head"),
        *("kv_heads",),
    )
)
_BLOCKS = (1, 3, 2)  # of a fused projection: none, [q | k | v], [gate | up]
_BATCH, _LENGTH = 2, 3


Region = Mapping[str, ParallelStyle]  # of a module ("") and its children, by name below it: they belong together


class Recogniser:
    """Recognises regions, for so many members where their sizes allow it; equal modules are tried once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._known: dict[object, Region | None] = {}

    def region(self, module: nn.Module) -> Region | None:
        """How a module may be cut; None where that is not known."""
        known = _by_class(module)
        if known is not None:
            return self._known.setdefault((type(module), repr(known)), known)
        children = {
            name: child for name, child in module.named_children() if type(child) is nn.Linear or is_conv1d(child)
        }
        if len(children) < 2:
            return None
        key = _key(module, children)
        if key not in self._known:
            self._known[key] = self._tried(module, children)
        return self._known[key]

    def _tried(self, module: nn.Module, children: Mapping[str, nn.Module]) -> Region | None:
        parameter = next(module.parameters())
        if parameter.is_meta:
            return None
        with untouched(module, device=parameter.device), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            module.eval()
            torch.manual_seed(0)
            trial = _Trial(module, children, like=parameter)
            order = trial.order()
            styles: dict[str, ParallelStyle] = {}
            columns: list[str] = []
            for name in order:
                found = trial.region(columns, name, wanted=self._count) if columns else None
                if found is None:
                    columns.append(name)
                else:
                    styles.update(found)
                    columns = []
        return styles or None


def _by_class(module: nn.Module) -> Region | None:
    forward, name = type(module).forward, type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        return {"": Heads()}
    if forward is nn.TransformerEncoderLayer.forward or forward is nn.TransformerDecoderLayer.forward:
        if not _is_elementwise(module.activation):  # type: ignore[arg-type]
            return None
        styles: dict[str, ParallelStyle] = {"linear1": Column(), "linear2": Row()}
        if forward is nn.TransformerEncoderLayer.forward:  # its short cut reads all weights as whole ones
            styles[""] = Local(fixed={"activation_relu_or_gelu": 0})
        return styles
    if forward is nn.TransformerEncoder.forward:
        return {"": Local(fixed={"use_nested_tensor": False})}
    if name == "GPT2Attention" and type(module).__module__.startswith("transformers."):
        local = Local("num_heads", "split_size", "embed_dim")
        if getattr(module, "is_cross_attention", False):
            return {"": local, "q_attn": Column(), "c_attn": Column(blocks=2), "c_proj": Row()}
        return {"": local, "c_attn": Column(blocks=3), "c_proj": Row()}
    return None


def _is_elementwise(function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
        return False
    x = torch.linspace(-2.0, 2.0, 8)
    try:
        return torch.equal(function(x)[:4], function(x[:4]))
    except (RuntimeError, IndexError, TypeError):
        return False


def _key(module: nn.Module, children: Mapping[str, nn.Module]) -> object:
    numbers = tuple((k, v) for k, v in module.__dict__.items() if isinstance(v, int | float | str))
    kinds = tuple((name, type(child)) for name, child in module.named_modules())
    return type(module), numbers, kinds, tuple((name, sizes_of(child)) for name, child in children.items())


class _StopError(Exception):
    """The row's input is known."""


class _Trial:
    """A module run on random numbers, with outputs of children replaced."""

    def __init__(self, module: nn.Module, children: Mapping[str, nn.Module], *, like: torch.Tensor) -> None:
        self._module = module
        self._children = children
        self._like = like
        self._x: torch.Tensor | None = None

    def order(self) -> list[str]:
        """Children in the order of their calls; none where the forward takes something else than one tensor."""
        for width in dict.fromkeys(sizes_of(child)[0] for child in self._children.values()):  # type: ignore[index]
            self._x = self._random(width).requires_grad_()
            called: list[str] = []
            with self._hooks(pre={name: partial(_note, called, name) for name in self._children}):
                if self._run() is not None and len(set(called)) == len(called):
                    return called
        return []

    def region(self, columns: Sequence[str], row: str, *, wanted: int) -> dict[str, ParallelStyle] | None:
        """Styles for these, if the body between them can be cut."""
        heads = [key for key, value in self._numbers().items() if key in HEADS]
        widths = {self._out(name) // blocks for name in columns for blocks in _BLOCKS}
        also = [key for key, value in self._numbers().items() if value in widths and key not in heads]
        for divided in dict.fromkeys([(), tuple(heads), (*heads, *also)]):
            for blocks in product(*[[b for b in _BLOCKS if self._out(name) % b == 0] for name in columns]):
                sizes = [self._numbers()[key] for key in divided]
                sizes += [self._out(name) // b for name, b in zip(columns, blocks, strict=True)]
                count = _members(sizes, wanted)
                if count is None or not self._commutes(dict(zip(columns, blocks, strict=True)), row, divided, count):
                    continue
                styles: dict[str, ParallelStyle] = {
                    name: Column(blocks=number) for name, number in zip(columns, blocks, strict=True)
                }
                styles[row] = Row()
                return ({"": Local(*divided)} if divided else {}) | styles
        return None

    def _commutes(self, columns: Mapping[str, int], row: str, divided: Sequence[str], count: int) -> bool:
        outputs = {name: self._random(self._out(name)) for name in columns}
        whole = self._body(outputs, row)
        width = sizes_of(self._children[row])[0]  # type: ignore[index]
        if whole is None or whole.shape[-1] != width or width % count:
            return False
        if whole.requires_grad:  # the columns' outputs are constants here: x or weights are in the body
            return False
        kept = {key: self._module.__dict__[key] for key in divided}
        try:
            self._module.__dict__.update({key: value // count for key, value in kept.items()})
            for index in range(count):
                part = self._body({n: _part(outputs[n], b, index, count) for n, b in columns.items()}, row)
                if part is None or not _equal(part, whole.chunk(count, -1)[index]):
                    return False
        finally:
            self._module.__dict__.update(kept)
        return self._goes_nowhere_else(outputs, row)

    def _goes_nowhere_else(self, outputs: Mapping[str, torch.Tensor], row: str) -> bool:
        fixed = self._random(self._out(row))
        one = self._run_with({**outputs, row: fixed})
        other = self._run_with({**{name: torch.rand_like(x) for name, x in outputs.items()}, row: fixed})
        return one is not None and other is not None and len(one) == len(other) and all(map(_equal, one, other))

    def _run_with(self, outputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor] | None:
        with self._hooks(post=outputs):
            value = self._run()
        if value is None:
            return None
        values = value if isinstance(value, tuple | list) else [value]
        return [x for x in values if isinstance(x, torch.Tensor)]

    def _body(self, outputs: Mapping[str, torch.Tensor], row: str) -> torch.Tensor | None:
        """The row's input when the columns give these outputs."""
        seen: list[torch.Tensor] = []

        def stop(x: torch.Tensor) -> None:
            seen.append(x)
            raise _StopError

        with self._hooks(pre={row: stop}, post=outputs):
            try:
                self._run()
            except _StopError:
                return seen[0]
        return None

    @contextmanager
    def _hooks(
        self,
        *,
        pre: Mapping[str, Callable[[torch.Tensor], object]] | None = None,
        post: Mapping[str, torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Within: children call `pre` with their input; `post` is their output."""
        handles = []
        for name, tell in (pre or {}).items():
            handles.append(self._children[name].register_forward_pre_hook(partial(_tell, tell)))
        for name, value in (post or {}).items():
            handles.append(self._children[name].register_forward_hook(partial(_instead, value)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _run(self) -> Any:
        try:
            return self._module(self._x)
        except _StopError:
            raise
        except Exception:  # whatever the user's forward raises for made-up inputs: it is not known, then
            return None

    def _random(self, width: int) -> torch.Tensor:
        return torch.randn((_BATCH, _LENGTH, width), dtype=self._like.dtype, device=self._like.device)

    def _out(self, name: str) -> int:
        return sizes_of(self._children[name])[1]  # type: ignore[index]

    def _numbers(self) -> dict[str, int]:
        own = self._module.__dict__
        return {k: v for k, v in own.items() if isinstance(v, int) and not isinstance(v, bool) and v > 0}


def _note(called: list[str], name: str, _: torch.Tensor) -> None:
    called.append(name)


def _tell(tell: Callable[[torch.Tensor], object], module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    tell(args[0])


def _instead(value: torch.Tensor, module: nn.Module, args: object, out: object) -> torch.Tensor:
    return value


def _members(sizes: Sequence[int], wanted: int) -> int | None:
    """How many members to try for: as many as wanted, or the least that divide these sizes."""
    common = math.gcd(*sizes)
    if common % wanted == 0:
        return wanted
    return next((n for n in range(2, min(common, 16) + 1) if common % n == 0), None)


def _part(x: torch.Tensor, blocks: int, index: int, count: int) -> torch.Tensor:
    return torch.cat([block.chunk(count, -1)[index] for block in x.chunk(blocks, -1)], -1)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    tolerance = 1e-9 if one.dtype is torch.float64 else 1e-4 if one.dtype is torch.float32 else 3e-2
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance)
