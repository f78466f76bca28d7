"""Saves that cannot be done: told, alike on all ranks, without harm to the run and to what was saved before."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.inside import Alone
from support.pool import Pool
from support.small import X, Y, layers, make

from stagewright.pipe import PipelineModule


def trained(steps: int, **options: Any) -> PipelineModule:
    torch.manual_seed(0)
    pipe = make(model=layers(), **options)
    for _ in range(steps):
        pipe.train_step(X, Y)
    return pipe


LEFT: list[int] = []  # writing operations until the disk is full; empty: it never is


def _write_something() -> None:
    if LEFT:
        LEFT[0] -= 1
        if LEFT[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if LEFT and (event in ("os.mkdir", "os.rename") or (event == "open" and set("wx") & set(str(arguments[1])))):
        _write_something()


sys.addaudithook(_audit)
_fsync = os.fsync


@contextmanager
def full_disk(operations: int) -> Iterator[None]:
    """Within, the disk has room for so many more operations; removing always works."""

    def fsync(file: int) -> None:
        _write_something()
        _fsync(file)

    LEFT[:] = [operations]
    os.fsync = fsync
    try:
        yield
    finally:
        LEFT.clear()
        os.fsync = _fsync


@pytest.mark.thorough
def test_a_disk_that_is_full_at_any_moment_is_told_and_the_next_save_is_tried_again(tmp_path: Path) -> None:
    pipe, other = trained(1), trained(0)
    pipe.save(tmp_path)
    pipe.train_step(X, Y)
    pipe.save(tmp_path)
    operations, told = 0, list[str]()
    while True:
        before = sorted(tmp_path.rglob("*"))
        step = pipe.num_steps
        pipe.train_step(X, Y)
        with full_disk(operations), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            result = pipe.save(tmp_path)
        if result.path is not None:
            break
        assert not result.is_mistake
        assert [str(one.message) for one in said] == [result.problem]
        assert "rank 0: " in result.problem
        told.append(result.problem)
        assert "No space left on device. Earlier ones are unchanged" in result.problem
        assert sorted(tmp_path.rglob("*")) == before  # its space is given back
        other.load(tmp_path)
        assert other.num_steps == (step if operations else 2)
        pipe.load(tmp_path)
        operations += 1
    assert operations > 8
    for name in ("process-0.safetensors", "checkpoint.json"):
        assert any(f"{name}: No space left on device" in problem for problem in told)
    other.load(tmp_path)
    assert other.num_steps == pipe.num_steps


def test_a_folder_that_cannot_be_written_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = trained(1)

    def mkdir(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", mkdir)
        with pytest.raises(ValueError, match=r"no checkpoint was saved in .*: rank 0: .*Read-only file system\. Those"):
            pipe.save(tmp_path / "c")
    pipe.train_step(X, Y)
    assert pipe.save(tmp_path / "c").path is not None


def _each_in_turn(folder: str) -> list[tuple[str, bool, int]]:
    """Saves of two ranks, most of which fail on one of them: what was said, and whether there is a checkpoint."""
    pipe = trained(1, mesh={"pipe": 2})
    found: list[tuple[str, bool, int]] = []

    def attempt(name: str, save: Callable[[], Any]) -> None:
        try:
            result = save()
            found.append((result.problem, result.path is not None, pipe.num_steps))
        except ValueError as error:
            found.append((str(error), False, pipe.num_steps))
        pipe.train_step(X, Y)

    own = f"{folder}/{pipe.rank}"
    attempt("good", lambda: pipe.save(f"{folder}/c"))
    with full_disk(0 if pipe.rank == 1 else 1000):
        attempt("full", lambda: pipe.save(f"{folder}/c"))
    attempt("apart", lambda: pipe.save(own))
    attempt("good", lambda: pipe.save(f"{folder}/c"))
    pipe.close()
    return found


@pytest.mark.filterwarnings("ignore:no checkpoint was saved")
def test_ranks_agree_on_what_became_of_a_save(gloo: Pool, tmp_path: Path) -> None:
    gloo_filters, gloo.filters = gloo.filters, (*gloo.filters, "ignore:no checkpoint was saved")
    try:
        one, other = gloo.run(_each_in_turn, ranks=2, args=(str(tmp_path),))
    finally:
        gloo.filters = gloo_filters
    assert one == other
    good, full, apart, again = one
    assert good == ("", True, 1)
    assert again == ("", True, 4)
    assert "rank 1: " in full[0]
    assert "No space left on device" in full[0]
    assert "rank 1: " in apart[0]
    assert "is not the folder that rank 0 writes into: expected one folder that all ranks share" in apart[0]
    assert sorted(path.name.split("-")[1] for path in (tmp_path / "c").glob("step-*")) == ["1", "4"]
    assert not list((tmp_path / "0").iterdir())
    pipe = trained(0)
    pipe.load(tmp_path / "c")
    assert pipe.num_steps == 4


@pytest.mark.thorough(but=["x", "answer4"])
@pytest.mark.parametrize(
    "answer",
    [
        "x",
        {},
        ["step-1-00000000", "", None, "", "", 5],
        ["step-1-00000000", "", None, "", "", False, 1],
        ["../step-1-00000000", "", None, "", "", False],
    ],
)
def test_answers_that_no_process_gives_are_refused(answer: object, tmp_path: Path) -> None:
    """Beside training they come out of a store that others may reach."""
    pipe = trained(1)
    pipe.save(tmp_path / "c")
    before = sorted(tmp_path.rglob("*"))
    state = pipe._building.built("a test").state
    snapshot = state.snapshot(None)

    class Forged(Alone):
        rank = 1

        def gather(self, mine: Any, *, what: str) -> list[Any]:
            return [answer, mine]

    with pytest.raises(ValueError, match=r"something else than its part of a checkpoint|not the name of a checkpoint"):
        state.persist(tmp_path / "c", snapshot, processes=Forged())
    assert sorted(tmp_path.rglob("*")) == before
