"""A failing case, made smaller as long as it fails in the same way."""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from .cases import Case
from .verdict import Verdict

Check = Callable[[Case], Verdict]


def simpler(case: Case) -> Iterator[Case]:
    half = len(case.calls) // 2
    yield from (replace(case, calls=calls) for calls in (case.calls[:half], case.calls[half:]) if calls)
    yield from _with_less(case)
    yield from (replace(case, model=model) for model in _with_less(case.model))
    for i, name in enumerate(case.model.blocks):
        blocks = (*case.model.blocks[:i], "linear", *case.model.blocks[i + 1 :])
        if name not in ("stash", "pop"):
            yield replace(case, model=replace(case.model, blocks=blocks))
    yield replace(case, schedule="1f1b", builder=(), V=None)
    yield from (replace(case, P=P) for P in range(1 + case.gloo, min(case.P, 3)))
    yield from (replace(case, M=M) for M in (1, 2, case.M - 1) if 0 < M < case.M)
    for i, call in enumerate(case.calls):
        for size in ((2, 3), (case.M, 3)):
            if call[0] == "train" and size < call[1:]:
                yield replace(case, calls=(*case.calls[:i], ("train", *size), *case.calls[i + 1 :]))


def _with_less(record: Any) -> Iterator[Any]:
    """Lists without one of their members, and other fields as by default."""
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, tuple):
            for parts in (value[:i] + value[i + 1 :] for i in range(len(value))):
                if parts or not field.default:
                    yield replace(record, **{field.name: parts})
        elif field.name not in ("model", "schedule", "P", "M", "gloo", "seed") and value != field.default:
            yield replace(record, **{field.name: field.default})


def shrink(case: Case, verdict: Verdict, check: Check) -> tuple[Case, Verdict]:
    """The smallest case found within the time that ends as `verdict` does."""
    deadline, seen = time.monotonic() + 60.0, {case}
    found = True
    while found:
        found = False
        for smaller in simpler(case):
            if time.monotonic() > deadline:
                return case, verdict
            if smaller in seen:
                continue
            seen.add(smaller)
            now = check(smaller)
            if now.signature == verdict.signature or (now.kind == verdict.kind == "wrong"):
                case, verdict, found = smaller, now, True
                break
    return case, verdict
