"""Things that a forward leaves behind: plain attributes, tensors for the next one, buffers written between units."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .calls import GlueCall, UnitCall
from .templates import Ref, Slot
from .values import Values


def plain_attributes(module: nn.Module) -> dict[str, object]:
    """Attributes of simple types, and such entries of dicts; lists and sets as copies."""
    kinds = bool | int | float | str | None
    found = {key: value for key, value in vars(module).items() if isinstance(value, kinds)}
    for name, table in vars(module).items():
        if type(table) is dict and not name.startswith("_"):
            found |= {f"{name}[{key!r}]": value for key, value in table.items() if isinstance(value, kinds)}
    return found | {key: copy.copy(value) for key, value in vars(module).items() if type(value) in (list, set)}


def follows(value: object, values: Values, calls: Sequence[UnitCall | GlueCall]) -> bool:
    """Whether a tensor in `value` follows from inputs, parameters or units, unlike a mask that is made once."""
    tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
    todo = [number for x in tensors if (number := values.number_of(x)) is not None]
    while todo:
        made_by = values.made_by[todo.pop()]
        call = calls[made_by] if made_by >= 0 else None
        if call is None or isinstance(call, UnitCall):
            return True
        for each in call.templates():
            if isinstance(each, Slot) and each.table == "_parameters":
                return True
            if isinstance(each, Ref):
                todo.append(each.number)
    return False


def around_writes(calls: Sequence[UnitCall | GlueCall]) -> Iterator[tuple[int, int, str]]:
    """Pairs of calls that take a buffer which the code between the units writes to: one stage makes them all."""
    taking: dict[Slot, list[int]] = {}
    for i, call in enumerate(calls):
        for each in call.templates():
            if isinstance(each, Slot):
                taking.setdefault(each, []).append(i)
    for slot, takers in taking.items():
        if any(calls[i].writes for i in takers):
            for first, second in pairwise(takers):
                yield first, second, f"both take buffer {slot.key!r}, which changes"
