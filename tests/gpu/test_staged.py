"""Several processes on one CUDA device, whose messages go through the host's memory: against plain training there.

On the CPU gloo processes carry them out with copies in place of a device's.
"""

import os
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from support.gpu_report import adamw, note, plain_step, seconds
from support.pool import Pool
from support.staged import staging
from torch import Tensor, nn
from torch.nn import functional as F

import stagewright as sw
from stagewright.schedules import memory_curves

DEVICE = os.environ.get("STAGEWRIGHT_DEVICE", "cpu")
IS_CUDA = DEVICE.startswith("cuda")
ONE = "cuda:0" if DEVICE == "cuda" else DEVICE  # for all processes, however many there are
WIDTH, LAYERS, SAMPLES, M = (2048, 16, 4096, 8) if IS_CUDA else (32, 8, 16, 8)
TIMED = 5

pytestmark = [pytest.mark.gpu, pytest.mark.gloo]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(LAYERS))
    return nn.Sequential(*blocks)


def batch(step: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))
    return x.to(ONE), y.to(ONE)


class Trained(NamedTuple):
    """peak: bytes of a step that nobody watches (on the CPU, that is watched); predicted: of this rank."""

    losses: list[float]
    step_s: float
    peak: int
    predicted: float


def train(schedule: str, ranks: int, *, measures: bool = True) -> Trained:
    """In a process a rank; or, without measuring, all ranks in this one."""
    options: dict[str, Any] = {"mesh": {"pipe": ranks}, "num_microbatches": M, "device": ONE}
    distributed = staging() if measures and not IS_CUDA else nullcontext()
    with (
        distributed,
        sw.PipelineModule(mlp(), schedule=schedule, loss_fn=F.mse_loss, optimizer=adamw, **options) as pipe,
    ):
        told = [pipe.train_step(*batch(step)).loss for step in range(4)]
        losses = [loss for loss in told if loss is not None]  # of an asynchronous schedule later
        if not measures:
            return Trained(losses, 0.0, 0, 0.0)
        predicted, peak = 0.0, 0
        if not pipe.schedule.is_asynchronous:
            with pipe.watch_memory() as watched:
                result = pipe.train_step(*batch(0))
            timeline = result.timeline()
            predicted = memory_curves(timeline, pipe.stage_bytes(watched))[pipe.rank].peak
            peak = watched.peak_bytes
        x, y = batch(0)
        if IS_CUDA:
            torch.cuda.reset_peak_memory_stats()
        step = seconds(lambda: pipe.train_step(x, y), TIMED)
        peak = torch.cuda.max_memory_allocated() if IS_CUDA else peak
    return Trained(losses, step, peak, predicted)


def plain() -> tuple[list[float], float]:
    """Losses without a pipeline, and the median of a step's seconds."""
    model = mlp().to(ONE)
    optimizer = adamw(model.parameters())
    losses = [plain_step(model, optimizer, F.mse_loss, batch(step), M) for step in range(4)]
    x_and_y = batch(4)
    return losses, seconds(lambda: plain_step(model, optimizer, F.mse_loss, x_and_y, M), TIMED)


@pytest.mark.thorough(but=["1f1b-2"])
@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 2), ("1f1b", 4), ("interleaved", 2), ("2bw", 2)])
def test_processes_on_one_device_train_as_plain(gloo: Pool, schedule: str, ranks: int) -> None:
    """2bw, whose weights are late, as with all ranks in one process."""
    found = gloo.run(train, ranks=ranks, args=(schedule, ranks), timeout=600.0)
    losses, step = plain()
    wanted = train(schedule, ranks, measures=False).losses if schedule == "2bw" else losses
    for each in found:
        assert len(each.losses) >= 3
        assert each.losses == pytest.approx(wanted[: len(each.losses)], rel=1e-4 if IS_CUDA else 1e-6)
    samples = {"samples_per_s": SAMPLES / found[0].step_s, "samples_per_s_plain": SAMPLES / step}
    note(f"staged {schedule}, {ranks} processes", **samples)
    if schedule != "2bw":
        ratios = [each.peak / each.predicted for each in found]
        note(f"staged memory {schedule}, {ranks} processes", least=min(ratios), most=max(ratios))
        within = 0.1 if IS_CUDA else 0.25  # a few kilobytes beside small tensors
        assert all(1 - within <= ratio <= 1 + within for ratio in ratios), ratios
