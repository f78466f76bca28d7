"""Trace files read back: the timelines of the steps that a run traced, of all ranks whose files exist.

    trace.rank0.jsonl    start a: steps 3 23 43    start b, from step 30 on: steps 43 63
    trace.rank1.jsonl    start a: steps 3 23    start b: step 43                      ->  a3 a23 b43, b63 of rank 0

Missing or broken records are no error as long as there is something to draw: a note reports them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from ..ir import Schedule
from ..lowering.calls import make_calls
from ..messages import NOTHING_SHARED
from ..timing.records import RankRecord, as_it_ran, assemble_stream, assemble_timeline
from ..timing.timeline import MeasuredStep, Timeline
from .clocks import ClockReading, offset_at
from .trace_file import VERSION, TraceHeader, digest, parse_header, parse_line, parse_step, trace_path

_NAME = re.compile(r"trace\.rank(\d+)\.jsonl")
_NAMED = 3  # broken lines of a file that are reported one by one
_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, OverflowError)


class Traces(NamedTuple):
    """The contents of trace files."""

    steps: tuple[MeasuredStep, ...]  # in ascending order
    notes: tuple[str, ...]  # what is missing or could not be read, a sentence each


@dataclass(slots=True)
class _Process:
    path: Path
    header: TraceHeader | None = None
    readings: list[ClockReading] = field(default_factory=list)
    steps: dict[int, dict[int, RankRecord]] = field(default_factory=dict)
    full: int | None = None


class _Files:
    """Records of all files, by name of the start, by process; and notes on lines that could not be read."""

    def __init__(self) -> None:
        self.starts: dict[str, dict[int, _Process]] = {}
        self.notes: list[str] = []
        self._foreign: set[str] = set()  # starts of other versions

    def read(self, path: Path) -> None:
        match = _match(path)
        process = 0 if match is None else int(match[1])
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            self.notes.append(f"{path} cannot be read: {error.strerror or error}")
            return
        if not any(lines):
            self.notes.append(f"{path} is empty")
        broken: list[str] = []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                self._take(parse_line(line), process, path)
            except _UNREADABLE as error:
                why = str(error) if isinstance(error, ValueError) else f"not as this version writes it ({error!r})"
                broken.append(f"{path}, line {number}: {why}; left out")
        rest = len(broken) - _NAMED
        self.notes += broken[:_NAMED]
        self.notes += [f"{path}: {rest} more broken lines, left out"] if rest > 0 else []

    def _take(self, data: Mapping[str, Any], process: int, path: Path) -> None:
        run = str(data["run"])
        if data.get("trace", VERSION) != VERSION:
            self._foreign.add(run)
            raise ValueError(f"trace version {data['trace']!r}, expected {VERSION}: written by another stagewright")
        if run in self._foreign:
            return
        one = self.starts.setdefault(run, {}).setdefault(process, _Process(path))
        if "trace" in data:
            one.header = parse_header(data)
        elif "clock" in data:
            one.readings.append(ClockReading(*map(float, data["clock"])))
        elif "step" in data:
            one.steps[int(data["step"])] = parse_step(data)
        elif "full" in data:
            one.full = int(data["full"])


def find_traces(folders: Iterable[Path]) -> list[Path]:
    """The trace files in some folders, in the order of their processes."""
    paths = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
    matches = ((path, _match(path)) for path in paths)
    return [path for _, path in sorted((int(match[1]), path) for path, match in matches if match)]


def is_trace_file(path: Path) -> bool:
    return _match(path) is not None and path.is_file()


def starts_of(paths: Iterable[Path]) -> frozenset[str]:
    """Names of the starts in the headers of some files; unreadable ones are skipped."""
    return frozenset(str(header["run"]) for header in _headers_in(paths) if "run" in header)


def processes_by_host(paths: Iterable[Path]) -> dict[str, frozenset[int]]:
    """Processes by host, from the headers of some files; under "" those whose files are missing."""
    found: dict[str, set[int]] = {}
    size = 0
    for header in _headers_in(paths):
        if {"host", "process", "num_processes"} <= header.keys():
            found.setdefault(str(header["host"]), set()).add(int(header["process"]))
            size = max(size, int(header["num_processes"]))
    lacking = set(range(size)).difference(*found.values())
    return {host: frozenset(each) for host, each in (*found.items(), *([("", lacking)] if lacking else []))}


def newest_cut_since(paths: Iterable[Path]) -> int:
    """Number of the first step from which on the run had its latest stages, by the headers of its starts.

    Not 0 if a run resumed from a checkpoint with another cut; unreadable headers are skipped.
    """
    starts = {str(each["run"]): each for each in _headers_in(paths) if {"run", "started", "first_step"} <= each.keys()}
    ordered = sorted(starts.values(), key=lambda each: str(each["started"]), reverse=True)
    alike = takewhile(lambda each: each.get("cut", "") == ordered[0].get("cut", ""), ordered)
    return min((int(each["first_step"]) for each in alike), default=0)


def _headers_in(paths: Iterable[Path]) -> Iterator[Mapping[str, Any]]:
    for path in paths:
        with suppress(OSError):
            for line in path.read_bytes().split(b"\n"):
                if line.startswith(b'{"trace":'):
                    with suppress(*_UNREADABLE):
                        yield parse_line(line)


def read_traces(paths: Sequence[Path], *, schedules: Iterable[Schedule] = ()) -> Traces:
    """Combine the files of a run's processes; `schedules`: candidates for the one that ran, if no file has it."""
    files = _Files()
    for path in paths:
        files.read(path)
    known = {digest(schedule): schedule for schedule in schedules}
    ordered = sorted(
        files.starts.values(), key=lambda start: min((each.started for each in _headers(start)), default="")
    )
    steps: dict[int, Timeline] = {}
    for number, processes in enumerate(ordered):
        after = (header for later in ordered[number + 1 :] for header in _headers(later))
        until = min((header.first_step for header in after), default=None)
        found, notes = _Start(processes, known).read(until)
        steps |= found
        files.notes += notes
    return Traces(tuple(MeasuredStep(number, steps[number]) for number in sorted(steps)), tuple(files.notes))


def _match(path: Path) -> re.Match[str] | None:
    return _NAME.fullmatch(path.name)


def _headers(processes: Mapping[int, _Process]) -> list[TraceHeader]:
    return [one.header for _, one in sorted(processes.items()) if one.header is not None]


class _Start:
    """Processes that were started together; `known`: schedules of other files, by digest."""

    def __init__(self, processes: Mapping[int, _Process], known: Mapping[str, Schedule]) -> None:
        self._processes = dict(sorted(processes.items()))
        self._headers = _headers(processes)
        self._schedule = self._find_schedule(known)
        self._notes: list[str] = []

    def read(self, until: int | None) -> tuple[dict[int, Timeline], list[str]]:
        """Timelines by step, before the step from which on another start counts, and notes."""
        numbers = sorted({step for one in self._processes.values() for step in one.steps})
        kept = [number for number in numbers if until is None or number < until]
        if not kept:
            return {}, []
        if self._schedule is None:
            files = ", ".join(str(one.path) for one in self._processes.values())
            return {}, [f"no file has the schedule of {files}: expected those of the same host next to it"]
        steps = self._together(kept)
        self._note_missing(kept, steps)
        for one in self._processes.values():
            if one.full is not None:
                self._notes.append(f"{one.path} is full: no step after {one.full} is traced")
        return steps, self._notes

    def _find_schedule(self, known: Mapping[str, Schedule]) -> Schedule | None:
        wanted = {header.digest for header in self._headers}
        for header in self._headers:
            if header.schedule is not None and digest(header.schedule) == header.digest:
                return header.schedule
        found = [schedule for name, schedule in known.items() if name in wanted or not wanted]
        return found[0] if found else None

    def _together(self, numbers: Sequence[int]) -> dict[int, Timeline]:
        schedule = self._schedule
        assert schedule is not None
        flush_first = max((header.flush_first for header in self._headers), default=0)
        calls = None
        if schedule.is_asynchronous:
            calls = make_calls(schedule, sharing=NOTHING_SHARED, flush_first=flush_first)
        steps: dict[int, Timeline] = {}
        for number in numbers:
            records: list[RankRecord | None] = [None] * schedule.num_ranks
            for process, one in self._processes.items():
                for rank, record in one.steps.get(number, {}).items():
                    placed = self._placed(process, one, record)
                    if 0 <= rank < len(records) and records[rank] is None:
                        records[rank] = placed
            try:
                steps[number] = (
                    assemble_timeline(as_it_ran(schedule, records), records)
                    if calls is None
                    else assemble_stream(calls, records)
                )
            except _UNREADABLE as error:
                self._notes.append(f"step {number} does not fit its schedule {schedule.name!r} ({error!r}); left out")
        return steps

    def _placed(self, process: int, one: _Process, record: RankRecord) -> RankRecord | None:
        """The record with its clock; None if its offset from process 0's is not known."""
        if not one.readings and not self._shares_clock(process, one):
            return None
        begun = record.compute[0].start if record.compute else 0.0
        offset, error = offset_at(sorted(one.readings), begun)
        return replace(record, offset=offset, error=error)

    def _shares_clock(self, process: int, one: _Process) -> bool:
        """Whether its clock is that of process 0's machine, by its header, or by those of all others."""
        headers = self._headers if one.header is None else [one.header]
        return process == 0 or all(header.machine == header.origin for header in headers)

    def _note_missing(self, numbers: Sequence[int], steps: Mapping[int, Timeline]) -> None:
        lacking: dict[int, list[int]] = {}
        for number in numbers:
            for rank in steps[number].missing if number in steps else ():
                lacking.setdefault(rank, []).append(number)
        for rank, without in lacking.items():
            whose = {p: one for p, one in self._processes.items() if any(rank in each for each in one.steps.values())}
            path = next((one.path for one in whose.values()), None)
            if path is None:
                self._notes.append(f"nothing of rank {rank}: {self._where(rank)}")
            elif not any(one.readings or self._shares_clock(p, one) for p, one in whose.items()):
                self._notes.append(f"rank {rank} left out: {path} has no reading of its clock, which is another host's")
            else:
                which = f"step {without[0]}" if len(without) == 1 else f"steps {', '.join(map(str, without))}"
                last = max(number for one in whose.values() for number in one.steps)
                self._notes.append(f"nothing of rank {rank} in {which}: {path} ends with step {last}")

    def _where(self, rank: int) -> str:
        own = next((one for one in self._processes.values() if one.header and rank in one.header.ranks), None)
        if own is not None:
            return f"{own.path} has no step of it"
        some = next(iter(self._processes.values()))
        sizes = {header.num_processes for header in self._headers}
        is_line = self._schedule is not None and sizes <= {self._schedule.num_ranks}
        name = trace_path(some.path.parent, rank).name if is_line else "the file of its process"
        return (
            f"expected {name} next to {some.path} (copy the files of all hosts into one folder, or name their folders)"
        )
