"""A record in words that are the same in every process: no id, hash or address; sets sorted, modules by their paths."""

from __future__ import annotations

import enum
import re
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..units import Step
from .calls import Context, Guard, Record, Store, UnitCall
from .templates import Constant, Parts, Ref, Slot, State, Template

# Modules of types whose text says all of a value; of other objects the class alone counts.
_TOLD = ("builtins", "functools", "numpy", "torch")


class Words:
    """Texts of values and calls.

    Arguments:
        model: whose modules are named by their paths.
        numbers: whether numbers count, which shapes decide on.
    """

    def __init__(self, model: nn.Module, *, numbers: bool = True) -> None:
        self._numbers = numbers
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._open: list[object] = []  # being looked into, outermost first
        self._states: dict[int, int] = {}  # in the order in which they are named here

    def call(self, call: Any, value: Callable[[int], str]) -> str:
        """What is called, under which modes, with what; values are named by `value`."""
        if isinstance(call, UnitCall):
            what = f"{call.name.partition('#')[0]} ({type(call.module).__name__})"
        else:
            what = self.value(call.function)
        region = "" if call.region is None else f" in checkpoint({self.value(dict(call.region.options))})"
        arguments = [self._template(each, value) for each in call.args.parts]
        named = zip(call.kwargs.keys, call.kwargs.parts, strict=True)
        arguments += [f"{key}={self._template(each, value)}" for key, each in named]
        modes = "" if call.context == Context() else f" under {tuple(call.context)}"
        return f"{what}({', '.join(arguments)}){modes}{region}"

    def record(self, record: Record) -> Iterator[Step]:
        """All of it, call by call."""
        regions: dict[object, int] = {}
        for call in record.calls:
            region = "" if call.region is None else regions.setdefault(call.region, len(regions))
            name = call.name if isinstance(call, UnitCall) else ""
            gives = f"{call.results} {_plain(call.structure)} {call.changed} {call.writes} {call.enters}"
            behind = f"{sorted(call.behind)} {name} {region}"
            yield Step(f"{self.call(call, _number)} -> {gives} {behind}", call.line)
        results = [self._template(each, _number) for each in record.results]
        pairs = sorted({(first, second) for first, second, _ in record.together})
        yield Step(f"the model returns {results} as {record.output_form}, with {pairs} together")

    def _template(self, template: Template, value: Callable[[int], str]) -> str:
        if isinstance(template, Ref):
            return value(template.number)
        if isinstance(template, Slot):
            return f"{self.value(template.module)}.{template.key}"
        if isinstance(template, Constant):
            return self.value(template.value)
        if isinstance(template, Parts):
            parts = [self._template(each, value) for each in template.parts]
            if template.kind is not dict:
                return f"{template.kind.__name__ if template.kind else _plain(template.spec)}({', '.join(parts)})"
            return str(dict(zip(map(self.value, template.keys), parts, strict=True)))
        assert isinstance(template, State)
        number = self._states.setdefault(template.number, len(self._states))
        held = {key: self._template(each, value) for key, each in template.attributes.items()}
        items = None if template.items is None else self._template(template.items, value)
        return f"{template.kind.__qualname__} {number}{held}{items}"

    def value(self, value: Any) -> str:
        """A value; of objects that are no data, their class alone."""
        if isinstance(value, nn.Module):
            path = self._paths.get(id(value))
            return type(value).__qualname__ if path is None else f"module {path!r}"
        if isinstance(value, set | frozenset):
            return f"set{sorted(map(self.value, value))}"
        name, parts = _parts(value)
        if parts is None or any(value is each for each in self._open):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return "number" if is_number and not self._numbers else name
        self._open.append(value)
        text = f"{name}{[*map(self.value, parts)]}"
        self._open.pop()
        return text


def _parts(value: Any) -> tuple[str, Iterable[Any] | None]:
    """The name of a value, and what is in it."""
    kind = type(value).__qualname__
    if isinstance(value, torch.Tensor):
        return _tensor(value) + _content(value), None
    if isinstance(value, np.ndarray):
        return f"array{value.shape} {value.dtype} {'' if value.dtype.hasobject else zlib.crc32(value.tobytes())}", None
    if isinstance(value, Mapping):
        return kind, [*value, *value.values()]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return kind, value
    if isinstance(value, slice):
        return kind, [value.start, value.stop, value.step]
    if isinstance(value, Guard | Store):
        return kind, [getattr(value, key) for key in value.__slots__ if key != "line"]
    if isinstance(value, types.MethodWrapperType):
        return value.__name__, [value.__self__]
    if isinstance(value, types.FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        code = zlib.crc32(value.__code__.co_code)
        return f"{value.__module__}.{value.__qualname__} {code}", [*held, *(value.__defaults__ or ())]
    if isinstance(value, torch.device):
        return str(value.type), None  # each process has its own
    is_told = type(value).__module__ in _TOLD or isinstance(value, enum.Enum)
    return _plain(value) if is_told else kind, None


def _number(number: int) -> str:
    return f"v{number}"


def _plain(value: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _tensor(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return type(tensor).__name__
    return f"{tuple(tensor.shape)} {tensor.dtype}{' wants a gradient' if tensor.requires_grad else ''}"


def _content(tensor: torch.Tensor) -> str:
    """Of a constant: each process has made its own."""
    if tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided or type(tensor) is not torch.Tensor:
        return ""
    with torch.no_grad():
        bytes_of = tensor.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return f" {zlib.crc32(bytes_of.numpy().tobytes())}"


def digest(steps: Iterable[Step]) -> str:
    """A short text that differs where any step does."""
    return blake2b("\n".join(step.text for step in steps).encode(), digest_size=16).hexdigest()


def modules(root: nn.Module) -> list[Step]:
    """Classes of a model's modules, and shapes and types of its tensors, by name."""
    found = [f"module {name!r}: {type(module).__name__}" for name, module in root.named_modules(remove_duplicate=False)]
    tensors = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    return [Step(each) for each in [*found, *(f"{name!r}: {_tensor(x)}" for name, x in tensors)]]
