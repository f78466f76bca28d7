"""What a test costs and covers: CPU seconds and branches of this process, a line of JSON a test.

    STAGEWRIGHT_TIERS=FOLDER pytest -p tiers.recorder      every process of the run writes FOLDER/<host>-<pid>.jsonl

A test's own process is watched by pytest's hooks, workers of the gloo pool and forked ranks by `recording`, and other
Python processes that a test starts by `site/sitecustomize.py`. The reader adds up what the processes of a test wrote.
"""

import base64
import contextlib
import json
import os
import sys
import zlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

FOLDER = os.environ.get("STAGEWRIGHT_TIERS", "")
_SHARED = ("class", "module", "package")  # scopes; what a session has once costs little
PACKAGES = ("schedules", "partition", "pipe", "comm")
_OUTER: list[str] = []  # what is being recorded, from the outside in
_ELSEWHERE = [0.0]  # [s] of recordings that have ended
_WATCHED: list[Any] = []  # this process's coverage, once started, and the process it was started in


def _coverage() -> Any:
    """The running measurement of this process; a forked one begins its own."""
    if _WATCHED and _WATCHED[1] == os.getpid():
        return _WATCHED[0]
    import coverage

    if _WATCHED:
        _WATCHED[0].stop()
    root = Path(__file__).parents[2]
    watched = coverage.Coverage(
        data_file=None,
        branch=True,
        config_file=False,
        include=[str(root / name / "*") for name in PACKAGES],
        messages=False,
    )
    watched.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured", "module-not-imported"])
    watched.start()
    _WATCHED[:] = [watched, os.getpid()]
    return watched


def seconds() -> float:
    """[s] of CPU of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _write(test: str, spent: float, watched: Any, shared: Sequence[str] = ()) -> None:
    root = Path(__file__).parents[2]
    data = watched.get_data()
    arcs = {
        os.path.relpath(file, root): sorted(arc for arc in data.arcs(file) or () if arc[0] > 0)
        for file in data.measured_files()
    }
    data.erase()
    packed = base64.b85encode(zlib.compress(json.dumps(arcs, separators=(",", ":")).encode(), 1)).decode()
    with open(Path(FOLDER) / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
        record = {"test": test, "seconds": round(spent, 3), "arcs": packed, "shared": list(shared)}
        file.write(json.dumps(record) + "\n")


@contextlib.contextmanager
def recording(test: str, shared: Sequence[str] = ()) -> Iterator[None]:
    """What this process does within is a test's, which uses some `shared` fixtures; nothing is recorded where no run of
    tiers is on. One within another is not counted in that one."""
    if not FOLDER:
        yield
        return
    watched = _coverage()
    if _OUTER:
        _write(_OUTER[-1], 0.0, watched)
    watched.get_data().erase()
    _OUTER.append(test)
    before, elsewhere = seconds(), _ELSEWHERE[0]
    try:
        yield
    finally:
        _OUTER.pop()
        taken = seconds() - before
        _write(test, taken - (_ELSEWHERE[0] - elsewhere), watched, shared)
        _ELSEWHERE[0] = elsewhere + taken


def current_test() -> str:
    """The test that this process, or the one that started it, is at."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    info = getattr(item, "_fixtureinfo", None)
    used = [found[-1] for found in info.name2fixturedefs.values()] if info is not None else []
    with recording(item.nodeid, [_name(fixture) for fixture in used if fixture.scope in _SHARED]):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Generator[None, object, object]:
    """What tests share is a cost of each that asks for it, not of the first alone."""
    if not FOLDER or fixturedef.scope not in _SHARED:
        return (yield)
    before = os.environ["PYTEST_CURRENT_TEST"]
    os.environ["PYTEST_CURRENT_TEST"] = f"{_name(fixturedef)} (setup)"
    try:
        with recording(_name(fixturedef)):
            return (yield)
    finally:
        os.environ["PYTEST_CURRENT_TEST"] = before


def _name(fixture: Any) -> str:
    return f"{fixture.baseid} fixture {fixture.argname}"


def watch_process() -> None:
    """From the start of a process on to its end: one that a test started, by a command of its own."""
    import atexit

    test = current_test()
    if not FOLDER or not test or any("multiprocessing" in word for word in sys.orig_argv):
        return  # servers of the gloo pool count for every test, and what they fork for its own
    watched = _coverage()
    atexit.register(lambda: _write(test, seconds(), watched))
