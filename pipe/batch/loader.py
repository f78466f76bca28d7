"""Batches of a dataset for `train_step`, with a place in the data that a checkpoint keeps.

Random numbers that a dataset draws for a sample depend on (seed, epoch, sample) alone: the same with workers and
without, on every rank of a pipeline, and in a run that goes on from a checkpoint with other sizes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

from .sampler import Draw, ReplicaBatches


class ReplicaLoader:
    """Batches for `train_step`, epoch after epoch: `for epoch in ...: for batch in loader: pipe.train_step(*batch)`.

    Arguments:
        batches: which samples this process passes.
        is_idle: whether no stage of this process reads a batch's values, once the stages are built.
        same_shapes: all batches have the first one's shapes; an idle process then loads no other, and passes meta
            tensors (shapes alone).
        options: of `torch.utils.data.DataLoader` (num_workers, collate_fn, pin_memory, ...).

    Python's, numpy's and torch's generators are seeded for each sample, so that augmentation is random and can be
    repeated (a generator of the dataset's own is not; a dataset with `__getitems__` is seeded once a batch). Without
    workers the process's own random state is put back behind each batch.

    Raises ValueError under `same_shapes` for a batch of other shapes than the first one's.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batches: ReplicaBatches,
        *,
        is_idle: Callable[[], bool] = lambda: False,
        same_shapes: bool = False,
        **options: Any,
    ) -> None:
        for name in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"):
            if name in options:
                raise ValueError(f"{name}= is the pipeline's to decide: expected options of DataLoader beside it")
        self.batches = batches
        self._workers: torch.Generator = options.setdefault("generator", torch.Generator())
        self._name = type(dataset).__name__
        self._loader: DataLoader[Any] = DataLoader(_Seeded(dataset, batches), batch_sampler=_Draws(batches), **options)
        self._is_idle = is_idle
        self._same_shapes = same_shapes
        self._shapes: Any = None

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch; the next `iter()` begins another one."""
        left = self.batches.left
        self._workers.manual_seed(self.batches.worker_seed())
        for batch in () if self._may_rest() else self._loaded():
            if self._same_shapes:
                self._check_shapes(batch)
            self.batches.passed()  # before the caller runs it: a state saved after train_step begins behind it
            left -= 1
            yield batch
            if self._may_rest():
                break
        for _ in range(left):
            self.batches.passed()
            yield self._shapes

    def state_dict(self) -> dict[str, int]:
        """Place in the data: see ReplicaBatches.state_dict."""
        return self.batches.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there; ValueError where samples would be lost or seen twice."""
        try:
            self.batches.load_state_dict(state)
        except ValueError as error:
            raise ValueError(f"{self._name} as the dataset: {error}") from None

    def _loaded(self) -> Iterator[Any]:
        """The rest of the epoch from the DataLoader, whose work leaves this process's random state as it was."""
        loaded = iter(self._loader)
        while True:
            with _own_random_state():
                try:
                    batch = next(loaded)
                except StopIteration:
                    return
            yield batch

    def _may_rest(self) -> bool:
        return self._shapes is not None and self._is_idle()

    def _check_shapes(self, batch: Any) -> None:
        shapes = pytree.tree_map(_shape_alone, batch)
        if self._shapes is None:
            self._shapes = shapes
            return
        for leaf, known in zip(pytree.tree_leaves(shapes), pytree.tree_leaves(self._shapes), strict=True):
            if isinstance(leaf, torch.Tensor) and (leaf.shape, leaf.dtype) != (known.shape, known.dtype):
                raise ValueError(
                    f"a batch with {tuple(leaf.shape)} {leaf.dtype} where the first one had {tuple(known.shape)} "
                    f"{known.dtype}: expected equal shapes, or same_shapes=False (then every rank loads every batch)"
                )


class _Draws(Sampler[list[Draw]]):
    """Samples that ReplicaBatches draws, with the epoch of each sample."""

    def __init__(self, batches: ReplicaBatches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Draw]]:
        return self._batches.draws()


class _Seeded(Dataset[Any]):
    """A dataset whose samples are drawn under seeds of their own; all else is that of the dataset within."""

    def __init__(self, dataset: Dataset[Any], batches: ReplicaBatches) -> None:
        self.dataset = dataset
        self._batches = batches

    def __getitems__(self, draws: Sequence[Draw]) -> Any:
        within: Any = self.dataset
        while isinstance(within, Subset):  # which only passes on what the dataset within can
            within = within.dataset
        if getattr(within, "__getitems__", None) is not None:
            seed_generators(self._batches.sample_seed(draws[0]))
            return self.dataset.__getitems__([draw.number for draw in draws])  # type: ignore[attr-defined]
        samples = []
        for draw in draws:
            seed_generators(self._batches.sample_seed(draw))
            samples.append(self.dataset[draw.number])
        return samples

    def __getattr__(self, name: str) -> Any:  # for a worker_init_fn
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def seed_generators(seed: int) -> None:
    """Seed the generators that a user's data may draw from."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def _own_random_state() -> Iterator[None]:
    """Within, generators may be seeded: this process's state is put back."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _shape_alone(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf


def count_samples(dataset: Dataset[Any]) -> int:
    """Samples of a dataset; ValueError for one that cannot be drawn from by number."""
    has_numbers = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if not has_numbers or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"pipe.loader was given {type(dataset).__name__}, which cannot be drawn from by number: expected a "
            f"dataset with __len__ and __getitem__; or a DataLoader of your own that yields the same batches on "
            f"all ranks of a pipeline"
        )
    return len(dataset)
