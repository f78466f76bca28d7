"""Options of optimizers (rates, betas, decay), copied and compared; and as a user changes them while batches run.

In a stream the update of batch t runs in call t on the last stages, and in call t + 1 on the first. What a user changes
in front of call t counts from the update of batch t on, on every stage, as in one process:

    call t      the changes are read, and wait
    update b    those of calls up to b are made; behind it, what still waits is shown again
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Group = dict[str, Any]


def options_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[Group]:
    """A copy, by group of all of them."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [{k: copied_option(v) for k, v in g.items() if k not in ("params", "param_names")} for g in groups]


def differences(before: Sequence[Group], now: Sequence[Group]) -> list[Group]:
    """By group, what is other than before."""
    pairs = zip(before, now, strict=False)
    return [{k: v for k, v in new.items() if k not in old or not _is_same(old[k], v)} for old, new in pairs]


def set_options(optimizers: Iterable[torch.optim.Optimizer], options: Sequence[Group]) -> None:
    """By group; a tensor stays the same one, which the user may hold."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, given in zip(groups, options, strict=False):
        for key, value in given.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = copied_option(value)


class BatchOptions:
    """Options of one stage's optimizers, by the batch from which on they count."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.forget()

    def forget(self) -> None:
        """What is there now counts for all updates."""
        self._waiting: list[tuple[int, list[Group]]] = []  # changes, and the batch that they begin with
        self._shown = self._used = options_of(self._optimizers)

    def read(self, batch: int) -> set[str]:
        """Changes by the user since the last call, which count from this batch on; returns the options' names."""
        now = options_of(self._optimizers)
        changes = differences(self._shown, now)
        if any(changes):
            self._waiting.append((batch, changes))
            self._shown = now
        return {name for group in changes for name in group}

    @contextmanager
    def of(self, batch: int) -> Iterator[None]:
        """Within: those of an update of this batch; what a step or a schedule changes in them stays."""
        if self._waiting:
            set_options(self._optimizers, self._used)
            while self._waiting and self._waiting[0][0] <= batch:
                set_options(self._optimizers, self._waiting.pop(0)[1])
        try:
            yield
        finally:
            self._shown = self._used = options_of(self._optimizers)
            for _, changes in self._waiting:
                set_options(self._optimizers, changes)
                self._shown = options_of(self._optimizers)


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def copied_option(value: Any) -> Any:
    """A value of its own."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
