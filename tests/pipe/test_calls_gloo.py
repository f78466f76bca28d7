"""Ranks that make different calls, or call collectives of the user: all of them end by name, none with other values."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import sliced
from support.failing import LONG, Told, told
from support.pool import Pool
from support.small import X, Y, layers, make, sgd
from torch import Tensor, nn

from stagewright.comm import PipelineError

CALLS: dict[str, Callable[[Any, Any, str], object]] = {
    "train_step": lambda pipe, result, folder: pipe.train_step(X, Y),
    "forward_backward": lambda pipe, result, folder: pipe.forward_backward(X, Y),
    "eval_step": lambda pipe, result, folder: pipe.eval_step(X, Y),
    "predict": lambda pipe, result, folder: pipe.predict(X),
    "clip_grad_norm_": lambda pipe, result, folder: pipe.clip_grad_norm_(1.0),
    "save": lambda pipe, result, folder: pipe.save(f"{folder}/new"),
    "load": lambda pipe, result, folder: pipe.load(f"{folder}/old"),
    "checkpointer": lambda pipe, result, folder: pipe.checkpointer(f"{folder}/beside", every=1),
    "full_state_dict": lambda pipe, result, folder: pipe.full_state_dict(),
    "timeline": lambda pipe, result, folder: result.timeline(),
    "close": lambda pipe, result, folder: pipe.close(),
    "nothing": lambda pipe, result, folder: None,
}
AT_ONCE = [  # the others wait for each other's messages until the time-out, which tells
    ("train_step", "forward_backward"),
    ("forward_backward", "train_step"),
    ("predict", "nothing"),
    ("predict", "eval_step"),
    ("save", "load"),
    ("save", "checkpointer"),
    ("save", "close"),
    ("save", "timeline"),
    ("load", "checkpointer"),
    ("load", "close"),
    ("load", "timeline"),
    ("checkpointer", "close"),
    ("checkpointer", "timeline"),
    ("close", "timeline"),
]
SAME = "expected the same calls, in the same order"


def differ(folder: str, pairs: list[tuple[str, str]], timeout: float) -> list[list[Told]]:
    """What this rank is told by its call of each pair, in a pipeline of its own, and by a save of all ranks after."""
    rank, results = int(os.environ["RANK"]), []
    for number, pair in enumerate(pairs):
        here = f"{folder}/{number}"
        torch.manual_seed(0)  # whatever a case before drew in one of the processes
        pipe: Any = make(mesh=None, model=layers(2), num_microbatches=2, timeout=timeout)
        result = pipe.train_step(X, Y)
        calls = partial(CALLS[pair[rank]], pipe, result, here), partial(pipe.save, f"{here}/after")
        results.append([told(call) for call in calls])
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
    by_rank = gloo.run(differ, ranks=2, args=(str(tmp_path), AT_ONCE, LONG))
    for number, (pair, *ranks) in enumerate(zip(AT_ONCE, *by_rank, strict=True)):
        for first, last in ranks:
            assert first.kind in ("none", "ValueError", "PeerLost"), (pair, first)
            assert last.kind in ("ValueError", "PeerLost", "PipelineError"), (pair, last)
            assert SAME in (last.text if first.kind == "none" else first.text), (pair, first, last)
        assert not (tmp_path / str(number) / "after" / "latest").exists()
    for number in range(2):  # of step and accumulation the losses tell, at once
        assert by_rank[0][number][0].kind == "ValueError"


MEMBERS = [(one, other) for one in ("eval_step", "predict") for other in ("train_step", "eval_step") if one != other]


def members_differ(pairs: list[tuple[str, str]]) -> list[Told]:
    """What a member of a context group is told by its call of each pair."""
    rank, results, (tokens, targets) = int(os.environ["RANK"]), [], sliced.batch()
    calls: dict[str, Callable[[Any], object]] = {
        "train_step": lambda pipe: pipe.train_step(tokens, targets),
        "eval_step": lambda pipe: pipe.eval_step(tokens, targets),
        "predict": lambda pipe: pipe.predict(tokens),
    }
    for pair in pairs:
        torch.manual_seed(0)
        options: dict[str, Any] = {"loss_fn": sliced.mean_loss, "num_microbatches": 2, "timeout": LONG}
        pipe: Any = make(model=sliced.gpt(), mesh={"pipe": 1, "context": 2}, example_inputs=(tokens,), **options)
        pipe.train_step(tokens, targets)
        results.append(told(partial(calls[pair[rank]], pipe)))
        dist.barrier()
    return results


def test_members_of_a_context_group_that_make_different_calls_end_by_name(gloo: Pool) -> None:
    """The process itself was aborted: two sizes met in one gather."""
    pairs = [pair[::step] for pair in MEMBERS for step in (1, -1)]
    for pair, *ranks in zip(pairs, *gloo.run(members_differ, ranks=2, args=(pairs,)), strict=True):
        for said in ranks:
            assert said.kind == "ValueError", (pair, said)
            assert SAME in said.text, (pair, said)


class Centred(nn.Linear):
    """Takes off the mean over all processes."""

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
    assert isinstance(losses[0], float)
    assert math.isfinite(losses[0])
