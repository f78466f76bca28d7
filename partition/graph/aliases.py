"""Views of memory that the graph changes in place: what a cut must not separate.

    h = linear(x)     v = h[:, :4]     y = relu_(h)     ...     z = pad(v)

`v` is another tensor over the same memory, so `z` reads what relu_ wrote. With a cut between `v` and `y` the stage
of `z` would get a `v` from before the change. (Later uses of `h` itself are uses of `y` in an exported graph.)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx


def changed_views(nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    """(tensor, in-place operation behind it that changes its memory), for tensors that are used after the change.

    Which results share memory with which arguments is read from the operators' schemas.
    """
    place = {node: i for i, node in enumerate(nodes)}
    memory: dict[fx.Node, fx.Node] = {}  # tensor -> the first one over the same memory
    sharing: dict[fx.Node, list[fx.Node]] = {}
    changes: list[tuple[fx.Node, fx.Node]] = []
    for node in nodes:
        aliased, written = shared_arguments(node)
        for argument in written:
            changes.append((node, memory.get(argument, argument)))
        if aliased:
            memory[node] = memory.get(aliased[0], aliased[0])
        sharing.setdefault(memory.get(node, node), []).append(node)
    return [
        (tensor, change)
        for change, root in changes
        for tensor in sharing.get(root, [])
        if place[tensor] < place[change] and any(place.get(user, len(nodes)) > place[change] for user in tensor.users)
    ]


def shared_arguments(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The arguments whose memory the result shares, and those that are written to."""
    if node.target is operator.getitem:
        return [argument for argument in node.args[:1] if isinstance(argument, fx.Node)], []
    if not isinstance(node.target, torch._ops.OpOverload):
        return [], []
    aliased, written = [], []
    for position, formal in enumerate(node.target._schema.arguments):
        actual = node.args[position] if position < len(node.args) else node.kwargs.get(formal.name)
        if formal.alias_info is None or not isinstance(actual, fx.Node):
            continue
        aliased.append(actual)
        if formal.alias_info.is_write:
            written.append(actual)
    return (aliased if any(r.alias_info is not None for r in node.target._schema.returns) else []), written
