"""Fake tensors: for a module's parameters and buffers, strict about types, and models run on them for their shapes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree

from .forms import Arguments
from .memory import Operations, memory_of
from .modes import uncompiled
from .surroundings import Surroundings
from .untouched import Places, untouched

_STATISTICS = ("running_mean", "running_var")
_ORIGINAL = "_stands_in_for"


def original_of(fake: torch.Tensor) -> torch.Tensor | None:
    """The parameter or buffer that a fake replaces; None for any other tensor."""
    original: torch.Tensor | None = getattr(fake, _ORIGINAL, None)
    return original


@contextmanager
def stand_ins(module: nn.Module, device: torch.device) -> Iterator[set[int]]:
    """Within a fake mode: fake tensors replace every parameter and buffer. Yields a set that holds, afterwards,
    the ids of the real tensors that the forward would have written to."""
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (table, name, value)
        for part in module.modules()
        for table in (part._parameters, part._buffers)
        for name, value in table.items()
        if value is not None
    ]
    fakes = _fakes_of([value for _, _, value in places], device)
    recurrent = [(part, part._flat_weights) for part in module.modules() if isinstance(part, nn.RNNBase)]
    for table, name, value in places:
        table[name] = fakes[id(value)]
    for rnn, _ in recurrent:  # it keeps its parameters in a list of its own too
        rnn._flat_weights = [getattr(rnn, name) for name in rnn._flat_weights_names]
    written: set[int] = set()
    statistics: set[int] = set()  # that a normalisation updates, by id, since it counts no version of them

    def watch(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if names := _names_of_normalisation(function):
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            if given.get("training", given.get("train", False)):
                statistics.update(id(given[name]) for name in _STATISTICS if given.get(name) is not None)
        return function(*args, **kwargs)

    # It sees each operation, and takes a sixth of its time. What wants a gradient, or is whole, is no statistic.
    has_statistics = any(fake.is_floating_point() and not fake.requires_grad for fake in fakes.values())
    try:
        with Operations(watch) if has_statistics else nullcontext():
            yield written
    finally:
        for table, name, value in places:
            fake = fakes[id(value)]
            now = table.get(name)
            grows = now is not None and (now.shape, now.dtype) != (fake.shape, fake.dtype)  # as a cache
            if not grows and (now is not fake or fake._version or id(fake) in statistics):
                written.add(id(value))
            table[name] = value
        for rnn, flat in recurrent:
            rnn._flat_weights = flat


def _fakes_of(values: Sequence[torch.Tensor], device: torch.device) -> dict[int, torch.Tensor]:
    """Fakes by id of the value. They are made around the mode, which gives the same at ten times the cost: a model has
    as many parameters as operations."""
    originals = {id(value): value for value in values}
    with unset_fake_temporarily() as mode:
        assert mode is not None, "outside of a fake mode"
        fakes: dict[int, torch.Tensor] = {
            key: FakeTensor(
                mode, torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta"), device
            )
            for key, value in originals.items()
        }
    for key, fake in fakes.items():
        value = originals[key]
        if isinstance(value, nn.Parameter):
            fake.requires_grad_(value.requires_grad)
            fake._is_param = True  # what nn.Parameter() makes of a tensor of another class
        setattr(fake, _ORIGINAL, value)
    return fakes


@cache  # asked at each operation of each stage
def _names_of_normalisation(func: Any) -> tuple[str, ...]:
    """Names of the arguments of an operation that may update statistics; none of any other."""
    names = tuple(formal.name for formal in func._schema.arguments) if isinstance(func, torch._ops.OpOverload) else ()
    return names if any(name in names for name in _STATISTICS) else ()


_aten = torch.ops.aten
_LIFTS = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default)
_PRODUCTS = {_aten.linear, _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.addmv, _aten.dot}
_PRODUCTS |= {_aten.convolution, _aten._cdist_forward, _aten.index_add}
_NORMS = {_aten.native_layer_norm, _aten.native_group_norm, _aten.native_batch_norm, _aten._native_batch_norm_legit}
_NORMS |= {_aten._native_batch_norm_legit_functional, _aten.cudnn_batch_norm}
_REDUCED = {torch.float16, torch.bfloat16}  # that norms take along with weights in float32
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)


def strict_fake_mode(joined: set[tuple[int, ...]] | None = None) -> FakeTensorMode:
    """A FakeTensorMode, in which products and norms of tensors of several types are a RuntimeError, as on real ones.
    `joined` is filled with the processes of each group in which a collective is called."""
    mode = _fake_mode()
    carry_out = mode.dispatch

    def dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if joined is not None and getattr(func, "namespace", "") == "c10d":
            groups = [x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())]
            joined.update(tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))) for group in groups)
        operation = getattr(func, "overloadpacket", None)
        if operation in _PRODUCTS or operation in _NORMS:
            valued = args[:2] + args[3:] if operation is _aten.index_add else args  # without the index
            kinds = dict.fromkeys(x.dtype for x in valued if isinstance(x, torch.Tensor))
            if len(kinds) > 1 and (operation in _PRODUCTS or kinds.keys().isdisjoint(_REDUCED)):
                raise RuntimeError(f"{operation.__name__} of {' and '.join(map(str, kinds))}, which takes one type")
        return carry_out(func, types, args, kwargs)

    mode.dispatch = dispatch  # type: ignore[method-assign]
    return mode


def _fake_mode() -> FakeTensorMode:
    """One that knows grouped products of any type, which real tensors have: torch's own (2.13) takes bfloat16 alone;
    that views as real tensors are viewed, where torch's own takes ten operations; and that remembers what operations
    gave for tensors of the same forms, as blocks of a model have."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # torch's own cache takes four times as long
    carry_out = mode.dispatch

    def run(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if getattr(func, "overloadpacket", None) is _aten._grouped_mm and (args[0].dim(), args[1].dim()) == (2, 3):
            rows, weight = args[:2]
            if rows.dtype in (torch.float32, torch.float16) and (rows.dtype, rows.size(1)) == (
                weight.dtype,
                weight.size(1),
            ):
                with mode:
                    return torch.empty(rows.size(0), weight.size(2), dtype=rows.dtype, device=rows.device)
        if func in _VIEWS and type(x := args[0]) is FakeTensor and x.layout is torch.strided:
            viewed = torch.empty_strided(x.shape, x.stride(), device="meta").view(args[1])
            with mode:
                return x.as_strided(viewed.shape, viewed.stride())
        return carry_out(func, types, args, kwargs)

    def dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = _place_of(mode, func, args, kwargs)
        if place and place[0] is not None:
            return place[0](mode, args)
        value = run(func, types, args, kwargs)
        if place == [] and _place_of(mode, func, args, kwargs) is place:  # not where an argument has another form now
            place.append(_making(mode, func, args, kwargs, value))
        return value

    mode.dispatch = dispatch  # type: ignore[method-assign]  # operators of a higher order know no class but its own
    return mode


# What makes the value of an operation from its arguments; None: it has to run each time.
_Making = Callable[[FakeTensorMode, Sequence[Any]], Any] | None
_VALUES = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


@lru_cache(maxsize=1 << 14)
def _place(form: object) -> list[_Making]:
    return []


def _place_of(mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Any) -> list[_Making] | None:
    """The place of an operation with its arguments; None where their forms do not say all that its value depends on."""
    if not _follows_from_forms(func):
        return None
    around = torch.get_default_dtype(), torch._C._get_default_device(), torch.is_inference_mode_enabled()
    is_below = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)
    by_grad = not is_below or _is_composite(func)  # after autograd's part it counts no more; matmul folds by it
    try:
        forms = [_form(mode, x, by_grad) for x in args]
        named = [(name, _form(mode, x, by_grad)) for name, x in kwargs.items()] if kwargs else ()
    except _UnknownError:
        return None
    return _place((func, around, *forms, *named))


@cache
def _follows_from_forms(func: Any) -> bool:
    """Whether the form of what an operation gives depends on those of its arguments alone; those that torch's own
    cache (FakeTensorMode._validate_cache_key) leaves out do not count."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or torch.Tag.inplace_view in func.tags:
        return False
    return func not in _LIFTS and not (func.is_view and _is_composite(func))


@cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(str(func._name), "CompositeImplicitAutograd")


class _UnknownError(Exception):
    """Raised for an argument whose form does not say all."""


def _form(mode: FakeTensorMode, x: Any, by_grad: bool) -> object:
    """`by_grad`: whether tensors that want a gradient have another form."""
    kind = type(x)
    if kind is FakeTensor:
        if x.constant is None and x.layout is torch.strided and x.fake_mode is mode:
            flags = by_grad and x.requires_grad, x.is_conj(), x.is_neg(), x.is_inference()
            memory = x.storage_offset(), x.untyped_storage().nbytes()
            return x.shape, x.stride(), x.dtype, x.fake_device, flags, memory
    elif kind in _VALUES:
        return kind, x
    elif kind is list or kind is tuple:
        return kind, *[_form(mode, each, by_grad) for each in x]
    raise _UnknownError


def _making(mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Any, value: Any) -> _Making:
    """A function that makes such a value again: the first argument itself, views of it, or new tensors."""
    if args and value is args[0]:
        return lambda mode, args: args[0]
    given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    is_view = func.is_view or func is _aten._unsafe_view.default
    several = isinstance(value, list | tuple)
    outputs = list(value) if several else [value]
    if func._schema.is_mutable or (is_view and not (len(given) == 1 and given[0] is args[0])):
        return None
    if not all(type(x) is FakeTensor and x.constant is None and x.layout is torch.strided for x in outputs):
        return None
    held = [{key: value for key, value in vars(x).items() if key != "fake_mode"} for x in outputs]
    layouts = [(x.shape, x.stride(), x.storage_offset(), x.dtype, x.fake_device) for x in outputs]
    kind = list if isinstance(value, list) else tuple

    def make(mode: FakeTensorMode, args: Sequence[Any]) -> Any:
        made: list[torch.Tensor] = []
        for (shape, stride, offset, dtype, device), attributes in zip(layouts, held, strict=True):
            if is_view:
                inner = torch.empty_strided((0,), (1,), dtype=dtype, device="meta")
                inner.set_(args[0].untyped_storage(), offset, shape, stride)
            else:
                inner = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            # What FakeTensor(mode, inner, device) makes, at a fifth of the cost
            options = {"dispatch_device": True, "device_for_backend_keys": device}
            made.append(torch.Tensor._make_subclass(FakeTensor, inner, False, **options))
            torch._C._set_warn_deprecated_on_mutable_data_ptr(made[-1])
            vars(made[-1]).update(attributes, fake_mode=mode)
        return kind(made) if several else made[0]

    again = make(mode, args) if several else [make(mode, args)]
    facts = [[_facts(x, given) for x in each] for each in (again, outputs)]
    return make if facts[0] == facts[1] else None


def _facts(x: torch.Tensor, given: Sequence[torch.Tensor]) -> object:
    sharing = [memory_of(x) == memory_of(each) for each in given]
    return torch._C._dispatch_key_set(x), x.storage_offset(), x.untyped_storage().nbytes(), x.requires_grad, sharing


@contextmanager
def on_fakes(
    model: nn.Module, example: Arguments, *, device: torch.device, training: bool
) -> Iterator[tuple[Arguments, set[type], Places, Surroundings]]:
    """Within, the model may be called, with arguments like those of the example, in training with a graph. Gives these
    arguments, the classes of what the model reaches, at the end, where it left tensors, and what its code finds around
    it."""
    with ExitStack() as stack:
        kept = stack.enter_context(untouched(model, device=device))
        left: Places = []
        stack.callback(lambda: left.extend(kept.new_tensors()))
        stack.enter_context(uncompiled())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of the user's code: it will say so when it runs
        stack.enter_context(_fake_mode())
        stack.enter_context(torch.enable_grad() if training else torch.no_grad())
        given = example.map(lambda x: torch.empty(x.shape, dtype=x.dtype, device=device))
        stack.enter_context(stand_ins(model, device))
        yield given, kept.kinds, left, kept.surroundings
