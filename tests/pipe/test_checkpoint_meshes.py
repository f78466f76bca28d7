"""Checkpoints from mesh to mesh: runs that go on one from the other, together equal to one plain process."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.inside import Checkpoint, TensorPiece
from support.pool import Pool
from support.records import records
from torch import Tensor, nn

import stagewright
from stagewright.pipe import PipelineModule

WIDTH, WORDS, LENGTH, BATCH, M = 8, 12, 4, 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.scale * self.down(F.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Tied weights, a frozen weight, one that no forward uses, one without elements, scalars, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.unused, self.empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0, 2))
        self.blocks[1].up.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def make_model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator) for _ in range(2))
    return x, y


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@stagewright.named
def adamw(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    flat = [p for _, p in parameters if p.ndim < 2]
    rest = [p for _, p in parameters if p.ndim >= 2]
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": flat, "weight_decay": 0.0, "betas": (0.8, 0.9)}]
    return torch.optim.AdamW(groups, lr=1e-2)


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)


def make(model: nn.Module, **options: Any) -> PipelineModule:
    settings: dict[str, Any] = {
        "num_microbatches": M,
        "loss_fn": loss_fn,
        "optimizer": adamw,
        "lr_scheduler": schedule_of,
        "example_inputs": (torch.zeros(BATCH, LENGTH, dtype=torch.long),),
        "timeout": 120.0,
    }
    return PipelineModule(model, **records(**(settings | options)))


PATTERNS = {"blocks.*.up": "column", "blocks.*.down": "row"}
MESHES: list[dict[str, Any]] = [
    {"schedule": "1f1b", "mesh": {"pipe": 4}},
    {"schedule": "interleaved", "mesh": {"pipe": 2, "data": 2}, "num_chunks": 2, "data_parallel": "zero1"},
    {"schedule": "gpipe", "mesh": {"pipe": 2, "tensor": 2}, "tensor_parallel": PATTERNS},
    {"mesh": {"data": 2, "tensor": 2}, "tensor_parallel": PATTERNS, "data_parallel": "fsdp"},
    {"schedule": "1f1b", "mesh": {"pipe": 2, "data": 2}},
]
STEPS = 1  # of each run


def chain(folder: str) -> list[tuple[list[float], int]]:
    """Losses of each run of the chain, and how many bytes this process read of the checkpoint that it began with."""
    read: list[int] = []
    check = Checkpoint._check

    def count(self: Checkpoint, key: str, piece: TensorPiece) -> None:
        read[-1] += prod(piece.sizes) * 8
        check(self, key, piece)

    Checkpoint._check = count  # type: ignore[method-assign]
    found = []
    try:
        for number, options in enumerate(MESHES):
            replicas = options["mesh"].get("data", 1)
            pipe = make(make_model(), **options, **{"num_microbatches": M // replicas})
            read.append(0)
            if number:
                pipe.load(f"{folder}/{number - 1}")
            losses = []
            for step in range(number * STEPS, (number + 1) * STEPS):
                x, y = (
                    torch.cat(part.tensor_split(M)[pipe._building.replica[0] :: replicas]) if replicas > 1 else part
                    for part in batch(step)
                )
                losses.append(pipe.train_step(x, y).loss)
            pipe.save(f"{folder}/{number}")
            pipe.close()
            found.append((losses, read[-1]))
    finally:
        Checkpoint._check = check  # type: ignore[method-assign]
    return found


def plain(steps: int) -> tuple[Model, torch.optim.Optimizer, list[float]]:
    """One process that knows of no pipeline."""
    model = make_model()
    optimizer = adamw([(name, p) for name, p in model.named_parameters() if p.requires_grad])
    scheduler = schedule_of(optimizer)
    losses = []
    for step in range(steps):
        x, y = batch(step)
        loss = loss_fn(model(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer, losses


@pytest.mark.thorough
def test_from_mesh_to_mesh(gloo: Pool, tmp_path: Path) -> None:
    results = gloo.run(chain, ranks=4, args=(str(tmp_path),))
    model, _, losses = plain(STEPS * (len(MESHES) + 1))
    for found in results:
        told = [loss for run, _ in found for loss in run]
        assert told == pytest.approx(losses[: len(told)], rel=0, abs=1e-11)
    sizes = [
        [size for size, _ in json.loads(path.read_text())["files"].values()]
        for number in range(len(MESHES))
        for path in (tmp_path / str(number)).glob("step-*/checkpoint.json")
    ]
    assert [len(each) for each in sizes] == [4] * len(MESHES)  # each process wrote
    assert max(sizes[-1]) < 2 * min(sizes[-1])  # replicas shared it out
    assert all(found[-1][1] < 0.7 * sum(sizes[-2]) for found in results)  # and each read what it needs

    pipe = make(make_model(), mesh={"pipe": 3})
    pipe.load(tmp_path / str(len(MESHES) - 1))
    for step in range(len(MESHES) * STEPS, (len(MESHES) + 1) * STEPS):
        assert pipe.train_step(*batch(step)).loss == pytest.approx(losses[step], rel=0, abs=1e-11)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(pipe.full_state_dict()[name], value, rtol=0, atol=1e-10)
