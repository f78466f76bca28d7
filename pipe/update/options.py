"""Options of optimizers (rates, betas, decay), copied and compared; and changed by a user while batches run.

In a stream the update of batch t runs in call t on the last stages, and in call t + 1 on the first. A user's change
before call t applies from the update of batch t on, on every stage, as in one process:

    call t      the changes are read, and wait
    update b    those of calls up to b are applied; after it, the user sees the waiting ones again
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Group = dict[str, Any]

_OPTION_NUMBERS = 1 << 16  # squares and their sums over a thousand ranks are exact in float64
_KEPT = 16  # updates: more than ranks can be apart


def options_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[Group]:
    """A copy of the options, by group of all optimizers."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [{k: copied_option(v) for k, v in options_of_group(group).items()} for group in groups]


def options_of_group(group: Mapping[str, Any]) -> Group:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def differences(before: Sequence[Group], now: Sequence[Group]) -> list[Group]:
    pairs = zip(before, now, strict=False)
    return [{k: v for k, v in new.items() if k not in old or not _is_same(old[k], v)} for old, new in pairs]


def set_options(optimizers: Iterable[torch.optim.Optimizer], options: Sequence[Group]) -> None:
    """Set options by group; tensors are changed in place, since the user may hold them."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, given in zip(groups, options, strict=False):
        for key, value in given.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = copied_option(value)


class BatchOptions:
    """Options of one stage's optimizers, by the batch from which they apply."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.forget()

    def forget(self) -> None:
        """Apply the present options to all updates."""
        self._waiting: list[tuple[int, list[Group]]] = []  # changes, and the batch that they begin with
        self._shown = self._used = options_of(self._optimizers)

    def read(self, batch: int) -> set[str]:
        """Read the user's changes since the last call, which apply from this batch on; returns the options' names."""
        now = options_of(self._optimizers)
        changes = differences(self._shown, now)
        if any(changes):
            self._waiting.append((batch, changes))
            self._shown = now
        return {name for group in changes for name in group}

    @contextmanager
    def of(self, batch: int) -> Iterator[None]:
        """Context with the options of an update of this batch; changes by a step or a schedule stay."""
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
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


class SameOptions:
    """Options of one rank's updates of the parameters that it shares, compared with the other ranks' after the update.
    A rate that is changed while batches are in flight is first used in a different update on each rank, so the options
    that an update used are compared. Each rank sends them with the gradients of a later update group, without waiting.
    `num_stages`: of the rank: its updates of a group."""

    def __init__(self, rank: int, *, num_stages: int) -> None:
        self._rank = rank
        self._num_stages = num_stages
        self._newest = -1
        self._used: dict[int, dict[str, int]] = {}  # update group -> parameter -> option number
        self._stages_done: dict[int, int] = {}
        self._received: list[tuple[int, int, dict[str, int]]] = []  # (peer, update group, parameter -> number)

    def used(self, index: int, numbers: Mapping[str, int]) -> None:
        """Note the option numbers that a stage's update used, by parameter.

        Raises ValueError that names a parameter for which another rank has used other options.
        """
        self._used.setdefault(index, {}).update(numbers)
        self._stages_done[index] = self._stages_done.get(index, 0) + 1
        if self._stages_done[index] < self._num_stages:
            return
        del self._stages_done[index]
        self._newest = index
        for old in [known for known in self._used if known <= index - _KEPT]:
            del self._used[old]
        self._compare()

    def note(self, names: Sequence[str]) -> list[float]:
        """Numbers to send to a rank with which these parameters are shared: [n + 1]."""
        known = self._used.get(self._newest, {})
        return [float(self._newest), *(float(known.get(name, 0)) for name in names)]

    def received(self, peer: int, names: Sequence[str], note: Sequence[float]) -> None:
        index, *numbers = map(int, note)
        if index >= 0:
            self._received.append((peer, index, dict(zip(names, numbers, strict=True))))

    def drop(self) -> None:
        self._newest = -1
        self._used.clear()
        self._stages_done.clear()
        self._received.clear()

    def _compare(self) -> None:
        for peer, index, numbers in self._received:
            own = self._used.get(index, {}) if index <= self._newest else {}
            differing = [name for name, number in numbers.items() if own.get(name, number) != number]
            if differing:
                raise ValueError(differing_options(differing, sorted((self._rank, peer))))
        self._received = [one for one in self._received if one[1] > self._newest]


def shown(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def differing_options(names: Sequence[str], ranks: Sequence[int]) -> str:
    return (
        f"the ranks {list(ranks)} hold copies of the same weights, and their optimizers have different options for "
        f"{shown(names)} (a learning rate that was changed on some of them?): the copies would drift apart. Expected "
        f"the same change of pipe.optimizers on every rank, under an asynchronous schedule after flush(), or "
        f"lr_scheduler="
    )


def option_number(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> int:
    shown = sorted((key, shown) for key, value in group.items() if (shown := _shown_option(key, value)))
    return zlib.crc32(f"{type(optimizer).__name__} {shown}".encode()) % _OPTION_NUMBERS


def _shown_option(key: str, value: object) -> str:
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 else ""
    return repr(value) if key != "params" and isinstance(value, bool | int | float | str | tuple | None) else ""
