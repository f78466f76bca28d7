"""Which files changed: since the main branch, on it within a day, and where nobody knows."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.changed import DAY, changed_files, concerns

NOW = 1_700_000_000  # [s] the last commits' date


def git(root: Path, *arguments: str, at: int = NOW) -> None:
    own = {"user.name": "a test", "user.email": "a@test", "commit.gpgsign": "false"}
    settings = [part for name, value in own.items() for part in ("-c", f"{name}={value}")]
    dated = os.environ | {"GIT_COMMITTER_DATE": f"{at} +0000"}
    subprocess.run(["git", *settings, *arguments], cwd=root, check=True, capture_output=True, env=dated)


def commit(root: Path, *names: str, at: int = NOW) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "files", at=at)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    commit(tmp_path, "first", at=NOW - 3 * DAY)
    commit(tmp_path, "old", at=NOW - DAY)
    commit(tmp_path, "morning", at=NOW - DAY + 1)
    commit(tmp_path, "noon", at=NOW - DAY // 2)
    commit(tmp_path, "a/second")
    return tmp_path


def test_on_main_a_day_counts(root: Path) -> None:
    """As in a fresh clone, where origin's main is HEAD: a session lands many commits, and CI may see the last alone."""
    git(root, "update-ref", "refs/remotes/origin/main", "HEAD")
    assert changed_files(root) == {"a/second", "noon", "morning"}
    (root / "first").write_text("edited")
    (root / "new").write_text("not yet tracked")
    assert changed_files(root) == {"a/second", "noon", "morning", "first", "new"}


def test_in_a_history_of_less_than_a_day_anything_may_have_changed(tmp_path: Path) -> None:
    """A shallow clone, too."""
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    commit(tmp_path, "first", at=NOW - DAY + 1)
    commit(tmp_path, "second")
    assert changed_files(tmp_path) is None


def test_on_a_branch_all_of_it_counts(root: Path) -> None:
    git(root, "switch", "--quiet", "--create", "topic")
    commit(root, "b/third")
    commit(root, "fourth")
    assert changed_files(root) == {"b/third", "fourth"}


def test_without_git_anything_may_have_changed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert changed_files(tmp_path) is None
    assert concerns(["a"], None)


def test_folders_are_whole_names() -> None:
    assert concerns(["a"], frozenset({"a/b/file"}))
    assert concerns(["a/file"], frozenset({"a/file"}))
    assert not concerns(["a"], frozenset({"ab/file", "b/a"}))
