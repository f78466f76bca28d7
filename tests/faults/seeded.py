"""Seeded faults: the records of this folder, and copies of the package in which one of them is true at a time."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import stagewright

ROOT = Path(stagewright.__file__).parent
FAULTS = Path(__file__).parent
ROOMS = ("schedules", "partition", "run", "stage", "update", "checkpoint", "comm")
LONG = 240  # [s] of one test in a copy; one that a fault makes wait for ever has failed
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "runs", "build", ".*_cache", ".hypothesis")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    name: str
    file: str
    old: str
    new: str
    caught_by: str
    gloo: bool = False

    def seed(self, text: str) -> str:
        """The file with the mistake in it."""
        count = text.count(self.old)
        assert count == 1, f"fault {self.name}: {self.old!r} is {count} times in {self.file}, expected once"
        return text.replace(self.old, self.new)

    def lines(self) -> range:
        text = (ROOT / self.file).read_text(encoding="utf-8")
        first = text[: text.index(self.old)].count("\n") + 1
        return range(first, first + self.old.count("\n") + 1)


def read(room: str) -> list[Fault]:
    records = tomllib.loads((FAULTS / f"{room}.toml").read_text(encoding="utf-8"))
    return [Fault(name=name, **record) for name, record in records.items()]


def copy(folder: Path) -> Path:
    """The tree once more, in `folder`; processes that `run_in` starts there import this copy."""
    root = folder / "stagewright"
    shutil.copytree(ROOT, root, ignore=_NOT_COPIED)  # with times: what is compiled beside it stays valid
    found = run_in(root, "-c", "import stagewright; print(stagewright.__file__)")
    assert Path(found.stdout.strip()) == root / "__init__.py", found
    return root


def run_in(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(root.parent)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=LONG + 60, check=False
    )


@contextlib.contextmanager
def seeded(root: Path, fault: Fault) -> Iterator[None]:
    file = root / fault.file
    text, stat = file.read_text(encoding="utf-8"), file.stat()
    file.write_text(fault.seed(text), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(text, encoding="utf-8")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
