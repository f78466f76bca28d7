"""The first tier's core-seconds, on the scale of a fixed piece of work that is timed alongside: no wall time, no retry.

Each worker of pytest times the work before its first test and after its last one, and adds up the CPU seconds of itself
and of all processes below it. A machine that is slow, or busy with other work, makes both grow alike.
"""

import os
import statistics
import time
from typing import Any

import pytest
from support.hangs import below

from .recorder import seconds

MARKS = "not thorough and not nightly"  # what `make test` asks pytest for
LIMIT, PER_WORKER = 480.0, 40.0  # [s] of cores: with the three workers of two cores five minutes of both
REFERENCE = 0.29  # [s] of CPU that the work takes on the machine the limit is meant for


def work() -> float:
    """[s] of CPU for a fixed piece of work, as the tests' own: half in Python, half in small operations of torch."""
    import torch

    begun = time.process_time()
    table: dict[int, int] = {}
    for number in range(1_200_000):
        table[number % 1009] = table.get(number % 917, 0) + number
    x = torch.ones(64, 64, dtype=torch.float64)
    for _ in range(7_500):
        x = (x @ x).clamp(0.0, 1.0)
    return time.process_time() - begun


def spent() -> float:
    """[s] of CPU of this process and of all below it, those that still run included (on Linux)."""
    running = {pid: taken for pid, (_, taken) in below([os.getpid()]).items() if pid != os.getpid()}
    return seconds() + sum(running.values())


class Budget:
    """A plugin of pytest for runs of the first tier: the line at the end, and failure where the limit is exceeded."""

    def __init__(self) -> None:
        self._begun = 0.0  # [s] that the work took before the first test
        self._workers: list[tuple[float, float]] = []  # CPU seconds, and those of the work

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        if not _spreads(session.config):
            self._begun = work()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if _spreads(session.config):
            return
        taken = spent(), statistics.mean([self._begun, work()])
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["core_seconds"] = taken
        else:
            self._workers.append(taken)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if "core_seconds" in getattr(node, "workeroutput", {}):
            self._workers.append(node.workeroutput["core_seconds"])

    @pytest.hookimpl(trylast=True, specname="pytest_sessionfinish")
    def fail_where_exceeded(self, session: pytest.Session) -> None:
        if self._workers and session.exitstatus == pytest.ExitCode.OK and not self.verdict()[1]:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._workers:
            line, holds = self.verdict()
            terminalreporter.write_line(line, red=not holds)

    def verdict(self) -> tuple[str, bool]:
        """A line for people, and whether the limit holds."""
        scale = statistics.mean(unit for _, unit in self._workers) / REFERENCE
        total = sum(taken for taken, _ in self._workers) / scale
        limit = LIMIT + PER_WORKER * len(self._workers)  # each collects all tests, and starts a pool
        unit = f"the reference work took {scale:.2f} times its {REFERENCE} s"
        return f"first tier: {total:.0f} core-seconds of {limit:.0f} ({unit})", total <= limit


def _spreads(config: pytest.Config) -> bool:
    """Whether this process only hands tests to others."""
    return bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")
