"""New values of buffers, which torch.export copies back at the end of a graph: moved to where they are made.

    count = get_attr[count]   new = add(count, 1)   ...   out = linear_9(...)   copy_(count, new)   as exported
    count = get_attr[count]   new = add(count, 1)   copy_(count, new)   ...   out = linear_9(...)   here

So a buffer stands on the stage of the module that it belongs to, and not on the last one as well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx

from .aliases import shared_arguments


def write_back_early(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Move each copy behind the new value and behind all that reads the old one; a copy onto itself goes.

    Returns (operation, the copy that now follows it), for those that were moved.
    """
    nodes = list(graph.nodes)
    waiting = _copies_at_the_end(nodes)
    moved = []
    while waiting:
        copy = waiting.pop(0)
        names = {n.target for n in copy.all_input_nodes[:1]}
        same_memory = _aliases([n for n in nodes if n.op == "get_attr" and n.target in names], nodes)
        if _is_the_buffer(copy.args[1], names):
            graph.erase_node(copy)
            nodes.remove(copy)
            continue
        place = {node: i for i, node in enumerate(graph.nodes)}
        readers = [user for n in same_memory for user in n.users]
        before = max((n for n in (*copy.all_input_nodes, *readers) if n not in (copy, *waiting)), key=place.__getitem__)
        if before.op != "output":
            before.append(copy)
            moved.append((before, copy))
    return moved


def _copies_at_the_end(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    copies: list[fx.Node] = []
    for node in reversed(nodes[:-1]):  # the last one is the output
        target = node.args[0] if node.target is torch.ops.aten.copy_.default else None
        if not isinstance(target, fx.Node) or target.op != "get_attr" or node.users:
            break
        copies.insert(0, node)
    return copies


def _is_the_buffer(value: object, names: Collection[object]) -> bool:
    """Whether a value is a buffer itself, or what operations in place made of it."""
    while isinstance(value, fx.Node) and value.op != "get_attr":
        written = shared_arguments(value)[1]
        value = written[0] if written else None
    return isinstance(value, fx.Node) and value.target in names


def _aliases(roots: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Roots, and what shares memory with them."""
    found = set(roots)
    for node in nodes:
        if any(argument in found for argument in shared_arguments(node)[0]):
            found.add(node)
    return found
