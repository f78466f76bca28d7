"""Batches of the user's data, epoch after epoch, with a position from which another process can resume.

    a Dataset        sampled, reshuffled each epoch; its position is the loader's
    an iterable      iterated once per epoch; its position is the epoch and the number of its batches, which a resumed
                     run reads again and skips
    an iterator      the same, but the function is called again for each epoch

Python's, numpy's and torch's generators are seeded before each epoch, equally in every process: a DataLoader that
shuffles gives every rank the same batches. The data draws from its own random state, which nothing else in the process
changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..pipe.batch.loader import ReplicaBatches, ReplicaLoader, count_samples, seed_generators
from ..schedules.custom.user_code import UserCodeError, call, load
from .options import OwnOptions
from .own_task import DEFAULT_BATCH, Batch


class OwnBatches(Iterator[Batch]):
    """The user's batches, without end.

    Arguments:
        batch_size: samples of each; None: default_size if the function takes it, else the function's own.
        workers: processes that read a Dataset ahead; other data has its own.

    Raises ValueError for data of another form; UserCodeError for an error in the user's code.
    """

    def __init__(
        self,
        options: OwnOptions,
        *,
        batch_size: int | None,
        seed: int,
        default_size: int = DEFAULT_BATCH,
        workers: int = 0,
    ) -> None:
        self._value = str(options.data)
        self._function = load("data", self._value)
        self._batch_size, self._default_size = batch_size, default_size
        self._seed, self._workers = seed, workers
        self._random = _RandomState()
        self._made: Iterable[Any] | None = None
        self._epoch, self._passed = 0, 0  # batches of this epoch
        self._is_begun = False
        self._batches = self._stream(to_skip=0)

    def __next__(self) -> Batch:
        with self._random:
            return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Position after the last batch."""
        if self._made is None:
            with self._random:
                self._begin()
        within = self._made.state_dict() if isinstance(self._made, ReplicaLoader) else None
        return {"epoch": self._epoch, "passed": self._passed, "within": within}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a position. Raises ValueError for the position in other data."""
        with self._random:
            if isinstance(self._made, Iterator):  # an iterator cannot be rewound
                self._made = None
            self._epoch, self._passed = state["epoch"], state["passed"]
            made, within = self._begin(), state["within"]
            if isinstance(made, ReplicaLoader) and within is not None:
                made.load_state_dict(within)
            elif isinstance(made, ReplicaLoader) or within is not None:
                now, then = (
                    ("no Dataset", "those of a Dataset") if within is not None else ("a Dataset", "other batches")
                )
                raise ValueError(
                    f"--data {self._value} is {now}, and the place is one in {then}: expected the same data"
                )
            self._batches = self._stream(to_skip=0 if within is not None else self._passed)

    def loader(self, why: str) -> tuple[DataLoader[Any], Callable[[Any], Batch]]:
        """The DataLoader that provides them, and the function that turns its items into batches.

        Raises ValueError, beginning with `why`, for data without indexed, countable samples.
        """
        with self._random:
            made: Any = self._begin()
        loader = made.within if isinstance(made, ReplicaLoader) else made
        within = loader.dataset if isinstance(loader, DataLoader) else loader
        of = "" if within is loader else "a DataLoader of "
        if not of or isinstance(within, IterableDataset) or not hasattr(within, "__len__"):
            raise ValueError(
                f"{why}: --data {self._value} returned {of}{type(within).__name__}, which has no samples to "
                f"be counted and fetched by number: expected a Dataset with __len__ and __getitem__, or a DataLoader "
                f"of one"
            )
        return loader, partial(_checked, self._value)

    def _begin(self) -> Iterable[Any]:
        seed_generators(self._seed + self._epoch)
        if self._made is None or isinstance(self._made, Iterator):
            self._made = self._make()
        self._is_begun = True
        return self._made

    def _stream(self, *, to_skip: int) -> Iterator[Batch]:
        first_size = None
        while True:
            made = self._made if self._is_begun and self._made is not None else self._begin()
            given, self._is_begun = 0, False
            for batch in _run(self._value, made):
                given += 1
                if given <= to_skip:
                    continue
                checked = _checked(self._value, batch)
                size = checked.num_samples
                if first_size is None and self._batch_size is not None and size != self._batch_size:
                    raise ValueError(
                        f"--batch {self._batch_size} and --data {self._value} gives batches of {size}: leave --batch "
                        f"away, or let the function take batch_size"
                    )
                first_size = size
                self._passed += 1
                yield checked
            if given < max(1, to_skip):
                raise ValueError(self._too_few(given, to_skip))
            self._epoch, self._passed, to_skip = self._epoch + 1, 0, 0

    def _too_few(self, given: int, to_skip: int) -> str:
        if to_skip:
            return (
                f"--data {self._value} gave {given} batches in epoch {self._epoch + 1}, and the run that goes on stood "
                f"behind {to_skip}: expected the same data"
            )
        again = "" if not self._epoch else f" when it was gone through again (epoch {self._epoch + 1})"
        return f"--data {self._value} gave no batch{again}: expected at least one, such as a list or DataLoader"

    def _make(self) -> Iterable[Any]:
        size = self._batch_size or self._default_size
        made = call("data", self._value, self._function, batch_size=size)
        if isinstance(made, Dataset) and not isinstance(made, IterableDataset):
            batches = ReplicaBatches(count_samples(made), batch_size=size, seed=self._seed, remainder="carry")
            return ReplicaLoader(made, batches, num_workers=self._workers)
        if self._workers:
            raise ValueError(
                f"--workers {self._workers} and --data {self._value} returned {type(made).__name__}: expected a torch "
                f"Dataset; leave --workers away, and type num_workers={self._workers} for a DataLoader of your own"
            )
        if isinstance(made, Iterable) and not isinstance(made, Tensor | nn.Module | str | dict):
            return made
        raise ValueError(
            f"--data {self._value} returned {type(made).__name__}: expected a torch Dataset, or an iterable of batches "
            f"(inputs..., target), such as a DataLoader, a list or a generator"
        )


class _RandomState:
    """A random state of its own, which is the process's inside the context."""

    def __init__(self) -> None:
        self._own: tuple[Any, ...] | None = None  # None: the process's, to begin with
        self._process: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        self._process = _random_states()
        if self._own is not None:
            _set_random_states(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = _random_states()
        _set_random_states(self._process)


def _random_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _set_random_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def _run(value: str, made: Iterable[Any]) -> Iterator[Any]:
    try:
        iterator = iter(made)
    except Exception as error:
        raise UserCodeError(f"--data {value} raised {type(error).__name__}") from error
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise UserCodeError(f"--data {value} raised {type(error).__name__}") from error
        yield batch


def _checked(value: str, batch: Any) -> Batch:
    if isinstance(batch, Mapping):
        if not any(isinstance(x, Tensor) and x.dim() for x in pytree.tree_leaves(dict(batch))):
            raise ValueError(f"--data {value} gave a batch without a tensor: expected tensors by name, {list(batch)}")
        return Batch(kwargs=dict(batch))
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        shown = type(batch).__name__ if not isinstance(batch, tuple | list) else f"a {type(batch).__name__} of one"
        raise ValueError(
            f"--data {value} gave a batch that is {shown}: expected (inputs..., target), two at least, or a dict of "
            f"keywords"
        )
    for position, x in enumerate(batch[:-1]):
        if not isinstance(x, Tensor) or not x.dim():
            shown = "a tensor without dimensions" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"--data {value} gave a batch whose input {position} is {shown}: expected a tensor with the batch in "
                f"dimension 0"
            )
    return Batch(args=tuple(batch))
