"""Ranks that make different calls all end by name; and what is held: descriptors, threads, bytes of messages."""

import gc
import itertools
import math
import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import sliced
from support.commands import run_forked
from support.failing import LONG, Told, pipeline, raise_key_error, step, told
from support.pool import Pool
from support.small import WIDTH, X, Y, layers, make, sgd
from torch import Tensor, nn

from stagewright.comm import PipelineError, ProcessGroupTransport

CALLS: dict[str, Callable[[Any, Any, Any, str], object]] = {
    "train_step": lambda pipe, batch, result, folder: pipe.train_step(*batch),
    "forward_backward": lambda pipe, batch, result, folder: pipe.forward_backward(*batch),
    "eval_step": lambda pipe, batch, result, folder: pipe.eval_step(*batch),
    "predict": lambda pipe, batch, result, folder: pipe.predict(batch[0]),
    "save": lambda pipe, batch, result, folder: pipe.save(f"{folder}/new"),
    "load": lambda pipe, batch, result, folder: pipe.load(f"{folder}/old"),
    "checkpointer": lambda pipe, batch, result, folder: pipe.checkpointer(f"{folder}/beside", every=1),
    "timeline": lambda pipe, batch, result, folder: result.timeline(),
    "close": lambda pipe, batch, result, folder: pipe.close(),
    "nothing": lambda pipe, batch, result, folder: None,
}
AT_ONCE = [  # the others wait for each other's messages until the time-out, which tells
    ("train_step", "forward_backward"),
    ("forward_backward", "train_step"),
    ("predict", "nothing"),
    ("predict", "eval_step"),
    *itertools.combinations(("save", "load", "checkpointer", "close", "timeline"), 2),
]
SAME = "expected the same calls, in the same order"


def differ(folder: str, pairs: list[tuple[str, str]], is_context: bool = False) -> list[list[Told]]:
    """What this rank, or member of a context group, is told by its call of each pair, in a pipeline of its own, and by
    a save of all ranks after."""
    rank, results = int(os.environ["RANK"]), []
    for number, pair in enumerate(pairs):
        here = f"{folder}/{number}"
        torch.manual_seed(0)  # whatever a case before drew in one of the processes
        batch, options = (X, Y), {"mesh": None, "model": layers(2)}
        if is_context:
            batch, options = sliced.batch(), {"mesh": {"pipe": 1, "context": 2}, "model": sliced.gpt()}
            options |= {"loss_fn": sliced.mean_loss, "example_inputs": batch[:1]}
        pipe: Any = make(num_microbatches=2, timeout=LONG, **options)
        result = pipe.train_step(*batch)
        calls = [partial(CALLS[pair[rank]], pipe, batch, result, here), partial(pipe.save, f"{here}/after")]
        results.append([told(call) for call in calls[: 1 if is_context else 2]])
        dist.barrier()  # no pipeline is made while another rank still ends the one before
    return results


def retry_alone(wrong: int) -> tuple[str, float, float]:
    torch.manual_seed(0)
    pipe: Any = make(mesh=None, model=layers(2), num_microbatches=2, timeout=LONG)
    with pipe:  # a worker of the pool destroys all groups behind it, with what is still on its way
        before = pipe.train_step(X, Y).loss
        said = told(lambda: pipe.train_step(X[:1], Y[:1])).kind if pipe.rank == wrong else ""
        return said, before, pipe.train_step(X, Y).loss


@pytest.mark.thorough(but=["1"])
@pytest.mark.parametrize("wrong", [0, 1])
def test_a_batch_that_one_rank_alone_was_refused_and_passed_again_counts_once(gloo: Pool, wrong: int) -> None:
    results = gloo.run(retry_alone, ranks=2, args=(wrong,))
    assert [said for said, *_ in results] == ["" if rank != wrong else "ValueError" for rank in range(2)]
    assert results[0][1:] == results[1][1:]
    assert results[0][2] < results[0][1]


@pytest.mark.thorough
def test_ranks_that_make_different_calls_end_by_name(gloo: Pool, tmp_path: Path) -> None:
    by_rank = gloo.run(differ, ranks=2, args=(str(tmp_path), AT_ONCE))
    for number, (pair, *ranks) in enumerate(zip(AT_ONCE, *by_rank, strict=True)):
        for first, last in ranks:
            assert first.kind in ("none", "ValueError", "PeerLost"), (pair, first)
            assert last.kind in ("ValueError", "PeerLost", "PipelineError"), (pair, last)
            assert SAME in (last.text if first.kind == "none" else first.text), (pair, first, last)
        assert not (tmp_path / str(number) / "after" / "latest").exists()
    for number in range(2):  # of step and accumulation the losses tell, at once
        assert by_rank[0][number][0].kind == "ValueError"


MEMBERS = [(one, other) for one in ("eval_step", "predict") for other in ("train_step", "eval_step") if one != other]


@pytest.mark.thorough
def test_members_of_a_context_group_that_make_different_calls_end_by_name(gloo: Pool) -> None:
    """The process itself was aborted: two sizes met in one gather."""
    pairs = [pair[::step] for pair in MEMBERS for step in (1, -1)]
    for pair, *ranks in zip(pairs, *gloo.run(differ, ranks=2, args=("", pairs, True)), strict=True):
        for (said,) in ranks:
            assert said.kind == "ValueError", (pair, said)
            assert SAME in said.text, (pair, said)


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return super().forward(x - mean)


def contrasted(output: Tensor, target: Tensor) -> Tensor:
    """As CLIP's loss, it sees the samples of all processes."""
    others = [torch.zeros_like(output) for _ in range(dist.get_world_size())]
    dist.all_gather(others, output.detach())
    return F.mse_loss(output, target) + 0.0 * torch.cat(others).sum()


def trained(kind: str, mesh: dict[str, int]) -> str | float:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), Centred(6, 6) if kind == "unit" else nn.Linear(6, 6)]
    options: dict[str, Any] = {"loss_fn": contrasted if kind == "loss" else F.mse_loss, "example_inputs": None}
    pipe = make(model=nn.Sequential(*layers), optimizer=sgd, mesh=mesh, timeout=60.0, **options)
    try:
        return [loss for _ in range(2) if (loss := pipe.train_step(X, Y).loss) is not None][-1]
    except (ValueError, PipelineError) as error:
        return str(error)


@pytest.mark.thorough(but=["loss"])
@pytest.mark.parametrize("kind", ["unit", "loss"])
def test_processes_that_do_not_run_the_stage_would_never_come(gloo: Pool, kind: str) -> None:
    """It hung, and the error named the network."""
    for said in gloo.run(trained, ranks=2, args=(kind, {"pipe": 2})):
        assert "stage 1 (2 .. 3), or its loss, calls a collective of processes [0, 1], and only [1] run it" in str(said)
    losses = gloo.run(trained, ranks=2, args=(kind, {"pipe": 1, "data": 2}))  # the check of the first batch hung
    assert losses[0] == losses[1]
    assert math.isfinite(losses[0])


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


def fail_and_close() -> list[tuple[int, int]]:
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
        # Less is garbage of a case before that was collected.
        assert all(more <= less for less, more in zip(found[settled], found[-1], strict=True)), found


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
    options = {"schedule": schedule, "num_microbatches": num_microbatches, "example_inputs": (x,)}
    pipe = make(model=layers(8), mesh=None, **options)
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


@pytest.mark.thorough
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
@pytest.mark.skipif(
    any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ),
    reason="the environment tells malloc what to do",
)
def test_steps_take_no_fresh_pages(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(_STEPS)
    (done,) = run_forked([str(tmp_path / "steps.py")], num_ranks=None)
    assert done.status == 0, done.stderr
    # Of 4 KiB. Each step would take 100,000 if nothing stayed; a heap that has holes may still grow by a few blocks.
    assert sum([int(line) for line in done.stdout.split()]) < 50_000, done.stdout
