"""Calls that a model makes while it runs, told to a listener: of modules, of torch's functions, of custom autograd
functions and of checkpointing.

Modules are seen whatever calls them, since for so long their classes have another `__call__`; autograd functions also
where `apply` was bound to a name before, since its code is another one for so long.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode

_MISSING = object()


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


class Listener(Protocol):
    """Told of calls; each method makes the call, and returns what it gave."""

    def module(self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of one of the modules that are listened to."""

    def function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a public function of torch, outside of others."""

    def autograd_function(
        self,
        kind: type[torch.autograd.Function],
        apply: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A call of `kind.apply`."""

    def reentrant(
        self, apply: Callable[..., Any], function: Callable[..., Any], preserve: bool, args: tuple[Any, ...]
    ) -> Any:
        """A call of checkpoint(use_reentrant=True)."""

    def not_reentrant(
        self,
        generator: Callable[..., Generator[None]],
        function: Callable[..., Any],
        options: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> AbstractContextManager[None]:
        """Around the function of checkpoint(use_reentrant=False)."""


@contextmanager
def listening(listener: Listener, modules: Mapping[int, nn.Module]) -> Iterator[None]:
    """Within: the listener is told.

    Arguments:
        modules: that are listened to, by id.
    """
    with ExitStack() as stack:
        stack.enter_context(_modules(listener, modules))
        stack.enter_context(_autograd_functions(listener))
        stack.enter_context(_checkpointing(listener))
        stack.enter_context(_Functions(listener))
        yield


class _Functions(TorchFunctionMode):
    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._listener.function(func, args, kwargs or {})


@contextmanager
def _modules(listener: Listener, modules: Mapping[int, nn.Module]) -> Iterator[None]:
    """Classes get another `__call__`: objects and what type() says of them stay as they are."""
    kinds = {type(module): type(module).__call__ for module in modules.values()}
    own = {kind: kind.__dict__["__call__"] for kind in kinds if "__call__" in kind.__dict__}

    def hooked(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(self) not in modules:
                return original(self, *args, **kwargs)
            return listener.module(self, partial(original, self), args, kwargs)

        return call

    for kind, original in kinds.items():
        kind.__call__ = hooked(original)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind in kinds:
            if kind in own:
                kind.__call__ = own[kind]  # type: ignore[method-assign]
            else:
                del kind.__call__


_TOLD = "_stagewright_told"  # a name among those of torch's module, for so long


class _Code:
    """Whose code stands in for that of Function.apply: both use the cell that `super()` needs, and nothing else."""

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        __class__  # type: ignore[name-defined]  # noqa: B018
        return _stagewright_told(cls, args, kwargs)  # type: ignore[name-defined]  # noqa: F821


@contextmanager
def _autograd_functions(listener: Listener) -> Iterator[None]:
    function = torch.autograd.Function.__dict__["apply"].__func__
    code, names = function.__code__, function.__globals__
    if _TOLD in names:  # a recording within another one
        raise RuntimeError("the forward of a model cuts another model into stages")
    original = types.FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__

    here = threading.get_ident()

    def told(kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != here:
            return original(kind, *args, **kwargs)

        def apply(*args: Any, **kwargs: Any) -> Any:
            return original(kind, *args, **kwargs)

        if kind is torch.utils.checkpoint.CheckpointFunction:
            return listener.reentrant(apply, args[0], args[1], args[2:])
        return listener.autograd_function(kind, apply, args, kwargs)

    names[_TOLD] = told
    function.__code__ = _Code.__dict__["apply"].__func__.__code__
    try:
        yield
    finally:
        function.__code__ = code
        del names[_TOLD]


_GENERATOR = "_checkpoint_without_reentrant_generator"
_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


@contextmanager
def _checkpointing(listener: Listener) -> Iterator[None]:
    place: Any = torch.utils.checkpoint
    original = getattr(place, _GENERATOR)

    here = threading.get_ident()

    def generator(function: Callable[..., Any], *rest: Any, **kwargs: Any) -> Generator[None]:
        if threading.get_ident() != here:
            yield from original(function, *rest, **kwargs)
            return
        options, args = dict(zip(_OPTIONS, rest, strict=False)), rest[len(_OPTIONS) :]
        with listener.not_reentrant(original, function, options, args, kwargs):
            yield

    setattr(place, _GENERATOR, generator)
    try:
        yield
    finally:
        setattr(place, _GENERATOR, original)
