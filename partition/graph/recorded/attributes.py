"""Reads and writes of attributes while a model is recorded: of objects that the forward made, and of modules.

What calls of units leave in an object, others may read: both must stand on one stage. What the code between the units
writes is done once, while it is recorded: who reads it in a stage would find what was there before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

_MISSING = object()
_PLAIN = bool | int | float | str


class Patches(ExitStack):
    """Methods of classes that have others within; put back in the reverse order, since several may share one."""

    def put(self, kind: type, name: str, make: Callable[[Any], Any]) -> bool:
        """Give a class what `make` makes of its method; False for a class of an extension."""
        original, own = getattr(kind, name), kind.__dict__.get(name, _MISSING)
        try:
            setattr(kind, name, make(original))
        except TypeError:
            return False
        if own is _MISSING:
            self.callback(delattr, kind, name)
        else:
            self.callback(setattr, kind, name, own)
        return True


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
