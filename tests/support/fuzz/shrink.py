"""A failing case, made smaller as long as it fails in the same way."""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from .cases import Case, Model
from .verdict import Verdict

Check = Callable[[Case], Verdict]


def simpler(case: Case) -> Iterator[Case]:
    """Cases with less in them, those that leave out most first."""
    half = len(case.calls) // 2
    for calls in (case.calls[:half], case.calls[half:], *_without_one(case.calls)):
        if calls:
            yield replace(case, calls=calls)
    for field in ("options", "builder"):
        for pairs in _without_one(getattr(case, field)):
            yield replace(case, **{field: pairs})
    for model in _simpler_models(case.model):
        yield replace(case, model=model)
    plain = Case(model=case.model)
    for name in ("V", "refill", "is_lazy", "is_deferred", "optimizer", "data", "tensor"):
        if getattr(case, name) != getattr(plain, name):
            yield replace(case, **{name: getattr(plain, name)})
    if case.schedule != plain.schedule:
        yield replace(case, schedule=plain.schedule, builder=(), V=None)
    yield from _smaller(case)


def _smaller(case: Case) -> Iterator[Case]:
    yield from (replace(case, P=P) for P in range(1 + case.gloo, min(case.P, 3)))
    yield from (replace(case, M=M) for M in (1, 2, case.M - 1) if 0 < M < case.M)
    for i, call in enumerate(case.calls):
        for size in ((2, 3), (case.M, 3)):
            if call[0] == "train" and size < call[1:]:
                yield replace(case, calls=(*case.calls[:i], ("train", *size), *case.calls[i + 1 :]))


def _without_one(items: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return [items[:i] + items[i + 1 :] for i in range(len(items))]


def _simpler_models(model: Model) -> Iterator[Model]:
    for blocks in _without_one(model.blocks):
        if blocks:
            yield replace(model, blocks=blocks)
    for i, name in enumerate(model.blocks):
        if name not in ("linear", "stash", "pop"):
            yield replace(model, blocks=(*model.blocks[:i], "linear", *model.blocks[i + 1 :]))
    for field in fields(Model):
        if field.name != "blocks" and getattr(model, field.name) != field.default:
            yield replace(model, **{field.name: field.default})


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
