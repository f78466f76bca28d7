"""Loss without a flush: settings of the convergence experiment, trained in one process or timed on ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from ...cli.train.corpus import Corpus, TokenBatch, load_corpus, loss_fn
from ...cli.train.gpt import GPT, GPTConfig
from ...cli.train.recipe import MOMENTUM, NESTEROV, learning_rate_curve, make_optimizer
from ...pipe import Asynchronous, ErrorFeedback, PipelineModule
from ...schedules import Schedule, build
from ..jobs.case import Case
from ..jobs.figure import Figure, How

SCHEDULES = ("1f1b", "2bw", "pipedream", "paci")
OPTIMIZERS = ("adamw", "nadam", "muon")
NONE, FEEDBACK = "none", "error-feedback"
CORRECTIONS = (NONE, FEEDBACK)
FLUSH = "1f1b"  # the reference
CURVE, FINAL, SPEED, SECONDS = "validation loss", "final loss", "throughput", "training time"

_EACH_UPDATES = ("pipedream", "paci")
_MICROBATCHES = 10  # under these: batches of the others
_TIMED, _WARM, _VALIDATED = 40, 10, 32  # updates, updates, sequences at once
_CURVE_SHARE = 4  # a curve uses every fourth validation batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A run's setting.

    Raises ValueError for invalid values.
    """

    schedule: str  # of SCHEDULES; pipedream and paci update after each batch of `sequences`, in `update_every` parts
    ranks: int = 2  # P
    update_every: int = 1
    optimizer: str = "adamw"  # adamw; nadam; muon: Muon for the matrices of the blocks, AdamW for the rest
    # correction, factor: of the delay; lambda of a stage is factor x its delay. Under 1f1b, as a control, as if the
    # delay were one.
    correction: str = NONE
    factor: float = 1.0
    rate: float = 2e-3  # peak rate
    momentum: float = 0.0  # of Muon, or AdamW's first one (0: the optimizer's usual)
    ends: float = 1.0  # AdamW's rate over Muon's
    warmup: float = 0.1  # share of the steps in which the rate rises
    seed: int = 0
    # number of first updates with a flush (`PipelineModule(flush_first=)`), corrected by lambda 1 if the others are
    # corrected
    flush_first: int = 0
    total_updates: int = 500  # of the weights, each after `sequences` of `length` bytes
    sequences: int = 16
    length: int = 64
    layers: int = 4
    width: int = 128
    evaluate_every: int = 50
    windows: int = 512  # validation sequences after the last update; a quarter of them every `evaluate_every` updates

    def __post_init__(self) -> None:
        for name, known in (("schedule", SCHEDULES), ("optimizer", OPTIMIZERS), ("correction", CORRECTIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected {', '.join(known)}")
        if self.total_updates % self.updates_a_step or self.evaluate_every % self.updates_a_step:
            raise ValueError(
                f"total_updates={self.total_updates}, evaluate_every={self.evaluate_every}: expected multiples of "
                f"{self.updates_a_step}, the updates of one step under {self.schedule}"
            )
        if not 0 <= self.flush_first <= self.total_updates or self.flush_first % self.updates_a_step:
            raise ValueError(
                f"flush_first={self.flush_first}: expected a multiple of {self.updates_a_step}, the updates of one "
                f"step under {self.schedule}, at most total_updates={self.total_updates}"
            )

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Setting:
        known = [field.name for field in fields(cls)]
        unknown = [key for key in values if key not in known]
        if unknown:
            raise ValueError(f"{unknown[0]}: expected some of {', '.join(known)}")
        return cls(**values)  # type: ignore[arg-type]

    @property
    def updates_a_step(self) -> int:
        return _MICROBATCHES if self.schedule in _EACH_UPDATES and self.update_every == 1 else 1

    def make_schedule(self) -> Schedule:
        """Schedule of one step: an update after every `sequences` samples."""
        if self.schedule in _EACH_UPDATES:
            each, number = self.update_every, self.update_every * self.updates_a_step
            return build(self.schedule, num_ranks=self.ranks, num_microbatches=number, update_every=each)
        return build(self.schedule, num_ranks=self.ranks, num_microbatches=self.ranks)


def loss(case: Case, repetitions: int) -> Iterator[Figure]:
    """Validation loss [nats per byte] of a setting after its updates, with the seed as repetition; over processes also
    the seconds of the updates."""
    setting = _setting(case)
    place = Case(tuple((key, value) for key, value in case.items if key != "seed"))
    for point in losses(setting):
        name, at = (FINAL, place) if point.whole else (CURVE, place.also(updates=point.updates))
        figure = partial(Figure, case=at, how=How.MEASURED, repetition=setting.seed)
        yield figure(name=name, value=point.loss, unit="nats")
        if point.whole and dist.is_initialized():
            yield figure(name=SECONDS, value=point.seconds, unit="s")


def speed(case: Case, repetitions: int) -> Iterator[Figure]:
    """Tokens per second of a setting, with a process per rank."""
    setting = _setting(case)
    for repetition in range(repetitions):
        value = tokens_per_second(setting, updates=_TIMED, warm=_WARM)
        yield Figure(case=case, name=SPEED, value=value, unit="tokens/s", how=How.MEASURED, repetition=repetition)


def _setting(case: Case) -> Setting:
    try:
        return Setting.of(case.values)
    except ValueError as error:
        raise ValueError(f"case {case}: {error}") from None


class Point(NamedTuple):
    """Validation loss [nats] after `updates` updates; `whole`: over all validation sequences, at the end; `seconds`: of
    all steps so far, without evaluation."""

    updates: int
    loss: float
    whole: bool
    seconds: float


def losses(setting: Setting) -> Iterator[Point]:
    """Train. Yields the loss during training, and after the last update over all windows."""
    corpus = load_corpus()
    validation = corpus.validation_batches(
        num_batches=max(1, setting.windows // _VALIDATED), batch_size=_VALIDATED, length=setting.length
    )
    each, seconds = setting.updates_a_step, 0.0
    with make_pipe(setting, corpus) as pipe:
        began = time.perf_counter()
        for step in range(setting.total_updates // each):
            pipe.train_step(*batch(setting, corpus, step))
            done = (step + 1) * each
            if done % setting.evaluate_every == 0 or done == setting.total_updates:
                pipe.flush()
                seconds += time.perf_counter() - began
                yield Point(done, _evaluate(pipe, validation[::_CURVE_SHARE]), whole=False, seconds=seconds)
                began = time.perf_counter()
        yield Point(setting.total_updates, _evaluate(pipe, validation), whole=True, seconds=seconds)


def tokens_per_second(setting: Setting, *, updates: int, warm: int) -> float:
    """Tokens per second of `updates` updates in a row, after `warm` others; with a process per rank."""
    corpus = load_corpus()
    steps, warm = (-(-each // setting.updates_a_step) for each in (updates, warm))
    batches = [batch(setting, corpus, step) for step in range(steps + warm)]
    with make_pipe(setting, corpus) as pipe:
        for one in batches[:warm]:
            pipe.train_step(*one)
        pipe.flush()
        dist.barrier()
        began = time.perf_counter()
        for one in batches[warm:]:
            pipe.train_step(*one)
        pipe.flush()
        dist.barrier()
        seconds = time.perf_counter() - began
    return steps * setting.updates_a_step * setting.sequences * setting.length / seconds


def make_pipe(setting: Setting, corpus: Corpus) -> PipelineModule:
    """The GPT in its pipeline, over the process group if there is one, else in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(setting.seed)
    schedule = setting.make_schedule()
    momentum = setting.momentum
    by_optimizer: dict[str, dict[str, Any]] = {
        "adamw": {"beta1": momentum or 0.9},
        "nadam": {"beta1": momentum or NESTEROV},
        "muon": {"momentum": momentum or MOMENTUM, "ends": setting.ends},
    }
    rates = learning_rate_curve(setting.total_updates, warmup_part=setting.warmup)
    return PipelineModule(
        GPT(GPTConfig(length=setting.length, layers=setting.layers, width=setting.width)),
        schedule=_arranged(setting, schedule),
        loss_fn=loss_fn,
        optimizer=make_optimizer(setting.optimizer, lr=setting.rate, **by_optimizer[setting.optimizer]),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, rates),
        example_inputs=(batch(setting, corpus, 0).tokens,),
        seed=setting.seed,
        verify=False,
    )


def _arranged(setting: Setting, schedule: str | Schedule) -> str | Schedule | Asynchronous:
    flushes = setting.schedule == FLUSH
    if setting.correction == NONE and flushes:
        return schedule
    delay = 1.0 if flushes else None
    correction = None if setting.correction == NONE else ErrorFeedback(factor=setting.factor, delay=delay)
    return Asynchronous(schedule, flush_first=setting.flush_first // setting.updates_a_step, correction=correction)


def batch(setting: Setting, corpus: Corpus, step: int) -> TokenBatch:
    """The step's batch: those of its updates in order, the same under every schedule."""
    parts = [
        corpus.batch(
            seed=setting.seed,
            step=step * setting.updates_a_step + at,
            batch_size=setting.sequences,
            length=setting.length,
        )
        for at in range(setting.updates_a_step)
    ]
    return TokenBatch(torch.cat([part.tokens for part in parts]), torch.cat([part.targets for part in parts]))


def _evaluate(pipe: PipelineModule, batches: list[TokenBatch]) -> float:
    found = [pipe.eval_step(tokens, targets).loss for tokens, targets in batches]
    return fmean(loss for loss in found if loss is not None)
