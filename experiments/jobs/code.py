"""Which code a job ran: told by version and commit, compared by what the files hold."""

from __future__ import annotations

import hashlib
import subprocess
from functools import cache
from pathlib import Path

from ... import __version__

_ROOT = Path(__file__).parents[2]
_ROOMS = ("schedules", "partition", "comm", "pipe", "experiments")  # all that figures come from


@cache
def code_version(work: str = "") -> str:
    """Such as "0.1.0, commit 6ab0328, source 1f2e3d4c"; equal exactly where the source is.

    Arguments:
        work: "file.py:function" counts that file in, other works are the package's or installed.
    """
    digest = hashlib.sha256()
    for room in _ROOMS:
        for path in sorted((_ROOT / room).rglob("*.py")):
            digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    own = Path(work.rpartition(":")[0])
    if own.suffix == ".py" and own.is_file():  # one that is missing fails in the job, which says so
        digest.update(own.read_bytes())
    commit = _commit()
    return f"{__version__}{f', commit {commit}' if commit else ''}, source {digest.hexdigest()[:8]}"


def same_code(one: str, other: str) -> bool:
    """Whether two versions are of the same source, whatever their commits."""
    return one.rpartition(" ")[2] == other.rpartition(" ")[2]


def _commit() -> str:
    """Commit of the folder that the package stands in; empty where it is no git work tree."""
    if not (_ROOT / ".git").exists():
        return ""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty=+", "--exclude", "*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
