"""Which units of a model are equal: fingerprints of what they compute, parameter values apart.

Equal fingerprints mean equal work. Where it cannot be told (an attribute of an unknown kind) the object's identity
stands in for its value: the units are then measured one by one, which costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_OF_THE_MACHINERY = frozenset(vars(nn.Module()))  # hooks, tables of parameters: looked at by themselves


def tensor_form(tensor: torch.Tensor) -> tuple[object, ...]:
    """Shape, layout, type and whether a gradient is wanted."""
    stride = tensor.stride() if tensor.layout == torch.strided else ()
    return tuple(tensor.shape), stride, tensor.dtype, tensor.requires_grad


def module_form(module: nn.Module) -> object:
    """Form of a module with everything in it: classes, plain attributes, hooks, forms of tensors, training flags."""
    return (
        type(module),
        module.training,
        tuple((name, value_form(value)) for name, value in vars(module).items() if name not in _OF_THE_MACHINERY),
        tuple(
            (name, tuple(map(id, value.values())))
            for name, value in vars(module).items()
            if name in _OF_THE_MACHINERY and name.endswith("_hooks") and value
        ),
        tuple((name, None if p is None else tensor_form(p)) for name, p in module._parameters.items()),
        tuple((name, None if b is None else tensor_form(b)) for name, b in module._buffers.items()),
        tuple((name, None if child is None else module_form(child)) for name, child in module._modules.items()),
    )


def graph_form(module: fx.GraphModule) -> object:
    """Form of a graph: its operations, their constants and wiring, and the forms of the tensors that it holds."""
    number: dict[fx.Node, int] = {}
    form: list[object] = []
    for node in module.graph.nodes:
        number[node] = len(number)
        what: object = node.target if node.op in ("call_function", "call_method") else None
        if node.op in ("get_attr", "call_module"):
            what = value_form(_attribute(module, str(node.target)))
        form.append((node.op, what, _argument_form(node.args, number), _argument_form(node.kwargs, number)))
    return tuple(form)


def _attribute(module: nn.Module, target: str) -> object:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _argument_form(value: object, number: Mapping[fx.Node, int]) -> object:
    if isinstance(value, fx.Node):
        return ("node", number[value])
    if isinstance(value, Mapping):
        return tuple((key, _argument_form(each, number)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(_argument_form(each, number) for each in value)
    if isinstance(value, slice):
        return tuple(_argument_form(each, number) for each in (value.start, value.stop, value.step))
    return value_form(value)


def value_form(value: object) -> object:
    """Form of any value: equal for equal ones, as far as can be told."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)  # 1, 1.0 and True are equal, their reprs are not
    if isinstance(value, torch.Tensor):
        return tensor_form(value)
    if isinstance(value, nn.Module):
        return module_form(value)
    if isinstance(value, Mapping):
        return tuple((value_form(key), value_form(each)) for key, each in value.items())
    if isinstance(value, Sequence):
        return type(value), tuple(map(value_form, value))
    return type(value), id(value)
