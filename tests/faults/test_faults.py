"""Tests of the tests: small mistakes of a programmer, about 20 a room, and one test that fails with each of them.

    [a-sum-is-taken-twice]                       the mistake, in tests/faults/<room>.toml
    file = "pipe/update/..."
    old = "..."                                  stands in the file once
    new = "..."
    caught_by = "tests/pipe/test_...::test_..."
    gloo = true                                  where only several processes show it

A change that moves or renames what `old` quotes, or the test that catches it, takes the record along: the tests of
every day say which. `make nightly ARGS="-k faults"` tries all of them, each in a copy of the package.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import stagewright

ROOT = Path(stagewright.__file__).parent
FAULTS = Path(__file__).parent
ROOMS = {"schedules": 20, "run": 20, "update": 20, "partition": 25, "checkpoint": 22, "comm": 21}  # faults in each
# [s] of one test in a copy; one that a fault makes wait for ever has failed.
LONG = 240
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "runs", "docs", ".*_cache", ".hypothesis")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    name: str
    file: str
    old: str
    new: str
    caught_by: str
    gloo: bool = False

    def seed(self, text: str) -> str:
        count = text.count(self.old)
        assert count == 1, f"fault {self.name}: {self.old!r} stands {count} times in {self.file}, expected once"
        return text.replace(self.old, self.new)


def read(room: str) -> list[Fault]:
    records = tomllib.loads((FAULTS / f"{room}.toml").read_text(encoding="utf-8"))
    return [Fault(name=name, **record) for name, record in records.items()]


@pytest.mark.parametrize("room", ROOMS)
def test_faults_fit_the_code_and_the_tests(room: str) -> None:
    """Otherwise the test of the night would try nothing."""
    faults = read(room)
    assert len(faults) == ROOMS[room]
    assert len({(fault.file, fault.old, fault.new) for fault in faults}) == ROOMS[room]
    for fault in faults:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert ast.dump(ast.parse(fault.seed(text))) != ast.dump(ast.parse(text)), f"{fault.name} changes no code"
        path, _, name = fault.caught_by.partition("[")[0].partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in tests, f"fault {fault.name}: expected a test of {path}, not {name!r}"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree once more, in which processes started by `run_in` find the package."""
    root = tmp_path_factory.mktemp("faults") / "stagewright"
    shutil.copytree(ROOT, root, ignore=NOT_COPIED)  # with times: what is compiled beside it stays valid
    found = run_in(root, "-c", "import stagewright; print(stagewright.__file__)")
    assert Path(found.stdout.strip()) == root / "__init__.py", found
    return root


def run_in(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(root.parent)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=LONG + 60, check=False
    )


@pytest.fixture
def seeded(copy: Path, request: pytest.FixtureRequest) -> Iterator[Fault]:
    """A fault, which stands in the copy for one test."""
    fault: Fault = request.param
    file = copy / fault.file
    text, stat = file.read_text(encoding="utf-8"), file.stat()
    file.write_text(fault.seed(text), encoding="utf-8")
    yield fault
    file.write_text(text, encoding="utf-8")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.nightly
@pytest.mark.timeout(LONG + 120)
@pytest.mark.parametrize(
    "seeded",
    [
        pytest.param(fault, id=f"{room}-{fault.name}", marks=pytest.mark.gloo if fault.gloo else ())
        for room in ROOMS
        for fault in read(room)
    ],
    indirect=True,
)
def test_a_fault_is_caught(copy: Path, seeded: Fault) -> None:
    """By the cases of every day."""
    options = ["-q", "-x", "-m", "not nightly", "-p", "no:cacheprovider", f"--timeout={LONG}"]
    ended = run_in(copy, "-m", "pytest", *options, seeded.caught_by)
    failed = ended.returncode == pytest.ExitCode.TESTS_FAILED and "\nFAILED " in ended.stdout
    assert failed, f"{seeded.caught_by} does not see {seeded.new!r} in {seeded.file}:\n{ended.stdout}{ended.stderr}"
