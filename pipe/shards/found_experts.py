"""Finds layers of experts of either form of `experts` in a model, and tries them as members of a group run them."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...partition.deferred.filling import lent
from ...partition.model.forms import Arguments, tensors_in
from ...partition.model.untouched import untouched
from ..guards.rounding import CUT_PROJECTIONS, by_type
from .experts import ExpertLayer, ListedExperts, StackedExperts, with_weights
from .recognise import Recogniser, _key
from .style import StyleError
from .tensor_group import TensorGroup
from .tensor_option import TensorStyles, _shared_parameters

_FORMS = (
    "expected an nn.ModuleList of experts, each called with rows of tokens, or one module with weights [experts, ...] "
    "whose forward takes tokens, [T, k] numbers of experts and their weights, as in models of transformers; or "
    '"expert": 1'
)


def read_experts(model: nn.Module, *, count: int, example: Arguments | None) -> TensorStyles:
    """Styles for the layers of experts of a model that is not cut yet. Raises ValueError, by name, for a model without
    any, for experts of another form, for numbers of them that `count` does not divide, and for a module that computes
    something else when it is divided: each is tried on random numbers."""
    found = {style.name: style for style in _found(model)}
    for name, module in model.named_modules():
        inside = any(f"{name}.".startswith(f"{each}.") for each in found)
        around = any(f"{each}.".startswith(f"{name}.") for each in found)
        if _is_experts(name, module) and not inside and not around:
            raise StyleError(f"module {name!r} ({type(module).__name__}) has experts of an unknown form: {_FORMS}")
    if not found:
        raise StyleError(f'mesh={{"expert": {count}}} and the model has no experts: {_FORMS}')
    shared = _shared_parameters(model)
    for name, style in found.items():
        module = model.get_submodule(name)
        style.check(name, module, count)
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
    recogniser, tried = Recogniser(count, model, example), set[object]()
    for name, style in found.items():
        module = model.get_submodule(name)
        kind = _key(module, {}), *(p.shape for p in module.parameters())
        if kind not in tried:
            _try(style, module, recogniser, count)
            tried.add(kind)
    return TensorStyles(count=count, styles=found)


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
            if any(p.dim() > 2 for p in own) and len({p.shape[0] for p in own}) == 1 and not module._buffers:
                yield StackedExperts(name, own[0].shape[0])


def _try(style: ExpertLayer, module: nn.Module, recogniser: Recogniser, count: int) -> None:
    with lent(module), untouched(module, device=None), torch.no_grad(), torch.random.fork_rng(devices=[]):
        module.eval()
        torch.manual_seed(0)
        call = recogniser._call(module)
        try:
            if call is None:
                raise ValueError("the model does not call it")
            (args, kwargs), alone = call, TensorGroup(None, index=0, count=1)
            if isinstance(style, StackedExperts):
                args, kwargs = [*args, *kwargs.values()], {}
                args[1] = torch.randint(style.number, args[1].shape, device=args[1].device)
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

    hooks = [hook for x in experts for hook in (x.register_forward_pre_hook(give), x.register_forward_hook(halves))]
    try:
        for expert in experts:
            take(expert)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for expert in experts:
            give(expert, None)


def _by_members(style: StackedExperts, module: nn.Module, args: list[Tensor], count: int) -> Tensor:
    """The sum over the members' experts, each called with rows of one expert each."""
    tokens, numbers, weights = args
    size, total = style.number // count, torch.zeros_like(tokens)
    for index in range(count):
        member = copy.copy(module)
        own = style.shards(module, index=index, count=count)
        parts = {key: shard.view(module.get_parameter(key)) for key, shard in own.items()}
        member._parameters = {key: nn.Parameter(part, False) for key, part in parts.items()}
        member.__dict__.update(style.attributes(module, count))
        token, choice = torch.where(numbers // size == index)
        if len(token):
            local = numbers[token, choice, None] - index * size
            total.index_add_(0, token, member(tokens[token], local, weights[token, choice, None]))
    return total
