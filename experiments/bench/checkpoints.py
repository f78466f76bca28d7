"""Cost of checkpoints for a training run: beside it, in two phases, against saves that it waits for.

A GPT with AdamW on two ranks; repetition by repetition the same steps run without checkpoints, with one written beside
them, and with one that they wait for. Then a run whose interval is found from what they cost.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ...pipe import PipelineModule
from ..training.corpus import loss_fn
from ..training.gpt import GPT, GPTConfig
from .records import CheckpointTimes
from .timing import in_turn, say, timed
from .workloads import CHECKPOINTS

STEPS = 10  # of one repetition, with one checkpoint
AUTO_STEPS = 200
OVERHEAD = 0.035
MICROBATCHES, BATCH = 8, 16
MODEL = GPTConfig(length=128, layers=4, width=256, heads=4)
_WARM_UP_STEPS = 3


def run_checkpoints(
    *, repetitions: int, model: GPTConfig = MODEL, steps: int = STEPS, auto_steps: int = AUTO_STEPS
) -> CheckpointTimes:
    """All sides in turn. Collective over the processes."""
    with _shared_folder() as folder:
        pipe, step = _pipeline(model)
        for _ in range(_WARM_UP_STEPS):
            step()
        saver = pipe.checkpointer(folder / "beside", every=steps)

        def plain() -> None:
            for _ in range(steps):
                step()

        def blocking() -> None:
            plain()
            pipe.save(folder / "blocking")

        def beside() -> None:
            for _ in range(steps):
                step()
                saver.step()  # the first of them begins one
            saver.wait()

        beside()  # the first one makes the memory that later ones use again
        sides = {"without": plain, "blocking": blocking, "beside": beside}
        seconds = in_turn(
            CHECKPOINTS, {name: partial(timed, side) for name, side in sides.items()}, repetitions=repetitions
        )
        saver.close()
        shares, every = [], []
        for repetition in range(repetitions):
            with pipe.checkpointer(folder / "auto", every="auto", overhead=OVERHEAD) as saver:
                for _ in range(auto_steps):
                    step()
                    saver.step()
            shares.append(0.0 if saver.overhead is None else saver.overhead)
            every.append(saver.every)
            say(f"{CHECKPOINTS}: auto {repetition + 1}/{repetitions}: {shares[-1]:.1%}, one in {every[-1]} steps")
        num_bytes = saver.records[-1].num_bytes
        pipe.close()
    return CheckpointTimes(seconds=seconds, steps=steps, num_bytes=num_bytes, shares=shares, every=every)


def _pipeline(model: GPTConfig) -> tuple[PipelineModule, Callable[[], None]]:
    torch.manual_seed(0)
    tokens = torch.randint(256, (BATCH, model.length + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
    pipe = PipelineModule(
        GPT(model),
        schedule="1f1b",
        num_microbatches=MICROBATCHES,
        mesh={"pipe": 2},
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        example_inputs=(inputs,),
    )

    def step() -> None:
        pipe.train_step(inputs, targets)

    return pipe, step


class _shared_folder:  # noqa: N801 - a context manager
    """A temporary folder of rank 0 that all ranks use."""

    def __enter__(self) -> Path:
        self._own = tempfile.TemporaryDirectory(prefix="stagewright-bench-") if dist.get_rank() == 0 else None
        name = ["" if self._own is None else self._own.name]
        dist.broadcast_object_list(name, src=0)
        return Path(name[0])

    def __exit__(self, *_: object) -> None:
        dist.barrier()
        if self._own is not None:
            self._own.cleanup()
