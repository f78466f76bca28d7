"""Reads and writes of attributes while a model is recorded, and what a forward leaves behind in them.

What calls of units leave in an object, others may read: both must stand on one stage. What the code between the units
writes is done once, while it is recorded: who reads it in a stage would find what was there before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .calls import GlueCall, UnitCall
from .intercept import Patches
from .templates import Ref, Slot
from .values import Values

_MISSING = object()
_PLAIN = bool | int | float | str


class Attributes:
    """Who wrote which attribute last.

    Arguments:
        running: number of the unit's call that is under way; None: the code between the units runs.
        opened: ids of the modules whose code is recorded.
        has_read: whether that code has read an attribute before.
        inside: ids of the modules that units consist of.
        refuse: called with the reason where a read finds what no stage will have written.
        join: called with two calls, of which the second reads what the first wrote.

    Attributes:
        setting_own: calls of units that have set attributes of their modules.
    """

    def __init__(
        self,
        *,
        running: Callable[[], int | None],
        opened: set[int],
        has_read: Callable[[int, str], bool],
        inside: set[int],
        refuse: Callable[[str], None],
        join: Callable[[int, int, str], None],
    ) -> None:
        self._running, self._opened, self._has_read, self._inside = running, opened, has_read, inside
        self._refuse, self._join = refuse, join
        self._objects: set[int] = set()
        self._written: dict[tuple[int, str], int | None] = {}
        self._patches = Patches()
        self._kinds: set[type] = set()
        self._carried: set[tuple[int, str]] = set()
        self.setting_own: set[int] = set()

    @contextmanager
    def watched(self) -> Iterator[Patches]:
        """Within: modules are watched, and objects from `watch` on; yields what else may patch their classes."""
        with self._patches:
            self._patches.put(nn.Module, "__setattr__", self._setting)
            yield self._patches

    def watch(self, value: object) -> None:
        """An object that the forward made and that units are given, as it is now."""
        self._objects.add(id(value))
        kind = type(value)
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._patches.put(kind, "__setattr__", self._setting)
            self._patches.put(kind, "__getattribute__", self._getting)

    def carries(self, module: nn.Module, name: str) -> bool:
        """Whether the code between the units has read an attribute of an opened module, and set it behind that."""
        return (id(module), name) in self._carried

    def _getting(self, original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def get(owner: Any, name: str) -> Any:
            if id(owner) in self._objects:
                self._read(owner, name)
            return original(owner, name)

        return get

    def _read(self, owner: object, name: str) -> None:
        me, key = self._running(), (id(owner), name)
        if me is None or key not in self._written:
            return
        writer = self._written[key]
        what = f"attribute {name!r} of a {type(owner).__name__}"
        if writer is None:
            self._refuse(f"a module reads {what} that the code between the modules has changed")
        elif writer != me:
            self._join(writer, me, f"one reads {what}, which the other one has changed")

    def _setting(self, original: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
        def put(owner: Any, name: str, value: Any) -> None:
            me, key = self._running(), (id(owner), name)
            if key[0] in self._objects:
                self._written[key] = me
            elif me is not None and key[0] in self._inside:
                self.setting_own.add(me)
                if not _is_as_before(vars(owner).get(name, _MISSING), value):  # a module that runs again counts on
                    writer = self._written.setdefault(key, me)
                    if writer is not None and writer != me:
                        self._join(writer, me, f"both count in attribute {name!r} of a {type(owner).__name__}")
            elif me is None and key[0] in self._opened:
                if key not in self._written and self._has_read(*key):
                    self._carried.add(key)
                self._written.setdefault(key, None)
            elif me is None and key[0] in self._inside and not _is_as_before(vars(owner).get(name, _MISSING), value):
                self._refuse(f"the code between the modules sets attribute {name!r} of a {type(owner).__name__}")
            original(owner, name, value)

        return put


def _is_as_before(before: object, now: object) -> bool:
    """Whether nobody could tell; who reads a tensor is found by what is done with it."""
    return before is now or isinstance(now, torch.Tensor) or (isinstance(before, _PLAIN) and before == now)


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
