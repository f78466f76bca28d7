"""Checkpoints: going on from one is exact, on the same cut and on another; nothing in one is executed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from support.pool import Pool
from torch import nn

from stagewright.pipe import PipelineModule


def make(schedule: str, ranks: int, chunks: int | None = None) -> PipelineModule:
    torch.manual_seed(3)
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2))]
    model = nn.Sequential(*layers, nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
    return PipelineModule(
        model,
        schedule=schedule,
        num_microbatches=4,
        num_chunks=chunks,
        mesh={"pipe": ranks},
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
        example_inputs=(torch.zeros(8, 6, dtype=torch.float64),),
        timeout=30.0,
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(8, 6, generator=generator, dtype=torch.float64),
        torch.randn(8, 2, generator=generator, dtype=torch.float64),
    )


def train(pipe: PipelineModule, steps: range) -> list[float]:
    return [pipe.train_step(*batch(step)).loss for step in steps]


def test_going_on_is_exact_on_the_same_and_on_another_cut(tmp_path: Path) -> None:
    pipe = make("1f1b", 2)
    train(pipe, range(3))
    pipe.save(tmp_path / "c")
    expected = train(pipe, range(3, 6))
    for schedule, ranks, chunks in [("1f1b", 2, None), ("interleaved", 2, 2), ("gpipe", 1, None), ("gpipe", 5, None)]:
        other = make(schedule, ranks, chunks)
        train(other, range(1))  # whatever stands there is replaced
        other.load(tmp_path / "c")
        assert train(other, range(3, 6)) == expected
        for name, value in pipe.full_state_dict().items():
            assert torch.equal(value, other.full_state_dict()[name]), name


def save_and_go_on(folder: str) -> list[float]:
    """Over processes: save after 2 steps, go on; on rank 0 the losses that follow."""
    import torch.distributed as dist

    pipe = make("1f1b", dist.get_world_size())
    train(pipe, range(2))
    pipe.save(folder)
    losses = train(pipe, range(2, 4))
    pipe.close()
    return losses


@pytest.mark.gloo
def test_saved_by_processes_loaded_by_one(gloo: Pool, tmp_path: Path) -> None:
    losses = gloo.run(save_and_go_on, ranks=3, args=(str(tmp_path / "c"),))
    pipe = make("interleaved", 2, 2)
    pipe.load(tmp_path / "c")
    assert train(pipe, range(2, 4)) == losses[0] == losses[2]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    pipe = make("1f1b", 2)
    with pytest.raises(ValueError, match=r"is no checkpoint: expected a folder with checkpoint\.json from pipe\.save"):
        pipe.load(tmp_path / "nothing")
    train(pipe, range(1))
    pipe.save(tmp_path / "c")
    manifest = tmp_path / "c" / "checkpoint.json"
    manifest.write_text(json.dumps({"version": 9, "step": 1, "num_stages": 2}))
    with pytest.raises(ValueError, match="expected version 1"):
        pipe.load(tmp_path / "c")
    manifest.write_text("{")
    with pytest.raises(ValueError, match="is unreadable"):
        pipe.load(tmp_path / "c")


class Evil:
    """Unpickling it would run code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('code from a checkpoint ran')",))


def test_loading_executes_no_code(tmp_path: Path) -> None:
    pipe = make("1f1b", 2)
    train(pipe, range(1))
    pipe.save(tmp_path / "c")
    for save in (lambda path: torch.save(Evil(), path), lambda path: path.write_bytes(pickle.dumps(Evil()))):
        save(tmp_path / "c" / "stage-1.pt")
        with pytest.raises(ValueError, match=r"stage-1\.pt cannot be read"):
            pipe.load(tmp_path / "c")
