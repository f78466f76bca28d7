"""Properties of a node of an exported graph, and the attributes and modules that it names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn


def is_computed(node: fx.Node) -> bool:
    """Whether it computes something, guards of torch.export apart."""
    if node.op == "call_module" and str(node.target).startswith("_guards"):
        return False
    return node.op in ("call_function", "call_module", "call_method")


def is_shape_number(node: fx.Node) -> bool:
    """Whether its value is a number that is derived from shapes."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def is_tensor(node: fx.Node) -> bool:
    """Whether its value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_random(node: fx.Node) -> bool:
    """Whether it draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def bytes_of_value(node: fx.Node) -> float:
    """Size of its tensor at the example's batch size, 0 where it has none [bytes].

    Raises ValueError for a size that follows from values.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0.0
    sizes = [size.node.hint if isinstance(size, torch.SymInt) else int(size) for size in value.shape]
    if None in sizes:
        where = (module_paths(node) or ["the model's own forward"])[-1]
        raise ValueError(
            f"{node.name!r} (in {where}) makes a tensor whose size follows from values, as x[mask] does: expected "
            f"sizes that follow from those of the inputs, or this code in a module of its own, which runs as it is"
        )
    return float(math.prod(sizes) * value.element_size())


def attributes(node: fx.Node) -> list[fx.Node]:
    """The parameters, buffers and constants that it takes."""
    return [n for n in node.all_input_nodes if n.op == "get_attr"]


def module_paths(node: fx.Node) -> list[str]:
    """Names of the modules around the node, outermost first: blocks, blocks.2, blocks.2.mlp."""
    stack = node.meta.get("nn_module_stack") or {}
    return [path for path, _ in stack.values() if path]


def span_name(nodes: Sequence[fx.Node]) -> str:
    """The innermost modules with which these nodes begin and end."""
    paths = [paths[-1] for node in nodes if (paths := module_paths(node))]
    if not paths:
        return "-"
    return paths[0] if paths[0] == paths[-1] else f"{paths[0]} .. {paths[-1]}"


def get_attribute(root: nn.Module, target: str) -> Any:
    """The attribute with a dotted name."""
    value: Any = root
    for part in target.split("."):
        value = getattr(value, part)
    return value


def set_attribute(root: nn.Module, target: str, value: Any) -> None:
    """Set the attribute with a dotted name, making modules on the way; tensors become parameters and buffers."""
    *path, name = target.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    if isinstance(value, nn.Parameter):
        root.register_parameter(name, value)
    elif isinstance(value, torch.Tensor):
        root.register_buffer(name, value)
    else:
        setattr(root, name, value)
