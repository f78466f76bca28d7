"""Reads and writes of recorded code, watched while it runs. Guards compare what it reads before each batch:

attributes   of modules and of the user's objects that they hold, by name
code         that ran, and so the globals that it names and the functions that close over something
os.environ   keys
tensors      of the user's own, whose values Python took

What calls of units leave in an object, others may read: both must be on one stage. What the code between the units
writes is done once, while it is recorded: who reads it in a stage would find what was there before.
"""

from __future__ import annotations

import copy
import cProfile
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ..modes import OWN_HOOKS
from ..source_line import is_ours, is_users, module_at
from ..untouched import Places
from .intercept import Patches
from .refusals import RefusedError

# They look one name up in `__dict__`, which is noted already.
_LOOK_UPS = {nn.Module.__getattr__.__code__, nn.Module.__setattr__.__code__, nn.Module.__delattr__.__code__}


class CodeReads:
    """Reads of one forward, outside of the calls that stages make. `opened`: the modules whose code is recorded, by
    path. `is_within_call`: whether a unit or a function of torch is under way, which a stage calls again."""

    def __init__(self, opened: dict[str, nn.Module], *, is_within_call: Callable[[], bool]) -> None:
        self.opened = opened
        self._is_within_call = is_within_call
        # that were read, by id of the object, as long as that is there: what the forward made holds fakes
        self.names: dict[int, set[str]] = {}
        self.kinds: set[type] = set()  # classes whose objects were watched; others count as read whole
        self.codes: dict[CodeType, dict[str, Any]] = {}  # that ran, with their globals
        self.environ: set[str] = set()  # keys
        self.tensors: list[torch.Tensor] = []  # whose values were taken
        self.names_of: dict[type, set[str]] = {}  # the same by class
        self._owners: dict[int, object] = {}  # by id: what is read of, held weakly where it can be
        self.left: Places = []  # places of tensors that were not there; lists there hold again what they held
        self.effects: list[str] = []  # what the code has changed, to stay
        # arguments of torch.profiler.record_function, of those that are entered now
        self.regions: list[tuple[Any, ...]] = []
        self._changed: dict[int, tuple[list[Any], list[Any]]] = {}  # lists, by id, and what they held

    @contextmanager
    def watching(self, kinds: set[type], patches: Patches) -> Iterator[None]:
        """Within: reads by this thread are noted, of objects of these classes."""
        self.kinds = {kind for kind in kinds if patches.put(kind, "__getattribute__", self._getting)}
        patches.put(os._Environ, "__getitem__", self._getting_variable)
        self._thread = threading.get_ident()
        before: Any = sys.getprofile()
        if before is not None and not callable(before) and not isinstance(before, cProfile.Profile):
            reason = f"a profiler ({type(before).__name__}) follows this thread's calls, as the recording must"
            raise RefusedError(reason, expected="pipe.build(...), or a first step, before the profiler starts")
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(before if callable(before) else None)
            if isinstance(before, cProfile.Profile):
                before.enable()
            for held, values in self._changed.values():
                if any(isinstance(x, FakeTensor) for x in pytree.tree_leaves(held)):
                    held.clear()
                    held.extend(values)
                    self.left.append((held, "changed between the modules"))
            # Both reach fakes, which hold the parameters that they replace: of other processes' stages, too.
            self._changed.clear()
            self._is_within_call = lambda: True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within a call of a unit or function, and what is noted of it: a fake tensor makes thousands of calls, and
        being notified of them takes twice their time."""
        if sys.getprofile() != self._called:
            yield
            return
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(self._called)

    def has_read(self, key: int, name: str) -> bool:
        return name in self.names.get(key, ())

    def _getting(self, original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def get(owner: Any, name: str) -> Any:
            if not self._is_within_call() and threading.get_ident() == self._thread:  # units read much: no more calls
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
            if not self._is_within_call() and threading.get_ident() == self._thread:
                self.environ.add(key)
            return original(environ, key)

        return get

    def _called(self, frame: FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        if self._is_within_call():
            return
        if event == "c_call" and isinstance(called.__self__, torch.Generator):
            reason = f"the code between the modules sets or reads the state of a random generator ({called.__name__})"
            raise RefusedError(reason, expected=IN_A_MODULE)
        if code is _ENTERS and event == "call":
            region = frame.f_locals["self"]
            self.regions.append((region.name, region.args))
        if code is _LEAVES and event == "call":
            self.regions.pop()
        if not _has_reads(code.co_filename):
            return
        if event == "call":
            self.codes[code] = frame.f_globals
        elif event == "c_call" and isinstance(called.__self__, list):
            self._changed.setdefault(id(called.__self__), (called.__self__, [*called.__self__]))


_ENTERS, _LEAVES = (getattr(torch.profiler.record_function, f"__{name}__").__code__ for name in ("enter", "exit"))
_is_ours = cache(is_ours)


@cache
def _has_reads(filename: str) -> bool:
    """Whether code of this file is the user's, or a library's other than torch: also what has no file."""
    return not filename.startswith(("<frozen", "<stagewright")) and (filename.startswith("<") or is_users(filename))


_MISSING = object()
_PLAIN = bool | int | float | str


class Attributes:
    """Who wrote which attribute last.

    Arguments:
        running: number of the unit's call that is under way; None: the code between the units runs.
        opened: ids of the modules whose code is recorded.
        has_read: whether that code has read an attribute before.
        inside: ids of the modules that units consist of.
        join: called with two calls, of which the second reads what the first wrote.
    """

    def __init__(
        self,
        *,
        running: Callable[[], int | None],
        opened: set[int],
        has_read: Callable[[int, str], bool],
        inside: set[int],
        join: Callable[[int, int, str], None],
    ) -> None:
        self._running, self._opened, self._has_read, self._inside = running, opened, has_read, inside
        self._join = join
        self._objects: set[int] = set()
        self._written: dict[tuple[int, str], int | None] = {}
        self._patches = Patches()
        self._kinds: set[type] = set()
        self._carried: set[tuple[int, str]] = set()
        self.setting_own: set[int] = set()  # calls of units that have set attributes of their modules

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
        """Whether the code between the units has read an attribute of an opened module, and set it after that."""
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
            raise RefusedError(f"a module reads {what} that the code between the modules has changed")
        if writer != me:
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
                raise RefusedError(f"the code between the modules sets attribute {name!r} of a {type(owner).__name__}")
            original(owner, name, value)

        return put


def _is_as_before(before: object, now: object) -> bool:
    """Whether it cannot be known; who reads a tensor is found by what is done with it."""
    return before is now or isinstance(now, torch.Tensor) or (isinstance(before, _PLAIN) and before == now)


class OpenedModule:
    """Attributes of a module whose code is recorded, as they are before the forward."""

    def __init__(self, module: nn.Module, path: str, attributes: Attributes, reads: CodeReads) -> None:
        self._module, self._at, self._attributes, self._reads = module, module_at(path), attributes, reads
        self._plain, self._names, self._buffers = _plain_attributes(module), {*vars(module)}, {*module._buffers}

    def check(self, follows: Callable[[object], bool]) -> None:
        """RefusedError after the forward for what it has changed and no stage would; effects that stay are noted.
        `follows`: whether a value follows from the batch or parameters."""
        module = self._module
        before, now = self._plain, _plain_attributes(module)
        changed = [k for k, v in now.items() if before.get(k, v) not in (v,)]  # NaN is NaN
        new = {k: v for k, v in module._buffers.items() if k not in self._buffers}
        carried = [
            k
            for k, v in {**vars(module), **new}.items()
            if (k in new or self._attributes.carries(module, k)) and follows(v)
        ]
        if carried:
            raise RefusedError(
                f"attribute {carried[0]!r} of {self._at} brings a tensor from one forward to the next",
                expected="a buffer (register_buffer in its __init__), which stages keep",
            )
        if changed:
            raise RefusedError(f"attribute {changed[0]!r} of {self._at} is changed by its own forward")
        self._reads.effects += [
            f"attribute {k!r} of {self._at}"
            for k, v in vars(module).items()
            if k not in self._names
            and (
                (follows(v) and not self._reads.has_read(id(module), k))
                or (type(v) in (int, float) and self._attributes.carries(module, k))
            )
        ]


def _plain_attributes(module: nn.Module) -> dict[str, object]:
    """Attributes of simple types, and such entries of dicts; lists and sets as copies."""
    kinds = bool | int | float | str | None
    found = {key: value for key, value in vars(module).items() if isinstance(value, kinds)}
    for name, table in vars(module).items():
        if type(table) is dict and not name.startswith("_"):
            found |= {f"{name}[{key!r}]": value for key, value in table.items() if isinstance(value, kinds)}
    return found | {key: copy.copy(value) for key, value in vars(module).items() if type(value) in (list, set)}


_LOOKING = ("_forward_hooks", "_forward_pre_hooks")  # hooks that may look at what flows
IN_A_MODULE = "that in the forward of a module of its own, which runs as it is"
NOT_HERE = "that before the PipelineModule is built, or in the forward of a module of its own, which runs as it is"


class Tables:
    """Tables of modules as the last call of a unit has left them; RefusedError for what others have changed."""

    def __init__(self, opened: Mapping[str, nn.Module], units: Mapping[str, nn.Module]) -> None:
        self._looking: set[int] = set()  # ids of hooks
        self._called: dict[int, nn.Module] = {}
        self._everywhere = _everywhere()
        self.on_tensors: list[RemovableHandle] = []
        self._known = {id(part): _tables(part) for unit in units.values() for part in unit.modules()}
        self._known |= {id(module): _tables(module) for module in opened.values()}

    def check(self, module: nn.Module, *, is_last: bool = False) -> None:
        """Before a unit is called, and after the forward; new hooks of forwards may look from here on."""
        if _everywhere() != self._everywhere:
            raise RefusedError("the code between the modules registers a hook on all modules", expected=NOT_HERE)
        for part in module.modules():
            before, now = self._known.get(id(part), {}), _tables(part)
            for kind, table in now.items():
                known = before.get(kind, {})
                if not table and not known:  # most of them
                    continue
                new = {key for key in table if known.get(key) is not table[key]}
                gone = {key for key in known if key not in table and id(known[key]) not in self._looking}
                if gone or (new and (is_last or kind not in _LOOKING)):
                    raise _refused(part, f"changes {kind.strip('_').replace('_', ' ')}")
                for key in new:
                    look = vars(part)[kind][key] = table[key] = _looking(table[key], part)
                    self._looking.add(id(look))
            self._known[id(part)] = now

    def note(self, unit: nn.Module) -> None:
        """A call of a unit is through, which may have changed its own."""
        self._called[id(unit)] = unit
        self._known |= {id(part): _tables(part) for part in unit.modules()}

    def finish(self) -> None:
        for unit in self._called.values():
            self.check(unit, is_last=True)
        for handle in self.on_tensors:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id not in hooks:
                raise RefusedError("the code between the modules removes a hook from a tensor", expected=NOT_HERE)

    def check_opened(self, module: nn.Module) -> None:
        for kind in ("_modules", "_parameters"):
            if _tables(module)[kind] != self._known[id(module)][kind]:
                raise _refused(module, f"changes {kind.strip('_')}")


def _refused(module: nn.Module, what: str) -> RefusedError:
    return RefusedError(f"the code between the modules {what} of a {type(module).__name__}", expected=NOT_HERE)


def _tables(module: nn.Module) -> dict[str, dict[str | int, Any]]:
    held = vars(module)
    found: dict[str, dict[str | int, Any]] = {kind: dict(held[kind]) for kind in (*OWN_HOOKS, "_modules")}
    found |= {kind: dict.fromkeys(held[kind]) for kind in ("_parameters", "_buffers")}
    return found | {"forward": {"forward": held["forward"]} if "forward" in held else {}}


def _everywhere() -> list[object]:
    tables = vars(torch.nn.modules.module)
    return [key for name in tables if name.startswith("_global_") and name.endswith("_hooks") for key in tables[name]]


def _looking(hook: Callable[..., Any], module: nn.Module) -> Callable[..., None]:
    """A hook that may look at what flows, and leave it in an object, but gives no more than it was given."""

    def look(*args: Any, **kwargs: Any) -> None:
        tensors = [x for x in pytree.tree_leaves(args[1:]) if isinstance(x, torch.Tensor)]
        versions = [x._version for x in tensors]
        given = [[*map(id, pytree.tree_leaves(each))] for each in (args[-1], args[1:])]
        found = hook(*args, **kwargs)
        changes = found is not None and [*map(id, pytree.tree_leaves(found))] not in given
        if changes or versions != [x._version for x in tensors]:
            raise _refused(module, "registers a hook that changes what flows through a forward")

    return look
