"""Calls of the user's modules, led through functions of ours for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.utils import checkpoint as torchs

_MISSING = object()


class Calls:
    """Forwards of modules, led through functions that are called with the module's own forward before its arguments.
    They are taken in place of the module's own from its `__dict__`, so that hooks run around it as before; of a module
    that was compiled in place, what was compiled."""

    def __init__(self, through: Mapping[nn.Module, Callable[..., Any]]) -> None:
        self._through = tuple(through.items())
        self._before: list[tuple[dict[str, Any], str, object]] = []

    def begin(self) -> None:
        for module, call in self._through:
            own = vars(module)
            key = "forward" if own.get("_compiled_call_impl") is None else "_compiled_call_impl"
            self._before.append((own, key, own.get(key, _MISSING)))
            own[key] = partial(call, getattr(module, key))

    def end(self) -> None:
        for own, key, before in self._before:
            if before is _MISSING:
                del own[key]
            else:
                own[key] = before
        self._before.clear()

    @contextmanager
    def through(self) -> Iterator[None]:
        """`begin` and `end` around a block."""
        self.begin()
        try:
            yield
        finally:
            self.end()


@contextmanager
def checkpoints_as(plain: Callable[..., Any], reentrant: Callable[..., Any]) -> Iterator[None]:
    """Within, torch.utils.checkpoint has these in place of its own: `plain`, a generator that runs the function where
    it yields, and for use_reentrant=True `reentrant`, called with the function and preserve_rng_state first."""
    own, others = vars(torchs), (plain, SimpleNamespace(apply=reentrant))
    before = {name: own[name] for name in ("_checkpoint_without_reentrant_generator", "CheckpointFunction")}
    own.update(zip(before, others, strict=True))
    try:
        yield
    finally:
        own.update(before)
