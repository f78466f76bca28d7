"""Which files changed: since the main branch, on it since the commit before, and where nobody knows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.changed import changed_files, concerns


def git(root: Path, *arguments: str) -> None:
    own = {"user.name": "a test", "user.email": "a@test", "commit.gpgsign": "false"}
    settings = [part for name, value in own.items() for part in ("-c", f"{name}={value}")]
    subprocess.run(["git", *settings, *arguments], cwd=root, check=True, capture_output=True)


def commit(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "files")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    commit(tmp_path, "first")
    commit(tmp_path, "a/second")
    return tmp_path


def test_on_main_the_last_commit_counts(root: Path) -> None:
    assert changed_files(root) == {"a/second"}
    (root / "first").write_text("edited")
    (root / "new").write_text("not yet tracked")
    assert changed_files(root) == {"a/second", "first", "new"}


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
