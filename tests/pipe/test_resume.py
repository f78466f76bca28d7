"""`load` straight behind the constructor, and folders of checkpoints: several runs, several ranks."""

import os
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import small
from support.failing import Told, refusal, told
from support.inside import ReplicaLoader, lock
from support.pool import Pool
from support.small import WIDTH, X, Y, layers
from support.small import trained as trained_small
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
    return [pipe.train_step(*batch).loss for _, batch in zip(range(steps), loader, strict=False)]


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


@pytest.mark.thorough
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


def steps_in(folder: Path) -> list[int]:
    return sorted(int(each.name.split("-")[1]) for each in folder.glob("step-*"))


def latest(folder: Path) -> Path:
    return folder / (folder / "latest").read_text()


def test_runs_that_save_into_one_folder_are_told_and_remove_nothing_of_each_other(tmp_path: Path) -> None:
    one, other = trained_small(5), trained_small(2)
    one.save(tmp_path)
    first = latest(tmp_path)
    with pytest.warns(UserWarning, match=rf"{first.name} was saved by another run, .* Expected a folder for each run"):
        other.save(tmp_path)
    for _ in range(3):  # its own ones go, but for two
        other.train_step(X, Y)
        other.save(tmp_path)
    assert steps_in(tmp_path) == [4, 5, 5]
    with pytest.warns(UserWarning, match="was saved by another run"):
        one.save(tmp_path)
    assert steps_in(tmp_path) == [4, 5, 5, 5]
    pipe = trained_small(1)
    pipe.load(first)
    assert pipe.num_steps == 5


def test_a_run_that_goes_on_takes_the_folder_over(tmp_path: Path) -> None:
    """No warning; what the run before has left is removed, too."""
    before = trained_small(1)
    before.save(tmp_path)
    before.train_step(X, Y)
    before.save(tmp_path)
    (tmp_path / "step-2-00000000").mkdir()  # cut off
    pipe = trained_small(0)
    pipe.load(tmp_path)
    pipe.train_step(X, Y)
    pipe.save(tmp_path)
    assert steps_in(tmp_path) == [2, 3]
    assert latest(tmp_path).name.startswith("step-3-")
    (tmp_path / "latest").write_text("")  # nothing but the folders' names
    back = trained_small(0)
    with pytest.raises(ValueError, match=r"is not a checkpoint: .*; there is one in it: pipe.load\(.*/step-3-"):
        back.load(tmp_path)
    back.load(next(tmp_path.glob("step-2-*")))
    back.save(tmp_path)
    assert latest(tmp_path).name.startswith("step-2-")
    again = trained_small(0)
    again.load(tmp_path)
    again.train_step(X, Y)
    again.save(tmp_path)
    assert steps_in(tmp_path) == [2, 3]  # the one before was the latest, whatever its step


@pytest.mark.filterwarnings("ignore:.*was saved by another run")
def test_the_checkpoint_to_use_instead_is_that_of_the_last_step(tmp_path: Path) -> None:
    """Step 10 is behind step 9, whatever their letters say."""
    pipe = trained_small(9)
    pipe.save(tmp_path)
    pipe.train_step(X, Y)
    pipe.save(tmp_path)
    trained_small(1).save(tmp_path)
    (latest(tmp_path) / "process-0.safetensors").unlink()
    message = r"process-0.safetensors cannot be read.*; there is another one: pipe.load\(.*/step-10-"
    with pytest.raises(ValueError, match=message):
        pipe.load(tmp_path)


def _load(folders: list[str]) -> tuple[str, int, list[float]]:
    """The words of loading, and steps and weights behind it."""
    pipe = trained_small(0)
    said = refusal(lambda: pipe.load(folders[pipe.rank]))
    sums = [float(value.detach().sum()) for value in pipe.state_dict().values()]
    pipe.train_step(X, Y)  # it is as whole as before
    steps = pipe.num_steps
    pipe.close()
    return said, steps, sums


@pytest.mark.thorough
def test_ranks_load_the_same_checkpoint_or_none(gloo: Pool, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    trained_small(2).save(one)
    trained_small(3).save(other)
    fresh = gloo.run(_load, ranks=2, args=([str(tmp_path / "no")] * 2,))
    both = gloo.run(_load, ranks=2, args=([str(one), str(one)],))
    mixed = gloo.run(_load, ranks=2, args=([str(one), str(other)],))
    missing = gloo.run(_load, ranks=2, args=([str(one), str(tmp_path / "no")],))
    assert [steps for _, steps, _ in both] == [3, 3]
    assert not any(said for said, _, _ in both)
    for rank in range(2):
        assert f"rank 0 read {latest(one)} and rank 1 read {latest(other)}: expected one folder" in mixed[rank][0]
        assert "rank 1 cannot load the checkpoint, so no rank does" in missing[rank][0]
        assert "is not a checkpoint: expected a folder from pipe.save" in fresh[rank][0]
        for outcome in (mixed, missing, fresh):
            assert outcome[rank][1:] == fresh[rank][1:]
            assert outcome[rank][2] != both[rank][2]


def test_a_save_removes_nothing_behind_a_link(tmp_path: Path) -> None:
    """A user keeps the best step in another folder, and a link to it here: it is not this run's to remove."""
    run, best = tmp_path / "run", tmp_path / "best"
    pipe = trained_small(1)
    kept = pipe.save(best).path
    assert kept is not None
    pipe.save(run)
    (run / kept.name).symlink_to(kept)
    (run / "step-0-00000000.partial").symlink_to(best)
    before = sorted(best.rglob("*"))
    again = trained_small(0)
    again.load(run)
    for _ in range(3):
        again.train_step(X, Y)
        again.save(run)
    assert sorted(best.rglob("*")) == before
    again.load(run / kept.name)  # the link itself is one that can be loaded
    assert again.num_steps == 1


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_what_the_writers_file_leads_to_is_not_written(link: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    getattr(folder / ".writer", link)(kept)
    pipe = trained_small(1)
    with pytest.raises(ValueError, match=r"run/\.writer is a link, or not a regular file: expected it to be removed"):
        pipe.checkpointer(folder, every=1)
    with pytest.raises(ValueError, match=r"run/\.writer is a link"):
        pipe.save(folder)
    assert kept.read_text() == "mine"


@pytest.mark.thorough
def test_a_save_beside_the_checkpointer_of_another_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves nothing; one beside this process's own is not."""
    hold = f"import runpy, pathlib; runpy.run_path({lock.__file__!r})['FolderLock'](pathlib.Path({str(tmp_path)!r}), "
    monkeypatch.setitem(lock.FolderLock.__init__.__kwdefaults__ or {}, "patience", 0.1)
    pipe = trained_small(1)
    with pipe.checkpointer(tmp_path, every=1) as saver:
        assert saver.save().path is not None
        pipe.train_step(X, Y)
        assert pipe.save(tmp_path).path is not None
        done = subprocess.run([sys.executable, "-P", "-c", f"{hold}patience=0)"], capture_output=True, check=False)
        assert b"is being written by another run (process " in done.stderr
    before = sorted(tmp_path.rglob("*"))
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", f"{hold}patience=60); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        with pytest.raises(ValueError, match=rf"is being written by another run \(process {holder.pid} on "):
            pipe.save(tmp_path)
    finally:
        holder.communicate()
    assert sorted(tmp_path.rglob("*")) == before
    assert pipe.save(tmp_path).path is not None
