"""Results of a first run that its second run is given in place of computing them again, while both do the same.

One that was changed in place meanwhile is computed again like all others. What wrote into its memory is seen

    within the run     by the operations' schemas and by memory: chunks of unsafe_chunk, .data and the like have it,
                       and count no version
    behind it          by the versions of the result and of what the run returned
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torchs
from torch.utils._python_dispatch import TorchDispatchMode

from ...partition.graph.memory import Operations, memory_of, parts_of, written
from .randomness import Seeder

Keeps = Callable[..., bool]  # (torch.utils.checkpoint.SelectiveCheckpointContext, operator, *args, **kwargs)

_aten = torch.ops.aten
# Of these runs may have different numbers, with casts that autocast keeps and memory that slices of a sequence have.
_UNCOUNTED = {*torchs.SAC_IGNORED_OPS, _aten._to_copy.default, _aten.new_empty.default}


class _Result(NamedTuple):
    """What an operation returned, its tensors' versions, and where the generators stood behind one that may draw."""

    value: Any
    versions: list[tuple[torch.Tensor, int]]
    random: Sequence[Any] | None


class KeptResults:
    """Those of one run of a module.

    Arguments:
        keeps: whether the result of an operation that just ran is kept.
        seeder: of the random numbers, which go on behind a result as if it had been computed.
    """

    def __init__(self, keeps: Keeps, seeder: Seeder) -> None:
        self._keeps = keeps
        self._seeder = seeder
        self._operators: list[Any] = []
        self._next = 0  # in the second run
        self._results: dict[int, _Result] = {}
        self._in_memory: dict[object, list[int]] = {}

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """For the first run and the second one, as `context_fn` of torch's checkpoint."""
        return Operations(self._first), Operations(self._second)

    def returned(self, value: object) -> None:
        """The first run returned it: others may change it."""
        for x in _tensors(value):
            for number in self._kept_in(x):
                self._results[number].versions.append((_detached(x), x._version))

    def _first(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value = operator(*args, **kwargs)
        if operator in _UNCOUNTED:
            return value
        number = len(self._operators)
        self._operators.append(operator)
        changed = list(written(operator, args, kwargs))
        for x in changed:
            for spoilt in self._kept_in(x):
                self._results.pop(spoilt, None)
        context = torchs.SelectiveCheckpointContext(is_recompute=False)
        context.op_output = value  # as newer releases of torch have it
        if self._keeps(context, operator, *args, **kwargs) and not changed:
            kept = pytree.tree_map_only(torch.Tensor, _detached, value)
            draws = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
            versions = [(x, x._version) for x in _tensors(kept)]
            self._results[number] = _Result(kept, versions, self._seeder.state() if draws else None)
            for x in _tensors(kept):
                for memory in _memories(x):
                    self._in_memory.setdefault(memory, []).append(number)
        return value

    def _second(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if operator in _UNCOUNTED:
            return operator(*args, **kwargs)
        number, self._next = self._next, self._next + 1
        if number >= len(self._operators) or self._operators[number] is not operator:
            self._results.clear()  # other operations from here on, as where the first run filled a cache of its own
        result = self._results.pop(number, None)
        if result is None or any(x._version != version for x, version in result.versions):
            return operator(*args, **kwargs)
        if result.random is not None:
            self._seeder.resume(result.random)
        return result.value

    def _kept_in(self, x: torch.Tensor) -> list[int]:
        numbers = [number for memory in _memories(x) for number in self._in_memory.get(memory, ())]
        return [number for number in numbers if number in self._results]


def _tensors(value: object) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _memories(x: torch.Tensor) -> list[object]:
    return [memory for part in parts_of(x) if (memory := memory_of(part)) is not None]


def _detached(x: torch.Tensor) -> torch.Tensor:
    """Without the graph, but of the same version, also below autograd."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()
