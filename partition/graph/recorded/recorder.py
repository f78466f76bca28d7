"""One forward of a model on fake tensors, recorded: calls of units, and of torch's public functions between them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..forms import Arguments, Form
from ..generators import python_and_numpy
from ..made_up import call_for_shapes
from ..memory import memory_of
from ..modes import uncompiled
from ..source_line import first_line, line_now, module_at, users_line
from ..stand_ins import stand_ins
from ..untouched import untouched
from .attributes import Attributes
from .calls import DRAWS, Call, Context, GlueCall, Guard, Modes, Record, Region, Store, UnitCall
from .decisions import READS, calls_behind, samples_of
from .intercept import listening
from .templates import Parts, Ref, Slot, Template
from .values import RefusedError, Values
from .which import Roles

_HOOKED = {
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
}
_SETTERS = {getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "data", "grad")}
_OWN_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLUE = -1  # who made a tensor, where it was no unit


class RecordingError(ValueError):
    """A forward does what cannot be recorded.

    Arguments:
        inside: path of the module that was opened and whose code does it.
        is_in_graph: whether a traced graph would do it.
    """

    def __init__(self, message: str, *, inside: str, is_in_graph: bool = True) -> None:
        super().__init__(message)
        self.inside = inside
        self.is_in_graph = is_in_graph


class _CarriedError(RefusedError):
    """Raised where the user's code does what no graph shows either."""


def record(model: nn.Module, roles: Roles, example: Arguments, *, device: torch.device, training: bool) -> Record:
    """Run the model once, on fake tensors, in the mode in which its modules stand; it stays as it was.

    Arguments:
        example: arguments, of whose tensors shapes and types count.
        training: whether a graph is built.

    Raises RecordingError, with the user's source line, for what cannot be recorded.
    """
    for path, module in roles.opened.items():
        hooks = next((kind for kind in _OWN_HOOKS if vars(module)[kind]), None)
        if hooks is not None:
            raise RecordingError(f"{module_at(path)} has hooks ({hooks.strip('_').replace('_', ' ')})", inside=path)
    grad = torch.enable_grad() if training else torch.no_grad()
    with ExitStack() as stack:
        stack.enter_context(untouched(model, device=device))
        stack.enter_context(uncompiled())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of the user's code: it will say so when it runs
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(grad)
        given = example.map(lambda x: torch.empty(x.shape, dtype=x.dtype, device=device))
        stack.enter_context(stand_ins(model, device))
        recorder = _Recorder(model, roles, given.tensors)
        try:
            with listening(recorder, {id(each): each for each in (*roles.opened.values(), *roles.units.values())}):
                with recorder.watching():
                    output: object = given.call(model)
                return recorder.finish(output)
        except Exception as error:
            inside = recorder.inside
            reason = str(error) if isinstance(error, RefusedError) else first_line(error)
            line = recorder.line if isinstance(error, RefusedError) and not users_line(error) else users_line(error)
            is_in_graph = not isinstance(error, _CarriedError)
            raise RecordingError(f"{reason}{line}", inside=inside, is_in_graph=is_in_graph) from error


class _Recorder:
    """Listens to one forward; see `Listener`."""

    def __init__(self, model: nn.Module, roles: Roles, inputs: Sequence[torch.Tensor]) -> None:
        self._roles = roles
        self._path_of = {id(module): path for path, module in (*roles.opened.items(), *roles.units.items())}
        self._units = {id(module) for module in roles.units.values()}
        self._stored = {
            (path, key): value for path, module in roles.opened.items() for key, value in module._buffers.items()
        }
        self._plain = {path: _plain_attributes(module) for path, module in roles.opened.items()}
        self._attributes = Attributes(
            running=lambda: self._running,
            opened={id(module) for module in roles.opened.values()},
            inside={id(part) for module in roles.units.values() for part in module.modules()},
            refuse=_refuse,
            join=lambda first, second, why: self._together.append((first, second, why)),
        )
        self._values = Values(model, what=self._what, on_object=self._attributes.watch)
        units = [part for module in roles.units.values() for part in module.modules()]
        held = [x for part in units for x in (*part._parameters.values(), *part._buffers.values()) if x is not None]
        self._unit_memory = {memory_of(x) for x in held} - {None}
        self._around = Modes.now()
        self._hooks_around = _saved_tensor_hooks()
        self._calls: list[UnitCall | GlueCall] = []
        self._times: dict[str, int] = {}
        self._kept: list[object] = []  # an id stays one object's
        self._together: list[tuple[int, int, str]] = []
        self._enters = 0
        self._whole: int | None = None  # number of the unit that was opened and is under way
        self._drawing: list[int] = []  # calls in it that have drawn
        self._stack = [""]
        self._regions: list[Region] = []
        self._running: int | None = None  # the call of a unit or function that is under way
        self._owner: dict[int, int] = {}  # call in which a tensor came to be, by id; _GLUE: outside of units
        self._runs_unit = False
        self._is_busy = False  # looking at tensors itself
        self._has_ended = False
        self._passed: set[int] = set()  # ids of what it was given
        self._passed_memory: set[object] = set()
        self._drew = False
        self._generators = python_and_numpy()
        for x in inputs:
            self._values.new(x, call=-1)
            self._owner[id(x)] = _GLUE

    @property
    def inside(self) -> str:
        """The opened module whose code runs."""
        return self._stack[-1]

    @property
    def line(self) -> str:
        """Where the user's code stands: " at file:line, in function"; "" behind the forward."""
        return "" if self._has_ended else line_now()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within: every operation is seen."""
        with _Operations(self._operation), self._attributes.watched(list(self._roles.opened.values())):
            yield

    def _operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            self._drew = True
        me = self._running
        is_unit = self._runs_unit
        if is_unit and me is not None:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, FakeTensor) and id(leaf) not in self._passed:
                    self._look_at(leaf, me)
        result = function(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._owner:
                self._owner[id(leaf)] = me if is_unit and me is not None else _GLUE
                self._kept.append(leaf)
        return result

    def _look_at(self, tensor: torch.Tensor, unit: int) -> None:
        """A tensor that a unit works on and that it was not given."""
        owner = self._owner.get(id(tensor))
        if (
            owner is None
            or owner == unit
            or id(tensor) in self._values.slots
            or memory_of(tensor) in self._passed_memory
        ):
            return
        if owner == _GLUE:
            raise RefusedError(
                f"{self._unit_name} takes a tensor of shape {tuple(tensor.shape)} that the code around it made, and "
                f"that is none of its arguments (it lies in an attribute or an object)"
            )
        first = self._calls[owner]
        assert isinstance(first, UnitCall)
        self._together.append((owner, unit, f"{self._unit_name} reads what {first.name} left in an object"))

    # What is listened to

    def module(self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See Listener."""
        if self._running is not None:
            return call(*args, **kwargs)
        path = self._path_of[id(module)]
        if id(module) not in self._units:
            is_whole = path in self._roles.opened_units and self._whole is None
            if is_whole:
                self._whole, self._enters, self._drawing = self._enters, self._enters + 1, []
            self._stack.append(path)
            value = call(*args, **kwargs)
            self._stack.pop()
            if is_whole:
                self._whole = None
            return value
        self._check_drawn()
        self._note_stores()
        self._times[path] = times = self._times.get(path, 0) + 1
        name = path if times == 1 else f"{path}#{times}"
        self._unit_name = name
        self._drew = False
        return self._make(
            lambda: call_for_shapes(module, args, kwargs, call=call),
            args,
            kwargs,
            lambda common: UnitCall(**common, name=name, module=module),
            is_unit=True,
            is_random=lambda: True,
        )

    def function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See Listener."""
        if self._running is not None or self._is_busy:
            return function(*args, **kwargs)
        if function is torch.Tensor.__iter__:
            return iter(self.function(torch.Tensor.unbind, args, kwargs))
        if function in READS and not kwargs:
            decided = self._decided(function, args)
            if decided is not None:
                return decided
        if function is torch.Tensor.backward:
            raise RefusedError("the forward runs a backward")
        self._note_stores()
        self._drew = False
        return self._make(
            lambda: function(*args, **kwargs),
            args,
            kwargs,
            lambda common: GlueCall(
                **common, function=function, is_random=self._drew, is_effect=function in _SETTERS | _HOOKED
            ),
            is_unit=False,
            is_random=lambda: self._drew,
            is_effect=function in _SETTERS,
            is_hook=function in _HOOKED,
        )

    def autograd_function(
        self,
        kind: type[torch.autograd.Function],
        apply: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """See Listener."""
        if self._running is not None:
            return apply(*args, **kwargs)
        self._drew = False
        return self._make(
            lambda: apply(*args, **kwargs),
            args,
            kwargs,
            lambda common: GlueCall(**common, function=kind.apply, is_random=self._drew, is_effect=False),
            is_unit=False,
            is_random=lambda: self._drew,
        )

    def reentrant(
        self, apply: Callable[..., Any], function: Callable[..., Any], preserve: bool, args: tuple[Any, ...]
    ) -> Any:
        """See Listener."""
        if self._running is not None:
            return apply(function, preserve, *args)
        with self._region({"use_reentrant": True, "preserve_rng_state": preserve}):
            return function(*args)

    def not_reentrant(
        self,
        generator: Callable[..., Generator[None]],
        function: Callable[..., Any],
        options: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> AbstractContextManager[None]:
        """See Listener."""
        if self._running is not None:
            return contextmanager(generator)(function, *options.values(), *args, **kwargs)
        return self._region({"use_reentrant": False, **options})

    @contextmanager
    def _region(self, options: Mapping[str, Any]) -> Iterator[None]:
        if self._regions:  # one within another: the outer one keeps less
            with nullcontext():
                yield
            return
        self._regions.append(Region(options=options))
        yield
        self._regions.pop()

    # Decisions on what is drawn

    def _decided(self, read: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Python's reading of a value that depends on random numbers and constants alone; None of any other value.

        It must be the same in all samples, and is guarded.
        """
        number = self._values.number_of(args[0])
        calls = None if number is None else calls_behind(number, self._values.made_by, self._calls)
        if number is None or calls is None:
            return None
        samples = samples_of(number, calls, lambda value: read(value, *args[1:]))
        if any(each != samples[0] for each in samples):
            raise RefusedError(
                "the code between the modules decides on a random number, such as which layer to leave out"
            )
        if len(samples) > 1:
            self._append(Guard(read, samples[0], line_now()), (Ref(number),))
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
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        build: Callable[[dict[str, Any]], UnitCall | GlueCall],
        *,
        is_unit: bool,
        is_random: Callable[[], bool],
        is_effect: bool = False,
        is_hook: bool = False,
    ) -> Any:
        if not is_unit:
            self._check_drawn()
        me = len(self._calls)
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        versions = [x._version for x in given]
        modes = Modes.now()
        try:  # before the call, which may change what it is given
            templates, refused = self._values.templates(args, kwargs), None
        except RefusedError as error:
            templates, refused = None, error
        self._running, self._runs_unit = me, is_unit
        self._passed = {id(x) for x in given} | (self._values.ids_in_states(args, kwargs) if is_unit else set())
        self._passed_memory = {memory_of(x) for x in given} - {None}
        try:
            result = call()
        finally:
            self._running, self._runs_unit = None, False
        self._generators = python_and_numpy()
        leaves, structure = pytree.tree_flatten(result)
        changed = [x for x, version in zip(given, versions, strict=True) if x._version != version]
        made = [x for x in leaves if isinstance(x, torch.Tensor)]
        if is_effect or is_hook:
            changed = given[:1]
        if not (is_unit or made or changed):
            return result
        if _saved_tensor_hooks() != self._hooks_around and not self._regions:
            raise RefusedError("saved_tensors_hooks are in force between the units")
        if templates is None:
            assert refused is not None
            raise refused
        _refuse_fakes_in_closures(args, kwargs)
        common: dict[str, Any] = {
            "args": templates[0],
            "kwargs": templates[1],
            "context": modes.differing(self._around),
            "region": self._regions[-1] if self._regions else None,
            "line": line_now(),
            "results": {},
            "structure": structure,
            "changed": {},
            "behind": frozenset(
                self._values.last_write[memory] for x in given if (memory := memory_of(x)) in self._values.last_write
            ),
        }
        record = build(common)
        self._calls.append(record)
        if is_random():
            record.enters = self._next_number()
        for x in {id(x): x for x in changed}.values():
            self._note_change(record, me, x, is_hook=is_hook)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                record.results[place] = self._values.new(leaf, call=me)
        return result

    def _next_number(self) -> int:
        if self._whole is None:
            number, self._enters = self._enters, self._enters + 1
        else:
            number = self._whole + (len(self._drawing) << DRAWS)
            if self._drew:
                me = len(self._calls) - 1
                self._together += [(each, me, "both draw random numbers of one unit") for each in self._drawing[-1:]]
                self._drawing.append(me)
        return number

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
                    raise _CarriedError(
                        "the code between the modules writes to a parameter or buffer of one of them: expected that "
                        "module to do it itself, or it to be done between two steps"
                    )
            for number in self._values.over(memory):
                if number != before:
                    self._together.append((self._values.made_by[number], me, why))
            self._values.last_write[memory] = me
        if before is None:
            if id(tensor) not in self._values.slots:
                raise RefusedError(f"{self._what(tensor)} is changed in place")
            record.writes = True
            return
        if is_hook:
            self._together.append((self._values.made_by[before], me, why))
        record.changed[before] = self._values.new(tensor, call=me)

    def _what(self, tensor: torch.Tensor) -> str:
        owner = self._owner.get(id(tensor), _GLUE)
        shape = f"a tensor of shape {tuple(tensor.shape)}"
        if owner >= 0:
            first = self._calls[owner]
            assert isinstance(first, UnitCall)
            return f"{shape} that {first.name} made and did not return"
        return f"{shape} that was not made by a public function of torch (vmap, for example)"

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
        call = GlueCall(
            args=Parts(tuple, args),
            kwargs=Parts(dict, ()),
            context=Context(),
            region=self._regions[-1] if self._regions else None,
            line=line_now(),
            results={},
            structure=pytree.tree_structure(None),
            changed={},
            writes=writes,
            function=function,
            is_random=False,
            is_effect=True,
        )
        self._calls.append(call)

    def _check_drawn(self) -> None:
        if python_and_numpy() != self._generators:
            raise RefusedError("the code between the modules draws from Python's or numpy's random generator")

    def finish(self, output: object) -> Record:
        """The record, from what the model returned."""
        self._check_drawn()
        self._is_busy = self._has_ended = True
        form, tensors = Form.of_output(output)
        results = [self._values.tensor(leaf) for leaf in tensors]
        self._note_stores()
        for path, module in self._roles.opened.items():
            changed = [k for k, v in _plain_attributes(module).items() if self._plain[path].get(k, v) != v]
            carried = [k for k, v in vars(module).items() if self._attributes.carries(module, k) and self._follows(v)]
            self._stack.append(path)  # an inner module that does this can run whole
            if carried:
                raise _CarriedError(
                    f"attribute {carried[0]!r} of {module_at(path)} brings a tensor from one forward to the next: "
                    f"expected a buffer (register_buffer), which stages keep"
                )
            if changed:
                raise RefusedError(f"attribute {changed[0]!r} of {module_at(path)} is changed by its own forward")
            self._stack.pop()
        return Record(
            num_inputs=self._values.made_by.count(-1),
            calls=tuple(self._calls),
            results=tuple(results),
            output_form=form,
            bytes_of=self._values.bytes_of,
            together=(*self._together, *self._around_writes()),
            opened=tuple(self._roles.opened.values()),
        )

    def _follows(self, value: object) -> bool:
        """Whether a tensor in it follows from inputs, parameters or units, unlike a mask that is made once."""
        tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
        todo = [number for x in tensors if (number := self._values.number_of(x)) is not None]
        while todo:
            made_by = self._values.made_by[todo.pop()]
            call = self._calls[made_by] if made_by >= 0 else None
            if call is None or isinstance(call, UnitCall):
                return True
            for each in call.templates():
                if isinstance(each, Slot) and each.table == "_parameters":
                    return True
                if isinstance(each, Ref):
                    todo.append(each.number)
        return False

    def _around_writes(self) -> Iterator[tuple[int, int, str]]:
        """Calls that take a buffer which the code between the units writes to: one stage makes them all."""
        taking: dict[Slot, list[int]] = {}
        for i, call in enumerate(self._calls):
            for each in call.templates():
                if isinstance(each, Slot):
                    taking.setdefault(each, []).append(i)
        for slot, calls in taking.items():
            if any(self._calls[i].writes for i in calls):
                for first, second in pairwise(calls):
                    yield first, second, f"both take buffer {slot.key!r}, which changes"


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tell: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._tell(func, args, kwargs or {})


def _refuse(reason: str) -> None:
    raise RefusedError(reason)


def _refuse_fakes_in_closures(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in pytree.tree_leaves((args, kwargs)):
        cells = getattr(value, "__closure__", None) or ()
        for cell in cells:
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(content)):
                raise RefusedError("a function that is passed on closes over a tensor of this forward")


def _saved_tensor_hooks() -> object:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _plain_attributes(module: nn.Module) -> dict[str, object]:
    kinds = bool | int | float | str | None
    found = {key: value for key, value in vars(module).items() if isinstance(value, kinds)}
    return found | {key: copy.copy(value) for key, value in vars(module).items() if type(value) in (list, set)}
