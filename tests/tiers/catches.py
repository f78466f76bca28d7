"""Which cases catch each seeded fault: tried, cheapest first, in copies of the package."""

import json
import queue
import re
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from faults.seeded import LONG, ROOMS, Fault, copy, read, run_in, seeded

from .choose import Measured

AT_ONCE = 2
TRIED = 30  # cases of a fault, besides those of the test that its record names
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)


def catching(cases: Mapping[str, Measured], known: Path) -> dict[str, list[str]]:
    """By fault, the cases that fail with it among those that run its lines; `known` keeps what was found before."""
    found: dict[str, list[str]] = json.loads(known.read_text()) if known.exists() else {}
    faults = [fault for room in ROOMS for fault in read(room) if _key(fault) not in found]
    with TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(AT_ONCE):
            copies.put(copy(Path(folder) / str(number)))

        def attempt(fault: Fault) -> None:
            root = copies.get()
            try:
                found[_key(fault)] = _attempt(root, fault, cases)
            finally:
                copies.put(root)
            known.write_text(json.dumps(found, indent=1))
            print(f"{len(found):4} {fault.name}: caught by {len(found[_key(fault)])} of those tried", flush=True)

        list(pool.map(attempt, faults))
    return {fault.name: found[_key(fault)] for room in ROOMS for fault in read(room)}


def _key(fault: Fault) -> str:
    return " | ".join((fault.file, fault.old, fault.new))


def _attempt(root: Path, fault: Fault, cases: Mapping[str, Measured]) -> list[str]:
    named = [name for name in cases if name == fault.caught_by or name.partition("[")[0] == fault.caught_by]
    touching = {(fault.file, line) for line in fault.lines()}
    running = sorted((case.seconds, name) for name, case in cases.items() if touching & case.lines)
    tried = dict.fromkeys([*(name for _, name in running[:TRIED]), *named])
    if not tried:
        return []
    options = ["-q", "-rfE", "--tb=no", "-m", "not nightly", "-p", "no:cacheprovider", f"--timeout={LONG}"]
    try:
        with seeded(root, fault):
            ended = run_in(root, "-m", "pytest", *options, *tried)
    except subprocess.TimeoutExpired:
        print(f"{fault.name}: not done in time: {' '.join(tried)}", flush=True)
        return []
    assert ended.returncode in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), ended.stdout + ended.stderr
    failed = set(_FAILED.findall(ended.stdout))
    return [name for name in tried if name in failed]
