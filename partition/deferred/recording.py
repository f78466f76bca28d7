"""`deferred`: within it, constructors run without memory for large tensors, and what they compute is kept as recipes.

Small tensors have values, and operations on them run. One that makes a large tensor, or takes a deferred one, becomes
a `Computation`; where Python asks for a value, it is computed there, and let go. Random numbers are drawn where they
are in plain construction, into memory that is let go, so that what is drawn afterwards is the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..model.source_line import line_now
from .filling import put
from .recipes import (
    Computation,
    Held,
    Read,
    Value,
    Window,
    Written,
    bytes_checksum,
    default_generator,
    draw,
    filled,
    give_value,
    plainly,
    value_of,
)

_WITHOUT_VALUES = {
    "device", "is_meta", "is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_nested", "shape", "dtype", "layout",
    "ndim", "itemsize", "nbytes", "grad", "requires_grad", "grad_fn", "is_leaf", "retains_grad", "_backward_hooks",
    "_post_accumulate_grad_hooks", "_version", "size", "stride", "numel", "dim", "nelement", "element_size",
    "storage_offset", "untyped_storage", "is_contiguous", "is_floating_point", "is_complex", "is_signed",
    "is_inference", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "get_device",
    "__hash__", "__len__", "__repr__",
}  # fmt: skip
_CONVERTING = ("to", "half", "float", "double", "bfloat16", "cuda", "cpu")
recording: dict[int, bool] = {}  # threads, and whether they draw


class DeferredBuffer(torch.Tensor):
    """A buffer of a model that was built within `sw.deferred()`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__self__.__name__ if func.__name__ in ("__get__", "__set__") else func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name not in _WITHOUT_VALUES and not is_recording():
                refuse(next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, DeferredBuffer)), name)
            found = func(*args, **(kwargs or {}))
        if name in _CONVERTING and type(found) is torch.Tensor and value_of(found) is not None:
            found.__class__ = DeferredBuffer
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            value = value_of(self)
            with plainly():
                storage = torch.empty(
                    self.untyped_storage().nbytes(), dtype=torch.uint8, device="meta"
                ).untyped_storage()
                made = Window.of(self).within(storage)
                if isinstance(self, DeferredParameter):
                    made = DeferredParameter(made, self.requires_grad)
                else:
                    made.__class__ = type(self)
            made.__dict__.update(self.__dict__)
            if value is not None:
                give_value(made, value)
            memo[id(self)] = made
        return memo[id(self)]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse(self, "pickling")


class DeferredParameter(DeferredBuffer, nn.Parameter):
    """A parameter of one."""


def is_recording() -> bool:
    return threading.get_ident() in recording


def refuse(tensor: torch.Tensor, what: str) -> NoReturn:
    with torch._C.DisableTorchFunction():
        name = tensor.__dict__.get("known_as", f"a tensor of shape {tuple(tensor.shape)}")
    raise ValueError(
        f"{what}(...) of {name}{line_now()}, which was built within stagewright.deferred() and has no values yet. "
        f"Expected PipelineModule(model, ...), which fills each process's own stages (weights= with files); or, before "
        f"that, within stagewright.deferred() what changes the model: its initialisation, a conversion such as "
        f"model.bfloat16()"
    )


SMALL = 4096  # elements, below which a tensor has values; a conversion leaves their number as it is

_CPU, _META = torch.device("cpu"), torch.device("meta")
_OVERWRITING = {
    "zero_", "fill_", "copy_", "normal_", "uniform_", "exponential_", "random_", "bernoulli_", "log_normal_", "cauchy_",
    "geometric_",
}  # fmt: skip
_REFUSED = frozenset(["resize_", "resize_as_", "_resize_output_"])


@contextmanager
def deferred(*, draw: bool = True) -> Iterator[None]:
    """Within, models are built without memory for their weights: parameters and large buffers are meta tensors, and
    PipelineModule makes those of each process's own stages, bit-equal to those of plain construction.

    Conversions (`model.bfloat16()`) and initialisation (`model.apply(init)`) belong within, too. A value that Python
    asks for (`.item()`, `if x.any()`) is computed there. Random numbers are drawn as in plain construction, one tensor
    at a time.

    Arguments:
        draw: False: of large tensors no random numbers are drawn, for weights that come from files: it takes next to no
            time, and what is drawn afterwards differs from plain construction.

    Raises ValueError, with the line, for what needs the memory of a large tensor (`data_ptr()`, `resize_`).
    """
    if is_recording():
        raise ValueError("stagewright.deferred() within stagewright.deferred(): expected the outer one alone")
    with ExitStack() as stack:
        stack.enter_context(_patched(draws=draw))
        stack.callback(register_module_buffer_registration_hook(_known).remove)
        stack.callback(register_module_parameter_registration_hook(_known).remove)
        stack.enter_context(_Questions())
        stack.enter_context(_Recorder(draws=draw))
        yield


@contextmanager
def _patched(*, draws: bool) -> Iterator[None]:
    """The first thread that records changes two functions of torch; the last one puts them back."""
    thread = threading.get_ident()
    with _LOCK:
        for each in () if recording else _PATCHES:
            each.start()
        recording[thread] = draws
    try:
        yield
    finally:
        with _LOCK:
            del recording[thread]
            for each in () if recording else _PATCHES:
                each.stop()


def as_recipes(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Within, what is done to these, such as cutting them, is added to the recipes of those that are deferred."""
    is_deferred = any(value_of(x) is not None for x in tensors)
    return deferred() if is_deferred and not is_recording() else nullcontext()


_make_parameter = nn.Parameter.__new__


def _new_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    if cls is nn.Parameter and isinstance(data, torch.Tensor) and value_of(data) is not None:
        cls = DeferredParameter
        if type(data) is DeferredParameter:
            data = data.data
    return _make_parameter(cls, data, requires_grad)


def _known(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    """A tensor becomes a module's: it refuses uses by that name."""
    if tensor is not None and value_of(tensor) is not None:
        if type(tensor) is torch.Tensor:
            tensor.__class__ = DeferredBuffer
        tensor.known_as = f"{name!r} of a {type(module).__name__}"  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Kind:
    """How an operation uses its arguments, by its schema."""

    names: tuple[str, ...]
    writes: frozenset[int]
    is_view: bool
    reads_values: bool
    draws: bool


@cache
def _kind(func: Any) -> _Kind:
    formal, returned, tags = func._schema.arguments, func._schema.returns, func.tags
    unsaid = ("running_mean", "running_var") if "batch_norm" in func.__name__ else ()  # the schema omits these writes
    is_view = bool(returned) and all(x.alias_info is not None and not x.alias_info.is_write for x in returned)
    return _Kind(
        names=tuple(x.name for x in formal),
        writes=frozenset(
            i for i, x in enumerate(formal) if x.name in unsaid or (x.alias_info is not None and x.alias_info.is_write)
        ),
        is_view=is_view or torch.Tag.inplace_view in tags,
        reads_values=torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags,
        draws=torch.Tag.nondeterministic_seeded in tags,
    )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, *, draws: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, kind = dict(kwargs or {}), _kind(func)
        tensors = _tensors((args, kwargs))
        first = next((value for value in map(value_of, tensors) if value is not None), None)
        if kwargs.get("device") == _META:  # as that of a deferred tensor is known below autograd
            kwargs["device"] = _CPU if first is None else first.device
        written = [x for i, x in _arguments(kind, args, kwargs) if i in kind.writes for x in _tensors(x)]
        are_deferred = {value_of(x) is not None for x in written}
        if first is not None and func.overloadpacket.__name__ in _REFUSED:
            raise _cannot(func.overloadpacket.__name__)
        if first is not None and kind.is_view:
            return func(*args, **kwargs)
        skips = kind.draws and not self._draws and not written  # then its size is known by its shape alone
        if (first is None and not skips) or kind.reads_values or False in are_deferred:
            return self._carried_out(func, args, kwargs, kind, written)
        on_meta = {
            name: x
            for name, x in (("generator", None), ("device", _META))
            if name in kwargs or (name == "device" and skips)
        }
        try:
            found = func(*_metas(args), **_metas(kwargs) | on_meta)
        except Exception:  # of a value that decides on a shape, or of the caller's own
            return self._carried_out(func, args, kwargs, kind, written)
        if first is None and all(x.numel() < SMALL for x in _tensors(found)):
            return func(*args, **kwargs)
        if any(x.layout != torch.strided for x in _tensors(found)):
            return self._carried_out(func, args, kwargs, kind, written)
        device = torch.device(kwargs.get("device") or (_CPU if first is None else first.device))
        note(func, args, kwargs, written, found, device=device, drawn=self._draws if kind.draws else None)
        return found

    def _carried_out(
        self, func: Any, args: Any, kwargs: dict[str, Any], kind: _Kind, written: Sequence[torch.Tensor]
    ) -> Any:
        """Runs an operation on values, made now for deferred tensors; large results become deferred tensors."""
        if any(value_of(x) is not None for x in written):
            raise _cannot(func.overloadpacket.__name__)
        real_args, real_kwargs = _real((args, kwargs))
        tensors = _tensors((real_args, real_kwargs))
        device = torch.device(kwargs.get("device") or next((x.device for x in tensors), _CPU))
        state = (kwargs.get("generator") or default_generator(device)).get_state() if kind.draws else None
        found = func(*real_args, **real_kwargs)
        before = {x.untyped_storage()._cdata for x in tensors if x.layout == torch.strided}

        def is_large(x: torch.Tensor) -> bool:
            is_new = x.layout == torch.strided and not x.is_meta and x.untyped_storage()._cdata not in before
            return is_new and x.numel() >= SMALL

        if not any(map(is_large, _tensors(found))):
            return found
        metas = pytree.tree_map_only(torch.Tensor, lambda x: _on_meta(x) if is_large(x) else x, found)
        note(func, args, kwargs, [], metas, device=device, drawn=state)
        return metas


def note(
    func: Any,
    args: Any,
    kwargs: Mapping[str, Any],
    written: Sequence[torch.Tensor],
    found: Any,
    *,
    device: torch.device,
    drawn: torch.Tensor | bool | None,
) -> None:
    """Keep an operation as the recipe of the tensors that it makes (`found`, on meta) and of those `written` to.
    `drawn`: of a random operation True, if it draws now, too, so that later draws are the same; False, if this is left
    out; or the state of its generator before it drew. None: it draws nothing."""
    call = Computation(func, (), {}, device, torch.get_default_dtype())
    storages = list({x.untyped_storage()._cdata: x for x in written}.values())
    slots = {x.untyped_storage()._cdata: slot for slot, x in enumerate(storages)}
    leaves = _tensors((args, kwargs))
    name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
    for slot, x in enumerate(storages):
        is_alone = sum(slots.get(y.untyped_storage()._cdata) == slot for y in leaves) == 1
        is_over = (name in _OVERWRITING or func in _IN_ONE) and is_alone and _is_whole(x)
        call.bases[slot] = None if is_over else value_of(x)
        call.num_bytes[slot] = x.untyped_storage().nbytes()

    def kept(x: torch.Tensor) -> object:
        if (slot := slots.get(x.untyped_storage()._cdata)) is not None:
            return Written(slot, Window.of(x))
        if (value := value_of(x)) is not None:
            return Read(value, Window.of(x))
        return x.detach().clone() if x.numel() < SMALL else Held(x, bytes_checksum(x))

    call.args, call.kwargs = pytree.tree_map_only(torch.Tensor, kept, (tuple(args), dict(kwargs)))
    for place, x in enumerate(pytree.tree_leaves(found)):
        if isinstance(x, torch.Tensor) and x.is_meta and value_of(x) is None:
            slot = len(slots) + len(call.made)
            call.made[slot] = (place, Window.of(x))
            give_value(x, Value(call, slot))
    call.is_skipped = drawn is False
    if isinstance(drawn, torch.Tensor):
        call.state = drawn
    elif drawn:
        generator = kwargs.get("generator") or default_generator(device)
        call.state = generator.get_state()
        draw(call, generator)
    for slot, x in enumerate(storages):
        give_value(x, Value(call, slot))


def _in_one(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """torch's trunc_normal_, which draws again until nothing is outside: one operation."""
    if (value := value_of(tensor)) is None or not is_recording():
        return _trunc_normal(tensor, *args, **kwargs)
    data = tensor.detach()
    note(
        _trunc_normal, (data, *args), kwargs, [data], None, device=value.device, drawn=recording[threading.get_ident()]
    )
    return tensor


_trunc_normal = nn.init._no_grad_trunc_normal_
_IN_ONE = frozenset([_trunc_normal])
_LOCK = threading.Lock()
_PATCHES = (
    patch.object(nn.Parameter, "__new__", staticmethod(_new_parameter)),
    patch.object(nn.init, "_no_grad_trunc_normal_", _in_one),
)


class _Questions(TorchFunctionMode):
    """Answers of deferred tensors in Python: where plain construction would have them, and values where asked."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__self__.__name__ if func.__name__ in ("__get__", "__set__") else func.__name__
        if func.__name__ == "__set__" and name == "data" and len({value_of(x) is None for x in args}) == 2:
            kind = type(args[0])
            put((), args[0], args[1].detach())
            args[0].__class__ = type(args[0]) if kind in _KINDS else kind
            return None
        if name in _ASKED and args and isinstance(args[0], torch.Tensor) and (value := value_of(args[0])) is not None:
            if name in ("data_ptr", "__cuda_array_interface__"):
                raise _cannot(name)
            if name in _DEVICE:
                return _DEVICE[name](value.device)
            (real,) = filled(args[:1])
            found = func(real, *args[1:], **(kwargs or {}))
            if name in ("numpy", "__array__"):
                found.flags.writeable = False  # what is written to it would be lost
            return found
        if name == "new_tensor" and (value := value_of(args[0])) is not None:
            told = {"dtype": args[0].dtype, "device": value.device} | (kwargs or {})
            name, func, args, kwargs = "tensor", torch.tensor, args[1:], told
        if name in ("tensor", "as_tensor") and args and isinstance(args[0], list | tuple):
            args = (_real(args[0]), *args[1:])
        if kwargs and kwargs.get("device") is not None and torch.device(kwargs["device"]) == _META:
            with _disable_current_modes():
                return func(*args, **kwargs)
        return func(*args, **(kwargs or {}))


_KINDS = (torch.Tensor, nn.Parameter, DeferredBuffer, DeferredParameter)
_DEVICE: dict[str, Any] = {
    "device": lambda device: device,
    "is_meta": lambda device: False,
    "is_cpu": lambda device: device.type == "cpu",
    "is_cuda": lambda device: device.type == "cuda",
    "get_device": lambda device: -1 if device.index is None else device.index,
}
_ASKED = frozenset(
    [*_DEVICE, "tolist", "numpy", "__array__", "__repr__", "__format__", "data_ptr", "__cuda_array_interface__"]
)


def _is_whole(x: torch.Tensor) -> bool:
    """Whether it has each element of its storage, once."""
    end = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.size(), strict=True) if size > 1):
        if stride != end:
            return False
        end *= size
    return x.nbytes == x.untyped_storage().nbytes()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _arguments(kind: _Kind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    yield from enumerate(args)
    yield from ((kind.names.index(name), x) for name, x in kwargs.items() if name in kind.names)


def _on_meta(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_meta else torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")


def _metas(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, _on_meta, tree)


def _real(tree: Any) -> Any:
    made = iter([*filled([x for x in _tensors(tree) if value_of(x) is not None])])
    return pytree.tree_map_only(torch.Tensor, lambda x: x if value_of(x) is None else next(made), tree)


def _cannot(name: str) -> ValueError:
    return ValueError(
        f"{name}{line_now()} needs the memory of a large tensor, which has none within stagewright.deferred(): "
        f"expected operations of torch on the tensor itself"
    )
