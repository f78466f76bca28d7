"""Options of optimizers (rates, betas, decay), copied and compared; and as a user changes them while batches run.

In a stream the update of batch t runs in call t on the last stages, and in call t + 1 on the first. What a user changes
in front of call t counts from the update of batch t on, on every stage, as in one process:

    call t      the changes are read, and wait
    update b    those of calls up to b are made; behind it, what still waits is shown again
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Group = dict[str, Any]


def options_of(optimizer: torch.optim.Optimizer) -> list[Group]:
    """A copy, by group."""
    return [
        {k: copied_option(v) for k, v in g.items() if k not in ("params", "param_names")}
        for g in optimizer.param_groups
    ]


def differences(before: Mapping[str, Any], now: Group) -> Group:
    """What is other than before."""
    return {key: value for key, value in now.items() if key not in before or not _is_same(before[key], value)}


def set_options(optimizer: torch.optim.Optimizer, groups: Sequence[Group]) -> None:
    """By group; a tensor stays the same one, which the user may hold."""
    for group, options in zip(optimizer.param_groups, groups, strict=False):
        for key, value in options.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = copied_option(value)


class BatchOptions:
    """Options of one stage's optimizers, by the batch from which on they count."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._waiting: list[tuple[int, list[list[Group]]]] = []  # changes by group, and the batch that they begin with
        self.forget()

    def forget(self) -> None:
        """What is there now counts for all updates."""
        self._waiting.clear()
        self._shown = self._used = list(map(options_of, self._optimizers))

    def read(self, batch: int) -> set[str]:
        """Changes by the user since the last call, which count from this batch on; returns the options' names."""
        now = list(map(options_of, self._optimizers))
        changes = [
            [differences(was, given) for was, given in zip(before, own, strict=False)]
            for before, own in zip(self._shown, now, strict=True)
        ]
        names = {name for own in changes for group in own for name in group}
        if names:
            self._waiting.append((batch, changes))
            self._shown = now
        return names

    @contextmanager
    def of(self, batch: int) -> Iterator[None]:
        """Within: those of an update of this batch; what a step or a schedule changes in them stays."""
        if self._waiting:
            self._set(self._used)
            while self._waiting and self._waiting[0][0] <= batch:
                self._set(self._waiting.pop(0)[1])
        try:
            yield
        finally:
            self._shown = self._used = list(map(options_of, self._optimizers))
            for _, changes in self._waiting:
                self._set(changes)
            if self._waiting:
                self._shown = list(map(options_of, self._optimizers))

    def _set(self, groups: Sequence[Sequence[Group]]) -> None:
        for optimizer, options in zip(self._optimizers, groups, strict=True):
            set_options(optimizer, options)


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def copied_option(value: Any) -> Any:
    """A value of its own."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
