"""Saves over processes: one that dies in the middle."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.failing import Told, told
from support.pool import Pool
from support.small import WIDTH, layers, make
from torch import nn
from torch.utils.data import TensorDataset


def make_full(schedule: str, **options: Any) -> tuple[Any, Any]:
    """Everything that a checkpoint keeps: moments, a schedule, dropout, running statistics, a shuffled order."""
    torch.manual_seed(0)
    pipe = make(
        model=nn.Sequential(*layers(2), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), *layers(2)),
        mesh=None,
        schedule=schedule,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
        timeout=120.0,
        **options,
    )
    x, y = torch.randn(2, 40, WIDTH, generator=torch.Generator().manual_seed(1)).unbind()
    return pipe, pipe.loader(TensorDataset(x, y), batch_size=8)


def train(pipe: Any, loader: Any, steps: int) -> list[float]:
    found = []
    for batch in loader:
        if steps == 0:
            break
        steps -= 1
        result = pipe.train_step(*batch)
        found.append(result.loss)
    return found


def die_in_a_save(folder: str, who: int, flushes: int) -> Told:
    pipe, loader = make_full("1f1b")
    train(pipe, loader, 1)
    pipe.save(folder, loader=loader)
    train(pipe, loader, 1)
    flush, left = os.fsync, flushes

    def fsync(file: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        flush(file)

    if pipe.rank == who:
        os.fsync = fsync
    return told(lambda: pipe.save(folder, loader=loader))


@pytest.mark.thorough(but=["1-0"])
@pytest.mark.parametrize(("who", "flushes"), [(1, 0), (0, 4)])
def test_a_process_that_is_killed_in_a_save_is_named_and_leaves_a_whole_checkpoint(
    gloo: Pool, who: int, flushes: int, tmp_path: Path
) -> None:
    replies = gloo.replies(die_in_a_save, ranks=2, args=(str(tmp_path), who, flushes))
    assert replies[who].kind == "died"
    other: Told = replies[1 - who].value
    assert other.kind == "PeerLost"
    assert f"rank {who}, which rank {1 - who} waited for, reports nothing: it died" in other.text
    pipe, loader = make_full("1f1b", device=None)
    pipe.load(tmp_path, loader=loader)
    assert pipe.num_steps in ((1, 2) if flushes == 4 else (1,))
    assert len(train(pipe, loader, 1)) == 1
