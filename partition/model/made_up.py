"""Code that cannot run on fake tensors, since it reads values: it runs once on made-up ones, for its shapes alone.

    fake arguments, parameters, buffers  ->  made-up values  ->  outputs  ->  fakes of their shapes

Sparse mixtures of experts (`nonzero`), boolean masks, `.item()`, numpy and kernels without a shape function are such
code. The values are small fractions, True for flags, and zeros for integers (any table has a row 0), or else ones (a
sequence has a length). Parameters are one number each and take no memory. Buffers have their own values where these are
at hand: code that reads values reads sizes, flags and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _pytree as pytree

from .fakes import original_of
from .memory import memory_of
from .reach import walk
from .untouched import StateSnapshot

_READS_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)
_SAID_OF_FAKES = (
    *("FakeTensor", "fake impl", "tensor subclasses", "shape_env", "Length of all samples"),
    "_apply(): Couldn't swap",  # of a forward that moves a module, which a fake parameter cannot follow
)

_RUNNING: list[object] = []


def is_made_up() -> bool:
    """Whether code runs on made-up values now, by which nothing can be checked."""
    return bool(_RUNNING)


def call_for_shapes(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    call: Callable[..., Any] | None = None,
) -> Any:
    """Value of `module(*args, **kwargs)`; on fake tensors that is a matter of shapes. Within a fake mode, with
    substitutes in it, code that reads values runs again, on made-up ones. What it then returns, changes in place
    and assigns as buffers are fakes as well. `call`: made in the place of the module."""
    run, named = call or module, dict(kwargs or {})
    if detect_fake_mode((args, named)) is None:
        return run(*args, **named)
    devices = [x.device for x in pytree.tree_leaves((args, named)) if isinstance(x, torch.Tensor)]
    kept = StateSnapshot([module], device=devices[0] if devices else torch.device("cpu"))
    objects = [(x, x.copy()) for x in walk([args, named], _changeable) if isinstance(x, list | dict)]
    try:
        return run(*args, **named)
    except Exception as error:
        if not reads_values(error):
            raise
    failed: list[Exception] = []
    for integers in (0, 1):
        kept.restore()
        for held, before in objects:
            held.clear()
            (held.extend if isinstance(held, list) else held.update)(before)
        made_up = _MadeUp(integers)
        try:
            with _values_in(module, made_up):
                given = pytree.tree_map_only(torch.Tensor, made_up.value_of, (tuple(args), named))
                with unset_fake_temporarily():
                    _RUNNING.append(run)
                    try:
                        value = run(*given[0], **given[1])
                    finally:
                        _RUNNING.pop()
                made_up.show_changes()
                value = pytree.tree_map_only(torch.Tensor, made_up.fake_of, value)
            break
        except Exception as error:
            failed.append(error)
    else:
        raise failed[0]
    taken = [x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)]
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in (*module.parameters(), *taken)):
        return value
    # Values decide what runs: what wants no gradient in this run may want one in another.
    return pytree.tree_map_only(torch.Tensor, wanting_gradient, value)


@dataclass(frozen=True, slots=True)
class Shaped:
    """A function that gives sizes which follow from values: in the place of fake tensors it takes made-up ones. No
    made-up lengths fit each other as ctc_loss expects: the place of its result takes one of that shape and history."""

    function: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", str(self.function))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.__name__ == "ctc_loss" and (is_made_up() or detect_fake_mode((args, kwargs)) is not None):
            given = dict(zip(("log_probs", "", "", "", "", "reduction"), args, strict=False)) | kwargs
            loss = given["log_probs"].sum((0, -1))
            return loss if given.get("reduction") in ("none", 0) else loss.sum()
        return call_for_shapes(_NO_MODULE, args, kwargs, call=self.function)


_NO_MODULE = nn.Module()


def _changeable(value: Any) -> Collection[Any]:
    """Parts of arguments, such as a cache, that code may change."""
    if callable(value) or isinstance(value, torch.Tensor):
        return ()
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [*held, *([vars(value)] if hasattr(value, "__dict__") else [])]


def wanting_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or one over the same memory that wants a gradient, where its type can."""
    can = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.detach().requires_grad_() if can and not tensor.requires_grad else tensor


def reads_values(error: BaseException | None) -> bool:
    """Whether an error says that fake tensors have none."""
    while error is not None:
        if isinstance(error, _READS_VALUES) or any(words in str(error) for words in _SAID_OF_FAKES):
            return True
        error = error.__cause__ or error.__context__
    return False


class _MadeUp:
    """Values in the place of fakes, and fakes in the place of what came of them."""

    def __init__(self, integers: int) -> None:
        self._integers = integers
        # Fakes with their values, and these as they were: their version, and a copy.
        self._pairs: list[tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]] = []
        self._memory: dict[object, torch.Tensor] = {}  # of a fake -> all of it, as one dimension
        self._fakes: dict[object, torch.Tensor] = {}  # memory of a value -> the fake that has it

    def value_of(self, fake: torch.Tensor) -> torch.Tensor:
        """The value for a fake, the same one each time; fakes that share memory have values that do."""
        known = next((value for one, value, *_ in self._pairs if one is fake), None)
        if known is not None or not isinstance(fake, FakeTensor):
            return fake if known is None else known
        with unset_fake_temporarily():
            value = self._parameter(fake) if isinstance(fake, nn.Parameter) else self._new(fake)
            copy = value if isinstance(fake, nn.Parameter) else value.detach().clone()
            self._pairs.append((fake, value, value._version, copy))
            self._fakes.setdefault(memory_of(value), fake)
        return value

    def _parameter(self, fake: torch.Tensor) -> nn.Parameter:
        """A matrix of one number that makes means of what it is multiplied by: nothing grows from layer to layer."""
        count = fake.shape[1:].numel()
        one = torch.ones((), dtype=fake.dtype, device=fake.device) / max(1, count)
        return nn.Parameter(one.expand(fake.shape), requires_grad=fake.requires_grad)

    def _new(self, fake: FakeTensor) -> torch.Tensor:
        original = original_of(fake)
        if original is not None and not original.is_meta:
            return original.detach().to(fake.device, copy=True)
        memory = (memory_of(fake), fake.dtype)
        if memory not in self._memory:
            count = fake.untyped_storage().nbytes() // fake.element_size()
            self._memory[memory] = _values(count, fake, self._integers)
        value = self._memory[memory].as_strided(fake.shape, fake.stride(), fake.storage_offset()).detach()
        value.requires_grad_(fake.requires_grad)
        return value if fake.is_leaf else value.clone()

    def fake_of(self, value: torch.Tensor) -> torch.Tensor:
        """A fake like a value that came out: the one that went in, a view of its memory, or one with its own."""
        known = next((fake for fake, one, *_ in self._pairs if one is value), None)
        if known is not None or isinstance(value, FakeTensor):
            return value if known is None else known
        if value.layout != torch.strided:
            return torch.empty_like(value)
        source = self._fakes.get(memory_of(value))
        if source is None or isinstance(source, nn.Parameter) or source.dtype != value.dtype:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        else:
            fake = source.detach().as_strided(value.shape, value.stride(), value.storage_offset())
        return fake.requires_grad_(value.requires_grad)

    def show_changes(self) -> None:
        """Fakes whose values were changed in place count that."""
        with unset_fake_temporarily():
            changed = [
                fake
                for fake, value, version, copy in self._pairs
                if value._version != version or not torch.equal(value, copy)  # batch_norm's changes have no version
            ]
        with torch.no_grad():
            for fake in changed:
                fake.detach().zero_()


@contextmanager
def _values_in(module: nn.Module, made_up: _MadeUp) -> Iterator[None]:
    """Within: values in place of a module's substitutes; what it has assigned as a buffer is a fake afterwards."""
    tables: list[dict[str, Any]] = [
        table for part in module.modules() for table in (part._parameters, part._buffers) if table
    ]
    recurrent = [(part, part._flat_weights) for part in module.modules() if isinstance(part, nn.RNNBase)]
    fakes = [(table, dict(table.items())) for table in tables]  # one by one: a table may be a view of another's entries
    for table, entries in fakes:
        for name in [name for name, fake in entries.items() if fake is not None]:
            table[name] = made_up.value_of(entries[name])
    for rnn, _ in recurrent:
        rnn._flat_weights = [getattr(rnn, name) for name in rnn._flat_weights_names]
    try:
        yield
    finally:
        for table, entries in fakes:
            for name, value in table.items():
                table[name] = value if value is None else made_up.fake_of(value)
            table.update({name: fake for name, fake in entries.items() if name not in table})
        for rnn, flat in recurrent:
            rnn._flat_weights = flat


def _values(count: int, like: torch.Tensor, integers: int) -> torch.Tensor:
    """[count] small fractions above 0, since a variance is; this one for integers; True for flags."""
    if like.dtype == torch.bool:
        return torch.ones(count, dtype=like.dtype, device=like.device)
    if not like.dtype.is_floating_point and not like.dtype.is_complex:
        return torch.full((count,), integers, dtype=like.dtype, device=like.device)
    return (torch.arange(count, device=like.device) % 7 / 8 + 0.125).to(like.dtype)
