"""The numbers of units and of random calls between them, told while a model runs as it is: the ones of its record."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..units import EnterUnit
from .intercept import listening
from .which import Roles


@contextmanager
def announcing(roles: Roles, numbers: Sequence[int | None], enter: EnterUnit) -> Iterator[None]:
    """Within, one forward of the model: `enter` is told as the stages tell it, also where it is checkpointed.

    Arguments:
        numbers: of the calls of units and the random ones between them, in order; see `Flow.numbers`.
    """
    announcer = _Announcer(roles, numbers, enter)
    with announcer.listens():
        yield


class _Announcer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """See Listener. A function between the units counts where it first draws."""

    def __init__(self, roles: Roles, numbers: Sequence[int | None], enter: EnterUnit) -> None:
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
        """Within: what the model calls counts."""
        if self._listens:
            yield
            return
        self._listens = True
        try:
            with listening(self, self._modules), self:
                yield
        finally:
            self._listens = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not self._has_drawn:
            self._has_drawn = True
            self._tell()
        return func(*args, **(kwargs or {}))

    def _tell(self) -> None:
        number = self._numbers[self._next] if self._next < len(self._numbers) else self._next
        self._next += 1
        if number is not None:
            self._enter(number)

    def _whole(self, call: Callable[[], Any], *, is_unit: bool) -> Any:
        """A call that is not looked into."""
        if self._inside:
            return call()
        self._inside, self._has_drawn = True, is_unit
        try:
            return call()
        finally:
            self._inside, self._has_drawn = False, True

    def module(self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See Listener."""
        if self._inside or id(module) not in self._units:
            return call(*args, **kwargs)
        self._tell()
        return self._whole(lambda: call(*args, **kwargs), is_unit=True)

    def function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See Listener."""
        return self._whole(lambda: function(*args, **kwargs), is_unit=False)

    def autograd_function(
        self,
        kind: type[torch.autograd.Function],
        apply: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """See Listener."""
        return self._whole(lambda: apply(*args, **kwargs), is_unit=False)

    def reentrant(
        self, apply: Callable[..., Any], function: Callable[..., Any], preserve: bool, args: tuple[Any, ...]
    ) -> Any:
        """See Listener."""
        if self._inside:
            return apply(function, preserve, *args)
        again = self._again(function)
        runs = [again, function]  # the first time within this forward, then in the backward

        def run(*given: Any) -> Any:
            return (runs.pop() if len(runs) > 1 else again)(*given)

        return apply(run, preserve, *args)

    def not_reentrant(
        self,
        generator: Callable[..., Generator[None]],
        function: Callable[..., Any],
        options: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> AbstractContextManager[None]:
        """See Listener."""
        rerun = function if self._inside else self._again(function)
        return contextmanager(generator)(rerun, *options.values(), *args, **kwargs)

    def _again(self, function: Callable[..., Any]) -> Callable[..., Any]:
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
