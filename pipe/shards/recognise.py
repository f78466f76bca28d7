"""Blocks that can be cut by columns and rows: recognised by what they compute, or by their class.

    x ── column(s) ── body ── row ── ...      all inside one module's forward

A module is tried on random numbers: the outputs of Linears in it, or in its children, are replaced, and the row's input
is compared. It may be cut where the body of a part of the columns' outputs is that part of the body, for each part;
where the body needs no x, whose gradient would be a partial sum; and where nothing else uses the columns' outputs.
Attention passes with the part's number of heads, and with weights in the body, or arguments such as alibi, divided too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ...partition.deferred.filling import lent
from ...partition.model.fakes import on_fakes
from ...partition.model.forms import Arguments, Form, tensors_in
from ...partition.model.made_up import call_for_shapes
from ...partition.model.untouched import untouched
from ..guards.rounding import CUT_PROJECTIONS, by_type
from .attention import Heads
from .style import StyleError
from .styles import Column, Local, Row, is_linear, sizes_of
from .tensor_group import TensorGroup

HEADS = frozenset(  # names that people give to numbers of heads
    (
        *("num_heads", "num_head", "n_heads", "n_head", "heads", "nhead", "nheads", "num_attention_heads"),
        *("num_query_heads", "num_q_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head"),
        *("kv_heads",),
    )
)
_BATCH, _LENGTH = 2, 3
_MOST = 24  # Linears in a module whose children's count, too: a layer, not a model of many layers


Region = Mapping[str, ParallelStyle]  # of a module ("") and its children, by name below it: they belong together
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Recogniser:
    """Recognises regions, for `count` members where sizes allow it; equal modules are tried once. With `model` and
    `example` modules are called as the model calls them with these arguments; else with one tensor."""

    def __init__(self, count: int, model: nn.Module | None = None, example: Arguments | None = None) -> None:
        self._count, self._model = count, model or nn.Module()
        self._known: dict[object, Region | None] = {}
        self._called: dict[nn.Module, tuple[Form, list[tuple[Any, ...]]]] = {}
        self.failure: Exception | None = None  # of the model, which ended before it called all modules
        if model is not None and example is not None:
            self._example = example.cut(max(1, example.num_samples // 2))[-1]
            hooks = [each.register_forward_pre_hook(self._note, with_kwargs=True) for each in model.modules()]
            self._value = self._run_on_fakes(hooks)

    def region(self, module: nn.Module, taken: Collection[nn.Module] = ()) -> Region | None:
        if (known := _by_class(module)) is not None:
            return self._known.setdefault((type(module), repr(known)), known)
        is_layer = sum(_sizes(each) is not None for each in module.modules()) <= _MOST
        linears = dict(_linears(module, depth=2 if is_layer else 1))
        children = {name: child for name, child in linears.items() if child not in taken}
        if len(children) < 2:
            return None
        key = _key(module, children)
        if key not in self._known:
            self._known[key] = self._tried(module, children, is_layer=is_layer)
        return self._known[key]

    def _tried(self, module: nn.Module, children: Mapping[str, nn.Module], *, is_layer: bool) -> Region | None:
        with lent(module), untouched(module, device=None), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            module.eval()
            torch.manual_seed(0)
            trial = _Trial(module, children)
            styles: dict[str, ParallelStyle] = {}
            columns: list[str] = []
            for name in trial.order(self._call(module) if is_layer else None):
                found = trial.region(columns, name, wanted=self._count) if columns else None
                if found is None or styles.keys() & found.keys():
                    columns.append(name)
                else:
                    styles.update(found)
                    columns = []
        unread = getattr(styles.get(""), "unread", ())
        if unread and (module not in self._called or self._reads(module, unread)):
            return None
        if styles and type(module).forward is nn.TransformerEncoderLayer.forward:
            styles[""] = Local(fixed={"activation_relu_or_gelu": 0})  # its fast path needs whole weights
        return styles or None

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        form, tensors = Form.of_output((args, kwargs))
        self._called[module] = form, [(x.shape, x.dtype, x.device, x.requires_grad) for x in tensors]

    def _call(self, module: nn.Module) -> Any:
        """Arguments like the module's, None for objects in them; None where it was not called."""
        form, specs = self._called.get(module, (None, []))
        return None if form is None else form.assemble([_made_up(*spec) for spec in specs])

    def _reads(self, module: nn.Module, positions: Sequence[int]) -> bool:
        """Whether the model needs the values that a module returns at these positions."""
        hook = module.register_forward_hook(
            lambda *given: tuple(None if i in positions else x for i, x in enumerate(given[2]))
        )
        return self._value is None or self._run_on_fakes([hook]) != self._value

    def _run_on_fakes(self, hooks: Sequence[Any]) -> Form | None:
        """Form of the model's output; None where it fails. Removes the hooks."""
        device = next(self._model.parameters()).device
        try:
            with on_fakes(self._model, self._example, device=device, training=True) as (given, *_):
                args, kwargs = given.form.assemble(given.tensors)
                return Form.of_output(call_for_shapes(self._model, args, kwargs))[0]
        except Exception as error:  # of the user's forward for made-up inputs
            self.failure = error
            return None
        finally:
            for hook in hooks:
                hook.remove()


def _made_up(shape: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype, device=device).requires_grad_(requires_grad)
    return torch.full(shape, dtype is torch.bool, dtype=dtype, device=device)


def _by_class(module: nn.Module) -> Region | None:
    if isinstance(module, nn.MultiheadAttention):
        return {"": Heads()}
    if type(module).forward is nn.TransformerEncoder.forward:
        return {"": Local(fixed={"use_nested_tensor": False})}
    return None


def _linears(module: nn.Module, depth: int) -> Iterator[tuple[str, nn.Module]]:
    """Linears by name, or the adapters around them, of this module and its children down to `depth`."""
    for name, child in module.named_children():
        if _sizes(child) is not None:
            yield name, child
        elif depth > 1 and not isinstance(child, nn.MultiheadAttention):
            yield from ((f"{name}.{below}", linear) for below, linear in _linears(child, depth - 1))


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a Linear, of a Conv1D of transformers or of an adapter around one."""
    linear = module._modules.get("base_layer") or module
    return sizes_of(linear) if is_linear(linear) else None


def _key(module: nn.Module, children: Mapping[str, nn.Module]) -> object:
    def constants(child: nn.Module) -> list[tuple[str, object]]:
        return [(k, v) for k, v in vars(child).items() if isinstance(v, int | float | str) and k != "layer_idx"]

    kinds = tuple((name, type(child), *constants(child)) for name, child in module.named_modules())
    return kinds, tuple((name, _sizes(child)) for name, child in children.items())


class _Trial:
    def __init__(self, module: nn.Module, children: Mapping[str, nn.Module]) -> None:
        self._module = module
        self._children = children
        self._sizes: dict[str, Any] = {name: _sizes(child) for name, child in children.items()}
        self._call: Call = ((), {})
        self._outputs: dict[str, torch.Tensor] = {}  # of the children, unchanged
        modules = {"": module, **{name: each for name, each in module.named_children() if name not in children}}
        self._numbers = {(name, key): n for name, each in modules.items() for key, n in _numbers(each).items()}

    def order(self, known: Call | None) -> list[str]:
        """Children that are called once, in the order of calls; none where no call of the module succeeds."""
        widths = dict.fromkeys(inputs for inputs, _ in self._sizes.values())
        like = next(self._module.parameters())
        calls: list[Call] = [((_made_up((_BATCH, _LENGTH, n), like.dtype, like.device, True),), {}) for n in widths]
        for self._call in calls if known is None else [*calls, known]:
            called: list[tuple[str, torch.Tensor]] = []
            noted = {name: partial(_noted, called, name, child.forward) for name, child in self._children.items()}
            if self._run(noted) is not None:
                self._outputs = dict(called)
                return [name for name in self._outputs if [each for each, _ in called].count(name) == 1]
        return []

    def region(self, columns: Sequence[str], row: str, *, wanted: int) -> dict[str, ParallelStyle] | None:
        outputs = {name: torch.randn_like(out) for name, out in self._outputs.items() if name in {*columns, row}}
        whole = self._values(outputs, row)
        weights = self._weights(whole[0]) if whole and whole[0][0].shape[-1] == self._sizes[row][0] else None
        again = self._values({**{name: torch.rand_like(x) for name, x in outputs.items()}, row: outputs[row]}, row)
        apart = [at for at, pair in enumerate(zip(whole, again, strict=False)) if not all(map(_equal, *pair))]
        if weights is None or not again or min(apart[1:], default=3) < 3:
            return None
        unread = tuple(at - 2 for at in apart[1:])

        def is_part(cut: Mapping[str, Column], local: Mapping[str, Local], index: int, count: int) -> bool:
            member = self._member(local, index, count)
            own = {name: style.part(outputs[name], index=index, count=count) for name, style in cut.items()}
            found = [] if member is None else member._values({**outputs, **own}, row)
            part = [[whole[0][0].chunk(count, -1)[index]], *whole[1:]]
            return found != [] and all(not x or all(map(_equal, x, y)) for x, y in zip(found, part, strict=True))

        heads = [at for at, value in self._numbers.items() if at[1] in HEADS and value > 1]
        kinds = [_kinds(self._sizes[name][1], self._sizes[row][0]) for name in columns]
        widths = {width for each in kinds for _, blocks in each for width in blocks}
        also = [at for at, value in self._numbers.items() if value in widths and at not in heads]
        for divided, chosen in product(dict.fromkeys([(), tuple(heads), (*heads, *also)]), product(*kinds)):
            cut = {name: style for name, (style, _) in zip(columns, chosen, strict=True)}
            sizes = [self._numbers[at] for at in divided] + [width for _, blocks in chosen for width in blocks]
            count = _members([*sizes, self._sizes[row][0]], wanted)
            for per_head in ({}, self._per_head({self._numbers[at] for at in divided})) if count else ():
                local = self._locals([*divided, *weights], per_head, unread)
                if all(is_part(cut, local, index, count) for index in range(count)):
                    return {**local, **cut, row: Row()}
        return None

    def _member(self, local: Mapping[str, Local], index: int, count: int) -> _Trial | None:
        """The trial of one member's module, which shares the memory of weights; None: it can't be cut so."""
        weights = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in self._module.parameters()}
        module = copy.deepcopy(self._module, weights)
        try:
            for name, style in local.items():
                style.cut(name, module.get_submodule(name), TensorGroup(None, index=index, count=count))
        except StyleError:
            return None
        member = _Trial(module, {name: module.get_submodule(name) for name in self._children})
        member._call = self._call
        return member

    def _weights(self, body: Sequence[torch.Tensor]) -> list[tuple[str, str]] | None:
        """Weights that the body needs, as (module, name); None where it needs x or another argument."""
        if not body[0].requires_grad:
            return []
        weights = [each for each in self._module.named_parameters() if each[1].requires_grad]
        given = [x for x in tensors_in(self._call) if x.requires_grad]
        grads = torch.autograd.grad(body[0].sum(), [*(x for _, x in weights), *given], allow_unused=True)
        if any(grad is not None for grad in grads[len(weights) :]):
            return None
        needed = [name.rpartition(".") for (name, _), grad in zip(weights, grads, strict=False) if grad is not None]
        return [(owner, key) for owner, _, key in needed]

    def _per_head(self, heads: Collection[int]) -> dict[str, tuple[int, int]]:
        """Keywords that have a dimension of heads: [batch * heads, ...] or [batch, heads, ...]."""
        args, kwargs = self._call
        batch = next((len(x) for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.dim()), 1)
        return {
            key: (dim, number)
            for (key, x), number in product(kwargs.items(), heads)
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 2 and number > 1
            for dim, size in enumerate((batch * number, number))
            if x.shape[dim] == size
        }

    def _locals(
        self, divided: Sequence[tuple[str, str]], per_head: Mapping[str, tuple[int, int]], unread: tuple[int, ...]
    ) -> dict[str, Local]:
        found = {}
        for name in dict.fromkeys([*(at for at, _ in divided), *([""] if per_head or unread else [])]):
            module, keys = self._module.get_submodule(name), [key for at, key in divided if at == name]
            sizes = {size for key in keys for size in getattr(getattr(module, key), "shape", ())[:1]}  # of weights
            keys += [key for key, value in _numbers(module).items() if value in sizes and key not in keys]
            found[name] = Local(*keys) if name else Local(*keys, per_head=per_head, unread=unread)
        return found

    def _values(self, outputs: Mapping[str, torch.Tensor], row: str) -> list[list[torch.Tensor]]:
        """The row's input, the columns' inputs, and each returned value, with these outputs; empty where it fails."""
        taken: dict[str, torch.Tensor] = {}
        value = self._run({name: partial(_given, taken, name, out) for name, out in outputs.items()})
        values = value if type(value) is tuple else (value,)
        tensors = [tensors_in(each) for each in values]
        return [] if value is None or row not in taken else [[taken.pop(row)], [*taken.values()], *tensors]

    def _run(self, forwards: Mapping[str, Callable[[Any], Any]]) -> Any:
        args, kwargs = self._call
        with suppress(Exception), ExitStack() as stack:  # of the user's forward for made-up inputs
            for name, forward in forwards.items():
                stack.enter_context(patch.object(self._children[name], "forward", forward))
            return self._module(*args, **kwargs)
        return None


def _numbers(module: nn.Module) -> dict[str, int]:
    return {k: v for k, v in vars(module).items() if isinstance(v, int) and not isinstance(v, bool) and v > 0}


def _kinds(outputs: int, inputs: int) -> list[tuple[Column, list[int]]]:
    """Styles of a projection, which may be fused, before a row of `inputs` inputs, with the sizes of their blocks."""
    styles = [Column(), Column(blocks=3), Column(blocks=2)]  # none, [q | k | v], [gate | up]
    styles += [Column(shared=outputs - inputs)] if outputs > inputs else []
    return [(style, widths) for style in styles if sum(widths := style.widths(outputs)) == outputs]


def _noted(called: list[tuple[str, torch.Tensor]], name: str, forward: Callable[[Any], torch.Tensor], x: Any) -> Any:
    called.append((name, forward(x)))
    return called[-1][1]


def _given(taken: dict[str, torch.Tensor], name: str, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    taken[name] = x  # what the module is called with
    return out.clone()  # in place of its own output; the caller may change it in place


def _members(sizes: Sequence[int], wanted: int) -> int:
    common = math.gcd(*sizes)
    if common % wanted == 0:
        return wanted
    return next((n for n in range(2, min(common, 16) + 1) if common % n == 0), 0)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    tolerance = by_type(CUT_PROJECTIONS, one.dtype)
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance)
