"""Folders of checkpoints: several runs, several ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.inside import lock
from support.pool import Pool
from support.small import X, Y, trained


def steps_in(folder: Path) -> list[int]:
    return sorted(int(each.name.split("-")[1]) for each in folder.glob("step-*"))


def latest(folder: Path) -> Path:
    return folder / (folder / "latest").read_text()


def test_runs_that_save_into_one_folder_are_told_and_remove_nothing_of_each_other(tmp_path: Path) -> None:
    one, other = trained(5), trained(2)
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
    pipe = trained(1)
    pipe.load(first)
    assert pipe.num_steps == 5


def test_a_run_that_goes_on_takes_the_folder_over(tmp_path: Path) -> None:
    """No warning; what the run before has left is removed, too."""
    before = trained(1)
    before.save(tmp_path)
    before.train_step(X, Y)
    before.save(tmp_path)
    (tmp_path / "step-2-00000000").mkdir()  # cut off
    pipe = trained(0)
    pipe.load(tmp_path)
    pipe.train_step(X, Y)
    pipe.save(tmp_path)
    assert steps_in(tmp_path) == [2, 3]
    assert latest(tmp_path).name.startswith("step-3-")
    (tmp_path / "latest").write_text("")  # nothing but the folders' names
    back = trained(0)
    with pytest.raises(ValueError, match=r"is not a checkpoint: .*; there is one in it: pipe.load\(.*/step-3-"):
        back.load(tmp_path)
    back.load(next(tmp_path.glob("step-2-*")))
    back.save(tmp_path)
    assert latest(tmp_path).name.startswith("step-2-")
    again = trained(0)
    again.load(tmp_path)
    again.train_step(X, Y)
    again.save(tmp_path)
    assert steps_in(tmp_path) == [2, 3]  # the one before was the latest, whatever its step


@pytest.mark.filterwarnings("ignore:.*was saved by another run")
def test_the_checkpoint_to_use_instead_is_that_of_the_last_step(tmp_path: Path) -> None:
    """Step 10 is behind step 9, whatever their letters say."""
    pipe = trained(9)
    pipe.save(tmp_path)
    pipe.train_step(X, Y)
    pipe.save(tmp_path)
    trained(1).save(tmp_path)
    (latest(tmp_path) / "process-0.safetensors").unlink()
    message = r"process-0.safetensors cannot be read.*; there is another one: pipe.load\(.*/step-10-"
    with pytest.raises(ValueError, match=message):
        pipe.load(tmp_path)


def _load(folders: list[str]) -> tuple[str, int, list[float]]:
    """The words of loading, and steps and weights behind it."""
    pipe, said = trained(0), ""
    try:
        pipe.load(folders[pipe.rank])
    except ValueError as error:
        said = str(error)
    sums = [float(value.detach().sum()) for value in pipe.state_dict().values()]
    pipe.train_step(X, Y)  # it is as whole as before
    steps = pipe.num_steps
    pipe.close()
    return said, steps, sums


def test_ranks_load_the_same_checkpoint_or_none(gloo: Pool, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    trained(2).save(one)
    trained(3).save(other)
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
    pipe = trained(1)
    kept = pipe.save(best).path
    assert kept is not None
    pipe.save(run)
    (run / kept.name).symlink_to(kept)
    (run / "step-0-00000000.partial").symlink_to(best)
    before = sorted(best.rglob("*"))
    again = trained(0)
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
    pipe = trained(1)
    with pytest.raises(ValueError, match=r"run/\.writer is a link, or not a regular file: expected it to be removed"):
        pipe.checkpointer(folder, every=1)
    with pytest.raises(ValueError, match=r"run/\.writer is a link"):
        pipe.save(folder)
    assert kept.read_text() == "mine"


@pytest.mark.thorough
def test_a_save_beside_the_checkpointer_of_another_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves nothing; one beside this process's own is not. A second checkpointer does not give the folder away."""
    hold = f"import runpy, pathlib; runpy.run_path({lock.__file__!r})['FolderLock'](pathlib.Path({str(tmp_path)!r}), "
    monkeypatch.setitem(lock.FolderLock.__init__.__kwdefaults__ or {}, "patience", 0.1)
    pipe = trained(1)
    with pipe.checkpointer(tmp_path, every=1) as saver:
        assert saver.save().path is not None
        pipe.train_step(X, Y)
        assert pipe.save(tmp_path).path is not None
        with pytest.raises(ValueError, match=r"has a checkpointer: expected its close\(\) first"):
            pipe.checkpointer(tmp_path, every=1)
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
