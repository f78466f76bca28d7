"""Results of a first run that its second run is given, by operation, in place of computing them again.

One that was changed in place meanwhile is computed again like all others. What wrote into its memory is seen

    within the run     by the operations' schemas and by memory: chunks of unsafe_chunk, .data and the like have it,
                       and count no version
    behind it          by the versions of the result and of what the run returned
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torchs
from torch.utils._python_dispatch import TorchDispatchMode

from ...partition.graph.split_backward import parts_of
from .randomness import Seeder

Keeps = Callable[..., bool]  # (torch.utils.checkpoint.SelectiveCheckpointContext, operator, *args, **kwargs)

_Key = tuple[Any, int]  # an operation, and how often it ran before


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
        self._results: dict[_Key, _Result] = {}
        self._in_memory: dict[int, list[_Key]] = {}

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """For the first run and the second one, as `context_fn` of torch's checkpoint."""
        return _Mode(self._first), _Mode(self._second)

    def returned(self, value: object) -> None:
        """The first run returned it: others may change it."""
        for x in _tensors(value):
            for key in self._kept_in(x):
                self._results[key].versions.append((_detached(x), x._version))

    def _first(self, key: _Key, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        value, (operator, _) = call(), key
        written = _written(operator)
        for i, name in written:
            for x in _tensors(args[i] if i < len(args) else kwargs.get(name)):
                for spoilt in self._kept_in(x):
                    del self._results[spoilt]
        context = torchs.SelectiveCheckpointContext(is_recompute=False)
        context.op_output = value  # as newer releases of torch have it
        if self._keeps(context, operator, *args, **kwargs) and not written:
            kept = pytree.tree_map_only(torch.Tensor, _detached, value)
            draws = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
            versions = [(x, x._version) for x in _tensors(kept)]
            self._results[key] = _Result(kept, versions, self._seeder.state() if draws else None)
            for x in _tensors(kept):
                for memory in _memories(x):
                    self._in_memory.setdefault(memory, []).append(key)
        return value

    def _second(self, key: _Key, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        result = self._results.pop(key, None)
        if result is None or any(x._version != version for x, version in result.versions):
            return call()
        if result.random is not None:
            self._seeder.resume(result.random)
        return result.value

    def _kept_in(self, x: torch.Tensor) -> list[_Key]:
        keys = [key for memory in _memories(x) for key in self._in_memory.get(memory, ())]
        return [key for key in keys if key in self._results]


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leads the operations of a run through a function."""

    def __init__(self, through: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._through = through
        self._counts: Counter[Any] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code is one operation."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in torchs.SAC_IGNORED_OPS:  # of which the runs have different numbers
            return func(*args, **kwargs)
        key = func, self._counts[func]
        self._counts[func] += 1
        return self._through(key, lambda: func(*args, **kwargs), args, kwargs)


@cache
def _written(operator: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operation changes, by place and name."""
    arguments = getattr(getattr(operator, "_schema", None), "arguments", ())
    return tuple((i, x.name) for i, x in enumerate(arguments) if x.alias_info is not None and x.alias_info.is_write)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _memories(x: torch.Tensor) -> list[int]:
    return [part.untyped_storage()._cdata for part in parts_of(x) if part.layout is torch.strided]


def _detached(x: torch.Tensor) -> torch.Tensor:
    """Without the graph, but of the same version, also below autograd."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()
