"""One run of the experiment: a setting, trained in one process or on a process a rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from ...pipe import ErrorFeedback, PipelineModule
from ..training.corpus import Corpus, TokenBatch, load_corpus, loss_fn
from ..training.gpt import GPT, GPTConfig
from ..training.recipe import MOMENTUM, learning_rate_curve, make_optimizer
from .setting import FLUSH, NONE, Setting

_VALIDATED = 32  # sequences at once
_CURVE_SHARE = 4  # one in so many of the validation batches along the way


class Point(NamedTuple):
    """Validation loss [nats] behind so many updates; `whole`: over all validation sequences, at the end."""

    updates: int
    loss: float
    whole: bool


def losses(setting: Setting) -> Iterator[Point]:
    """Train; the loss along the way, and behind the last update over all windows."""
    corpus = load_corpus()
    validation = corpus.validation_batches(
        num_batches=max(1, setting.windows // _VALIDATED), batch_size=_VALIDATED, length=setting.length
    )
    each = setting.updates_a_step
    with make_pipe(setting, corpus) as pipe:
        for step in range(setting.total_updates // each):
            pipe.train_step(*batch(setting, corpus, step))
            done = (step + 1) * each
            if done % setting.evaluate_every == 0 or done == setting.total_updates:
                yield Point(done, _evaluate(pipe, validation[::_CURVE_SHARE]), whole=False)
        yield Point(setting.total_updates, _evaluate(pipe, validation), whole=True)


def speed(setting: Setting, *, updates: int, warm: int) -> float:
    """Tokens a second of so many updates in a row, behind `warm` others; on a process a rank."""
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
    return steps * setting.tokens_a_step / seconds


def make_pipe(setting: Setting, corpus: Corpus) -> PipelineModule:
    """The GPT in its pipeline, over the process group that is there, else in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(setting.seed)
    schedule = setting.make_schedule()
    momentum = setting.momentum
    by_optimizer = {
        "adamw": {"beta1": momentum or 0.9},
        "muon": {"momentum": momentum or MOMENTUM, "ends": setting.ends},
    }
    rates = learning_rate_curve(setting.total_updates, warmup_part=setting.warmup)
    return PipelineModule(
        GPT(GPTConfig(length=setting.length, layers=setting.layers, width=setting.width)),
        schedule=schedule,
        loss_fn=loss_fn,
        optimizer=make_optimizer(setting.optimizer, lr=setting.rate, **by_optimizer[setting.optimizer]),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, rates),
        example_inputs=(batch(setting, corpus, 0).tokens,),
        seed=setting.seed,
        flush_first=setting.flush_first // setting.updates_a_step,
        **_correction(setting),
    )


def _correction(setting: Setting) -> dict[str, Any]:
    if setting.correction == NONE:
        return {}
    delay = 1.0 if setting.schedule == FLUSH else None
    return {"delay_correction": ErrorFeedback(factor=setting.factor, delay=delay)}


def batch(setting: Setting, corpus: Corpus, step: int) -> TokenBatch:
    """The step's batch: that of each of its updates, one behind the other, the same under every schedule."""
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
