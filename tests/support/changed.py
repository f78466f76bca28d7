"""Files that differ from the main branch: tests that only concern some files run where those changed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DAY = 24 * 60 * 60  # [s]


def changed_files(root: Path = ROOT) -> frozenset[str] | None:
    """Relative paths that differ from the merge base with the main branch, or on it from the state of a day before.

    None where git does not tell, or knows no commit that old: then anything may have changed.
    """
    try:
        head = _git(root, "rev-parse", "HEAD")
        bases = [_git(root, "merge-base", "HEAD", branch) for branch in _branches(root)]
        base = next((base for base in bases if base != head), None) or _a_day_before(root)
        if not base:
            return None
        different = _git(root, "diff", "--name-only", base)
        new = _git(root, "ls-files", "--others", "--exclude-standard")
    except (OSError, subprocess.CalledProcessError):
        return None
    return frozenset([*different.splitlines(), *new.splitlines()])


def concerns(paths: Iterable[str], changed: frozenset[str] | None) -> bool:
    """Whether a changed file is one of these, or lies below one of these folders."""
    return changed is None or any(name == path or name.startswith(f"{path}/") for path in paths for name in changed)


def _a_day_before(root: Path) -> str:
    """The last commit at least a day older than HEAD; "": there is none."""
    committed = int(_git(root, "log", "-1", "--format=%ct"))
    return _git(root, "rev-list", "-1", f"--before={committed - DAY}", "HEAD")


def _branches(root: Path) -> list[str]:
    known = _git(root, "for-each-ref", "--format=%(refname:short)", "refs/remotes/origin/main", "refs/heads/main")
    return sorted(known.splitlines(), reverse=True)  # origin's first


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
