"""Events of a trace file, in whole nanoseconds; a file that ends too early, or has broken lines, gives what it has.

Format: "Trace Event Format" (Duffy et al., the Catapult project); Kineto's files are of it, with keys of their own
(`distributedInfo`, `baseTimeNanoseconds`). Read are complete slices (X), pairs (B, E) and names of processes (M).
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_NS_PER_US = 1000
_GZIP = b"\x1f\x8b"
_RATIO, _UNPACKED = 200, 2**28  # that traces unpack to at most: times their size, or bytes
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_RANK = re.compile(r'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d+)')
_LOST = "unreadable events are left out"


class Event(NamedTuple):
    """One slice from `start` to `end` [ns of the file's clock], on a thread of a process."""

    name: str
    category: str
    pid: object
    tid: object
    start: int
    end: int
    args: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """Slices of one file, and what it says of itself.

    Arguments:
        slices: in the order of their starts, of equal ones the longer first.
        process_names: by pid.
        about: all other keys of the file.
        notes: what could not be read, a sentence each.
    """

    path: Path
    slices: tuple[Event, ...]
    process_names: Mapping[object, str]
    about: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def rank(self) -> int | None:
        """Rank of the process that wrote it, where it says so."""
        return self._said("rank", least=0)

    @property
    def world_size(self) -> int | None:
        """Number of processes, likewise."""
        return self._said("world_size", least=1)

    @property
    def host(self) -> str:
        """Name of its host; empty where it does not say so."""
        return str(self.about.get("host_name", ""))

    def _said(self, name: str, *, least: int) -> int | None:
        distributed = self.about.get("distributedInfo")
        number = distributed.get(name) if isinstance(distributed, Mapping) else None
        return number if type(number) is int and number >= least else None


def is_trace(text: str) -> bool:
    """Whether a text is a trace file, whole or not: an object with `traceEvents`, or a list of events.

    >>> is_trace('{"traceEvents": [{"ph": "X"'), is_trace('[{"ph": "X"}'), is_trace('{"ranks": []}')
    (True, True, False)
    """
    start = text.lstrip()
    return start.startswith("[") or (start.startswith("{") and _EVENTS.search(text) is not None)


def rank_in(text: str) -> int | None:
    """The rank that a trace file says it is of, without reading all of it.

    >>> rank_in('{"distributedInfo": {"backend": "gloo", "rank": 3, "world_size": 4}, "traceEvents": []}')
    3
    """
    match = _RANK.search(text) if is_trace(text) else None
    return None if match is None else int(match[1])


def read_text(path: Path) -> str:
    """All of a file, unpacked where it is gzipped; OSError and ValueError as they come, by the file's name.

    Of a gzipped file that ends too early, what there is.
    """
    data = path.read_bytes()
    if data[:2] == _GZIP:
        data = _unpacked(path, data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if 0 < error.start >= len(data) - 3:  # cut inside the last letter
            return data[: error.start].decode("utf-8")
        raise ValueError(f"{path}: no UTF-8 text at byte {error.start}: expected a text file") from None


def _unpacked(path: Path, data: bytes) -> bytes:
    text, limit = b"", max(_UNPACKED, _RATIO * len(data))
    while data:
        unpacker = zlib.decompressobj(31)
        try:
            text += unpacker.decompress(data, limit - len(text) + 1)
        except zlib.error:
            break
        if len(text) > limit:
            raise ValueError(
                f"{path}: unpacks to more than {limit} bytes: expected at most {_RATIO} times its own size"
            )
        data = unpacker.unused_data
    if not text:
        raise ValueError(f"{path}: a gzip file that cannot be unpacked: expected a whole one")
    return text


def read_trace(path: Path) -> TraceFile:
    """The slices of a file; ValueError where it is no trace at all."""
    text = read_text(path)
    notes: list[str] = []
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = _whole_part(path, text, notes)
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise ValueError(f"{path}: expected a trace: an object with a list of traceEvents, or a list of events")
    about = {key: value for key, value in data.items() if key != "traceEvents"} if isinstance(data, dict) else {}
    base = about.get("baseTimeNanoseconds", 0)
    reader = _Reader(int(base) if isinstance(base, int | float) and math.isfinite(base) else 0)
    for event in events:
        reader.add(event)
    reader.close()
    if reader.lost:
        notes.append(f"{path}: {reader.lost} of {len(events)} events have no time or no length: {_LOST}")
    if reader.unclosed:
        notes.append(f"{path}: {reader.unclosed} slices begin and do not end: drawn to the end of the trace")
    return TraceFile(
        path=path,
        slices=tuple(sorted(reader.slices, key=lambda each: (each.start, -each.end))),
        process_names=reader.process_names,
        about=about,
        notes=tuple(notes),
    )


def _whole_part(path: Path, text: str, notes: list[str]) -> dict[str, Any]:
    """The events that can be read, where the text as a whole cannot."""
    head = _EVENTS.search(text)
    at = head.end() if head else text.find("[") + 1
    about: dict[str, Any] = {}
    if head:
        try:
            about = json.loads(text[: head.start()] + '"traceEvents":[]}')
        except ValueError:
            about = {}
    events, broken, ended = [], 0, False
    decoder = json.JSONDecoder()
    while not ended:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at >= len(text) or text[at] == "]":
            ended = True
            break
        try:
            event, at = decoder.raw_decode(text, at)
            events.append(event)
        except (ValueError, RecursionError):
            next_line = text.find("\n", at)
            if next_line < 0:
                break
            broken, at = broken + 1, next_line
    if broken:
        notes.append(f"{path}: {broken} lines are broken: {_LOST}")
    if at >= len(text) or not ended:
        notes.append(f"{path}: the file ends too early, behind {len(events)} events: what follows is missing")
    return {**about, "traceEvents": events}


class _Reader:
    """Collects slices and names; `base`: [ns] of the file's zero."""

    def __init__(self, base: int) -> None:
        self._base = base
        self.slices: list[Event] = []
        self.process_names: dict[object, str] = {}
        self.lost = self.unclosed = 0
        self._open: dict[tuple[object, object], list[Event]] = {}

    def add(self, event: object) -> None:
        if not isinstance(event, dict):
            self.lost += 1
            return
        match event.get("ph"):
            case "X":
                self._complete(event)
            case "B" | "E":
                self._pair(event)
            case "M":
                self._name(event)

    def close(self) -> None:
        """End what did not end."""
        last = max((each.end for each in self.slices), default=0)
        for waiting in self._open.values():
            for each in waiting:
                self.slices.append(each._replace(end=max(last, each.start)))
                self.unclosed += 1

    def _complete(self, event: dict[str, Any]) -> None:
        start, length = _ns(event.get("ts")), _ns(event.get("dur", 0))
        if start is None or length is None or length < 0:
            self.lost += 1
            return
        self.slices.append(self._made(event, start, start + length))

    def _pair(self, event: dict[str, Any]) -> None:
        at, waiting = _ns(event.get("ts")), self._open.setdefault(_thread(event), [])
        if at is None or (event["ph"] == "E" and not waiting):
            self.lost += 1
        elif event["ph"] == "B":
            waiting.append(self._made(event, at, at))
        else:
            begun = waiting.pop()
            self.slices.append(begun._replace(end=max(begun.start, self._base + at)))

    def _made(self, event: dict[str, Any], start: int, end: int) -> Event:
        args = event.get("args")
        pid, tid = _thread(event)
        return Event(
            str(event.get("name", "")),
            str(event.get("cat", "")),
            pid,
            tid,
            self._base + start,
            self._base + end,
            args if isinstance(args, dict) else {},
        )

    def _name(self, event: dict[str, Any]) -> None:
        args, (pid, _) = event.get("args"), _thread(event)
        name = args.get("name") if isinstance(args, dict) else None
        if isinstance(name, str) and event.get("name") == "process_name":
            self.process_names[pid] = name


def _thread(event: Mapping[str, Any]) -> tuple[object, object]:
    """Process and thread; whatever is no number stands for itself as text."""
    pid, tid = (value if isinstance(value := event.get(key), int) else str(value) for key in ("pid", "tid"))
    return pid, tid


def _ns(value: object) -> int | None:
    """Whole nanoseconds of microseconds, which a text may say too; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return round(number * _NS_PER_US) if math.isfinite(number) else None
