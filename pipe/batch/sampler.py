"""Which samples a process passes to `train_step`: the same on all ranks of a pipeline, a share of its own per replica.

epoch's order   | 5 2 7 0 | 1 6 3 4 |          drawn from (seed, epoch) alone, so equal on every rank
batch 0         | 5 2 | 7 0 |                   replica 0 passes 5 2, replica 1 passes 7 0
batch 1                     | 1 6 | 3 4 |
position 4                  ^                  samples that all replicas together have passed
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch.utils.data import Sampler

from ..stages.randomness import mix

Remainder = Literal["drop", "carry"]


class Draw(NamedTuple):
    """A sample of an epoch."""

    epoch: int
    number: int


class ReplicaBatches(Sampler[list[int]]):
    """Sample numbers batch by batch: a `batch_sampler` for `torch.utils.data.DataLoader`.

    No sample is drawn twice in an epoch, over all replicas, also where another run with other sizes goes on from the
    state of this one. Each `iter()` after a whole epoch begins the next one.

    Arguments:
        num_samples: of the dataset.
        batch_size: samples that one replica passes to one `train_step`.
        replica, num_replicas: coordinate and size of the `data` axis; a rank's place along `pipe` does not matter.
        shuffle: another order in each epoch, drawn from `seed` and the epoch's number.
        remainder: samples at the end of an epoch that make no whole batch: "drop" leaves them out; "carry" fills the
            batch with the first ones of the next epoch, so that each sample is used exactly once an epoch.

    Raises ValueError for sizes that make no batch.

    >>> one, two = (ReplicaBatches(8, batch_size=2, replica=q, num_replicas=2, shuffle=False) for q in range(2))
    >>> list(one), list(two)
    ([[0, 1], [4, 5]], [[2, 3], [6, 7]])
    >>> list(ReplicaBatches(5, batch_size=2, shuffle=False, remainder="carry"))
    [[0, 1], [2, 3], [4, 0]]
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
        for name, value in (("batch_size", batch_size), ("num_replicas", num_replicas)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: expected a whole number, at least 1")
        if remainder not in get_args(Remainder):
            raise ValueError(f"remainder={remainder!r}: expected one of {', '.join(map(repr, get_args(Remainder)))}")
        if not 0 <= replica < num_replicas:
            raise ValueError(f"replica={replica} of num_replicas={num_replicas}: expected 0 to {num_replicas - 1}")
        if num_samples < batch_size * num_replicas:
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
        self._remainder = remainder
        self._orders: dict[int, Sequence[int]] = {}  # of this epoch and the one before

    def __len__(self) -> int:
        """Batches of a whole epoch that begins with its first sample."""
        return self._batches_from(0)

    @property
    def left(self) -> int:
        """Batches of the rest of the current epoch."""
        return self._batches_from(self.position)

    def __iter__(self) -> Iterator[list[int]]:
        """The rest of the current epoch."""
        for draws in self.draws():
            yield [draw.number for draw in draws]

    def draws(self) -> Iterator[list[Draw]]:
        """The rest of the current epoch, each sample with the epoch that it belongs to."""
        whole, epoch, begin = self._batch_size * self._num_replicas, self.epoch, self.position
        for number in range(self._batches_from(begin)):
            first = begin + number * whole + self._replica * self._batch_size
            places = (divmod(at, self._num_samples) for at in range(first, first + self._batch_size))
            yield [Draw(epoch + ahead, self._order(epoch + ahead)[at]) for ahead, at in places]

    def worker_seed(self) -> int:
        """For what a dataset's worker draws outside its samples: alike along a pipeline, another one per replica."""
        return mix(self._seed, self.epoch, self.position, self._replica) >> 1

    def sample_seed(self, draw: Draw) -> int:
        """For random augmentation of a sample: another one in each epoch, whoever draws it."""
        return mix(self._seed, draw.epoch, draw.number, 1) >> 1

    def passed(self) -> None:
        """One more batch was passed on."""
        self.position += self._batch_size * self._num_replicas
        self._enter_next()

    def state_dict(self) -> dict[str, int]:
        """Epoch, position and what they are counted in: enough to go on with the next sample."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self._seed,
            "num_samples": self._num_samples,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where another run stood, whatever its batches were and how many replicas passed them.

        Raises ValueError where samples would be lost or seen twice.
        """
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
        return left // whole if self._remainder == "drop" else -(-left // whole)

    def _enter_next(self) -> None:
        """Begin the next epoch where no batch of this one is left."""
        if self.left > 0:
            return
        carried = max(0, self.position - self._num_samples) if self._remainder == "carry" else 0
        self.epoch, self.position = self.epoch + 1, carried

    def _order(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(self._num_samples)
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(mix(self._seed, epoch, 0, 0) >> 1)
            order = torch.randperm(self._num_samples, generator=generator).tolist()
            self._orders = {known: self._orders[known] for known in self._orders if known == epoch - 1} | {epoch: order}
        return self._orders[epoch]
