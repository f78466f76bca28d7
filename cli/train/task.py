"""Tasks of a run: a model with its batches, loss and optimizer, either the example GPT or the user's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from ...partition.profiler.optimizers import OptimizerFactory
from ...pipe.checkpoint.snapshot import HasState
from ...schedules.wording import printable
from .. import own_task as own
from ..own_task import OwnBatches
from .corpus import Corpus, load_corpus, loss_fn
from .gpt import GPT, sample
from .options import TrainOptions, model_config
from .recipe import make_optimizer

VALIDATION_WINDOWS = 512
SAMPLE_PROMPT = b"import "
SAMPLE_BYTES = 240


class Batches(HasState, Iterator[own.Batch], Protocol):
    """Batches without an end; the state is the position after the last one."""

    def loader(self, why: str) -> tuple[DataLoader[Any], Callable[[Any], own.Batch]]:
        """The DataLoader that provides them, and the function that turns its items into batches. Raises ValueError
        without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model to train, and everything needed to train it."""

    source: str  # of the batches
    sha256: str | None  # of the batches; None if unknown
    make_model: Callable[[], nn.Module]  # makes the model with the same weights in each process
    loss_for: Callable[[own.Batch], own.Loss]  # the loss for batches like one
    loss_name: Callable[[own.Batch], str]  # as shown
    optimizer: OptimizerFactory
    batches: Callable[[], Batches]  # (inputs..., target) each, without an end, the same in each process
    validation: Callable[[], Iterable[own.Batch]]  # held-out batches; may be empty
    sample_bytes: int | None  # bytes of text in one sample, over which the loss is a mean; None for other data
    # makes text from a model with these weights; None: nothing to show
    describe: Callable[[Mapping[str, torch.Tensor]], str] | None


def make_task(options: TrainOptions) -> Task:
    """The task of the options. Raises ValueError for a model or data that cannot be trained."""
    return _gpt(options) if options.model is None else _own(options)


def _gpt(options: TrainOptions) -> Task:
    corpus, batch_size = load_corpus(options.text), options.batch_size
    corpus.check_length(options.length)

    def described(weights: Mapping[str, torch.Tensor]) -> str:
        """Text from a new model with the gathered weights, which shows that they are complete."""
        fresh = GPT(model_config(options))
        fresh.load_state_dict(weights)
        written = sample(fresh, SAMPLE_PROMPT, num_bytes=SAMPLE_BYTES, length=options.length, seed=options.seed)
        text = printable((SAMPLE_PROMPT + written).decode(errors="replace"))  # a young model writes escape sequences
        return f"sample after {SAMPLE_PROMPT.decode()!r}, from the gathered weights:\n\n{text}"

    return Task(
        source=corpus.source,
        sha256=corpus.sha256,
        make_model=lambda: make_gpt(options),
        loss_for=lambda batch: loss_fn,
        loss_name=lambda batch: "cross-entropy",
        optimizer=make_optimizer(options.optimizer_name, lr=options.learning_rate),
        batches=lambda: Windows(corpus, options),
        validation=lambda: [
            own.Batch(args=batch)
            for batch in corpus.validation_batches(
                num_batches=max(1, VALIDATION_WINDOWS // batch_size), batch_size=batch_size, length=options.length
            )
        ],
        sample_bytes=options.length,
        describe=described,
    )


def _own(options: TrainOptions) -> Task:
    return Task(
        source=str(options.data),
        sha256=None,
        make_model=lambda: own.make_model(options, seed=options.seed),
        loss_for=lambda batch: own.make_loss(options, batch),
        loss_name=lambda batch: own.describe_loss(options, batch),
        optimizer=lambda parameters: own.make_optimizer(options, parameters, lr=options.lr),
        batches=lambda: OwnBatches(options, batch_size=options.batch, seed=options.seed, workers=options.workers),
        validation=lambda: (),
        sample_bytes=None,
        describe=None,
    )


def make_gpt(options: TrainOptions) -> GPT:
    torch.manual_seed(options.seed)
    return GPT(model_config(options))


class Windows(Iterator[own.Batch]):
    """Batches of the corpus: each step's are drawn from (seed, step) alone."""

    def __init__(self, corpus: Corpus, options: TrainOptions) -> None:
        self._corpus, self._options = corpus, options
        self._step = 0

    def __next__(self) -> own.Batch:
        self._step += 1
        return own.Batch(args=self[self._step - 1])

    def __getitem__(self, step: int) -> tuple[torch.Tensor, ...]:
        options = self._options
        return self._corpus.batch(seed=options.seed, step=step, batch_size=options.batch_size, length=options.length)

    def loader(self, why: str) -> tuple[DataLoader[Any], Callable[[Any], own.Batch]]:
        """The same batches by a DataLoader, which fetches each as a whole."""
        del why
        sampler = cast("Sampler[int]", itertools.count())
        return DataLoader(cast("Dataset[Any]", self), sampler=sampler, batch_size=None), lambda args: own.Batch(
            args=args
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "corpus": self._corpus.sha256}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after these steps. Raises ValueError for another text."""
        if state.get("corpus") != self._corpus.sha256:
            raise ValueError(
                f"the resumed run was trained on another text than {self._corpus.source} is now: expected the "
                f"same files as --text, or the same Python"
            )
        self._step = state["step"]
