"""Which samples a process passes to `train_step`: the same on all ranks of a pipeline, a share of its own per replica.

epoch's order   | 5 2 7 0 | 1 6 3 4 |          drawn from (seed, epoch) alone, so equal on every rank
batch 0         | 5 2 | 7 0 |                   replica 0 passes 5 2, replica 1 passes 7 0
batch 1                     | 1 6 | 3 4 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ..stages.randomness import mix


class ReplicaBatches(Sampler[list[int]]):
    """Sample numbers batch by batch: a `batch_sampler` for `torch.utils.data.DataLoader`.

    Each sample is drawn once per epoch over all replicas (but for an incomplete last batch, which is left out: every
    replica passes as many batches as the others). Each `iter()` after a whole epoch begins the next one.

    Arguments:
        num_samples: of the dataset.
        batch_size: samples that one replica passes to one `train_step`.
        replica, num_replicas: coordinate and size of the `data` axis; a rank's place along `pipe` does not matter.
        shuffle: another order in each epoch, drawn from `seed` and the epoch's number.

    Raises ValueError for sizes that make no batch.

    >>> one, two = (ReplicaBatches(8, batch_size=2, replica=q, num_replicas=2, shuffle=False) for q in range(2))
    >>> list(one), list(two)
    ([[0, 1], [4, 5]], [[2, 3], [6, 7]])
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
    ) -> None:
        for name, value in (("batch_size", batch_size), ("num_replicas", num_replicas)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: expected a whole number, at least 1")
        if not 0 <= replica < num_replicas:
            raise ValueError(f"replica={replica} of num_replicas={num_replicas}: expected 0 to {num_replicas - 1}")
        if num_samples < batch_size * num_replicas:
            raise ValueError(
                f"{num_samples} samples for {num_replicas} data replicas of batch_size={batch_size}: expected at "
                f"least {batch_size * num_replicas}; give a smaller batch_size"
            )
        self.epoch = 0
        self.position = 0  # batches of this epoch that have been passed
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._replica, self._num_replicas = replica, num_replicas
        self._shuffle, self._seed = shuffle, seed

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._num_samples // (self._batch_size * self._num_replicas)

    def __iter__(self) -> Iterator[list[int]]:
        """The rest of the current epoch."""
        whole = self._batch_size * self._num_replicas
        order = self._order()
        for number in range(self.position, len(self)):
            begin = number * whole + self._replica * self._batch_size
            yield order[begin : begin + self._batch_size]

    def worker_seed(self) -> int:
        """For random augmentation from here on: the same along a pipeline, another one for each data replica."""
        return mix(self._seed, self.epoch, self.position, self._replica) >> 1

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._num_samples))
        generator = torch.Generator().manual_seed(mix(self._seed, self.epoch, 0, 0) >> 1)
        return cast("list[int]", torch.randperm(self._num_samples, generator=generator).tolist())

    def passed(self) -> None:
        """One more batch was passed on."""
        self.position += 1
        if self.position == len(self):
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Epoch, position and what they are counted in: enough to go on with the next batch."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self._seed,
            "global_batch": self._batch_size * self._num_replicas,
            "num_samples": self._num_samples,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where another run stood. Raises ValueError where samples would be lost or seen twice."""
        own = self.state_dict()
        if state.keys() != own.keys():
            raise ValueError(f"the data's state has {sorted(state)}: expected {sorted(own)}, as from state_dict()")
        for key in ("seed", "global_batch", "num_samples", "shuffle"):
            if state[key] != own[key]:
                raise ValueError(
                    f"the data's state was saved with {key}={state[key]}, and this run has {own[key]}: expected the "
                    f"same dataset, seed, shuffle=, and batch_size x data replicas"
                )
        if not (0 <= state["position"] < len(self) and state["epoch"] >= 0):
            raise ValueError(
                f"the data's state has epoch={state['epoch']} and position={state['position']}: expected an epoch of "
                f"at least 0 and a position from 0 to {len(self) - 1}"
            )
        self.epoch, self.position = state["epoch"], state["position"]


class ReplicaLoader:
    """Batches for `train_step`, epoch after epoch: `for epoch in ...: for batch in loader: pipe.train_step(*batch)`.

    Arguments:
        batches: which samples this process passes.
        is_idle: whether no stage of this process reads a batch's values, once the stages are built.
        same_shapes: all batches have the first one's shapes; an idle process then loads no other, and passes meta
            tensors (shapes alone).
        options: of `torch.utils.data.DataLoader` (num_workers, collate_fn, pin_memory, ...).

    Random numbers that the dataset draws in workers (`num_workers` above 0) are the same on all ranks of a pipeline;
    without workers it draws from the process's own state, so that ranks must be seeded alike.

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
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=batches, **options)
        self._is_idle = is_idle
        self._same_shapes = same_shapes
        self._shapes: Any = None

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch; the next `iter()` begins another one."""
        left = len(self.batches) - self.batches.position
        self._workers.manual_seed(self.batches.worker_seed())
        for batch in () if self._may_rest() else self._loader:
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
        self.batches.load_state_dict(state)

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


def _shape_alone(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf


def count_samples(dataset: Dataset[Any]) -> int:
    """Samples of a dataset; ValueError for one that cannot be drawn from by number."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"pipe.loader was given {type(dataset).__name__}, which cannot be drawn from by number: expected a "
            f"dataset with __len__ and __getitem__; or a DataLoader of your own that yields the same batches on "
            f"all ranks of a pipeline"
        )
    return len(dataset)
