"""Figures that tests of a device leave behind: printed, and kept, with its name, where STAGEWRIGHT_REPORT says."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(step: Callable[[], object], repetitions: int = 5) -> float:
    step()
    found = []
    for _ in range(repetitions):
        wait()
        begun = time.perf_counter()
        step()
        wait()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def plain_step(model: Any, optimizer: torch.optim.Optimizer, loss_fn: Any, batch: Any, number: int) -> float:
    optimizer.zero_grad()
    losses = []
    for part, target in zip(*(one.tensor_split(number) for one in batch), strict=True):
        loss = loss_fn(model(part), target) / number
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    return float(torch.stack(losses).sum())


def note(what: str, **figures: float | str | None) -> None:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    line = json.dumps({"what": what, "device": name, "torch": torch.__version__, **figures})
    print(line)
    if folder := os.environ.get("STAGEWRIGHT_REPORT"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (Path(folder) / "figures.jsonl").open("a", encoding="utf-8") as report:
            report.write(line + "\n")
