"""The listener that records a forward: calls of units, and of torch's public functions between them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ..forms import Form
from ..made_up import Shaped, call_for_shapes
from ..memory import memory_of
from ..source_line import line_now, module_at
from ..surroundings import Surroundings
from .around import AroundCalls, refuse_fakes_in_closures
from .calls import (
    HOOKED,
    LIKE_FIRST,
    READS,
    SETTERS,
    Call,
    Context,
    DecisionGuard,
    GlueCall,
    Record,
    Region,
    Store,
    UnitCall,
    around_writes,
    calls_behind,
    follows,
    samples_of,
)
from .intercept import AnyCall, Args, Generators, Keywords, Roles, hearing_no_functions
from .reads import IN_A_MODULE, NOT_HERE, Attributes, CodeReads, OpenedModule, Tables
from .refusals import RefusedError, check_now, refuse_distribution, refuse_function, refuse_packed
from .templates import Constant, Parts, Ref, Slot, Template
from .values import Draws, Owners, Values


class ForwardRecorder:
    """Recorder of one forward: calls of units and of functions, their values, what they share and what they check.
    `unit`: the unit's call that is under way, or that has raised an error, by name."""

    def __init__(
        self, model: nn.Module, roles: Roles, inputs: Sequence[torch.Tensor], surroundings: Surroundings
    ) -> None:
        self._roles = roles
        self._path_of = {id(module): path for path, module in (*roles.opened.items(), *roles.units.items())}
        self._units = {id(module) for module in roles.units.values()}
        self._stored = {
            (path, key): value for path, module in roles.opened.items() for key, value in module._buffers.items()
        }
        self._tables = Tables(roles.opened, roles.units)
        self._reads = CodeReads(roles.opened, is_within_call=lambda: self._running is not None or self._is_busy)
        self._attributes = Attributes(
            running=lambda: self._running,
            opened={id(module) for module in roles.opened.values()},
            has_read=self._reads.has_read,
            inside={id(part) for module in roles.units.values() for part in module.modules()},
            join=self._join,
        )
        opened = roles.opened.items()
        self._opened = {path: OpenedModule(module, path, self._attributes, self._reads) for path, module in opened}
        self._together: list[tuple[int, int, str]] = []
        self._handed_on: list[tuple[int, int, str]] = []
        self._draws = Draws(self._join)
        self._owners = Owners(
            self._draws.note, roles.units, is_models=lambda x: id(x) in self._values.slots, join=self._hand_on
        )
        self._values = Values(model, owners=self._owners, on_object=self._attributes.watch)
        units = [part for module in roles.units.values() for part in module.modules()]
        held = [x for part in units for x in (*part._parameters.values(), *part._buffers.values()) if x is not None]
        self._unit_memory = {memory_of(x) for x in held} - {None}
        self._around = Context.now()
        self._around_calls = AroundCalls(surroundings, self._reads)
        self._calls: list[UnitCall | GlueCall] = []
        self._times: dict[str, int] = {}
        self._stack = [""]
        self._regions: list[Region] = []
        self.unit: str | None = None
        self._running: int | None = None  # the call of a unit or function that is under way
        self._is_busy = False  # looking at tensors itself
        self._has_ended = False
        self._is_sized = False  # whether sizes of what the call gives follow from values
        for x in inputs:
            self._values.new(x, call=-1)
            self._owners.came_from_outside(x)

    @property
    def inside(self) -> str:
        """The opened module whose code runs."""
        return self._stack[-1]

    @property
    def line(self) -> str:
        """Where the user's code is: " at file:line, in function"; "" after the forward."""
        return "" if self._has_ended else line_now()

    @contextmanager
    def watching(self, kinds: set[type]) -> Iterator[None]:
        with self._owners.watching(), self._attributes.watched() as patches, self._reads.watching(kinds, patches):
            self._around_calls.begin()
            yield

    def _join(self, first: int, second: int, why: str) -> None:
        self._together.append((first, second, why))

    def _hand_on(self, first: int, second: int, why: str) -> None:
        self._together.append((first, second, why))
        self._handed_on.append((first, second, why))

    # What is listened to

    def module(self, module: nn.Module, call: AnyCall, args: Args, kwargs: Keywords) -> Any:
        if self._running is not None:
            return call(*args, **kwargs)
        path = self._path_of[id(module)]
        refuse_packed(path, (*args, *kwargs.values()))
        if id(module) not in self._units:
            self._stack.append(path)
            with self._draws.whole_unit() if path in self._roles.opened_units else nullcontext():
                value = call(*args, **kwargs)
            self._stack.pop()
            return value
        with self._reads.paused():
            return self._unit(path, module, call, args, kwargs)

    def _unit(self, path: str, module: nn.Module, call: AnyCall, args: Args, kwargs: Keywords) -> Any:
        self._draws.check()
        self._note_stores()
        self._tables.check(module)
        self._times[path] = times = self._times.get(path, 0) + 1
        name = path if times == 1 else f"{path}#{times}"
        self._draws.drew = False
        self._is_sized = self._values.is_sized((args, kwargs))
        buffers = [(buffer, buffer._version) for buffer in module.buffers()]

        def unit_call(common: dict[str, Any]) -> UnitCall:
            writes = any(buffer._version != version for buffer, version in buffers)
            keeps_state = writes or len(self._calls) in self._attributes.setting_own
            return UnitCall(**common, name=name, module=module, keeps_state=keeps_state)

        def run() -> Any:
            with hearing_no_functions(self):
                return call_for_shapes(module, args, kwargs, call=call)

        made = self._make(run, args, kwargs, unit_call, unit=name)
        self._tables.note(module)
        return made

    def function(self, function: AnyCall, call: AnyCall, args: Args, kwargs: Keywords) -> Any:
        if self._running is not None or self._is_busy:
            return call(*args, **kwargs)
        with self._reads.paused():
            return self._function(function, call, args, kwargs)

    def _function(self, function: AnyCall, call: AnyCall, args: Args, kwargs: Keywords) -> Any:
        if function is torch.Tensor.__iter__:
            return iter(self.function(torch.Tensor.unbind, torch.Tensor.unbind, args, kwargs))
        if function in READS and not kwargs:
            decided = self._decided(function, args)
            if decided is not None:
                return decided
        if function is torch._assert and (number := self._values.number_of(args[0])) is not None:
            return self._append(DecisionGuard(torch.Tensor.__bool__, True, line_now(), is_check=True), (Ref(number),))
        if function is torch.Tensor.__format__ and isinstance(args[0], FakeTensor):
            return f"a tensor of shape {tuple(args[0].shape)}"  # in an error's message, say
        name = getattr(function, "__name__", "")
        refuse_function(function, name)
        self._note_stores()
        self._draws.drew = False
        is_effect, is_hook = function in SETTERS | HOOKED, function in HOOKED
        if (is_effect or function is torch.Tensor.requires_grad_) and id(args[0]) in self._values.slots:
            what = "puts a hook on" if is_hook else "sets an attribute of"
            raise RefusedError(f"the code between the modules {what} a parameter or buffer", expected=NOT_HERE)
        self._is_sized = self._values.is_sized(args[:1] if name in LIKE_FIRST else (args, kwargs))
        made = Shaped(function) if name == "ctc_loss" else function

        def shaped() -> Any:
            nonlocal made
            if made is function:
                try:
                    return call(*args, **kwargs)
                except DynamicOutputShapeException:
                    made, self._is_sized = Shaped(function), True
            return Shaped(call)(*args, **kwargs)

        def glue_call(common: dict[str, Any]) -> GlueCall:
            return GlueCall(**common, function=made, is_random=self._draws.drew, is_effect=is_effect)

        result = self._make(shaped, args, kwargs, glue_call, is_effect=is_effect, is_hook=is_hook)
        if self._draws.drew and any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values())):
            raise RefusedError(
                "the code between the modules draws from a torch.Generator of its own", expected=IN_A_MODULE
            )
        self._tables.on_tensors += [result] * isinstance(result, RemovableHandle)
        return result

    def reentrant(self, apply: AnyCall, function: AnyCall, preserve: bool, args: Args) -> Any:
        if self._running is not None:
            return apply(function, preserve, *args)
        with self._region({"use_reentrant": True, "preserve_rng_state": preserve}):
            return function(*args)

    def not_reentrant(
        self, generator: Generators, function: AnyCall, options: Mapping[str, Any], args: Args, kwargs: Keywords
    ) -> AbstractContextManager[None]:
        if self._running is not None:
            return contextmanager(generator)(function, *options.values(), *args, **kwargs)
        return self._region({"use_reentrant": False, **options})

    @contextmanager
    def _region(self, options: Mapping[str, Any]) -> Iterator[None]:
        if self._regions:  # one within another: the outer one keeps less
            yield
            return
        self._regions.append(Region(options=options))
        yield
        self._regions.pop()

    # Decisions on what is drawn

    def _decided(self, read: AnyCall, args: Args) -> Any:
        """Python's reading of a value that depends on random numbers and constants alone; None of any other value. It
        must be the same in all samples, and is guarded. A flag of which one value alone raises no error is that."""
        number = self._values.number_of(args[0])
        calls = None if number is None else calls_behind(number, self._values.made_by, self._calls)
        if number is not None and calls is None and (args[0].dtype == torch.bool or read is torch.Tensor.__bool__):
            expected, line = check_now() or (None, "")
            if expected is not None:
                self._append(DecisionGuard(read, expected, line, is_check=True), (Ref(number),))
            return expected
        if number is None or calls is None:
            return None
        templates = [each for call in calls for each in call.templates()]
        self._reads.tensors += [
            each.value for each in templates if isinstance(each, Constant) and isinstance(each.value, torch.Tensor)
        ]
        samples = samples_of(number, calls, lambda value: read(value, *args[1:]))
        if any(each != samples[0] for each in samples):
            raise RefusedError(
                "the code between the modules decides on a random number, such as which layer to leave out"
            )
        if len(samples) > 1:
            self._append(DecisionGuard(read, samples[0], line_now()), (Ref(number),))
        return samples[0]

    # Making a call

    def _make(self, *args: Any, **options: Any) -> Any:
        self._is_busy = True
        try:
            return self._make_busy(*args, **options)
        finally:
            self._is_busy = False

    def _make_busy(
        self,
        call: Callable[[], Any],
        args: Args,
        kwargs: Keywords,
        build: Callable[[dict[str, Any]], UnitCall | GlueCall],
        *,
        unit: str | None = None,
        is_effect: bool = False,
        is_hook: bool = False,
    ) -> Any:
        if unit is None:
            self._draws.check()
        me, takes_sized = len(self._calls), self._is_sized
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        versions = [x._version for x in given]
        modes = Context.now()._replace(settings=self._around_calls.settings(unit))
        try:  # before the call, which may change what it is given
            templates, refused = self._values.templates(args, kwargs), None
        except RefusedError as error:
            templates, refused = None, error
        states = set() if unit is None else self._values.ids_in_states(args, kwargs)
        within = nullcontext() if unit is None else self._owners.within_unit(me, unit, given, states)
        apart = nullcontext() if unit is None else self._around_calls.apart()
        self._running, self.unit = me, unit
        try:
            with within, apart:
                result = call()
        finally:
            self._running = None
        self.unit = None
        self._draws.settle()
        leaves, structure = pytree.tree_flatten(result)
        changed = [x for x, version in zip(given, versions, strict=True) if x._version != version]
        made = [x for x in leaves if isinstance(x, torch.Tensor)]
        if is_effect:
            changed = given[:1]
        if takes_sized and unit is None and type(result) in (int, tuple, list, torch.Size):
            raise RefusedError("the code between the modules reads a size that follows from values of tensors")
        if not (unit is not None or made or changed):
            return result
        if self._around_calls.saves_by_hooks and not self._regions:
            raise RefusedError("saved_tensors_hooks are in force between the units")
        if templates is None:
            assert refused is not None
            raise refused
        refuse_fakes_in_closures(args, kwargs)
        record = build(self._fields(templates, given, modes, structure))
        self._calls.append(record)
        if isinstance(record, UnitCall) or record.is_random:
            record.enters = self._draws.number(me)
        for x in {id(x): x for x in changed}.values():
            self._note_change(record, me, x, is_hook=is_hook)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                record.results[place] = self._values.new(leaf, call=me, is_sized=self._is_sized and leaf.dim() > 0)
        return result

    def _fields(
        self,
        templates: tuple[Template, Template],
        given: Sequence[torch.Tensor],
        modes: Context,
        structure: pytree.TreeSpec,
    ) -> dict[str, Any]:
        """Fields that both kinds of calls have; the results are noted later."""
        writers = (self._values.last_write.get(memory_of(x)) for x in given)
        return {
            "args": templates[0],
            "kwargs": templates[1],
            "context": modes.differing(self._around),
            "region": self._regions[-1] if self._regions else None,
            "line": line_now(),
            "results": {},
            "structure": structure,
            "changed": {},
            "follows": frozenset(call for call in writers if call is not None),
        }

    def _note_change(self, record: Call, me: int, tensor: torch.Tensor, *, is_hook: bool) -> None:
        memory = memory_of(tensor)
        why = (
            "one has a hook on the other's value" if is_hook else "they share memory that one of them changes in place"
        )
        before = self._values.number_of(tensor)
        if memory is not None and not is_hook:
            if memory in self._values.slot_memory:
                record.writes = True
                if memory in self._unit_memory:
                    raise RefusedError(
                        "the code between the modules writes to a parameter or buffer of one of them",
                        expected="that module to do it itself, or it to be done between two steps",
                    )
            for number in self._values.over(memory):
                if number != before:
                    self._together.append((self._values.made_by[number], me, why))
            self._values.last_write[memory] = me
        if before is None:
            if id(tensor) not in self._values.slots:
                raise self._owners.refuse(tensor, "is changed in place")
            record.writes = True
            return
        if is_hook:
            self._together.append((self._values.made_by[before], me, why))
        record.changed[before] = self._values.new(tensor, call=me, is_sized=self._values.is_sized(tensor))

    # The end

    def _note_stores(self) -> None:
        """Buffers that the code between the units has assigned anew."""
        for (path, key), before in self._stored.items():
            module = self._roles.opened[path]
            value = module._buffers.get(key)
            if value is before:
                continue
            self._stored[path, key] = value
            self._is_busy = True
            template = None if value is None else self._values.tensor(value)
            self._is_busy = False
            if not isinstance(template, Ref):
                raise RefusedError(f"buffer {key!r} of {module_at(path)} becomes {'None' if value is None else 'odd'}")
            self._append(Store(module, key), (template, Slot(module, "_buffers", key)), writes=True)

    def _append(self, function: Callable[..., None], args: tuple[Template, ...], *, writes: bool = False) -> None:
        """A call of our own, made for its effect."""
        common = self._fields((Parts(tuple, args), Parts(dict, ())), (), self._around, pytree.tree_structure(None))
        self._calls.append(GlueCall(**common, writes=writes, function=function, is_random=False, is_effect=True))

    def _follows(self, value: object) -> bool:
        return follows(self._values.numbers_in(value), self._values.made_by, self._calls)

    def finish(self, output: object) -> Record:
        self._draws.check()
        self._is_busy = self._has_ended = True
        sys.setprofile(None)  # no more of the user's code runs
        refuse_distribution(output)
        form, tensors = Form.of_output(output)
        results = [self._values.tensor(leaf) for leaf in tensors]
        self._note_stores()
        self._tables.finish()
        self._reads.effects += self._around_calls.effects(self._follows)
        for path, module in self._roles.opened.items():
            self._stack.append(path)  # an inner module that does this can run whole
            self._tables.check_opened(module)
            self._opened[path].check(self._follows)
            self._stack.pop()
        return Record(
            calls=tuple(self._calls),
            results=tuple(results),
            output_form=form,
            bytes_of=self._values.bytes_of,
            together=(*self._together, *around_writes(self._calls)),
            handed_on=tuple(
                (one.module, other.module, why)
                for first, second, why in self._handed_on
                if isinstance(one := self._calls[first], UnitCall)
                and isinstance(other := self._calls[second], UnitCall)
            ),
            reads=self._reads,
            written_inputs=frozenset(
                n
                for memory in self._values.last_write
                for n in self._values.over(memory)
                if self._values.made_by[n] < 0
            ),
        )
