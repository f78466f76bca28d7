"""Several contexts around an action as one, which costs next to nothing where there is none to enter."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

NOTHING: AbstractContextManager[None] = nullcontext()


def within(*contexts: AbstractContextManager[object]) -> AbstractContextManager[object]:
    """Enter all of these contexts, for a `with` that leaves them. Those that do nothing should be NOTHING itself."""
    if {*contexts} == {NOTHING}:
        return NOTHING
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return stack.pop_all()
