"""How a job stands, on the disk: written whole or not at all, so that it can be read at any moment."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path


class State(StrEnum):
    """State of a job."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a job stands.

    Arguments:
        state: running, of a job that nobody runs: it was interrupted.
        code: version of the code that it ran with.
        machine: that it ran on, for people.
        started: [s] since the epoch.
        seconds: that it took; so far None.
        reason: why it is not done, or what was not as asked for; in one or several lines.
        commands: what each node ran, as it could be typed there.
    """

    state: State = State.PENDING
    code: str = ""
    machine: str = ""
    started: float | None = None
    seconds: float | None = None
    reason: str = ""
    commands: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Replace what the folder says."""
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "status.json", json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Status:
        """Status in the folder; pending where it says nothing that can be read."""
        try:
            found = json.loads((folder / "status.json").read_text(encoding="utf-8"))
            values = {**found, "state": State(found["state"]), "commands": tuple(found["commands"])}
            return cls(**values)
        except (OSError, ValueError, TypeError, KeyError):
            return cls()


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there as a whole, or as it was before, whenever this process is killed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
