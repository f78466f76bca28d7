"""Trace files: the record that each process of a run writes of some of its steps, without communication.

    runs/NAME/trace.rank0.jsonl    {"trace": 1, "run": "5f0c", "process": 0, ...}     each time that the process starts
                                   {"clock": [at, offset, error], "run": "5f0c"}      its clock relative to process 0's
                                   {"step": 3, "run": "5f0c", "ranks": {"0": ...}}    the actions of its ranks
                                   ...

Times are seconds of the process's own clock; `trace_reader` combines the files of all processes. Each line ends with a
checksum of the text before it: a truncated or changed line is detected, and the others are read.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..ir import Action, Collective, Schedule
from ..messages import Message, MessageKind
from ..timing.records import RankRecord, was_waited_for
from ..timing.timeline import ExpertRows, Span
from .clocks import ClockReading

VERSION = 1
_SUM = b',"crc":'
_LATER = ("flush_first", "cut")  # of a header: older files may lack them
WHOLE_SCHEDULE = 1 << 18  # characters of a schedule that every process writes; a longer one, the first of each host


def trace_path(folder: Path, process: int) -> Path:
    return folder / f"trace.rank{process}.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """One start of a process."""

    run: str  # name of this start, the same in all processes
    started: str  # when, by the wall clock of process 0, ISO 8601 in UTC
    process: int  # number of this one
    num_processes: int  # of all
    ranks: tuple[int, ...]  # of the schedule that it runs
    machine: str  # whose monotonic clock it has
    origin: str  # and process 0 has; equal ones are one clock
    host: str  # name, for people
    first_step: int  # number of the first step after this start; steps from here on of earlier starts do not count
    digest: str  # of the schedule that runs
    schedule: Schedule | None  # None if another file has it
    flush_first: int = 0  # batches that end in a flush, of a schedule without one
    cut: str = ""  # the same text if stages are the same modules and run equally; empty if not known
    versions: Mapping[str, str] = field(default_factory=dict)  # of packages, by name


def digest(schedule: Schedule) -> str:
    return short_digest(schedule.to_json())


def short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def header_line(header: TraceHeader) -> bytes:
    data: dict[str, Any] = {"trace": VERSION}
    data |= {name: getattr(header, name) for name in TraceHeader.__slots__}
    data["schedule"] = None if header.schedule is None else header.schedule.to_data()
    return _line(data | {"versions": dict(header.versions)})


def clock_line(run: str, reading: ClockReading) -> bytes:
    return _line({"clock": list(reading), "run": run})


def step_line(run: str, step: int, records: Mapping[int, RankRecord]) -> bytes:
    """One step of a process's ranks: times in nanoseconds from its first one, and messages that were waited for."""
    return _line({"step": step, "run": run, "ranks": {str(rank): _record(each) for rank, each in records.items()}})


def end_line(run: str, step: int) -> bytes:
    """No step after this one is traced: the file has reached its maximum size."""
    return _line({"full": step, "run": run})


def parse_line(line: bytes) -> dict[str, Any]:
    """The object of a line; ValueError if it is incomplete or changed."""
    text, found, checksum = line.rpartition(_SUM)
    if not found or not checksum.endswith(b"}") or not checksum[:-1].isdigit():
        raise ValueError("cut off, or no line of a trace")
    if zlib.crc32(text) != int(checksum[:-1]):
        raise ValueError("changed since it was written: its checksum does not fit")
    data: dict[str, Any] = json.loads(text + b"}")
    return data


def parse_header(data: Mapping[str, Any]) -> TraceHeader:
    schedule = None if data["schedule"] is None else Schedule.from_data(data["schedule"])
    values = {name: data[name] for name in TraceHeader.__slots__ if name in data or name not in _LATER}
    return TraceHeader(**(values | {"schedule": schedule, "ranks": tuple(data["ranks"])}))


def parse_step(data: Mapping[str, Any]) -> dict[int, RankRecord]:
    return {int(rank): _read_record(each) for rank, each in data["ranks"].items()}


def _line(data: Mapping[str, Any]) -> bytes:
    text = json.dumps(data, separators=(",", ":")).encode()[:-1]
    return text + _SUM + str(zlib.crc32(text)).encode() + b"}\n"


def _record(record: RankRecord) -> dict[str, Any]:
    origin = record.compute[0].start if record.compute else 0.0

    def at(time: float) -> float:
        return round(time - origin, 9)

    return {
        "from": origin,
        **({} if record.step is None else {"step": [at(time) for time in record.step]}),
        **({"data": [[at(start), at(end)] for start, end in record.data]} if record.data else {}),
        "compute": _spans(record.compute, at),
        "arrivals": [
            [*what, at(began), at(there)]
            for what, began, there in record.arrivals
            if was_waited_for(what, began, there)
        ],
        "collectives": _spans(record.collectives, at),
        **({"exchanges": _spans(record.exchanges, at)} if record.exchanges else {}),
        **({"rows": [[str(what), *rows] for what, rows in record.rows]} if record.rows else {}),
    }


def _spans(spans: Sequence[Span[Any]], at: Callable[[float], float]) -> list[list[Any]]:
    return [[str(what), at(start), at(end)] for what, start, end in spans]


def _read_record(data: Mapping[str, Any]) -> RankRecord:
    origin = float(data["from"])
    step = data.get("step")

    def together(name: str) -> tuple[Span[Collective], ...]:
        return tuple(Span(Collective.parse(w), origin + start, origin + end) for w, start, end in data.get(name, ()))

    return RankRecord(
        data=tuple((origin + start, origin + end) for start, end in data.get("data", ())),
        step=None if step is None else (origin + float(step[0]), origin + float(step[1])),
        compute=tuple(Span(Action.parse(what), origin + start, origin + end) for what, start, end in data["compute"]),
        arrivals=tuple(
            Span(Message(MessageKind(kind), src, dst, index), origin + began, origin + there)
            for kind, src, dst, index, began, there in data["arrivals"]
        ),
        rows=tuple((Action.parse(what), ExpertRows(*rows)) for what, *rows in data.get("rows", ())),
        collectives=together("collectives"),
        exchanges=together("exchanges"),
    )
