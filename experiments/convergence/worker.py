"""One run of the experiment: one method, one seed; a process a rank, one thread each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ...pipe import PipelineModule
from ...schedules import Schedule, build
from ..launcher import report_to_launcher
from ..training.corpus import TokenBatch, load_corpus, loss_fn
from ..training.gpt import GPT, GPTConfig
from ..training.recipe import learning_rate_curve, make_optimizer
from .curves import Curve
from .methods import METHODS, Method


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of one run; see the command's."""

    method: str
    seed: int
    steps: int
    microbatches: int
    layers: int
    width: int
    length: int
    batch: int
    lr: float
    beta1: float
    evaluate_every: int
    windows: int
    out: Path


def main() -> None:
    """Run it; rank 0 writes the curve as JSON."""
    options = tyro.cli(RunOptions)
    torch.set_num_threads(1)
    with report_to_launcher():
        curve = train(options)
        if not dist.is_initialized() or dist.get_rank() == 0:
            options.out.write_text(json.dumps(asdict(curve)), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


def train(options: RunOptions) -> Curve:
    """The curve of one run."""
    method = METHODS[options.method]
    torch.manual_seed(options.seed)
    model = GPT(GPTConfig(length=options.length, layers=options.layers, width=options.width))
    corpus = load_corpus()
    first = corpus.batch(seed=options.seed, step=0, batch_size=options.batch, length=options.length)
    runner: _Single | _Pipelined
    runner = _Single(options, method, model) if method.schedule is None else _Pipelined(options, method, model, first)
    validation = corpus.validation_batches(
        num_batches=max(1, options.windows // options.batch), batch_size=options.batch, length=options.length
    )
    steps, seconds, losses = [0], [0.0], [runner.evaluate(validation)]
    spent, began = 0.0, time.perf_counter()
    for step in range(options.steps):
        runner.step(*corpus.batch(seed=options.seed, step=step, batch_size=options.batch, length=options.length))
        if (step + 1) % options.evaluate_every == 0 or step + 1 == options.steps:
            runner.drain()
            spent += time.perf_counter() - began
            steps.append(step + 1)
            seconds.append(spent)
            losses.append(runner.evaluate(validation))
            began = time.perf_counter()
    runner.close()
    return Curve(
        method=options.method,
        seed=options.seed,
        tokens_per_step=options.batch * options.length,
        steps=steps,
        seconds=seconds,
        losses=losses,
    )


def _optimizer(options: RunOptions) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    return lambda parameters: make_optimizer(parameters, lr=options.lr, beta1=options.beta1)


def _scheduler(options: RunOptions, method: Method) -> Callable[[Optimizer], LambdaLR]:
    curve = learning_rate_curve(options.steps, warmup_part=0.1 if method.warmup else 0.0)
    return lambda optimizer: LambdaLR(optimizer, curve)


class _Single:
    """One process, a plain loop over the same microbatches."""

    def __init__(self, options: RunOptions, method: Method, model: GPT) -> None:
        self._model = model
        self._microbatches = options.microbatches
        self._optimizer = _optimizer(options)(model.parameters())
        self._scheduler = _scheduler(options, method)(self._optimizer)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        parts = zip(tokens.tensor_split(self._microbatches), targets.tensor_split(self._microbatches), strict=True)
        for x, y in parts:
            loss = loss_fn(self._model(x), y) * (len(x) / len(tokens))
            loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()

    def evaluate(self, batches: list[TokenBatch]) -> float:
        self._model.eval()
        with torch.no_grad():
            losses = [float(loss_fn(self._model(tokens), targets)) for tokens, targets in batches]
        self._model.train()
        return fmean(losses)

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Pipelined:
    """PipelineModule over the processes of this run."""

    def __init__(self, options: RunOptions, method: Method, model: GPT, first: TokenBatch) -> None:
        self._pipe = PipelineModule(
            model,
            schedule=_schedule(method, options.microbatches),
            loss_fn=loss_fn,
            optimizer=_optimizer(options),
            lr_scheduler=_scheduler(options, method),
            example_inputs=(first[0],),
            seed=options.seed,
        )

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        self._pipe.train_step(tokens, targets)

    def evaluate(self, batches: list[TokenBatch]) -> float:
        losses = (self._pipe.eval_step(tokens, targets).loss for tokens, targets in batches)
        return fmean(loss for loss in losses if loss is not None)

    def drain(self) -> None:
        """To the last update of every rank."""
        self._pipe.flush()
        dist.barrier()

    def close(self) -> None:
        self._pipe.close()


def _schedule(method: Method, num_microbatches: int) -> Schedule:
    assert method.schedule is not None
    options = {"update_every": num_microbatches} if method.schedule == "pipedream" else {}
    return build(method.schedule, num_ranks=method.num_ranks, num_microbatches=num_microbatches, **options)


if __name__ == "__main__":
    main()
