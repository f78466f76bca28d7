"""A folder of a run, as `stagewright train` leaves it, with one traced step."""

import json
from pathlib import Path
from typing import Any

from stagewright.schedules import Schedule, Timeline
from support.inside import RankRecord, RunFile, TraceHeader, header_line, step_line, trace_path
from support.inside import trace_file_digest as digest


def header_of(schedule: Schedule, **other: Any) -> TraceHeader:
    """Of a run in one process, unless said otherwise."""
    whole = {"process": 0, "num_processes": 1, "ranks": tuple(range(schedule.num_ranks)), "started": "2026"}
    here = {"machine": "a", "origin": "a", "host": "a", "first_step": 0}
    return TraceHeader(**whole | here | {"digest": digest(schedule), "schedule": schedule} | other)


def write_run(name: str, simulated: Timeline, measured: Timeline, **config: object) -> None:
    """Of a run in one process, which traced its step 3."""
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    schedule = simulated.schedule
    RunFile(schedule=schedule, simulated=simulated).write(folder)
    header = header_of(schedule, run=name)
    records = {
        rank: RankRecord(compute=trace.compute, arrivals=tuple((m, made, there) for m, made, there in trace.comm))
        for rank, trace in enumerate(measured.ranks)
    }
    trace_path(folder, 0).write_bytes(header_line(header) + step_line(name, 3, records))
    manifest = {"name": name, "config": {"name": name, **config}, "versions": {"torch": "2.13"}, "host": {"name": "a"}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
