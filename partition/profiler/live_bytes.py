"""Bytes of live tensors on the CPU, counted by storage as operations make them and let go of them.

torch.profiler sees each allocation, but crashes now and then where gloo's threads work beside it (torch 2.13). This
sees what is there between operations, so not what an operation takes for itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within: counts, in this thread and in the backwards that it runs.

    Arguments:
        known: tensors that are there before and may be let go of within.

    Attributes:
        level: what is there above what was there at the start [bytes]; `settle` brings it up to date.
        most: the highest level so far [bytes].
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.level = self.most = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        for tensor in known:
            self._note(tensor, is_new=False)

    def settle(self) -> None:
        """Take off what has been let go of."""
        for key in [key for key, (storage, _) in self._alive.items() if storage.expired()]:  # type: ignore[no-untyped-call]
            self.level -= self._alive.pop(key)[1]

    def _note(self, tensor: torch.Tensor, *, is_new: bool) -> None:
        if tensor.layout != torch.strided or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:  # a weak reference keeps the address from being used again
            return
        size = storage.nbytes()
        self._alive[key] = StorageWeakRef(storage), size  # type: ignore[no-untyped-call]
        if not is_new:
            return
        self.level += size
        if self.level > self.most:
            self.settle()
            self.most = max(self.most, self.level)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, is_new=False)
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, is_new=True)
        return result
