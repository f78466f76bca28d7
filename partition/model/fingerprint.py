"""Which units of a model are equal: fingerprints of what they compute, parameter values apart.

Equal fingerprints mean equal work. Where it cannot be told (an attribute of an unknown kind) the object's identity
stands in for its value: the units are then measured one by one, which costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

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
