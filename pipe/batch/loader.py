"""Batches of a dataset for `train_step`, with a position in the data that a checkpoint keeps.

All ranks of a pipeline pass the same samples, each replica its own share:

    epoch's order   | 5 2 7 0 | 1 6 3 4 |          drawn from (seed, epoch) alone, so equal on every rank
    batch 0         | 5 2 | 7 0 |                   replica 0 passes 5 2, replica 1 passes 7 0
    batch 1                     | 1 6 | 3 4 |
    position 4                  ^                  samples that all replicas together have passed

Random numbers that a dataset draws for a sample depend on (seed, epoch, sample) alone: the same with workers and
without, on every rank of a pipeline, and in a run that continues from a checkpoint with other sizes.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

from ...schedules.kinds import at_least, one_of, option
from ..guards.randomness import mix

_log = logging.getLogger("stagewright")
Remainder = Literal["drop", "carry", "keep"]


class Draw(NamedTuple):
    epoch: int
    number: int


class ReplicaBatches(Sampler[list[int]]):
    """Sample numbers batch by batch: a `batch_sampler` for `torch.utils.data.DataLoader`.

    No sample is drawn twice in an epoch, over all replicas, also where a run with other sizes continues from the state
    of this one. Each `iter()` after a whole epoch begins the next one.

    Arguments:
        num_samples: of the dataset.
        batch_size: samples that one replica passes to one `train_step`.
        replica, num_replicas: coordinate and size of the `data` axis; the coordinate along `pipe` does not matter.
        shuffle: another order in each epoch, drawn from `seed` and the epoch's number.
        remainder: what becomes of samples at the end of an epoch that make no whole batch: "drop" leaves them out;
            "carry" fills the batch with the first samples of the next epoch, so that each sample is used exactly once
            per epoch; "keep": the last batch has other sizes (with fewer samples than replicas they join the batch
            before), as for evaluation.

    Raises ValueError for sizes that make no batch.

    >>> one, two = (ReplicaBatches(8, batch_size=2, replica=q, num_replicas=2, shuffle=False) for q in range(2))
    >>> list(one), list(two)
    ([[0, 1], [4, 5]], [[2, 3], [6, 7]])
    >>> list(ReplicaBatches(5, batch_size=2, shuffle=False, remainder="carry"))
    [[0, 1], [2, 3], [4, 0]]
    >>> list(ReplicaBatches(5, batch_size=2, shuffle=False, remainder="keep"))
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        num_samples: int,
        *,
        batch_size: int,
        replica: int = 0,
        num_replicas: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        remainder: Remainder = "drop",
    ) -> None:
        batch_size = option("batch_size", batch_size, at_least(1))
        num_replicas = option("num_replicas", num_replicas, at_least(1))
        option("remainder", remainder, one_of(get_args(Remainder)))
        if not 0 <= replica < num_replicas:
            raise ValueError(f"replica={replica} of num_replicas={num_replicas}: expected 0 to {num_replicas - 1}")
        if num_samples < (num_replicas if remainder == "keep" else batch_size * num_replicas):
            raise ValueError(
                f"{num_samples} samples for {num_replicas} data replicas of batch_size={batch_size}: expected at "
                f"least {batch_size * num_replicas}; give a smaller batch_size"
            )
        self.epoch = 0
        self.position = 0  # samples of this epoch that all replicas together have passed
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._replica, self._num_replicas = replica, num_replicas
        self._shuffle, self._seed = shuffle, seed
        self.remainder = remainder
        self._orders: dict[int, Sequence[int]] = {}  # of this epoch and the one before

    def __len__(self) -> int:
        return self._batches_from(0)

    @property
    def left(self) -> int:
        return self._batches_from(self.position)

    def __iter__(self) -> Iterator[list[int]]:
        for draws in self.draws():
            yield [draw.number for draw in draws]

    def draws(self) -> Iterator[list[Draw]]:
        """The rest of the current epoch, each sample with the epoch that it belongs to."""
        whole, epoch, begin = self._batch_size * self._num_replicas, self.epoch, self.position
        for number in range(self._batches_from(begin)):
            first, size = begin + number * whole, whole
            if self.remainder == "keep" and number == self._batches_from(begin) - 1:
                size = self._num_samples - first
            own = (first + size * q // self._num_replicas for q in (self._replica, self._replica + 1))
            positions = (divmod(at, self._num_samples) for at in range(*own))
            yield [Draw(epoch + ahead, self._order(epoch + ahead)[at]) for ahead, at in positions]

    def worker_seed(self) -> int:
        """Seed for what a dataset's worker draws outside its samples: the same along a pipeline, not over replicas."""
        return mix(self._seed, self.epoch, self.position, self._replica) >> 1

    def sample_seed(self, draw: Draw) -> int:
        """Seed for random augmentation of a sample: different in each epoch, the same in every process."""
        return mix(self._seed, draw.epoch, draw.number, 1) >> 1

    def passed(self) -> None:
        self.position += self._batch_size * self._num_replicas
        self._enter_next()

    def state_dict(self) -> dict[str, int]:
        """Epoch, position and what they are counted in: enough to continue with the next sample."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self._seed,
            "num_samples": self._num_samples,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from another run's position, with any batch size and number of replicas. Raises ValueError where
        samples would be lost or seen twice."""
        own = self.state_dict()
        if state.keys() != own.keys():
            raise ValueError(f"the data's state has {sorted(state)}: expected {sorted(own)}, as from state_dict()")
        for key in ("seed", "num_samples", "shuffle"):
            if state[key] != own[key]:
                raise ValueError(
                    f"the data's state was saved with {key}={state[key]}, and this run has {own[key]}: expected the "
                    f"same dataset, seed and shuffle="
                )
        if not (0 <= state["position"] < self._num_samples and state["epoch"] >= 0):
            raise ValueError(
                f"the data's state has epoch={state['epoch']} and position={state['position']}: expected an epoch of "
                f"at least 0 and a position from 0 to {self._num_samples - 1}"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._enter_next()

    def _batches_from(self, position: int) -> int:
        whole, left = self._batch_size * self._num_replicas, self._num_samples - position
        is_batch = left % whole >= {"drop": whole, "carry": 1, "keep": self._num_replicas}[self.remainder]
        return left // whole + is_batch

    def _enter_next(self) -> None:
        if self.left > 0:
            return
        carried = max(0, self.position - self._num_samples) if self.remainder == "carry" else 0
        self.epoch, self.position = self.epoch + 1, carried

    def _order(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(self._num_samples)
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(mix(self._seed, epoch, 0, 0) >> 1)
            order = torch.randperm(self._num_samples, generator=generator).tolist()
            self._orders = {known: self._orders[known] for known in self._orders if known == epoch - 1} | {epoch: order}
        return self._orders[epoch]


class ReplicaLoader:
    """Batches for `train_step`, epoch after epoch: `for epoch in ...: for batch in loader: pipe.train_step(*batch)`.

    Arguments:
        batches: which samples this process passes.
        is_idle: whether no stage of this process reads a batch's values, once the stages are built.
        same_shapes: whether all batches have the first one's shapes; an idle process then loads no other, and passes
            meta tensors (shapes alone).
        waiting: context of the wait for a batch.
        seeded: makes the dataset that seeds the generators for each sample.
        options: of `torch.utils.data.DataLoader` (num_workers, collate_fn, pin_memory, ...).

    Python's, numpy's and torch's generators are seeded for each sample, so that augmentation is random and can be
    repeated (not a generator of the dataset's own; a dataset with `__getitems__` is seeded once per batch). Without
    workers the process's random state is restored after each batch.

    Raises ValueError under `same_shapes` for a batch of other shapes than the first one's.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batches: ReplicaBatches,
        *,
        is_idle: Callable[[], bool] = lambda: False,
        same_shapes: bool = False,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        seeded: Callable[[Dataset[Any], ReplicaBatches], Dataset[Any]] | None = None,
        **options: Any,
    ) -> None:
        for name in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"):
            if name in options:
                instead = (
                    'remainder="drop", "keep" or "carry"' if name == "drop_last" else "other options of DataLoader"
                )
                raise ValueError(f"{name}= is the pipeline's to decide: expected {instead}")
        if same_shapes and batches.remainder == "keep":
            raise ValueError(
                'same_shapes=True with remainder="keep", whose last batch is smaller: expected one of them'
            )
        self.batches = batches
        self._workers: torch.Generator = options.setdefault("generator", torch.Generator())
        self._name = type(dataset).__name__
        drawn = (seeded or Seeded)(dataset, batches)
        self.within: DataLoader[Any] = DataLoader(drawn, batch_sampler=_DrawnBatches(batches), **options)
        self._is_idle = is_idle
        self._same_shapes = same_shapes
        self._waiting = waiting
        self._shapes: Any = None

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch; the next `iter()` begins another one."""
        left = self.batches.left
        self._workers.manual_seed(self.batches.worker_seed())
        for batch in () if self.may_rest() else self.loaded():
            if self._same_shapes:
                self._check_shapes(batch)
            self.batches.passed()  # before the caller runs it: a state saved after train_step begins after it
            left -= 1
            yield batch
            if self.may_rest():
                break
        if left:
            self.rest()
        for _ in range(left):
            self.batches.passed()
            yield self._shapes

    def state_dict(self) -> dict[str, int]:
        return self.batches.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from there; ValueError where samples would be lost or seen twice."""
        try:
            self.batches.load_state_dict(state)
        except ValueError as error:
            raise ValueError(f"{self._name} as the dataset: {error}") from None

    def loaded(self) -> Iterator[Any]:
        """The rest of the epoch from the DataLoader, which does not change this process's random state."""
        loaded = iter(self.within)
        while True:
            with OwnRandomState(), self._waiting():
                try:
                    batch = next(loaded)
                except StopIteration:
                    return
            yield batch

    def may_rest(self) -> bool:
        return self._shapes is not None and self._is_idle()

    def rest(self) -> None:
        """Called when this process takes no more batches of the epoch."""

    def _check_shapes(self, batch: Any) -> None:
        shapes = pytree.tree_map_only(torch.Tensor, lambda leaf: torch.empty_like(leaf, device="meta"), batch)
        if self._shapes is None:
            self._shapes = shapes
            return
        for leaf, known in zip(pytree.tree_leaves(shapes), pytree.tree_leaves(self._shapes), strict=True):
            if isinstance(leaf, torch.Tensor) and (leaf.shape, leaf.dtype) != (known.shape, known.dtype):
                raise ValueError(
                    f"a batch with {tuple(leaf.shape)} {leaf.dtype} where the first one had {tuple(known.shape)} "
                    f"{known.dtype}: expected equal shapes, or same_shapes=False (then every rank loads every batch)"
                )


class _DrawnBatches(Sampler[list[Draw]]):
    def __init__(self, batches: ReplicaBatches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Draw]]:
        return self._batches.draws()


class Seeded(Dataset[Any]):
    """A dataset that seeds the generators for each sample; other attributes are those of the dataset within."""

    def __init__(self, dataset: Dataset[Any], batches: ReplicaBatches) -> None:
        self.dataset = dataset
        self._batches = batches

    def __getitems__(self, draws: Sequence[Draw]) -> Any:
        within: Any = self.dataset
        while isinstance(within, Subset):  # it has `__getitems__` whether its dataset has or not
            within = within.dataset
        if getattr(within, "__getitems__", None) is not None:
            seed_generators(self._batches.sample_seed(draws[0]))
            return self.dataset.__getitems__([draw.number for draw in draws])  # type: ignore[attr-defined]
        samples = []
        for draw in draws:
            seed_generators(self._batches.sample_seed(draw))
            samples.append(self.dataset[draw.number])
        return samples

    def __len__(self) -> int:
        return count_samples(self.dataset)

    def __getattr__(self, name: str) -> Any:  # for a worker_init_fn
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


class OwnRandomState:
    """A random state of its own, at first the process's: that of the generators inside the context, and only there."""

    def __init__(self) -> None:
        self._own: tuple[Any, ...] | None = None
        self._process: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        self._process = _states()
        if self._own is not None:
            _set_states(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = _states()
        _set_states(self._process)


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _set_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def count_samples(dataset: Dataset[Any]) -> int:
    has_numbers = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if not has_numbers or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"pipe.loader was given {type(dataset).__name__}, which has no samples by number: expected a dataset with "
            f"__len__ and __getitem__; or your own DataLoader that yields the same batches on all ranks of a pipeline"
        )
    return len(dataset)
