"""Modules whose tensors are not all here: their own state_dict would save too little without a word.

A stage of another process has meta tensors, a member of a tensor group holds a part, and under fsdp the weights are let
go of between two batches. `pipe.full_state_dict()` and `pipe.save` know all that; `model.state_dict()` does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import SupportsIndex

import torch
from torch import nn

META = "whose weights another process holds: they would be meta tensors, which have no values"
DIVIDED = "whose weights a tensor group divides: they would be this process's parts, under the names of whole ones"
BETWEEN_BATCHES = "whose weights fsdp divides between two batches: they would be NaN"


class Elsewhere:
    """Refuses the state of modules that the pipeline alone can read."""

    def __init__(self) -> None:
        self.is_open = False

    def stand_on(self, modules: Iterable[nn.Module], tensors: Collection[torch.Tensor], why: str) -> None:
        """Refuse `state_dict` and pickling of the modules that hold any of these tensors themselves.

        Arguments:
            why: "whose weights ...: they would be ...".
        """
        wanted = {id(tensor) for tensor in tensors}
        for module in modules:
            own = [*module._parameters.values(), *module._buffers.values()]
            if any(id(value) in wanted for value in own):
                module.register_state_dict_pre_hook(_Refusal(self, why))  # type: ignore[no-untyped-call]

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Within: the state is for the pipeline, which knows."""
        before, self.is_open = self.is_open, True
        try:
            yield
        finally:
            self.is_open = before


class _Refusal:
    """A hook in front of `state_dict`; it raises ValueError when its module is pickled whole, too."""

    def __init__(self, owner: Elsewhere, why: str) -> None:
        self._owner = owner
        self._why = why

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Before the module's state is read."""
        if not self._owner.is_open:
            raise self._error(f"state_dict() of {type(module).__name__} {prefix.rstrip('.')!r}")

    def __deepcopy__(self, memo: object) -> _Refusal:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> str:
        raise self._error("pickling a module")

    def _error(self, what: str) -> ValueError:
        return ValueError(
            f"{what}, {self._why}. Expected pipe.full_state_dict() for all weights, pipe.state_dict() for this "
            f"process's, or pipe.save(folder)"
        )
