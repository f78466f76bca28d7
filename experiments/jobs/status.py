"""State of a job on the disk, written atomically, so that it can be read at any time."""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from ... import __version__
from ...cli.train.run_folder import write_whole
from ..backends.facts import code_digest

_ROOT = Path(__file__).parents[2]


class State(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """State of a job.

    Arguments:
        state: "running" without a running process: it was interrupted.
        code: version of the code that it ran with.
        machine: that it ran on, as shown.
        started: [s] since the epoch.
        seconds: its duration; None before its end.
        reason: why it is not done, or how it differs from the request; one or several lines.
        commands: of each node, as they could be typed there.
    """

    state: State = State.PENDING
    code: str = ""
    machine: str = ""
    started: float | None = None
    seconds: float | None = None
    reason: str = ""
    commands: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "status.json", json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Status:
        """Status in the folder; pending if missing or unreadable."""
        try:
            found = json.loads((folder / "status.json").read_text(encoding="utf-8"))
            values = {**found, "state": State(found["state"]), "commands": tuple(found["commands"])}
            return cls(**values)
        except (OSError, ValueError, TypeError, KeyError):
            return cls()


@cache
def code_version(work: str = "") -> str:
    """Such as "0.1.0, commit 6ab0328, source 1f2e3d4c"; the source includes the file of a work "file.py:function"."""
    source, own = code_digest(), Path(work.rpartition(":")[0])
    if own.suffix == ".py" and own.is_file():  # a missing one fails in the job
        source = hashlib.sha256(source.encode() + own.read_bytes()).hexdigest()
    commit = _commit()
    return f"{__version__}{f', commit {commit}' if commit else ''}, source {source[:8]}"


def _commit() -> str:
    if not (_ROOT / ".git").exists():
        return ""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty=+", "--exclude", "*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
