"""Layers of experts in a model, found and tried: what an expert group divides."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...partition.deferred.filling import lent
from ...partition.model.forms import Arguments, tensors_in
from ...partition.model.untouched import untouched
from ..guards.rounding import CUT_PROJECTIONS, by_type
from .experts import ListedExperts, StackedExperts, _Experts
from .recognise import Recogniser
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
        norms = [each for expert in style.experts(module) for each in expert.modules() if isinstance(each, _BatchNorm)]
        if norms:
            raise StyleError(
                f"experts of {name!r} have a {type(norms[0]).__name__}, over the rows of all members: {_FORMS}"
            )
    recogniser, tried = Recogniser(count, model, example), set[object]()
    for name, style in found.items():
        module = model.get_submodule(name)
        kind = (
            type(module),
            *(
                (key, type(each), *(p.shape for p in each._parameters.values() if p is not None))
                for key, each in module.named_modules()
            ),
        )
        if kind not in tried:
            _try(style, module, recogniser, count)
            tried.add(kind)
    return TensorStyles(count=count, styles=found)


def _is_experts(name: str, module: nn.Module) -> bool:
    words = f"{name.rpartition('.')[2]} {type(module).__name__}"
    is_named = re.search("expert", words, re.IGNORECASE) and not re.search("shared|gate|rout", words, re.IGNORECASE)
    return bool(is_named) and any(True for _ in module.parameters())


def _found(model: nn.Module) -> Iterator[_Experts]:
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
        number = len([*module.children()])
        if is_list and number > 1 and (_is_experts(name, module) or all(_is_experts("", x) for x in module.children())):
            calls = type(module).forward not in (nn.ModuleList.forward, nn.ModuleDict.forward)
            outer, _, key = (name, "", "") if calls else name.rpartition(".")
            yield ListedExperts(outer, number, key)
        elif _is_experts(name, module) and not is_list:
            own = [p for p in module._parameters.values() if p is not None]
            if any(p.dim() > 2 for p in own) and len({p.shape[0] for p in own}) == 1 and not module._buffers:
                yield StackedExperts(name, own[0].shape[0])


def _try(style: _Experts, module: nn.Module, recogniser: Recogniser, count: int) -> None:
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
            whole = tensors_in(module(*args, **kwargs))
        except Exception as error:
            raise StyleError(
                f"module {style.name!r} has experts, and fails where it is tried: {error}. {_FORMS}"
            ) from error
    pairs = [(x, y) for x, y in zip(whole, found, strict=False) if x.is_floating_point()]
    tolerance = by_type(CUT_PROJECTIONS, pairs[0][0].dtype)
    for x, y in pairs:
        if x.shape != y.shape or not torch.allclose(x, y, rtol=tolerance, atol=tolerance):
            raise StyleError(f"module {style.name!r} gives something else when its experts are divided: {_FORMS}")


def _by_members(style: StackedExperts, module: nn.Module, args: list[Tensor], count: int) -> Tensor:
    """The sum over the members' experts, each called with rows of one expert each."""
    tokens, numbers, weights = args
    size, total = style.number // count, torch.zeros_like(tokens)
    for index in range(count):
        member = copy.copy(module)
        own = style.shards(module, index=index, count=count)
        member._parameters = {
            key: nn.Parameter(shard.view(module.get_parameter(key)), False) for key, shard in own.items()
        }
        member.__dict__.update(style.attributes(module, count))
        token, choice = torch.where(numbers // size == index)
        if len(token):
            local = numbers[token, choice, None] - index * size
            total.index_add_(0, token, member(tokens[token], local, weights[token, choice, None]))
    return total
