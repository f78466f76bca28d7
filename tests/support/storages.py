"""Live storages, counted."""

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """Counts the live storages of each size in bytes that were made within."""

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[int] = Counter()
        self._seen: set[int] = set()

    @property
    def bytes(self) -> int:
        return sum(size * count for size, count in self.live.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor):
                self.note(value)
        return out

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return
        size, key = storage.nbytes(), storage._cdata
        self._seen.add(key)
        self.live[size] += 1

        def gone() -> None:
            self.live[size] -= 1
            self._seen.discard(key)

        weakref.finalize(storage, gone)
