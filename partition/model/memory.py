"""Which tensors share memory, and what operations write into, whichever version it counts.

Chunks of unsafe_chunk, `.data`, tensors over a storage: they have the memory of a tensor, and no version of its.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass


def memory_of(tensor: torch.Tensor) -> object:
    """The same for tensors over the same memory; None where that is unknown (sparse ones)."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None


_MOST_PLACES = 1 << 20  # elements of a tensor with gaps that are looked at one by one


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two strided tensors over one memory have bytes in common; False for large ones with gaps."""
    if not (one.numel() and other.numel()):
        return False
    (low, high), (begin, end) = (bytes_of(x) for x in (one, other))
    if high <= begin or end <= low:
        return False
    if all(
        high - low == x.numel() * x.element_size() for x, (low, high) in ((one, (low, high)), (other, (begin, end)))
    ):
        return True
    if max(one.numel(), other.numel()) > _MOST_PLACES:
        return False
    places = [_places(x) for x in (one, other)]
    return bool(torch.isin(*places).any())


def bytes_of(x: torch.Tensor) -> tuple[int, int]:
    """First of its bytes in its memory, and the one after the last."""
    begin, width = int(x.storage_offset()) * x.element_size(), x.element_size()
    return begin, begin + width * (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)))


def _places(x: torch.Tensor) -> torch.Tensor:
    """The number of each of its bytes."""
    low, high = (at // x.element_size() for at in bytes_of(x))
    elements = torch.arange(low, high).as_strided(x.shape, x.stride()).flatten()
    return (elements[:, None] * x.element_size() + torch.arange(x.element_size())).flatten()


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that have the memory of one: that of a DTensor is its local part's."""
    if is_traceable_wrapper_subclass(tensor):
        for inner in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(inner, torch.Tensor):
                yield from parts_of(inner)
    else:
        yield tensor


DEVICE = torch.ops.prim.device.default  # on which a tensor is: four of five operations on fake ones; they know it


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within: operations go through a function, which takes each with its arguments and keywords."""

    supports_higher_order_operators = True  # flex attention

    def __init__(self, through: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._through = through

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code is one operation."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].device
        return self._through(func, args, kwargs or {})


def written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Tensors that an operation writes into, as its schema says."""
    for i, name in _written_arguments(operator):
        leaves = pytree.tree_leaves(args[i] if i < len(args) else kwargs.get(name))
        yield from (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


@cache
def _written_arguments(operator: Any) -> Sequence[tuple[int, str]]:
    arguments = getattr(getattr(operator, "_schema", None), "arguments", ())
    return [(i, x.name) for i, x in enumerate(arguments) if x.alias_info is not None and x.alias_info.is_write]


@contextmanager
def noting_writes() -> Iterator[set[object]]:
    memories: set[object] = set()

    def note(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        memories.update(map(memory_of, written(operator, args, kwargs)))
        return operator(*args, **kwargs)

    with Operations(note):
        yield memories
