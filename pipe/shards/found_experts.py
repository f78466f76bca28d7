"""Finds layers of experts of either form of `experts` in a model, and tries them as members of a group run them."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from ...partition.deferred.filling import lent
from ...partition.model.forms import Arguments, tensors_in
from ...partition.model.untouched import untouched
from ..guards.rounding import CUT_PROJECTIONS, by_type
from .experts import BatchedExperts, ExpertLayer, ListedExperts, StackedExperts, with_weights
from .recognise import Recogniser, _key
from .style import StyleError
from .tensor_group import TensorGroup
from .tensor_option import TensorStyles, _shared_parameters

_FORMS = (
    "expected an nn.ModuleList of experts, each called with rows of tokens, or one module with weights [experts, ...] "
    "whose forward takes tokens, [T, k] numbers of experts and their weights, or [experts, rows, width] alone, as in "
    'models of transformers, with "expert" in a name of an attribute or class; or "expert": 1'
)


def read_experts(model: nn.Module, *, count: int, example: Arguments | None) -> TensorStyles:
    """Styles for the layers of experts of a model that is not cut yet. Raises ValueError, by name, for a model without
    any, for experts of another form, for numbers of them that `count` does not divide, and for a module that computes
    something else when it is divided: each is tried on random numbers."""
    found: dict[str, ExpertLayer] = {}
    for style in _found(model):
        if (other := found.setdefault(style.name, style)) is not style:
            raise StyleError(
                f"module {style.name!r} calls two lists of experts, {other.key!r} and {style.key!r}: expected a module "
                f'for each that calls it, or "expert": 1'
            )
    for name, module in model.named_modules():
        inside = any(f"{name}.".startswith(f"{each}." if each else "") for each in found)
        around = any(f"{each}.".startswith(f"{name}.") for each in found)
        if _is_experts(name, module) and not inside and not around:
            raise StyleError(f"module {name!r} ({type(module).__name__}) has experts of an unknown form: {_FORMS}")
    if not found:
        raise StyleError(f'mesh={{"expert": {count}}} and the model has no experts: {_FORMS}')
    _check(model, found, count)
    recogniser, tried = Recogniser(count, model, example), set[object]()
    for name, style in found.items():
        module = model.get_submodule(name)
        kind = _key(module, {}), *(p.shape for p in module.parameters())
        if kind not in tried:
            _try(style, module, recogniser, count)
            tried.add(kind)
    return TensorStyles(count=count, styles=found)


def without_experts(tensor: TensorStyles, experts: TensorStyles) -> TensorStyles:
    """The styles of a tensor group for all but these experts, which each of its members holds whole, and computes.
    Raises ValueError for one of a module around them, whose members would have other rows, and for none at all."""
    places = tuple(f"{style.where}." for style in experts.styles.values() if isinstance(style, ExpertLayer))
    styles = {name: style for name, style in tensor.styles.items() if not f"{name}.".startswith(places)}
    for name, place in ((name, place) for name in styles for place in places):
        if place.startswith(f"{name}." if name else ""):
            raise StyleError(
                f"tensor_parallel= has a style for module {name!r}, with experts in it, {place[:-1]!r}, which "
                f"{experts.count} expert ranks divide: expected styles for modules without experts"
            )
    if tensor.count > 1 and not styles:
        raise StyleError(
            f"{tensor.count} tensor ranks would divide experts alone, which {experts.count} expert ranks divide: "
            f'expected "tensor": 1, or tensor_parallel= for attention and dense layers'
        )
    return replace(tensor, styles=styles)


def _check(model: nn.Module, found: Mapping[str, ExpertLayer], count: int) -> None:
    shared = _shared_parameters(model)
    layers = {id(model.get_submodule(name)): name for name in found}
    for name, style in found.items():
        module = model.get_submodule(name)
        style.check(name, module, count)
        below = (x for expert in style.experts(module) for x in expert.modules() if x is not module)
        if inner := next((layers[id(x)] for x in below if id(x) in layers), None):
            raise StyleError(
                f"experts of {name!r} have experts of their own, {inner!r}, which only some members would call: "
                f'expected one level of them, or "expert": 1'
            )
        for key in style.shards(module, index=0, count=count):
            if id(module.get_parameter(key)) in shared:
                raise StyleError(f"parameter {f'{name}.{key}'!r} of an expert has other names, too: expected its own")
        for each in (each for expert in style.experts(module) for each in expert.modules()):
            if isinstance(each, _BatchNorm):
                raise StyleError(
                    f"experts of {name!r} have a {type(each).__name__}, over rows of all members: {_FORMS}"
                )
            if each is not module and (buffer := next(iter(each._buffers), None)) is not None:
                raise StyleError(
                    f"experts of {name!r} have a buffer, {buffer!r} of a {type(each).__name__}, which some members "
                    f"would not change: {_FORMS}"
                )


def _is_experts(name: str, module: nn.Module) -> bool:
    words = f"{name.rpartition('.')[2]} {type(module).__name__}"
    is_named = re.search("expert", words, re.IGNORECASE) and not re.search("shared|gate|rout", words, re.IGNORECASE)
    return bool(is_named) and any(True for _ in module.parameters())


def _found(model: nn.Module) -> Iterator[ExpertLayer]:
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
        held = [x for _, x in with_weights(module)] if is_list else []
        if len(held) > 1 and (_is_experts(name, module) or all(_is_experts("", x) for x in held)):
            calls = type(module).forward not in (nn.ModuleList.forward, nn.ModuleDict.forward)
            outer, _, key = (name, "", "") if calls else name.rpartition(".")
            yield ListedExperts(outer, len(held), key)
        elif _is_experts(name, module) and not is_list:
            own = [p for p in module._parameters.values() if p is not None]
            form = _STACKED.get(len(inspect.signature(type(module).forward).parameters) - 1)
            if form and any(p.dim() > 2 for p in own) and len({len(p) for p in own}) == 1 and not module._buffers:
                yield form(name, len(own[0]))


_STACKED = {3: StackedExperts, 1: BatchedExperts}  # by number of arguments


def _try(style: ExpertLayer, module: nn.Module, recogniser: Recogniser, count: int) -> None:
    with lent(module), untouched(module, device=None), torch.no_grad(), torch.random.fork_rng(devices=[]):
        module.eval()
        torch.manual_seed(0)
        try:
            if (call := recogniser._call(module)) is None:
                why = f" with made-up inputs, on which it fails: {recogniser.failure}" if recogniser.failure else ""
                raise ValueError(f"the model does not call it{why}")
            most, alone = style.number if isinstance(style, StackedExperts) else 2, TensorGroup(None, index=0, count=1)
            args, kwargs = pytree.tree_map_only(torch.Tensor, partial(_random, most=most), call)
            if isinstance(style, StackedExperts):
                args, kwargs = [*args, *kwargs.values()], {}
                found = [_by_members(style, module, args, count)]
            else:
                torch.manual_seed(0)
                found = tensors_in(style.forward(module, type(module), alone, *args, **kwargs))
                torch.manual_seed(0)
                with _alone(style.experts(module)):
                    found += tensors_in(module(*args, **kwargs))
            torch.manual_seed(0)
            whole = tensors_in(module(*args, **kwargs))
        except Exception as error:
            what = f"module {style.name!r} has experts, and fails where it is tried: {error}"
            raise StyleError(f"{what}; {_FORMS}") from error
    again = len(found) // len(whole)  # listed experts run twice, in two ways
    pairs = [(x, y) for x, y in zip(again * whole, found, strict=False) if x.is_floating_point()]
    tolerance = by_type(CUT_PROJECTIONS, pairs[0][0].dtype)
    for x, y in pairs:
        if x.shape != y.shape or not torch.allclose(x, y, rtol=tolerance, atol=tolerance):
            raise StyleError(f"module {style.name!r} gives something else when its experts are divided: {_FORMS}")


def _random(x: Tensor, *, most: int) -> Tensor:
    """In place of integers, numbers below `most`."""
    return x if x.is_floating_point() or x.dtype is torch.bool else torch.randint(most, x.shape, device=x.device)


@contextmanager
def _alone(experts: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which weights of each expert are empty but while it runs, and half of its rows are another call."""
    held = {expert: [(p, p.data) for p in expert.parameters()] for expert in experts}

    def give(expert: nn.Module, _: object) -> None:
        for p, data in held[expert]:
            p.data = data

    def take(expert: nn.Module, *_: object) -> None:
        for p, data in held[expert]:
            p.data = data.new_empty(0, *data.shape[1:])

    def halves(expert: nn.Module, given: tuple[Any, ...], whole: Any) -> Any:
        found = whole
        if given and isinstance(whole, Tensor) and (rows := given[0].reshape(-1, given[0].shape[-1])).numel():
            found = torch.cat([expert.forward(part) for part in rows.tensor_split(2) if len(part)]).view(whole.shape)
        take(expert)
        return found

    with ExitStack() as stack:
        for expert in experts:
            stack.callback(give, expert, None)
            stack.enter_context(expert.register_forward_pre_hook(give))
            stack.enter_context(expert.register_forward_hook(halves))
            take(expert)
        yield


def _by_members(style: StackedExperts, module: nn.Module, args: Sequence[Tensor], count: int) -> Tensor:
    """The sum over the members' experts, each called with rows of one expert each, in two calls."""
    size, whole = style.number // count, torch.zeros_like(args[0])
    for index in range(count):
        member = copy.copy(module)
        own = style.shards(module, index=index, count=count)
        parts = {key: shard.view(module.get_parameter(key)) for key, shard in own.items()}
        member._parameters = {key: nn.Parameter(part, False) for key, part in parts.items()}
        member.__dict__.update(style.attributes(module, count))
        if isinstance(style, BatchedExperts):
            (x,), width = args, args[0].shape[-1]
            rows = style.by_expert(x)[index * size : (index + 1) * size]
            given = [part if x.dim() == 3 else part.reshape(-1, width) for part in rows.tensor_split(2, 1)]
            found = [member(part).view(size, -1, width) for part in given if part.numel()]
            style.by_expert(whole)[index * size : (index + 1) * size] = torch.cat(found, 1)
            continue
        tokens, numbers, weights = args
        for token, choice in zip(*(x.tensor_split(2) for x in torch.where(numbers // size == index)), strict=True):
            if len(token):
                local = numbers[token, choice, None] - index * size
                whole.index_add_(0, token, member(tokens[token], local, weights[token, choice, None]))
    return whole
