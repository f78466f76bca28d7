"""Exchange between processes alongside training, in a separate thread: through the rendezvous store.

A collective of the run would wait for the run's other collectives, and one that timed out would break its group. Here a
wait polls the store, on any thread, and a time-out ends nothing. Any process that reaches the store may write into it:
so its entries are sealed (see `sealed`) where the run has a secret, and JSON, never code.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TypeVar

from torch.distributed.distributed_c10d import Store, _get_default_store

from .mesh import World
from .sealed import sealed

T = TypeVar("T")

_POLL = 0.02  # [s]


class ExchangeError(Exception):
    """Another process gave up, or this one is to stop waiting."""


class StoreExchange:
    """Rounds in which each process gives a value and gets those of all."""

    def __init__(self, store: Store, *, rank: int, size: int, name: str, is_over: Callable[[], bool]) -> None:
        self.rank = rank
        self._store = store
        self._size = size
        self._name = name  # of these rounds, the same on all processes and never used before
        self._is_over = is_over  # whether to stop waiting
        self._round = 0

    def gather(self, mine: T, *, what: str) -> list[T]:
        """[size] values of all processes, on every process, as JSON. Raises ExchangeError where one will not come, or
        is no JSON."""
        keys = [self._key(rank) for rank in range(self._size)]
        self._store.set(keys[self.rank], json.dumps(mine))
        while not self._store.check(keys):
            if self._store.check([self._ended]):
                raise ExchangeError(f"{what}: {self._store.get(self._ended).decode(errors='replace')}")
            if self._is_over():
                raise ExchangeError(f"{what}: no process waits for it any more")
            time.sleep(_POLL)
        try:
            answers: list[T] = [json.loads(self._store.get(key)) for key in keys]
        except (ValueError, RecursionError) as error:
            raise ExchangeError(f"{what}: an entry of the store is no JSON ({error})") from None
        if self._round:  # all are in this round, and have read the one before
            self._store.delete_key(self._key(self.rank, self._round - 1))
        self._round += 1
        return answers

    def give_up(self, why: str) -> None:
        self._store.set(self._ended, f"process {self.rank}: {why}")

    def missing(self) -> list[int]:
        return [rank for rank in range(self._size) if not self._store.check([self._key(rank)])]

    @property
    def _ended(self) -> str:
        return f"{self._name}/ended"

    def _key(self, rank: int, number: int | None = None) -> str:
        return f"{self._name}/{self._round if number is None else number}/{rank}"


class Alone:
    rank = 0

    def gather(self, mine: T, *, what: str) -> list[T]:
        return [mine]

    def give_up(self, why: str) -> None:
        """Nothing to do: no process waits."""

    def missing(self) -> list[int]:
        return []


def exchanges(world: World, *, what: str) -> Callable[[int, Callable[[], bool]], StoreExchange | Alone]:
    """Makes exchanges between the processes of a run, by number and `is_over`. All call it in the same order."""
    if not world.distributed:
        return lambda number, is_over: Alone()
    store = sealed(_get_default_store())
    name = f"exchange/{what}/{store.add(f'exchange/{what} of {world.rank}', 1)}"
    return lambda number, is_over: StoreExchange(
        store, rank=world.rank, size=world.size, name=f"{name}/{number}", is_over=is_over
    )
