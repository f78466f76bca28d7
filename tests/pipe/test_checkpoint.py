"""Checkpoints: going on from one is exact, on the same cut and on another; nothing in one is executed."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import pickle
import random
import sys
import time
from pathlib import Path

import pytest
import torch
from support.pool import Pool
from torch import nn
from torch.utils.data import TensorDataset

from stagewright.pipe import PipelineModule
from stagewright.pipe.batch.loader import ReplicaLoader


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


def test_going_on_takes_the_learning_rates_schedule_along(tmp_path: Path) -> None:
    """It halves after every other step: who loads after an even number of steps shows that an odd one was saved."""
    pipe = make("1f1b", 2)
    train(pipe, range(3))
    pipe.save(tmp_path / "c")
    expected = train(pipe, range(3, 6))
    other = make("1f1b", 2)
    train(other, range(2))
    other.load(tmp_path / "c")
    assert train(other, range(3, 6)) == expected


def test_the_place_in_the_data_goes_along(tmp_path: Path) -> None:
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*(batch(step) for step in range(4)), strict=True)))

    def epochs(pipe: PipelineModule, loader: ReplicaLoader, steps: int) -> list[float]:
        batches = (each for _ in range(9) for each in loader)
        return [pipe.train_step(*each).loss for each in itertools.islice(batches, steps)]

    pipe = make("1f1b", 2)
    loader = pipe.loader(data, batch_size=8)
    epochs(pipe, loader, 6)  # the second epoch's middle
    pipe.save(tmp_path / "c", loader=loader)
    expected = epochs(pipe, loader, 4)
    other = make("gpipe", 2)
    again = other.loader(data, batch_size=8)
    other.load(tmp_path / "c", loader=again)
    assert (other.num_steps, again.state_dict()["epoch"]) == (6, 1)
    assert epochs(other, again, 4) == expected

    with pytest.warns(UserWarning, match=r"'epoch': 1.*nobody takes it.*pipe.load\(folder, loader=loader\)"):
        other.load(tmp_path / "c")
    smaller = other.loader(data, batch_size=4)
    other.load(tmp_path / "c", loader=smaller)  # in other batches
    assert smaller.state_dict() == {**again.state_dict(), "epoch": 1, "position": 16}
    assert len(list(smaller)) == 4
    with pytest.raises(ValueError, match="shuffle=True, and this run has False: expected the same dataset"):
        other.load(tmp_path / "c", loader=other.loader(data, batch_size=4, shuffle=False))
    pipe.save(tmp_path / "without")
    with pytest.raises(ValueError, match=r"no place in the data: expected one from pipe.save\(..., loader=\)"):
        other.load(tmp_path / "without", loader=again)


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


# --- what is refused ---


def saved(folder: Path, steps: int = 1, schedule: str = "1f1b") -> Path:
    """The folder of a checkpoint after so many steps, inside `folder`."""
    pipe = make(schedule, 2)
    train(pipe, range(steps))
    pipe.save(folder)
    return newest(folder)


def newest(folder: Path) -> Path:
    return folder / (folder / "latest").read_text()


def state_of(pipe: PipelineModule) -> list[torch.Tensor]:
    """All tensors that a checkpoint would change."""
    states = [value for optimizer in pipe.optimizers for state in optimizer.state.values() for value in state.values()]
    return [tensor.clone() for tensor in [*pipe.full_state_dict().values(), *states]]


def refused(folder: Path, match: str) -> None:
    """Loading is refused, and has changed nothing."""
    pipe = make("1f1b", 2)
    train(pipe, range(2))
    before = state_of(pipe)
    with pytest.raises(ValueError, match=match):
        pipe.load(folder)
    assert all(map(torch.equal, before, state_of(pipe)))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", r"nothing is no checkpoint: expected a folder from pipe\.save")
    manifest = saved(tmp_path / "c") / "checkpoint.json"
    good = json.loads(manifest.read_text())
    for changed, message in [
        (json.dumps(good | {"version": 9}), r"checkpoint\.json is unreadable: expected version 3"),
        (json.dumps(good | {"files": []}), "at least one stage"),
        (json.dumps(good | {"more": 1}), "more"),
        (json.dumps(good | {"step": -1}), "expected a step"),
        ("[" * 100_000, "is unreadable"),
        ("{", "is unreadable"),
        ("7", "is unreadable"),
    ]:
        manifest.write_text(changed)
        refused(tmp_path / "c", message)
    manifest.unlink()
    refused(tmp_path / "c", r"checkpoint\.json is unreadable: .*No such file")


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """Bits over the whole file: tensors, names, archive; torch.load alone takes most of them in silence."""
    path = saved(tmp_path / "c") / "stage-1.pt"
    whole = path.read_bytes()
    pipe = make("1f1b", 2)
    for at in range(0, len(whole), len(whole) // 60):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"stage-1\.pt is damaged: its SHA-256 is not that of the file"):
            pipe.load(tmp_path / "c")
    path.write_bytes(whole)
    pipe.load(tmp_path / "c")


def test_a_file_that_was_cut_off_or_is_gone_is_refused_by_name(tmp_path: Path) -> None:
    path = saved(tmp_path / "c") / "stage-1.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    refused(tmp_path / "c", rf"stage-1\.pt has {len(whole) - 7} bytes of {len(whole)}: it was cut off")
    path.unlink()
    refused(tmp_path / "c", r"stage-1\.pt cannot be read: No such file")


def test_a_file_of_another_step_stage_or_run_is_refused_by_name(tmp_path: Path) -> None:
    one, other, again = saved(tmp_path / "a"), saved(tmp_path / "b", steps=2), saved(tmp_path / "c")
    for source, what in (
        (other / "stage-1.pt", rf"is stage 1 of the checkpoint {other.name}: expected stage 1 of {one.name}"),
        (again / "stage-1.pt", rf"is stage 1 of the checkpoint {again.name}: expected"),
        (one / "stage-0.pt", rf"is stage 0 of the checkpoint {one.name}: expected stage 1"),
    ):
        (one / "stage-1.pt").write_bytes(source.read_bytes())
        refused(tmp_path / "a", what)


def test_a_checkpoint_without_optimizer_or_of_another_model_changes_nothing(tmp_path: Path) -> None:
    def plain(width: int) -> PipelineModule:
        layers = [nn.Linear(6, width), nn.Linear(width, 2)]
        return PipelineModule(
            nn.Sequential(*layers).double(),
            mesh={"pipe": 2},
            loss_fn=nn.functional.mse_loss,
            example_inputs=batch(0)[:1],
        )

    plain(5).save(tmp_path / "other")
    refused(tmp_path / "other", r"has no optimizer state of")
    plain(5).load(tmp_path / "other")
    with pytest.raises(ValueError, match=r"'\d\.\w+' has shape .*5.*, expected .*4"):
        plain(4).load(tmp_path / "other")


class Evil:
    """Unpickling it would run code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('code from a checkpoint ran')",))


def test_loading_executes_no_code(tmp_path: Path) -> None:
    place = saved(tmp_path / "c")
    path, manifest = place / "stage-1.pt", json.loads((place / "checkpoint.json").read_text())
    for save in (lambda: torch.save(Evil(), path), lambda: path.write_bytes(pickle.dumps(Evil()))):
        save()
        refused(tmp_path / "c", r"stage-1\.pt (has \d+ bytes|is damaged)")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()  # whoever can write the one can write the other
        manifest["files"][1] = {"num_bytes": path.stat().st_size, "sha256": digest}
        (place / "checkpoint.json").write_text(json.dumps(manifest))
        refused(tmp_path / "c", r"stage-1\.pt cannot be read")


# --- a save that is cut off ---


class Cut(BaseException):
    """As if the process had been killed here."""


CUT_AT: list[int] = []  # file operations until the cut; empty: none
WRITTEN: set[str] = set()  # names of files that were opened for writing


def _count_down(event: str, arguments: tuple[object, ...]) -> None:
    if CUT_AT and event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
        CUT_AT[0] -= 1
        if event == "open" and "w" in str(arguments[1]):
            WRITTEN.add(Path(str(arguments[0])).name)
        if CUT_AT[0] < 0:
            raise Cut


sys.addaudithook(_count_down)


def test_a_save_that_is_cut_off_anywhere_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Before each of a save's file operations in turn, until one save goes through."""
    pipe, other = make("1f1b", 2), make("1f1b", 2)
    train(pipe, range(1))
    pipe.save(tmp_path)
    pipe.save(tmp_path)  # so that there is an older one to remove
    last = state_of(pipe)
    cuts = 0
    while True:
        train(pipe, range(1))
        CUT_AT[:] = [cuts]
        try:
            pipe.save(tmp_path)
            break
        except Cut:
            cuts += 1
        finally:
            CUT_AT.clear()
        other.load(tmp_path)
        found = state_of(other)
        if not all(map(torch.equal, found, last)):
            last = state_of(pipe)  # cut off behind the switch
            assert all(map(torch.equal, found, last))
    other.load(tmp_path)
    assert all(map(torch.equal, state_of(other), state_of(pipe)))
    assert cuts > 10
    assert "latest" not in WRITTEN  # else it is empty for a moment; it is renamed into its place
    assert "latest.partial" in WRITTEN
    assert len(list(tmp_path.glob("step-*"))) == 2  # the newest and the one before; no leftovers


def save_for_ever(folder: str) -> None:
    pipe = make("1f1b", 2)
    for step in range(10_000):
        train(pipe, range(step, step + 1))
        pipe.save(folder)


@pytest.mark.slow
def test_thirty_kills_leave_a_checkpoint_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # the processes import this file by its name
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "stagewright.pipe"])
    pause, pipe = random.Random(0), make("1f1b", 2)
    for number in range(30):
        process = context.Process(target=save_for_ever, args=(str(tmp_path),))
        process.start()
        until = time.monotonic() + 60
        while not (tmp_path / "latest").exists() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(pause.uniform(0.0, 0.3) + (0.5 if number else 0.0))
        process.kill()
        process.join()
        pipe.load(tmp_path)


def test_a_file_in_place_of_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    pipe = make("1f1b", 2)
    with pytest.raises(ValueError, match=r"file is a file: expected a folder"):
        pipe.save(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    pipe.save(tmp_path / "new")
