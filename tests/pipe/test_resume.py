"""`load` straight behind the constructor: the first batch builds the stages, which go on from there."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import small
from support.failing import Told, told
from support.inside import ReplicaLoader
from support.pool import Pool
from support.small import WIDTH, layers
from torch import nn
from torch.utils.data import TensorDataset

import stagewright as sw
from stagewright import PipelineModule

DATA = TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(24, 2))


class Net(nn.Sequential):
    """Its dropout and its optimizer's momentum show a resume that forgets a part."""

    def __init__(self, width: int = 5) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, width), nn.Dropout(0.3), nn.Tanh(), nn.Linear(width, 2))


def make(model: nn.Module | None = None, **options: Any) -> PipelineModule:
    settings: dict[str, Any] = {"mesh": {"pipe": 2}, "num_microbatches": 2, "schedule": "1f1b", **options}
    settings |= {"loss_fn": nn.functional.mse_loss, "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}
    return PipelineModule(model or Net(), **settings)


def trained(steps: int) -> tuple[PipelineModule, ReplicaLoader]:
    pipe = make()
    loader = pipe.loader(DATA, batch_size=8)
    train(pipe, loader, steps)
    return pipe, loader


def train(pipe: PipelineModule, loader: ReplicaLoader, steps: int) -> list[float]:
    """Losses, in which noise of three generators is, as of a loader that augments."""
    losses: list[float] = []
    while True:
        for x, y in loader:
            noise = torch.randn(1) + random.random() + float(np.random.random())
            losses.append(pipe.train_step(x + 0.1 * noise, y).loss or 0.0)
            if len(losses) == steps:
                return losses


def _seed(number: int) -> None:
    for each in (torch.manual_seed, random.seed, np.random.seed):
        each(number)


def save_and_go_on(folder: str, schedule: str = "1f1b") -> list[float]:
    """Losses of a run that nothing stops: two steps behind the fourth, at which it saved."""
    _seed(4)
    pipe = make(schedule=schedule)
    loader = pipe.loader(DATA, batch_size=8)
    train(pipe, loader, 4)
    pipe.save(folder, loader=loader)
    losses = train(pipe, loader, 2)
    pipe.close()
    return losses


def resume(folder: str, schedule: str = "1f1b") -> list[float]:
    """The same two steps by another process, whose generators stand elsewhere."""
    _seed(5)
    pipe = make(schedule=schedule)
    loader = pipe.loader(DATA, batch_size=8)
    pipe.load(folder, loader=loader)
    assert pipe.num_steps == 4
    losses = train(pipe, loader, 2)
    assert pipe.num_steps == 6
    pipe.close()
    return losses


@pytest.mark.thorough(but=["interleaved"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "2bw"])
def test_load_behind_the_constructor_goes_on_to_the_bit(tmp_path: Path, schedule: str) -> None:
    expected = save_and_go_on(str(tmp_path), schedule)
    assert resume(str(tmp_path), schedule) == expected
    if schedule == "1f1b":
        assert resume(str(tmp_path), "gpipe") == expected


def test_the_first_call_may_be_another_one(tmp_path: Path) -> None:
    pipe, _ = trained(1)
    pipe.save(tmp_path)
    x, expected = torch.ones(4, 6), pipe.full_state_dict()
    output = pipe.predict(x)
    other_model = Net()
    nn.init.zeros_(other_model[0].weight)  # type: ignore[arg-type]
    other = make(other_model)
    other.load(tmp_path)
    assert torch.equal(other.predict(x), output)  # type: ignore[arg-type]
    built = make()
    built.load(tmp_path)
    built.build(torch.ones(8, 6), torch.ones(8, 2))
    assert all(torch.equal(value, expected[name]) for name, value in built.full_state_dict().items())


@pytest.mark.thorough
def test_under_a_plan_that_the_first_batch_decides_on(tmp_path: Path) -> None:
    pipe, loader = trained(2)
    pipe.save(tmp_path, loader=loader)
    before = random.getstate(), torch.get_rng_state()
    auto = make(schedule=sw.Auto(trials=1), mesh={"pipe": 2}, num_microbatches=None)
    other = auto.loader(DATA, batch_size=8)
    auto.load(tmp_path, loader=other)
    assert (random.getstate(), other.state_dict()) == (before[0], loader.state_dict())
    assert torch.equal(torch.get_rng_state(), before[1])
    auto.build(torch.ones(8, 6), torch.ones(8, 2))
    assert torch.equal(torch.get_rng_state(), before[1])  # whatever the profiler and a trial drew
    assert auto.num_steps == 2
    loaded, saved = auto.full_state_dict(), pipe.full_state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in saved.items())


def test_what_does_not_fit_is_refused_before_anything_is_taken(tmp_path: Path) -> None:
    pipe, loader = trained(2)
    pipe.save(tmp_path / "c", loader=loader)
    wide = make(Net(width=7))
    place = wide.loader(DATA, batch_size=8)
    named = make(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)))
    drawn = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"of another model: '0.weight' has shape \(5, 6\), expected \(7, 6\)"):
        wide.load(tmp_path / "c", loader=place)
    with pytest.raises(ValueError, match="nowhere is not a checkpoint: expected a folder from"):
        wide.load(tmp_path / "nowhere", loader=place)
    with pytest.raises(ValueError, match=r"it lacks \['1.weight', '1.bias'\] and has \['3.weight', '3.bias'\]"):
        named.load(tmp_path / "c", loader=place)
    assert (place.state_dict()["position"], wide.num_steps) == (0, 0)
    assert torch.equal(torch.get_rng_state(), drawn)
    with pytest.warns(UserWarning, match=r"which was not loaded.*pipe.load\(folder, loader=loader\)"):
        make().load(tmp_path / "c")


def test_weights_that_go_bad_before_the_first_batch_are_refused_by_each_call(tmp_path: Path) -> None:
    pipe, _ = trained(2)
    place = pipe.save(tmp_path).path
    other = make()
    other.load(tmp_path)
    assert place is not None
    file = next(place.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for _ in range(2):  # a second call must not begin with the weights that the model came with
        with pytest.raises(ValueError, match="is damaged: the SHA-256"):
            other.train_step(torch.ones(8, 6), torch.ones(8, 2))


def make_full(schedule: str, **options: Any) -> tuple[Any, Any]:
    """Everything that a checkpoint keeps: moments, a schedule, dropout, running statistics, a shuffled order."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers(2), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), *layers(2))
    options |= {"lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5), "timeout": 120.0}
    optimizer = partial(torch.optim.AdamW, lr=0.05)
    pipe = small.make(model=model, mesh=None, schedule=schedule, optimizer=optimizer, **options)
    x, y = torch.randn(2, 40, WIDTH, generator=torch.Generator().manual_seed(1)).unbind()
    return pipe, pipe.loader(TensorDataset(x, y), batch_size=8)


def gloo_train(pipe: Any, loader: Any, steps: int) -> list[float]:
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
    gloo_train(pipe, loader, 1)
    pipe.save(folder, loader=loader)
    gloo_train(pipe, loader, 1)
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
    assert len(gloo_train(pipe, loader, 1)) == 1
