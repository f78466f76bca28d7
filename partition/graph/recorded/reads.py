"""What recorded code reads, watched while it runs: guards compare it before each batch.

attributes   of modules and of the user's objects that they hold, by name
code         that ran, and so the globals that it names and the functions that close over something
os.environ   keys
tensors      of the user's own, whose values Python took
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ..source_line import is_ours, is_users
from ..untouched import Places
from .intercept import Patches

# They look one name up in `__dict__`, which is noted already.
_LOOK_UPS = {nn.Module.__getattr__.__code__, nn.Module.__setattr__.__code__, nn.Module.__delattr__.__code__}


class Reads:
    """Reads of one forward, outside of the calls that stages make.

    Arguments:
        opened: the modules whose code is recorded, by path.
        is_within_call: whether a unit or a function of torch is under way, which a stage calls again.

    Attributes:
        names: that were read, by id of the object, as long as that is there: what the forward made holds fakes.
        names_of: the same by class.
        kinds: classes whose objects were watched; others count as read whole.
        codes: that ran, with their globals.
        environ: keys.
        tensors: whose values were taken.
        left: where tensors stand that did not; lists there hold again what they held.
    """

    def __init__(self, opened: dict[str, nn.Module], *, is_within_call: Callable[[], bool]) -> None:
        self.opened = opened
        self._is_within_call = is_within_call
        self.names: dict[int, set[str]] = {}
        self.kinds: set[type] = set()
        self.codes: dict[CodeType, dict[str, Any]] = {}
        self.environ: set[str] = set()
        self.tensors: list[torch.Tensor] = []
        self.names_of: dict[type, set[str]] = {}
        self._owners: dict[int, object] = {}  # by id: what is read of, held weakly where it can be
        self.left: Places = []
        self._changed: dict[int, tuple[list[Any], list[Any]]] = {}  # lists, by id, and what they held

    @contextmanager
    def watching(self, kinds: set[type], patches: Patches) -> Iterator[None]:
        """Within: reads by this thread are noted.

        Arguments:
            kinds: classes of the modules and objects that are watched.
        """
        self.kinds = {kind for kind in kinds if patches.put(kind, "__getattribute__", self._getting)}
        patches.put(os._Environ, "__getitem__", self._getting_variable)
        self._thread = threading.get_ident()
        before = sys.getprofile()
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(before)
            for held, values in self._changed.values():
                if any(isinstance(x, FakeTensor) for x in pytree.tree_leaves(held)):
                    held.clear()
                    held.extend(values)
                    self.left.append((held, "changed between the modules"))
            # Both reach fakes, which hold the parameters that they stand in for: of other processes' stages, too.
            self._changed.clear()
            self._is_within_call = lambda: True

    def has_read(self, key: int, name: str) -> bool:
        """Whether this was read of the object with this id."""
        return name in self.names.get(key, ())

    def _getting(self, original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def get(owner: Any, name: str) -> Any:
            if self._is_seen():
                frame: Any = sys._getframe(1)
                while frame.f_code.co_name == "get" and _is_ours(frame.f_code.co_filename):
                    frame = frame.f_back  # another patch of the same class
                if frame.f_code not in _LOOK_UPS and not _is_ours(frame.f_code.co_filename):
                    self._note(owner, name)
            return original(owner, name)

        return get

    def _note(self, owner: object, name: str) -> None:
        key = id(owner)
        if key not in self.names:
            self.names[key] = set()
            try:
                self._owners[key] = weakref.ref(owner, lambda _: self.names.pop(key, None))
            except TypeError:  # of a class with slots alone
                self._owners[key] = owner
        self.names[key].add(name)
        self.names_of.setdefault(type(owner), set()).add(name)

    def _getting_variable(self, original: Callable[[Any, str], str]) -> Callable[[Any, str], str]:
        def get(environ: Any, key: str) -> str:
            if self._is_seen():
                self.environ.add(key)
            return original(environ, key)

        return get

    def _is_seen(self) -> bool:
        return not self._is_within_call() and threading.get_ident() == self._thread

    def _called(self, frame: FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        if self._is_within_call() or not _has_reads(code.co_filename):
            return
        if event == "call":
            self.codes[code] = frame.f_globals
        elif event == "c_call" and isinstance(called.__self__, list):
            self._changed.setdefault(id(called.__self__), (called.__self__, [*called.__self__]))


_is_ours = cache(is_ours)


@cache
def _has_reads(filename: str) -> bool:
    """Whether code of this file is the user's, or a library's beside torch: also what has no file."""
    return not filename.startswith(("<frozen", "<stagewright")) and (filename.startswith("<") or is_users(filename))
