"""Recipes: how the values of tensors without memory are made.

The storage of a deferred tensor, which is a meta tensor, has a `Value`: one result of a `Computation`, an operation
that the constructor made, whose inputs are Values in turn. A tensor that is written in place has another Value
afterwards, so that a Value never changes; views share that of their storage. What draws random numbers keeps the state
that its generator had: each Value can be made alone, in any order, with the same bits.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from mmap import mmap
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

_ATTRIBUTE = "_stagewright_value"  # of a storage, which lives as long as a tensor that has it


@dataclass(frozen=True, slots=True)
class Window:
    """Where in a storage a tensor lies."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Window:
        size, stride, offset = tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset())
        return cls(tensor.dtype, size, stride, offset, tensor.is_conj(), tensor.is_neg())

    def within(self, storage: torch.UntypedStorage) -> torch.Tensor:
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        made.set_(storage, self.offset, self.size, self.stride)
        made = made.conj() if self.is_conj else made
        return torch._neg_view(made) if self.is_neg else made


@dataclass(slots=True, eq=False)
class Computation:
    """An operation of a constructor."""

    function: Callable[..., Any]
    args: Sequence[Any]  # with a Read or Written in the place of each deferred tensor
    kwargs: Mapping[str, Any]
    device: torch.device
    default_dtype: torch.dtype  # torch's, at that time
    # by slot of what is written in place, the Value before; None: all of it is overwritten
    bases: dict[int, Value | None] = field(default_factory=dict)
    # by slot of a new tensor, its place among the results, and its window
    made: dict[int, tuple[int, Window]] = field(default_factory=dict)
    num_bytes: dict[int, int] = field(default_factory=dict)
    state: torch.Tensor | None = None  # of the generator that is drawn from
    is_skipped: bool = False  # nothing was drawn, and there is no state
    is_read: bool = False  # its result is a file's memory, which no one may keep or write to

    def needs(self) -> list[Value]:
        """Each Value that it reads, or writes a part of, once."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        found = [leaf.value for leaf in leaves if isinstance(leaf, Read)] + [x for x in self.bases.values() if x]
        return list({value.key: value for value in found}.values())


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """All bytes of a storage: what `call` leaves in its `slot`. `were_given`: whether this process has made any."""

    were_given: ClassVar[bool] = False
    call: Computation
    slot: int

    @property
    def key(self) -> tuple[int, int]:
        return id(self.call), self.slot

    @property
    def device(self) -> torch.device:
        return self.call.device

    def is_drawn(self) -> bool:
        """Whether all that is drawn on the way to it was drawn."""
        return not any(call.is_skipped for call in _computations([self]))

    def checksum(self) -> float:
        """A whole number of 32 bits over the operations, numbers and random numbers that it is made of; of what files
        have, nothing."""
        number = 0
        for call in _computations([self]):
            said = [getattr(call.function, "__name__", "")]  # no address, which is another in each process
            for leaf in pytree.tree_leaves((call.args, call.kwargs)):
                if isinstance(leaf, Held | torch.Tensor):
                    said.append(str(leaf.checksum if isinstance(leaf, Held) else bytes_checksum(leaf)))
                elif isinstance(leaf, int | float):
                    said.append(repr(leaf))
            number = zlib.crc32(" ".join(said).encode(), number)
            number = number if call.state is None else zlib.crc32(call.state.numpy().tobytes(), number)
        return float(number)


@dataclass(frozen=True, slots=True)
class Read:
    value: Value
    window: Window


@dataclass(frozen=True, slots=True)
class Written:
    slot: int
    window: Window


@dataclass(frozen=True, slots=True)
class Held:
    """A large tensor that had values: it is not copied, and must not be changed."""

    tensor: torch.Tensor
    checksum: int

    def now(self) -> torch.Tensor:
        if bytes_checksum(self.tensor) != self.checksum:  # its version says nothing of what numpy wrote to it
            raise ValueError(
                f"a tensor of shape {tuple(self.tensor.shape)} from which the constructor of a deferred model computed "
                f"has changed since: expected it unchanged until the stages are built, or its clone() in its place"
            )
        return self.tensor


def bytes_checksum(tensor: torch.Tensor) -> int:
    values = torch.empty(0) if tensor.is_meta else tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return zlib.crc32(values.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def value_of(tensor: torch.Tensor) -> Value | None:
    """The recipe of a deferred tensor; None for any other."""
    with torch._C.DisableTorchFunction():
        value = getattr(tensor.untyped_storage(), _ATTRIBUTE, None) if tensor.is_meta else None
    assert value is None or isinstance(value, Value)
    return value


def give_value(tensor: torch.Tensor, value: Value) -> None:
    Value.were_given = True
    with torch._C.DisableTorchFunction():
        setattr(tensor.untyped_storage(), _ATTRIBUTE, value)


def reading(
    read: Callable[[], torch.Tensor], dtype: torch.dtype, shape: Sequence[int], device: torch.device
) -> torch.Tensor:
    """A deferred tensor that is read, of the file's type, when it is filled."""
    with plainly():
        made = torch.empty(tuple(shape), dtype=dtype, device="meta")
    call = Computation(read, (), {}, device, torch.get_default_dtype(), made={0: (0, Window.of(made))}, is_read=True)
    give_value(made, Value(call, 0))
    return made


def device_where_built(tensor: torch.Tensor) -> torch.device:
    """Where plain construction would have put it; what was built on the meta device is for the CPU."""
    if (value := value_of(tensor)) is not None:
        return value.device
    return torch.device("cpu") if tensor.is_meta else tensor.device


def filled(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Tensors with values, one for each deferred one, in order. What several need is made once, and let go after the
    last of them. Tensors of one storage share one; copies do not; a single part of a storage has memory of its own."""
    values = [value for value in map(value_of, tensors) if value is not None]
    assert len(values) == len(tensors), "a tensor that is not deferred"
    with torch._C.DisableTorchFunction():
        places = [(tensor.untyped_storage()._cdata, Window.of(tensor)) for tensor in tensors]
    users, parts = Counter(key for key, _ in places), Counter(key for key, _ in {*places})
    kept: dict[int, torch.UntypedStorage] = {}
    given: set[tuple[int, int]] = set()
    work = _Work(values)
    for value, (key, window) in zip(values, places, strict=True):
        with plainly():
            storage = work.take(value)
            if key in kept:
                storage = kept[key]
            elif value.key in given:
                storage = copied(storage)
            found = window.within(storage)
            if value.call.is_read or (parts[key] == 1 and found.nbytes < storage.nbytes()):
                found = found.clone()
            else:
                given.add(value.key)
        if users[key] > 1:
            kept[key] = storage
        yield found


def draw(call: Computation, generator: torch.Generator) -> None:
    """Carry out a call for what it does to the generator alone."""
    with plainly():
        _Work(call.needs()).run(call, draws_from=generator)


@contextmanager
def plainly() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


def _computations(wanted: Collection[Value]) -> Iterator[Computation]:
    pending, seen = [value.call for value in wanted], set()
    while pending:
        call = pending.pop()
        if id(call) not in seen:
            seen.add(id(call))
            yield call
            pending += [value.call for value in call.needs()]


class _Work:
    """Storages that are made, each kept until its last use."""

    def __init__(self, wanted: Collection[Value]) -> None:
        self._made: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._wanted = {value.key for value in wanted}  # their holders keep them: no one writes to them
        self._uses = Counter(value.key for value in wanted)
        for call in _computations(wanted):
            self._uses.update(value.key for value in call.needs())

    def take(self, wanted: Value) -> torch.UntypedStorage:
        """The storage, for one use of it."""
        pending = [wanted]
        while wanted.key not in self._made:
            value = pending[-1]
            missing = [] if value.key in self._made else [x for x in value.call.needs() if x.key not in self._made]
            pending += missing
            if not missing:
                pending.pop()
                if value.key not in self._made:
                    self.run(value.call)
        self._uses[wanted.key] -= 1
        return self._made[wanted.key] if self._uses[wanted.key] else self._made.pop(wanted.key)

    def run(self, call: Computation, *, draws_from: torch.Generator | None = None) -> None:
        """Carry out a call; it draws from this generator, or from one in the state of that time."""
        storages = {value.key: self.take(value) for value in call.needs()}
        written: dict[int, torch.UntypedStorage] = {}
        for slot, base in call.bases.items():
            if base is None:
                scratch = draws_from is not None and call.device.type == "cpu"
                made: Any = _mapped if scratch else partial(torch.UntypedStorage, device=call.device)
                written[slot] = made(call.num_bytes[slot])
            else:
                is_needed = base.key in self._made or base.key in self._wanted or base.call.is_read
                written[slot] = copied(storages[base.key]) if is_needed else storages[base.key]

        def real(leaf: object) -> object:
            if isinstance(leaf, Read):
                return leaf.window.within(storages[leaf.value.key])
            if isinstance(leaf, Written):
                return leaf.window.within(written[leaf.slot])
            return leaf.now() if isinstance(leaf, Held) else leaf

        args, kwargs = pytree.tree_map(real, (tuple(call.args), dict(call.kwargs)))
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(call.default_dtype)
            with nullcontext() if call.state is None else _drawing(call, kwargs, draws_from):
                results = pytree.tree_leaves(call.function(*args, **kwargs))
        finally:
            torch.set_default_dtype(before)
        for slot, (place, window) in call.made.items():
            if self._uses[id(call), slot]:
                written[slot] = _storage(results[place], window)
        self._made |= {(id(call), slot): x for slot, x in written.items() if self._uses[id(call), slot]}


@contextmanager
def _drawing(call: Computation, kwargs: dict[str, Any], draws_from: torch.Generator | None) -> Iterator[None]:
    if draws_from is not None:
        if kwargs.get("generator") is not None:
            kwargs["generator"] = draws_from
        yield
    elif kwargs.get("generator") is not None:
        kwargs["generator"] = torch.Generator(call.device)
        kwargs["generator"].set_state(call.state)
        yield
    else:
        default = default_generator(call.device)
        before = default.get_state()
        assert call.state is not None
        try:
            default.set_state(call.state)
            yield
        finally:
            default.set_state(before)


def copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    found: torch.UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]
    return found


def _mapped(num_bytes: int) -> torch.UntypedStorage:
    """Memory that goes back to the system with it; an allocator would keep it."""
    return torch.frombuffer(mmap(-1, max(1, num_bytes)), dtype=torch.uint8).untyped_storage()


def default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def _storage(result: torch.Tensor, window: Window) -> torch.UntypedStorage:
    """The storage of a result, laid out as was foreseen."""
    found = result.untyped_storage()
    if Window.of(result) != window:
        made = torch.empty_strided(window.size, window.stride, dtype=window.dtype, device=result.device)
        found = made.copy_(result).untyped_storage()
    return found
