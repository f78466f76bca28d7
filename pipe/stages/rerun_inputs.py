"""Arguments of a module, kept for its second run: what is one tensor, list or object in them stays one there.

first run      f(h, h[:, :2], into=h)     in which the module changes h in place
second run     f(c, c[:, :2], into=c)     c: a copy of h from before
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..nested import mapped


@dataclass(frozen=True, slots=True)
class _Place:
    number: int


class KeptInputs:
    """Those of one call.

    Attributes:
        tensors: in them, also in objects such as caches, each once.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._given = mapped((args, kwargs), self._place)
        self._versions = _versions(self.tensors)

    def _place(self, x: torch.Tensor) -> _Place:
        self.tensors.append(x)
        return _Place(len(self.tensors) - 1)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with others in their places; the module may change what they are in."""
        args, kwargs = mapped(self._given, lambda place: tensors[place.number], kind=_Place)
        return args, kwargs

    def copies(self, changed: Collection[int]) -> list[torch.Tensor]:
        """The tensors, with copies of those that are changed and of all that have memory with them.

        A copy is no leaf, which no operation could change in place.
        """
        by_memory: dict[object, list[int]] = {}
        for i, x in enumerate(self.tensors):
            by_memory.setdefault((x.untyped_storage()._cdata, x.dtype) if _is_plain(x) else i, []).append(i)
        found = list(self.tensors)
        for numbers in by_memory.values():
            if not set(numbers).isdisjoint(changed):
                for i, copy in zip(numbers, _copies([self.tensors[i] for i in numbers]), strict=True):
                    found[i] = copy
        return found

    def changed(self, copies: Sequence[torch.Tensor] = ()) -> frozenset[int]:
        """The tensors that are no longer what they were, and let go of them.

        Arguments:
            copies: of all of them, if there are: not every change counts a version.
        """
        values = copies if copies else self.tensors
        same = zip(self._versions, _versions(self.tensors), map(_equal, self.tensors, values), strict=True)
        found = frozenset(i for i, (before, after, is_equal) in enumerate(same) if before != after or not is_equal)
        self.tensors = []
        return found


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of tensors in one memory, with their strides: kernels, and so what is saved for a backward, depend on them."""
    first = tensors[0]
    if len(tensors) == 1:
        copy = first.detach().requires_grad_(first.requires_grad).clone()
        if not _is_plain(first) or copy.stride() == first.stride():
            return [copy]
    begin = min(x.storage_offset() for x in tensors)
    end = max(begin, *map(_end, tensors))
    wants_grad = any(x.requires_grad for x in tensors)
    memory = first.detach().as_strided((end - begin,), (1,), begin).requires_grad_(wants_grad).clone()
    views = [memory.as_strided(x.shape, x.stride(), x.storage_offset() - begin) for x in tensors]
    return [view if x.requires_grad else view.detach() for x, view in zip(tensors, views, strict=True)]


def _end(x: torch.Tensor) -> int:
    """Behind its last element, in its memory."""
    return (
        int(x.storage_offset()) + 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    )


def _is_plain(x: torch.Tensor) -> bool:
    return type(x) is torch.Tensor and x.layout is torch.strided


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [0 if x.is_inference() else x._version for x in tensors]


def _equal(x: torch.Tensor, copy: torch.Tensor) -> bool:
    """As far as it can be told."""
    return x is copy or not _is_plain(x) or torch.equal(x.detach(), copy.detach())
