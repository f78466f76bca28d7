"""Blocks that can be cut by columns and rows: recognised by what they compute, or by their class.

    x ── column(s) ── body ── row ── ...      all inside one module's forward

A module of Linears, its own or its children's, is tried on random numbers: their outputs are replaced, the row's input
is looked at. It may be cut where the body of a part of the columns' outputs is that part of the body, for each part;
where the body needs no x, whose gradient would be a partial sum; and where the columns' outputs go nowhere else.
Attention passes this test once its number of heads is that of the part, and what is of each head (weights in the body,
arguments such as alibi) is divided as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils import _pytree as pytree

from ...partition.model.untouched import untouched
from .attention import Heads
from .calls import Call, ModuleCalls
from .styles import Column, Local, Row, SummedGradients, is_conv1d, is_linear, sizes_of

HEADS = frozenset(  # names that people give to numbers of heads
    (
        *("num_heads", "num_head", "n_heads", "n_head", "heads", "nhead", "nheads", "num_attention_heads"),
        *("num_query_heads", "num_q_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head"),
        *("kv_heads",),
    )
)
_BATCH, _LENGTH = 2, 3
_MOST = 24  # Linears of a module that is called as the model calls it


Region = Mapping[str, ParallelStyle]  # of a module ("") and its children, by name below it: they belong together


class Recogniser:
    """Recognises regions, for so many members where their sizes allow it; equal modules are tried once.

    Arguments:
        calls: how the model calls its modules; without them those are tried that take one tensor.
    """

    def __init__(self, count: int, calls: ModuleCalls | None = None) -> None:
        self._count = count
        self._calls = calls
        self._known: dict[object, Region | None] = {}

    def region(self, module: nn.Module, taken: Collection[nn.Module] = ()) -> Region | None:
        """How a module may be cut, without the modules that are taken; None where that is not known."""
        known = _by_class(module)
        if known is not None:
            return self._known.setdefault((type(module), repr(known)), known)
        is_layer = sum(_sizes(each) is not None for each in module.modules()) <= _MOST  # and no model of many
        linears = dict(_linears(module, depth=2 if is_layer else 1))
        children = {name: child for name, child in linears.items() if child not in taken}
        if len(children) < 2:
            return None
        key = _key(module, children)
        if key not in self._known:
            call = self._calls.of(module) if self._calls is not None and is_layer else None
            self._known[key] = self._tried(module, children, call)
        return self._known[key]

    def _tried(self, module: nn.Module, children: Mapping[str, nn.Module], call: Call | None) -> Region | None:
        parameter = next(module.parameters())
        if parameter.is_meta:
            return None
        with untouched(module, device=parameter.device), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            module.eval()
            torch.manual_seed(0)
            trial = _Trial(module, children, call, like=parameter)
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
    forward = type(module).forward
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
    return None


def _linears(module: nn.Module, depth: int) -> Iterator[tuple[str, nn.Module]]:
    """Linears by name, with the adapters around them, of this module and of its children so far down."""
    for name, child in module.named_children():
        if _sizes(child) is not None:
            yield name, child
        elif depth > 1 and not isinstance(child, nn.MultiheadAttention):
            yield from ((f"{name}.{below}", linear) for below, linear in _linears(child, depth - 1))


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a Linear, of a Conv1D or of an adapter around one."""
    linear = module._modules.get("base_layer") or module
    return sizes_of(linear) if is_conv1d(linear) or is_linear(linear) else None


def _is_elementwise(function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
        return False
    x = torch.linspace(-2.0, 2.0, 8)
    try:
        return torch.equal(function(x)[:4], function(x[:4]))
    except (RuntimeError, IndexError, TypeError):
        return False


def _key(module: nn.Module, children: Mapping[str, nn.Module]) -> object:
    kinds = tuple(
        (name, type(child), *((k, v) for k, v in child.__dict__.items() if isinstance(v, int | float | str)))
        for name, child in module.named_modules()
    )
    return kinds, tuple((name, _sizes(child)) for name, child in children.items())


class _StopError(Exception):
    """The row's input is known."""


class _Trial:
    """A module run on random numbers, with outputs of children replaced."""

    def __init__(
        self, module: nn.Module, children: Mapping[str, nn.Module], call: Call | None, *, like: torch.Tensor
    ) -> None:
        self._module = module
        self._children = children
        self._like = like
        self._known_call = call
        self._call: Call = ((), {})
        self._outputs: dict[str, torch.Tensor] = {}  # of the children, as they were

    def order(self) -> list[str]:
        """Children that are called once, in that order; none where nobody knows how to call the module."""
        widths = dict.fromkeys(self._in(name) for name in self._children)
        calls: list[Call] = [((self._random((_BATCH, _LENGTH, width)).requires_grad_(),), {}) for width in widths]
        for self._call in calls if self._known_call is None else [*calls, self._known_call]:
            called: list[str] = []

            def note(name: str, out: torch.Tensor, called: list[str] = called) -> None:
                called.append(name)
                self._outputs[name] = out.detach()

            with self._hooks(post={name: partial(note, name) for name in self._children}):
                if self._run() is not None:
                    return [name for name in dict.fromkeys(called) if called.count(name) == 1]
        return []

    def region(self, columns: Sequence[str], row: str, *, wanted: int) -> dict[str, ParallelStyle] | None:
        """Styles for these, if the body between them can be cut."""
        numbers = self._numbers()
        heads = [at for at, value in numbers.items() if at[1] in HEADS and value > 1]
        kinds = [list(_kinds(self._out(name), self._in(row))) for name in columns]
        widths = {width for each in kinds for _, blocks in each for width in blocks}
        also = [at for at, value in numbers.items() if value in widths and at not in heads]
        for divided in dict.fromkeys([(), tuple(heads), (*heads, *also)]):
            for chosen in product(*kinds):
                cut = {name: style for name, (style, _) in zip(columns, chosen, strict=True)}
                sizes = [numbers[at] for at in divided] + [width for _, blocks in chosen for width in blocks]
                count = _members(sizes, wanted)
                body = None if count is None else self._body_styles(cut, row, divided, count)
                if body is not None:
                    return {**body, **cut, row: Row()}
        return None

    def _body_styles(
        self, columns: Mapping[str, Column], row: str, divided: Sequence[tuple[str, str]], count: int
    ) -> dict[str, ParallelStyle] | None:
        """Styles of the modules between columns and row, of which each member computes its part; None: it cannot."""
        outputs = {name: self._random(self._outputs[name].shape) for name in columns}
        whole = self._body(outputs, row)
        if whole is None or whole.shape[-1] != self._in(row) or whole.shape[-1] % count:
            return None
        needed, unread = self._needed(whole), self._unread(outputs, row)
        if needed is None or unread is None:
            return None
        weights, keywords = needed
        for per_head, split in product(self._per_head(divided, keywords), (True, False)):
            local = self._locals(divided, weights if split else {}, per_head, unread)
            if not split and (not weights or weights.keys() & local.keys()):
                continue
            parts = (self._part(outputs, columns, row, local, index, count) for index in range(count))
            if all(part is not None and _equal(part, whole.chunk(count, -1)[i]) for i, part in enumerate(parts)):
                return {**local, **({} if split else dict.fromkeys(weights, SummedGradients()))}
        return None

    def _needed(self, whole: torch.Tensor) -> tuple[dict[str, tuple[str, ...]], set[str]] | None:
        """Weights that the body needs, by module, and keywords whose gradient it needs; None where it needs x."""
        names, weights = zip(*self._module.named_parameters(), strict=True)
        args, kwargs = self._call
        given = [x for x in args if isinstance(x, torch.Tensor)]
        keywords = {key: x for key, x in kwargs.items() if isinstance(x, torch.Tensor)}
        if not whole.requires_grad:
            return {}, set()
        leaves = [x for x in (*weights, *given, *keywords.values()) if x.requires_grad]
        grads = torch.autograd.grad(whole.sum(), leaves, allow_unused=True)
        used = {id(x) for x, grad in zip(leaves, grads, strict=True) if grad is not None}
        if any(id(x) in used for x in given):
            return None
        found: dict[str, tuple[str, ...]] = {}
        for name, weight in zip(names, weights, strict=True):
            owner, _, key = name.rpartition(".")
            if id(weight) in used:
                found[owner] = (*found.get(owner, ()), key)
        return found, {key for key, x in keywords.items() if id(x) in used}

    def _per_head(
        self, divided: Sequence[tuple[str, str]], needed: Collection[str]
    ) -> Iterator[dict[str, tuple[int, int]]]:
        """Keywords that may have a dimension of heads: [batch * heads, ...] or [batch, heads, ...]."""
        args, kwargs = self._call
        batch = next((len(x) for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.dim()), 1)
        found: dict[str, tuple[int, int]] = {}
        for heads in {value for at, value in self._numbers().items() if at in divided and at[1] in HEADS}:
            for key, x in kwargs.items():
                if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 2:
                    dims = [dim for dim, size in enumerate((batch * heads, heads)) if x.shape[dim] == size]
                    found.update({key: (dim, heads) for dim in dims[:1]})
        singles = ({key: place} for key, place in found.items()) if len(found) > 1 else ()
        yield from (each for each in ({}, *singles, found) if needed <= each.keys())

    def _locals(
        self,
        divided: Sequence[tuple[str, str]],
        weights: Mapping[str, tuple[str, ...]],
        per_head: Mapping[str, tuple[int, int]],
        unread: tuple[int, ...],
    ) -> dict[str, Local]:
        found = {}
        for name in dict.fromkeys([*(at for at, _ in divided), *weights, *([""] if per_head or unread else [])]):
            module, keys = self._module.get_submodule(name), weights.get(name, ())
            sizes = {len(module.get_parameter(key)) for key in keys if module.get_parameter(key).dim()}
            numbers = [key for at, key in divided if at == name]
            numbers += [key for key, value in _numbers(module).items() if value in sizes and key not in numbers]
            outer: dict[str, Any] = {} if name else {"arguments": per_head, "unread": unread}
            found[name] = Local(*numbers, parameters=keys, **outer)
        return found

    def _part(
        self,
        outputs: Mapping[str, torch.Tensor],
        columns: Mapping[str, Column],
        row: str,
        styles: Mapping[str, Local],
        index: int,
        count: int,
    ) -> torch.Tensor | None:
        """The row's input on one member."""
        whole = self._call
        with ExitStack() as stack:
            for name, style in styles.items():
                module = self._module.get_submodule(name)
                if any(module.get_parameter(key).dim() == 0 for key in style.parameters):
                    return None
                stack.enter_context(_as_member(module, style, index, count))
            if "" in styles:
                self._call = whole[0], styles[""].own_heads(whole[1], index, count)
            try:
                return self._body({n: style.part(outputs[n], index, count) for n, style in columns.items()}, row)
            finally:
                self._call = whole

    def _unread(self, outputs: Mapping[str, torch.Tensor], row: str) -> tuple[int, ...] | None:
        """Places beside the first one where the columns' outputs are returned; None where they go elsewhere, too."""
        fixed = self._random(self._outputs[row].shape)
        one = self._run_with({**outputs, row: fixed})
        other = self._run_with({**{name: torch.rand_like(x) for name, x in outputs.items()}, row: fixed})
        if one is None or other is None:
            return None
        (value, taken), (again, taken_again) = one, other
        tensors = [[x for x in pytree.tree_leaves(v) if isinstance(x, torch.Tensor)] for v in (value, again)]
        if not all(map(_equal, taken, taken_again)) or len(tensors[0]) != len(tensors[1]):
            return None
        if type(value) is not tuple:
            return () if all(map(_equal, *tensors)) else None
        apart = [
            i
            for i, pair in enumerate(zip(value, again, strict=True))
            if not all(map(_equal, *([x for x in pytree.tree_leaves(v) if isinstance(x, torch.Tensor)] for v in pair)))
        ]
        return None if 0 in apart or (apart and self._call is not self._known_call) else tuple(apart)

    def _run_with(self, outputs: Mapping[str, torch.Tensor]) -> tuple[Any, list[torch.Tensor]] | None:
        """The module's value with these outputs of children, and what those took."""
        taken: list[torch.Tensor] = []
        with self._hooks(pre=dict.fromkeys(list(outputs)[:-1], taken.append), post=_given(outputs)):
            value = self._run()
        return None if value is None else (value, taken)

    def _body(self, outputs: Mapping[str, torch.Tensor], row: str) -> torch.Tensor | None:
        """The row's input when the columns give these outputs."""
        seen: list[torch.Tensor] = []

        def stop(x: torch.Tensor) -> None:
            seen.append(x)
            raise _StopError

        with self._hooks(pre={row: stop}, post=_given(outputs)):
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
        post: Mapping[str, Callable[[torch.Tensor], torch.Tensor | None]],
    ) -> Iterator[None]:
        """Within: children call `pre` with their input; `post` gives their output in the place of theirs."""
        with ExitStack() as stack:
            for name, tell in (pre or {}).items():
                hook = self._children[name].register_forward_pre_hook(partial(_tell, tell))
                stack.callback(hook.remove)
            for name, change in post.items():
                stack.callback(self._children[name].register_forward_hook(partial(_instead, change)).remove)
            yield

    def _run(self) -> Any:
        args, kwargs = self._call
        try:
            return self._module(*args, **kwargs)
        except _StopError:
            raise
        except Exception:  # whatever the user's forward raises for made-up inputs: it is not known, then
            return None

    def _random(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(tuple(shape), dtype=self._like.dtype, device=self._like.device)

    def _in(self, name: str) -> int:
        return _sizes(self._children[name])[0]  # type: ignore[index]

    def _out(self, name: str) -> int:
        return _sizes(self._children[name])[1]  # type: ignore[index]

    def _numbers(self) -> dict[tuple[str, str], int]:
        """Whole numbers of the module and its children, by their names."""
        modules = {"": self._module, **{n: m for n, m in self._module.named_children() if _sizes(m) is None}}
        return {(name, key): value for name, module in modules.items() for key, value in _numbers(module).items()}


def _numbers(module: nn.Module) -> dict[str, int]:
    own = module.__dict__
    return {k: v for k, v in own.items() if isinstance(v, int) and not isinstance(v, bool) and v > 0}


@contextmanager
def _as_member(module: nn.Module, style: Local, index: int, count: int) -> Iterator[None]:
    """Within: the module's own numbers and weights are those of one member."""
    weights = {
        key: nn.Parameter(shard.take(module.get_parameter(key).detach()))
        for key, shard in style.shards(module, index=index, count=count).items()
    }
    changed = ((module.__dict__, style.attributes(module, count)), (module._parameters, weights))
    kept = [{key: table[key] for key in new} for table, new in changed]
    for table, new in changed:
        table.update(new)
    try:
        yield
    finally:
        for (table, _), before in zip(changed, kept, strict=True):
            table.update(before)


def _kinds(outputs: int, inputs: int) -> Iterator[tuple[Column, tuple[int, ...]]]:
    """Styles of a projection, which may be fused, in front of a row of so many inputs, with the widths of its blocks."""
    rest = outputs - inputs
    styles = [Column(), Column(blocks=3), Column(blocks=2)]  # [q | k | v], [gate | up]
    if rest > 0 and rest % 2 == 0:  # with fewer keys and values than queries; one for all heads
        styles += [Column(blocks=(inputs, rest // 2, rest // 2)), Column(blocks=(inputs, rest), gather_last=True)]
    for style in styles:
        widths = style.widths(outputs)
        if sum(widths) == outputs:
            yield style, widths


def _given(outputs: Mapping[str, torch.Tensor]) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    return {name: partial(_first, value) for name, value in outputs.items()}


def _first(one: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return one.clone()  # it may be changed in place


def _tell(tell: Callable[[torch.Tensor], object], module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    tell(args[0])


def _instead(change: Callable[[torch.Tensor], torch.Tensor | None], module: nn.Module, args: object, out: Any) -> Any:
    return change(out)


def _members(sizes: Sequence[int], wanted: int) -> int | None:
    """How many members to try for: as many as wanted, or the least that divide these sizes."""
    common = math.gcd(*sizes)
    if common % wanted == 0:
        return wanted
    return next((n for n in range(2, min(common, 16) + 1) if common % n == 0), None)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    tolerance = 1e-9 if one.dtype is torch.float64 else 1e-4 if one.dtype is torch.float32 else 3e-2
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance)
