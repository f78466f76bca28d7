"""Messages for users, on rank 0: progress of long decisions such as schedule="auto", and what they wait for.

To the handlers of the logger "stagewright" if there are any, else to stderr; silenced by
logging.getLogger("stagewright").setLevel(logging.WARNING).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from ..partition.plans.as_text import describe
from ..partition.plans.plan import Plan
from ..schedules.wording import count, duration

SILENT_SECONDS = 4.0  # without a message
_KEEP = 'Path("plan.json").write_text(pipe.plan.to_json())'
_log = logging.getLogger("stagewright")


def tell(text: str, *, rank: int) -> None:
    if rank != 0:
        return
    if _log.hasHandlers():
        _log.info("%s", text)
    elif _log.level <= logging.INFO:
        print(text, file=sys.stderr, flush=True)


@cache  # once a process
def tell_of_gpus() -> None:
    """A message, once, if the model is on the CPU of a host with GPUs."""
    if number := torch.cuda.device_count():
        tell(
            f"the model is on the CPU, and so is the run; torch sees {count(number, 'GPU')} here: to train there write "
            f'PipelineModule(..., device="cuda"); device="cpu" leaves this line out',
            rank=int(os.environ.get("RANK", "0")),
        )


@cache
def tell_of_one_rank() -> None:
    """A line, once, where a script without a launcher and without mesh= runs no pipeline."""
    tell(
        'one process and no mesh=: one rank runs all stages. Write PipelineModule(..., mesh={"pipe": 4}) for four in '
        "this process, or start four with `torchrun --nproc-per-node 4 SCRIPT`; "
        'mesh={"pipe": 1} leaves this line out',
        rank=0,
    )


@cache
def tell_of_late_loss(schedule: str, *, rank: int) -> None:
    """A line, once, where a call returns before a loss is known."""
    tell(
        f"schedule {schedule!r}: result.loss is None on rank {rank} so far, since batches overlap; it will be that of "
        f"an earlier batch (result.loss_step), and flush() returns the rest",
        rank=rank,
    )


@contextmanager
def told_if_slow(what: str, *, rank: int, silent: float | None = None) -> Iterator[None]:
    """Context of work that may take long: reports after `silent` seconds (None: SILENT_SECONDS), then each time after
    twice as long."""
    if rank != 0:
        yield
        return
    ended, begun = threading.Event(), time.perf_counter()

    def watch() -> None:
        pause = SILENT_SECONDS if silent is None else silent
        while not ended.wait(pause):
            pause = time.perf_counter() - begun
            tell(f"{what}: {duration(pause)} so far", rank=rank)

    watcher = threading.Thread(target=watch, name="stagewright-waits", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


class Phases:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._begun = self._phase_begun = time.perf_counter()

    def begin(self, text: str) -> None:
        self._begun = self._phase_begun = time.perf_counter()
        tell(f'schedule="auto": {text}', rank=self._rank)

    def ended(self, phase: str, *details: str, then: str) -> None:
        now = time.perf_counter()
        took = [f"{phase}: {duration(now - self._phase_begun)}", *details]
        self._phase_begun = now
        tell(f"{'; '.join(took)}. Next: {then}", rank=self._rank)

    def decided(self, plan: Plan, predicted: Plan, *, num_samples: int, replans: bool) -> None:
        took = duration(time.perf_counter() - self._begun)
        lines = [f"plan, found in {took}:", *outline(plan, predicted, num_samples=num_samples)]
        if not replans:  # which needs the profile
            lines.append(f'  next time without measuring: {_KEEP}, then schedule="plan.json"')
        tell("\n".join(lines), rank=self._rank)


def figure(plan: Plan, predicted: Plan) -> str:
    step = duration(predicted.simulated_step_time or 0.0)
    if plan.tried_seconds is None:
        return f"{step} a batch, predicted"
    return f"{duration(plan.tried_seconds)} a batch, measured (predicted {step})"


def outline(plan: Plan, predicted: Plan, *, num_samples: int) -> list[str]:
    """A plan in a few lines, with what it leaves idle."""
    busy = len({rank for stage in plan.stages for rank in stage.ranks})
    shape = f"{plan.schedule}, {describe(plan)}, {count(plan.num_microbatches or 0, 'microbatch')}"
    lines = [f"  {shape}: {figure(plan, predicted)}", f"  ranks at work wait for {plan.bubble:.0%} of a step"]
    if busy < plan.num_devices:
        why = (
            f"your batch of {count(num_samples, 'sample')} is too small"
            if num_samples < plan.num_devices
            else "they would gain less than sending to them takes; a larger batch, or model, would use them"
        )
        lines.append(f"  {plan.num_devices - busy} of {plan.num_devices} processes idle: {why}")
    return [*lines, "  why: print(pipe.plan.explain())"]


def warn_of_evaluation_mode(root: nn.Module) -> None:
    """Warns if a model would train without dropout or updates of BatchNorm, as from_pretrained leaves it.

    If only some modules are in evaluation mode, the user has chosen that.
    """
    acts = (_DropoutNd, _NormBase)
    if any(isinstance(each, acts) for each in root.modules()) and not any(each.training for each in root.modules()):
        warnings.warn(
            "the model is in evaluation mode and trains as it is, without dropout and with BatchNorm's running "
            "statistics: expected model.train() before PipelineModule(model), unless that is meant",
            stacklevel=4,
        )
