"""The user's own model, data, loss and optimizer, as the commands use them.

    --model m:f      f() -> nn.Module, called once in each process, with the same seed
    --data m:f       f() or f(batch_size=B) -> Dataset of samples          sampled, reshuffled each epoch
                                            -> iterable of batches         iterated once per epoch
                                            (for an iterator that has ended, f is called again)
                                            a batch: (inputs..., target), or a dict of keywords
    --loss m:f       f(output, target) -> scalar mean, or (sum, count); a Module class is made first; "model": its own
    --optimizer m:f  f(parameters) or f(parameters, lr=...) -> Optimizer

Batches of a run come epoch after epoch, with a position from which another process can resume: that of the loader of a
Dataset; else the epoch and the number of its batches, which a resumed run reads again and skips.

Python's, numpy's and torch's generators are seeded before each epoch, equally in every process: a DataLoader that
shuffles gives every rank the same batches. The data draws from its own random state, which nothing else in the process
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..partition.model.batch_dims import TARGET
from ..pipe.batch.loader import OwnRandomState, ReplicaBatches, ReplicaLoader, count_samples, seed_generators
from ..schedules.custom.user_code import UserCodeError, call, load, takes
from .options import OwnOptions

DEFAULT_BATCH = 16
IGNORED = -100  # a target without loss, as in torch's cross-entropy
OWN_LOSS = "model"  # the model returns it
Loss = Callable[[Any, Any], Any] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Arguments of one `train_step`: (inputs..., target), or keywords."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """N, the first tensor's size in dimension 0."""
        first = next(x for x in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(x, Tensor) and x.dim())
        return int(first.shape[0])

    def head(self, num_samples: int) -> Batch:
        """The first samples, along dimension 0 of every tensor."""
        return self.map(lambda x: x[:num_samples] if x.dim() else x)

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            args=pytree.tree_map_only(Tensor, change, self.args),
            kwargs=pytree.tree_map_only(Tensor, change, dict(self.kwargs)),
        )

    def parted(self, loss: Loss) -> tuple[tuple[Any, ...] | dict[str, Any], Any]:
        """The model's arguments, as example_inputs= takes them, and the loss's target."""
        if self.kwargs:
            return {name: its for name, its in self.kwargs.items() if name != TARGET}, self.kwargs.get(TARGET)
        return (self.args, None) if loss == OWN_LOSS else (self.args[:-1], self.args[-1])


def make_model(options: OwnOptions, *, seed: int) -> nn.Module:
    """The user's model. Raises ValueError for a result of another type."""
    value = str(options.model)
    function = load("model", value)
    seed_generators(seed)
    model = call("model", value, function)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"--model {value} returned {type(model).__name__}: expected a torch.nn.Module; write `return model` at its "
            f"end"
        )
    return model


def make_loss(options: OwnOptions, batch: Batch) -> Loss:
    """The user's loss; else the model's own, for keywords without a target; else what the target's type suggests."""
    if options.loss == OWN_LOSS or (options.loss is None and batch.kwargs and TARGET not in batch.kwargs):
        return OWN_LOSS
    if options.loss is None:
        return default_loss
    loss = load("loss", options.loss)
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        module: nn.Module = call("loss", options.loss, loss)
        return module
    return loss


def describe_loss(options: OwnOptions, batch: Batch) -> str:
    loss = make_loss(options, batch)
    if loss == OWN_LOSS:
        return "the model's own"
    target = batch.parted(loss)[1]
    whole = isinstance(target, Tensor) and not target.is_floating_point()
    return options.loss or ("cross-entropy" if whole else "mean squared error")


def make_optimizer(options: OwnOptions, parameters: list[nn.Parameter], *, lr: float | None) -> Optimizer:
    """The user's optimizer, or AdamW. Raises ValueError for a result of another type, or an lr it does not take."""
    if options.optimizer is None:
        return AdamW(parameters) if lr is None else AdamW(parameters, lr=lr)
    value = options.optimizer
    function = load("optimizer", value)
    if lr is not None and not takes(function, "lr"):
        raise ValueError(
            f"--lr {lr} with --optimizer {value}, which has no parameter lr: leave --lr away, or write "
            f"`def {value.rpartition(':')[2]}(parameters, lr)`"
        )
    optimizer = call("optimizer", value, function, parameters, **({} if lr is None else {"lr": lr}))
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"--optimizer {value} returned {type(optimizer).__name__}: expected a torch.optim.Optimizer")
    return optimizer


def default_loss(output: Any, target: Any) -> tuple[Tensor, Tensor] | Tensor:
    """Cross-entropy of whole-number targets, as (sum, count of targets other than IGNORED); else mean squared error.

    The classes are the output's dimension that the target lacks: the last one, or the second.

    Raises ValueError for outputs and targets whose shapes don't determine it.
    """
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
        kinds = " and ".join(type(each).__name__ for each in (output, target))
        raise ValueError(f"output and target are {kinds}: expected tensors, or --loss package.module:function")
    shapes = f"an output of shape {tuple(output.shape)} and a target of shape {tuple(target.shape)}"
    if target.is_floating_point():
        if output.shape != target.shape:
            raise ValueError(f"{shapes}: expected equal shapes for mean squared error, or --loss")
        return F.mse_loss(output, target)
    last, second = output.shape[:-1] == target.shape, output.shape[:1] + output.shape[2:] == target.shape
    if target.is_complex() or last == (second and output.dim() > 2):
        which = "either may be" if last else "none is"
        raise ValueError(f"{shapes}: {which} the dimension of the classes for cross-entropy: expected --loss")
    if last:
        output, target = output.flatten(0, -2), target.flatten()
    count = (target != IGNORED).sum()
    return F.cross_entropy(output, target.long(), ignore_index=IGNORED, reduction="sum"), count


# --- batches, epoch after epoch ---


class OwnBatches(Iterator[Batch]):
    """The user's batches, without end, with a position to resume from.

    Arguments:
        batch_size: samples per batch; None: `default_size` if the function takes batch_size, else what it yields.
        seed: epoch e is read with generators seeded with seed + e.
        workers: processes that read a Dataset ahead; other data is read as it comes.

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
        self._random = OwnRandomState()
        self._made: Iterable[Any] | None = None
        self._epoch, self._passed = 0, 0  # number of the epoch, and of its batches so far
        self._is_begun = False  # whether generators are seeded for an epoch that `_stream` has yet to read
        self._batches = self._stream(to_skip=0)

    def __next__(self) -> Batch:
        with self._random:
            return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Position after the newest batch."""
        if self._made is None:
            with self._random:
                self._begin()
        within = self._made.state_dict() if isinstance(self._made, ReplicaLoader) else None
        if within is not None and within["position"] == 0 and self._passed:  # it is at the next epoch
            return {"epoch": self._epoch + 1, "passed": 0, "within": within}
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
                f"--data {self._value} gave {given} batches in epoch {self._epoch + 1}, and the resumed run was "
                f"after {to_skip}: expected the same data"
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
