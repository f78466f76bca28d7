"""The autocast that a batch was passed under: what is left of it may run after that context has ended."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

_NOTHING: AbstractContextManager[None] = nullcontext()


class Autocast(NamedTuple):
    """Type that a kind of device casts to; None: no autocast."""

    kind: str
    dtype: torch.dtype | None

    @classmethod
    def now(cls, kind: str) -> Autocast:
        return cls(kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)

    def off(self) -> AbstractContextManager[None]:
        """Within: none is in force. Backwards run so: operations have the types of the forward's results already, and
        float32 islands in a forward must not be cast behind it."""
        return torch.autocast(self.kind, enabled=False) if torch.is_autocast_enabled(self.kind) else _NOTHING

    def again(self) -> AbstractContextManager[None]:
        if self.dtype is None:
            return self.off()
        if Autocast.now(self.kind) == self:
            return _NOTHING
        return torch.autocast(self.kind, dtype=self.dtype)
