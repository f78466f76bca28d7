"""A stage of a record: its calls as Python, over the user's own modules.

def run(v0, v3):
    v2 = c0(v0, 4)                  glue that each stage makes for itself
    enter(5)
    v4 = u0(v3, **{'mask': v2})     a unit
    with grad(False):
        v6 = c1(v4, t0['scale'])    glue with a buffer, looked up when it runs
    return (v4, v6)

Whoever names a keyword, a buffer or an attribute chooses no text of it: names are numbered here, and what else is
in it are constants of Python's own types.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, groupby
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ..fingerprint import module_form, tensor_form, value_form
from ..forms import Form
from ..surroundings import holding
from ..units import MODEL_INPUT, EnterUnit, Linked, OutputError, StageModule, ValueRef
from .calls import Call, Context, GlueCall, Region, UnitCall
from .flow import Flow
from .templates import Constant, MadeObject, Parts, Ref, Slot, Template, is_written_out, walk

_NUMBERS = count()


@dataclass(frozen=True, kw_only=True)  # no slots: a cached property
class RecordedPiece:
    """One stage of a recorded model: the calls that `stage_of` puts on it, and others that all stages make."""

    flow: Flow
    stage_of: Mapping[int, int]
    stage: int
    num_stages: int
    numbers: Mapping[int, int | None]
    enter_unit: EnterUnit | None
    is_flat: ClassVar[bool] = True

    @cached_property
    def parts(self) -> tuple[list[int], list[int], list[Template]]:
        """Numbers of the values that it takes, the calls that it makes, ascending, and what it returns."""
        is_last = self.stage == self.num_stages - 1
        given, calls = self.flow.needed(self.stage_of, self.stage, is_last=is_last)
        if is_last:
            return given, calls, list(self.flow.record.results)
        return given, calls, [Ref(n) for n in self.flow.travelling(self.stage_of, self.stage, self.num_stages)]

    @property
    def name(self) -> str:
        own = [call for call in self.parts[1] if call in self.flow.position]
        names = [call.name for i in own if isinstance(call := self.flow.record.calls[i], UnitCall)]
        names = names or [self.flow.name_of(call) for call in own] or ["nothing"]  # without labels, a loss is gone
        return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"

    @property
    def end(self) -> str:
        return self.name

    def link(self, before: StageModule | None, *, index: int, inputs: Form) -> Linked:
        given, calls, outputs = self.parts
        number_of = (
            {} if self.enter_unit is None else {id(self.flow.record.calls[i]): self.numbers.get(i) for i in calls}
        )
        module = Program(self.flow, calls, inputs=given, outputs=outputs, writer=_Writer(self.enter_unit, number_of))
        return module, tuple(map(self._source, given))

    def _source(self, number: int) -> ValueRef:
        maker = self.flow.maker.get(number)
        if maker is None:
            return ValueRef(MODEL_INPUT, number)
        producer = self.stage_of[maker]
        return ValueRef(producer, self.flow.travelling(self.stage_of, producer, self.num_stages).index(number))

    def form(self) -> object:
        given, calls, outputs = self.parts
        number = {value: i for i, value in enumerate(given)}

        def text(template: Template) -> object:
            if isinstance(template, Ref):
                return "value", number[template.number]
            if isinstance(template, Slot):
                return tensor_form(template.tensor())
            if isinstance(template, Constant):
                return value_form(template.value)
            if isinstance(template, MadeObject):
                return template.kind, tuple(map(text, template.attributes.values()))
            return template.kind, tuple(map(text, template.parts)), template.keys

        found: list[Any] = []
        for i in calls:
            call = self.flow.record.calls[i]
            what = module_form(call.module) if isinstance(call, UnitCall) else call.function
            around = tuple((each.name, value_form(each.value)) for each in call.context.settings)
            modes = call.context._replace(settings=())
            found.append((what, text(call.args), text(call.kwargs), modes, around, call.region is not None))
            for made in call.made():
                number[made] = len(number)
        return tuple(found), tuple(map(text, outputs))


class Program(nn.Module):
    """Runs some calls of a record: flat tensors in, a tuple of tensors out. Its parameters and buffers are those of the
    units that it runs, and those that the code between them takes."""

    def __init__(
        self, flow: Flow, calls: Sequence[int], *, inputs: Sequence[int], outputs: Sequence[Template], writer: _Writer
    ) -> None:
        super().__init__()
        chosen = [flow.record.calls[i] for i in calls]
        modules = {id(call.module): call.module for call in chosen if isinstance(call, UnitCall)}
        self.units = nn.ModuleList(modules.values())
        inside = {id(part) for part in self.units.modules()}
        slots = [slot for i in calls for slot in flow.slots[i]] + [each for each in outputs if isinstance(each, Slot)]
        holders: dict[int, dict[Slot, None]] = {}
        for slot in slots:
            if id(slot.module) not in inside:
                holders.setdefault(id(slot.module), {})[slot] = None
        self.slots = nn.ModuleList(_Entries(list(each)) for each in holders.values())
        self.code = writer.write(chosen, inputs, outputs)
        self.forward = _compiled(self.code, writer.names)


class _Entries(nn.Module):
    """Some parameters and buffers of a module that is not run itself: what is written here is written there."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        super().__init__()
        for table in ("_parameters", "_buffers"):
            keys = [slot.key for slot in slots if slot.table == table]
            if keys:
                self.__dict__[table] = _View(vars(slots[0].module)[table], keys)


class _View(dict[str, Any]):
    """Chosen entries of another table, as they are there at any moment."""

    def __init__(self, table: MutableMapping[str, Any], keys: Sequence[str]) -> None:
        super().__init__(dict.fromkeys(keys))
        self._table = table

    def __getitem__(self, key: str) -> Any:
        return self._table[key]

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, None)
        self._table[key] = value

    def get(self, key: str, default: Any = None) -> Any:
        return self._table.get(key, default) if key in self else default

    def values(self) -> Any:
        return [self._table[key] for key in self]

    def items(self) -> Any:
        return [(key, self._table[key]) for key in self]


class _Writer:
    """Writes the Python of some calls; `names` that it uses, and what they mean."""

    def __init__(self, enter_unit: EnterUnit | None, number_of: Mapping[int, int | None]) -> None:
        self._number_of = number_of
        self._known: dict[tuple[str, int], str] = {}
        self._states: set[int] = set()
        self.names: dict[str, Any] = {
            "Tensor": torch.Tensor,
            "grad": torch.set_grad_enabled,
            "autocast": torch.autocast,
            "holding": holding,
            "checkpoint": checkpoint,
            "unflatten": pytree.tree_unflatten,
            "leaves": _leaves,
            "other": _other,
            "new": _new,
            "enter": enter_unit,
        }

    def write(self, calls: Sequence[UnitCall | GlueCall], inputs: Sequence[int], outputs: Sequence[Template]) -> str:
        taken_behind = _taken_behind(calls, outputs)
        lines = [f"def run({', '.join(f'v{number}' for number in inputs)}):"]
        done = 0
        for region, group in groupby(calls, key=lambda call: call.region):
            some = list(group)
            done += len(some)
            if region is not None:  # what runs again in the backward finds the same objects
                for call in some:
                    lines += ["    " + line for line in self._new_states(call)]
            body = list(self._calls(some))
            if region is not None:
                body = self._region(region, some, body, taken_behind[done])
            lines += ["    " + line for line in body]
        lines.append(f"    return ({''.join(self._text(each) + ', ' for each in outputs)})")
        return "\n".join(lines) + "\n"

    def _region(
        self, region: Region, calls: Sequence[Call], body: Sequence[str], taken_behind: frozenset[int]
    ) -> list[str]:
        made = {number for call in calls for number in call.made()}
        takes = dict.fromkeys(
            each.number
            for call in calls
            for each in call.templates()
            if isinstance(each, Ref) and each.number not in made
        )
        gives = [f"v{number}" for number in sorted(made & taken_behind)]
        arguments = ", ".join(f"v{number}" for number in takes)
        name = f"r{next(_NUMBERS)}"
        options = self._dict(region.options, map(self._constant, region.options.values()))
        given = f"{name}, {arguments}" if arguments else name
        call = f"checkpoint({given}, **{options})"
        returned = gives[0] if len(gives) == 1 else f"({', '.join(gives)})"
        target = f"{', '.join(gives)} = " if gives else ""
        return [
            f"def {name}({arguments}):",
            *("    " + line for line in body),
            f"    return {returned}" if gives else "    return None",
            target + call,
        ]

    def _calls(self, calls: Sequence[UnitCall | GlueCall]) -> Iterator[str]:
        for context, group in groupby(calls, key=lambda call: call.context):
            lines = [line for call in group for line in self._call(call)]
            for opening in reversed(self._openings(context)):
                lines = [opening, *("    " + line for line in lines)]
            yield from lines

    def _openings(self, context: Context) -> list[str]:
        found = [] if context.grad is None else [f"with grad({context.grad}):"]
        for kind, dtype in context.autocast:
            found.append(f"with autocast({kind!r}, dtype={self._constant(dtype)}, enabled={dtype is not None}):")
        if context.settings:
            found.append(f"with holding({self._name('c', context.settings)}):")
        return found

    def _call(self, call: UnitCall | GlueCall) -> Iterator[str]:
        yield from self._new_states(call)  # here at the earliest: objects hold what calls have made
        number = self._number_of.get(id(call))
        if number is not None:
            yield f"enter({number})"
        arguments = [self._text(each) for each in call.args.parts]
        arguments += [f"**{self._text(call.kwargs)}"] if call.kwargs.parts else []
        called = self._name("u", call.module) if isinstance(call, UnitCall) else self._name("c", call.function)
        text = f"{called}({', '.join(arguments)})"
        if call.structure.is_leaf() and 0 in call.results:  # one tensor
            value = f"v{call.results[0]}"
            yield f"{value} = {text}"
            if isinstance(call, UnitCall):
                yield f"if not isinstance({value}, Tensor): other({self._name('c', call)}, {value})"
        elif call.results:
            yield f"o = leaves({text}, {self._name('c', call)})"
            for place, number in call.results.items():
                yield f"v{number} = o[{place}]"
        else:
            yield text
        for before, after in call.changed.items():
            if after not in call.results.values():
                yield f"v{after} = v{before}"

    # Texts

    def _new_states(self, call: Call) -> Iterator[str]:
        for state in [each for each in call.templates() if isinstance(each, MadeObject)][::-1]:  # inner ones first
            if state.number not in self._states:
                self._states.add(state.number)
                attributes = self._dict(state.attributes, map(self._text, state.attributes.values()))
                items = "None" if state.items is None else self._text(state.items)
                yield f"s{state.number} = new({self._name('c', state.kind)}, {attributes}, {items})"

    def _text(self, template: Template) -> str:
        if isinstance(template, Ref):
            return f"v{template.number}"
        if isinstance(template, Slot):
            return f"{self._name('t', vars(template.module)[template.table])}[{self._constant(template.key)}]"
        if isinstance(template, MadeObject):
            return f"s{template.number}"
        if isinstance(template, Constant):
            return self._constant(template.value)
        return self._parts(template)

    def _parts(self, template: Parts) -> str:
        parts = [self._text(each) for each in template.parts]
        if template.kind is tuple:
            return f"({''.join(part + ', ' for part in parts)})"
        if template.kind is slice:
            return f"slice({', '.join(parts)})"
        if template.kind is dict:
            return self._dict(template.keys, parts)
        inner = f"[{', '.join(parts)}]"
        return inner if template.kind is list else f"unflatten({inner}, {self._name('c', template.spec)})"

    def _dict(self, keys: Iterable[object], parts: Iterable[str]) -> str:
        return f"{{{', '.join(f'{self._constant(key)}: {part}' for key, part in zip(keys, parts, strict=True))}}}"

    def _constant(self, value: object) -> str:
        return repr(value) if is_written_out(value) else self._name("c", value)

    def _name(self, letter: str, value: object) -> str:
        """A name for an object (the names hold it, so that its id stays its own)."""
        key = (letter, id(value))
        if key not in self._known:
            self._known[key] = f"{letter}{len(self._known)}"
            self.names[self._known[key]] = value
        return self._known[key]


def _taken_behind(calls: Sequence[Call], outputs: Sequence[Template]) -> list[frozenset[int]]:
    """[n + 1] values that are taken at or after each call."""
    found = [frozenset(each.number for out in outputs for each in walk(out) if isinstance(each, Ref))]
    for call in reversed(calls):
        found.append(found[-1] | {each.number for each in call.templates() if isinstance(each, Ref)})
    return found[::-1]


def _compiled(code: str, names: Mapping[str, Any]) -> Callable[..., Any]:
    filename = f"<stagewright stage {next(_NUMBERS)}>"
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
    space = dict(names)
    exec(compile(code, filename, "exec"), space)
    run: Callable[..., Any] = space["run"]
    return run


def _leaves(value: object, call: UnitCall | GlueCall) -> list[Any]:
    found, structure = pytree.tree_flatten(value)
    if isinstance(call, UnitCall):
        places = {i for i, leaf in enumerate(found) if isinstance(leaf, torch.Tensor)}
        if structure != call.structure or places != call.results.keys():
            _other(call, value)
    return found


def _other(call: UnitCall, value: object) -> None:
    found, structure = pytree.tree_flatten(value)
    now = pytree.tree_unflatten([type(leaf).__name__ for leaf in found], structure)
    raise OutputError(
        f"{call.name} ({type(call.module).__name__}) returns {now!r:.200}, and returned something built otherwise when "
        f"the model was recorded: expected the same structure for every batch"
    )


def _new(kind: type, attributes: Mapping[str, Any], items: Any) -> Any:
    """An object in the state in which a forward made it."""
    maker: Any = kind
    made = maker.__new__(maker)
    made.__dict__.update(attributes)
    if isinstance(made, dict):
        dict.update(made, items)
    elif isinstance(made, list):
        list.extend(made, items)
    return made
