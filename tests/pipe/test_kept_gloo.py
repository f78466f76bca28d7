"""What is held: descriptors, threads and bytes of closed modules, of messages, and of batches that are filled again."""

from __future__ import annotations

import gc
import os
import platform
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.commands import run_forked
from support.failing import pipeline, raise_key_error, step, told
from support.pool import Pool
from support.small import WIDTH, X, Y, layers, make
from torch import Tensor, nn

from stagewright.comm import ProcessGroupTransport


def open_and_close() -> list[tuple[int, int]]:
    """(descriptors, threads) of this process after each of twelve modules, one after the other."""
    found, kept = [], []
    for _ in range(12):
        pipe = pipeline(schedule="2bw")
        step(pipe)()
        pipe.close()
        pipe.close()
        kept.append(pipe)  # the user's own variables live on
        found.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    closed = told(lambda: kept[-1].train_step(X, Y))
    assert closed.kind == "PipelineError", closed
    assert "this pipeline has ended: expected a new PipelineModule after close()" in closed.text
    return found


def grown(before: tuple[int, int], after: tuple[int, int]) -> list[int]:
    """How much there is more of each; less is garbage of a case before that was collected."""
    return [more - less for less, more in zip(before, after, strict=True) if more > less]


def fail_and_close() -> list[tuple[int, int]]:
    """The same after a step that fails on rank 1."""
    found = []
    for _ in range(4):
        pipe = pipeline(trip={1: raise_key_error})
        assert told(step(pipe)).kind != "none"
        pipe.close()
        del pipe
        gc.collect()  # the error's traceback holds what it passed through
        found.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
        dist.barrier()
    return found


@pytest.mark.thorough
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no /proc/self here")
@pytest.mark.parametrize(("close", "settled"), [(open_and_close, 2), (fail_and_close, 1)])
def test_modules_that_are_closed_leave_no_descriptors_and_no_threads(gloo: Pool, close: Any, settled: int) -> None:
    for found in gloo.run(close, ranks=2):
        assert grown(found[settled], found[-1]) == [], found


def most_bytes_unconsumed(schedule: str, num_microbatches: int) -> int:
    """The most bytes of posted receives at once in a step, microbatches of one size."""
    most = 0
    post = ProcessGroupTransport.post

    def watched(self: ProcessGroupTransport, *arguments: Any) -> None:
        nonlocal most
        post(self, *arguments)
        most = max(most, self.unconsumed_bytes)

    x = torch.zeros(2 * num_microbatches, WIDTH)
    torch.manual_seed(0)
    pipe = make(
        model=layers(8),
        mesh=None,
        schedule=schedule,
        num_microbatches=num_microbatches,
        example_inputs=(x,),
        loss_fn=F.mse_loss,
    )
    ProcessGroupTransport.post = watched  # type: ignore[method-assign]
    pipe.train_step(x, x)
    ProcessGroupTransport.post = post  # type: ignore[method-assign]
    transport = pipe._building.pipeline.engine.ranks[0].transport
    assert not transport._posted
    pipe.close()
    assert not transport._sent
    assert not transport._leftover
    return most


def bytes_by_microbatches(schedule: str) -> list[int]:
    """Messages are so large that 16 MiB hold less than four."""
    with mock.patch("stagewright.schedules.messages.AHEAD_BYTES", 1):
        return [most_bytes_unconsumed(schedule, count) for count in (4, 8, 32)]


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_unconsumed_receive_bytes_do_not_grow_with_the_microbatches(gloo: Pool, schedule: str) -> None:
    losses = 16  # [bytes] of a microbatch, in the one message of losses at the end
    for few, more, most in gloo.run(bytes_by_microbatches, ranks=2, args=(schedule,)):
        assert more <= few + 4 * losses
        assert most <= few + 28 * losses
        assert most < 8 * 2 * WIDTH * 4 + 32 * losses  # eight microbatches of floats


class Skipping(nn.Module):
    """The last stage takes the batch's input, too, and a mask out of a nested argument."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor, *, extra: dict[str, tuple[Tensor]]) -> Tensor:
        h = self.two(self.one(x).relu()) * extra["mask"][0]
        return self.three(h) + x


def loss(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, target["y"])


def state_after_training(refill: bool, options: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    pipe = make(model=Skipping(), loss_fn=loss, example_inputs=None, **options)
    random = np.random.default_rng(0)
    buffers = [np.empty((8, WIDTH)) for _ in range(3)]
    for _ in range(5):
        filled = [random.standard_normal((8, WIDTH)) for _ in buffers]
        if refill:
            for buffer, values in zip(buffers, filled, strict=True):
                buffer[:] = values
        x, y, mask = map(torch.from_numpy, buffers if refill else filled)
        pipe.train_step(x, extra={"mask": (mask,)}, target={"y": y})
        for buffer in buffers:
            buffer[:] = 7.0
    return pipe.full_state_dict()


def both(options: dict[str, Any]) -> list[dict[str, Tensor]]:
    return [state_after_training(refill, options) for refill in (True, False)]


@pytest.mark.thorough(but=["1f1b"])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b"},
        {"schedule": "2bw"},
        {"schedule": "2bw", "recompute": "full"},
        {"schedule": "pipedream"},
        {"schedule": "paci"},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_the_numbers_are_those_of_batches_that_stay(options: dict[str, Any]) -> None:
    found, expected = both(options)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# Prints how often each later step took a page from the system. Its process is fresh: what else lies on a heap may keep
# malloc from giving anything back.
_STEPS = """
import resource

import torch
import torch.nn.functional as F
from support.small import make
from torch import nn

torch.set_num_threads(1)
x, y = torch.randn(32768, 256), torch.randn(32768, 1)  # 16 MiB between two layers
model = nn.Sequential(*(nn.Tanh() for _ in range(12)), nn.Linear(256, 1))
pipe = make(model=model, loss_fn=F.mse_loss, example_inputs=(x,), schedule="gpipe", num_microbatches=2)
for step in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pipe.train_step(x, y)
    if step > 3:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
@pytest.mark.skipif(
    any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ),
    reason="the environment tells malloc what to do",
)
def test_steps_take_no_fresh_pages(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(_STEPS)
    (done,) = run_forked([str(tmp_path / "steps.py")], num_ranks=None)
    assert done.status == 0, done.stderr
    taken = [int(line) for line in done.stdout.split()]
    # Of 4 KiB. Each step would take 100,000 if nothing stayed; a heap that has holes may still grow by a few blocks.
    assert sum(taken) < 50_000, done.stdout
