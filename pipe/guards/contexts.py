"""Several contexts around an action as one, which costs next to nothing where there is none to enter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

NOTHING: AbstractContextManager[None] = nullcontext()


def within(*contexts: AbstractContextManager[object]) -> AbstractContextManager[None]:
    """All of these contexts, the first one outermost. Those that do nothing should be NOTHING itself."""
    return NOTHING if {*contexts} == {NOTHING} else _within(contexts)


@contextmanager
def _within(contexts: tuple[AbstractContextManager[object], ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
