"""Calls that a model makes while it runs, reported to a listener: of modules, of torch's functions, of custom autograd
functions and of checkpointing. One listener is here: it reports the numbers of units and of random calls between them,
the ones of a record, while the model runs as it is.

Modules are seen whoever calls them, since for so long their classes have another `__call__`; autograd functions also
where `apply` was bound to a name before, since its code is another one for so long.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import nn, overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

Args = tuple[Any, ...]
Keywords = dict[str, Any]
AnyCall = Callable[..., Any]
Generators = Callable[..., Generator[None]]  # each a context before `contextmanager`
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The modules of a model by what happens when they are called."""

    opened: dict[str, nn.Module]  # recorded, by path ("" is the model)
    units: dict[str, nn.Module]  # run whole, by path
    opened_units: frozenset[str]  # paths of the opened ones that would be units


def roles_of(model: nn.Module, *, also_open: Collection[str] = (), keep_whole: Collection[str] = ()) -> Roles:
    """The rule above, but for paths of modules that are opened, or units, all the same."""
    opened: dict[str, nn.Module] = {"": model}
    units: dict[str, nn.Module] = {}
    opened_units: set[str] = set()
    known = {id(model)}

    def look_into(module: nn.Module, path: str) -> None:
        is_list = isinstance(module, _LISTS)
        for name, child in module._modules.items():
            if child is None or id(child) in known:
                continue
            known.add(id(child))
            inner = f"{path}.{name}" if path else name
            is_opened = inner not in keep_whole and _is_opened(child, is_element=is_list)
            if inner in also_open and not is_opened:
                opened_units.add(inner)
            if inner in also_open or is_opened:
                opened[inner] = child
                look_into(child, inner)
            else:
                units[inner] = child

    look_into(model, "")
    return Roles(opened=opened, units=units, opened_units=frozenset(opened_units))


def is_compiled(module: nn.Module) -> bool:
    """Whether a call runs what torch.compile has made of all of it."""
    own = vars(module)
    return own.get("_compiled_call_impl") is not None or "_torchdynamo_orig_callable" in own


def has_parts(module: nn.Module) -> bool:
    return any(child is not None for child in module._modules.values())


def _is_opened(child: nn.Module, *, is_element: bool) -> bool:
    if isinstance(child, nn.ModuleList | nn.ModuleDict):
        return True  # it is never called
    if is_element:
        return False
    return any(isinstance(part, _LISTS) for part in child.modules())


_MISSING = object()


class Patches(ExitStack):
    """Methods of classes that have others within; put back in the reverse order, since several may share one."""

    def put(self, kind: type, name: str, make: Callable[[Any], Any]) -> bool:
        """Replace a method of a class by `make(method)` within this context; False if the class is of an extension."""
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


class Listener(Protocol):
    """Sees calls; each method makes the call, and returns its result."""

    def module(self, module: nn.Module, call: AnyCall, args: Args, kwargs: Keywords) -> Any:
        """A call of one of the modules that are listened to."""

    def function(self, function: AnyCall, call: AnyCall, args: Args, kwargs: Keywords) -> Any:
        """A call of a public function of torch, or of the `apply` of an autograd function, outside of others. `call`:
        makes it."""

    def reentrant(self, apply: AnyCall, function: AnyCall, preserve: bool, args: Args) -> Any:
        """A call of checkpoint(use_reentrant=True)."""

    def not_reentrant(
        self, generator: Generators, function: AnyCall, options: Mapping[str, Any], args: Args, kwargs: Keywords
    ) -> AbstractContextManager[None]:
        """Around the function of checkpoint(use_reentrant=False)."""


@contextmanager
def listening(listener: Listener, modules: Mapping[int, nn.Module]) -> Iterator[None]:
    """Within: the listener sees calls, those of modules with these ids only."""
    with Patches() as patches, _autograd_functions(listener), _checkpointing(listener), _Functions(listener):

        def hooked(original: AnyCall, _: object) -> AnyCall:
            def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if id(self) not in modules:
                    return original(self, *args, **kwargs)
                return listener.module(self, partial(original, self), args, kwargs)

            return call

        # Classes get another `__call__`: objects and what type() says of them stay as they are. All originals are taken
        # first, since a class may have that of another.
        for kind, original in {type(module): type(module).__call__ for module in modules.values()}.items():
            patches.put(kind, "__call__", partial(hooked, original))
        yield


class _Functions(TorchFunctionMode):
    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self.listener = listener

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Keywords | None = None) -> Any:
        return self.listener.function(func, func, args, kwargs or {})


def hearing_no_functions(listener: Listener) -> AbstractContextManager[object]:
    """Within, torch's functions do not go through the listener, which would only make the call."""
    own = overrides._get_current_function_mode()  # type: ignore[no-untyped-call]
    is_listeners = isinstance(own, _Functions) and own.listener is listener
    return overrides._pop_mode_temporarily() if is_listeners else nullcontext()


_TOLD = "_stagewright_told"  # a name among those of torch's module; it stays, see below


class _Code:
    """Whose code replaces that of Function.apply: both use the cell that `super()` needs, and nothing else."""

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        __class__  # type: ignore[name-defined]  # noqa: B018
        return _stagewright_told(cls, args, kwargs)  # type: ignore[name-defined]  # noqa: F821


@contextmanager
def _autograd_functions(listener: Listener) -> Iterator[None]:
    function = torch.autograd.Function.__dict__["apply"].__func__
    code, names = function.__code__, function.__globals__
    stand_in = _Code.__dict__["apply"].__func__.__code__
    if code is stand_in:  # a recording within another one
        raise RuntimeError("the forward of a model cuts another model into stages")
    original = types.FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__

    here = threading.get_ident()

    def told(kind: Any, args: Args, kwargs: Keywords) -> Any:
        if threading.get_ident() != here:
            return original(kind, *args, **kwargs)

        def apply(*args: Any, **kwargs: Any) -> Any:
            return original(kind, *args, **kwargs)

        if kind is torch.utils.checkpoint.CheckpointFunction:
            return listener.reentrant(apply, args[0], args[1], args[2:])
        return listener.function(kind.apply, apply, args, kwargs)

    names[_TOLD] = told
    function.__code__ = stand_in
    try:
        yield
    finally:
        function.__code__ = code
        # Other threads may be at the first line of the replacing code: they look the name up afterwards.
        names[_TOLD] = lambda kind, args, kwargs: original(kind, *args, **kwargs)


_GENERATOR = "_checkpoint_without_reentrant_generator"
_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


def _checkpointing(listener: Listener) -> AbstractContextManager[object]:
    original = getattr(torch.utils.checkpoint, _GENERATOR)
    here = threading.get_ident()

    def generator(function: AnyCall, *rest: Any, **kwargs: Any) -> Generator[None]:
        if threading.get_ident() != here:
            yield from original(function, *rest, **kwargs)
            return
        options, args = dict(zip(_OPTIONS, rest, strict=False)), rest[len(_OPTIONS) :]
        with listener.not_reentrant(original, function, options, args, kwargs):
            yield

    return patch.object(torch.utils.checkpoint, _GENERATOR, generator)


class Announcer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `enter` as the stages call it, also where the model is checkpointed; `listens` around one forward.
    `numbers`: of the calls of units and the random ones between them, in order; see `Flow.numbers`. A function between
    the units counts where it first draws."""

    def __init__(self, roles: Roles, numbers: Sequence[int | None], enter: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._units = {id(module) for module in roles.units.values()}
        self._modules = {id(module): module for module in (*roles.opened.values(), *roles.units.values())}
        self._enter = enter
        self._numbers = numbers
        self._next = 0
        self._inside = False
        self._has_drawn = False
        self._listens = False

    @contextmanager
    def listens(self) -> Iterator[None]:
        if self._listens:
            yield
            return
        self._listens = True
        try:
            with listening(self, self._modules), self:
                yield
        finally:
            self._listens = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Keywords | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not self._has_drawn:
            self._has_drawn = True
            self._tell()
        return func(*args, **(kwargs or {}))

    def _tell(self) -> None:
        number = self._numbers[self._next] if self._next < len(self._numbers) else self._next
        self._next += 1
        if number is not None:
            self._enter(number)

    def module(self, module: nn.Module, call: AnyCall, args: Args, kwargs: Keywords) -> Any:
        if self._inside or id(module) not in self._units:
            return call(*args, **kwargs)
        self._tell()
        self._inside, self._has_drawn = True, True
        try:
            with self._absent():
                return call(*args, **kwargs)
        finally:
            self._inside = False

    @contextmanager
    def _absent(self) -> Iterator[None]:
        """Within a unit there is nothing to report; compiled code runs as it is only where there is no mode."""
        with ExitStack() as stack:
            if python_dispatch._get_current_dispatch_mode() is self:
                stack.enter_context(python_dispatch._pop_mode_temporarily())
            stack.enter_context(hearing_no_functions(self))
            yield

    def function(self, function: AnyCall, call: AnyCall, args: Args, kwargs: Keywords) -> Any:
        if self._inside:
            return call(*args, **kwargs)
        self._inside, self._has_drawn = True, False
        try:
            return call(*args, **kwargs)
        finally:
            self._inside, self._has_drawn = False, True

    def reentrant(self, apply: AnyCall, function: AnyCall, preserve: bool, args: Args) -> Any:
        if self._inside:
            return apply(function, preserve, *args)
        again = self._again(function)
        runs = [again, function]  # the first time within this forward, then in the backward

        def run(*given: Any) -> Any:
            return (runs.pop() if len(runs) > 1 else again)(*given)

        return apply(run, preserve, *args)

    def not_reentrant(
        self, generator: Generators, function: AnyCall, options: Mapping[str, Any], args: Args, kwargs: Keywords
    ) -> AbstractContextManager[None]:
        rerun = function if self._inside else self._again(function)
        return contextmanager(generator)(rerun, *options.values(), *args, **kwargs)

    def _again(self, function: AnyCall) -> AnyCall:
        """The function as it runs again in the backward: it begins with the number of the first time."""
        first = self._next

        def again(*args: Any, **kwargs: Any) -> Any:
            kept, self._next = self._next, first
            try:
                with self.listens():
                    return function(*args, **kwargs)
            finally:
                self._next = kept

        return again
