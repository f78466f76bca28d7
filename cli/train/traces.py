"""A run's folder read as an Exhibit: its simulation, and the steps that its processes traced."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...schedules import Timeline, simulate
from ...schedules.timing.timeline import MeasuredStep
from ...schedules.traces.clocks import clock_note
from ...schedules.traces.run_file import NAME, RunFile
from ...schedules.traces.trace_reader import find_traces, read_traces, starts_of
from ...viz.exhibit import Exhibit
from .run_folder import read_whole

TRACE_NAMES = "trace.rankN.jsonl"


def read_run(*folders: Path) -> Exhibit:
    """The run of a folder, or of the folders of several hosts.

    The notes list missing or broken parts (a rank's file, truncated lines, the simulation). Raises ValueError naming
    files and lines if nothing is readable, and for folders of different runs.
    """
    groups = hosts_of_runs(folders)
    if len(groups) > 1:
        raise ValueError(
            f"{groups[1][0]} is of another run than {groups[0][0]}: expected folders that hosts have left of one run; "
            f"to compare runs, type stagewright compare {groups[0][0]} {groups[1][0]}"
        )
    file, notes = _read_file(folders)
    paths = find_traces(folders)
    traces = read_traces(paths, schedules=[] if file is None else [file.schedule])
    notes += traces.notes
    measured = traces.steps
    first = next((folder for folder in folders if (folder / NAME).exists()), folders[0])
    summary = read_whole(first / "summary.json")
    if file is None and not measured:
        why = "; ".join(notes)
        raise ValueError(f"nothing to show in {_told(folders)}: {why}; expected the folder of a run that traced steps")
    if measured and (note := clock_note(measured[-1].timeline)):
        notes.append(f"step {measured[-1].number}: {note}")
    if not measured:
        notes.append(f"no step was traced: {first} has no {TRACE_NAMES}" if not paths else "no traced step is left")
    return Exhibit(
        name=first.resolve().name,
        simulated=None if file is None else _simulation(file, measured),
        measured=measured,
        costs=None if file is None else file.costs,
        sampled=None if file is None else file.sampled,
        memory=() if file is None else file.memory,
        memory_limit=None if file is None else file.memory_limit,
        predicted_peak=None if file is None else file.predicted_peak,
        measured_peak=_measured_peak(summary, measured),
        context=1 if file is None else _parts(summary, file.schedule.num_microbatches),
        notes=tuple(notes),
    )


def draw(exhibit: Exhibit, folder: Path) -> tuple[Path, Path]:
    """Write timeline.png (simulated above measured) and timeline.perfetto.json; returns both paths."""
    from ...viz import comparison_figure, write_figure, write_perfetto  # imports matplotlib

    picture, trace = folder / "timeline.png", folder / "timeline.perfetto.json"
    write_figure(comparison_figure([exhibit]), picture)
    write_perfetto(list(exhibit.timelines), trace)
    return picture, trace


def _read_file(folders: Sequence[Path]) -> tuple[RunFile | None, list[str]]:
    """The first readable timeline.json, and notes on unreadable ones; only one of several hosts has it."""
    notes: list[str] = []
    for folder in folders:
        try:
            return RunFile.read(folder), notes
        except ValueError as error:
            if (folder / NAME).exists():
                notes.append(f"no simulation: {error}")
    return None, notes or [f"no simulation: {_told(folders)} has no {NAME}, which process 0 of a run writes"]


def hosts_of_runs(folders: Sequence[Path]) -> list[tuple[Path, ...]]:
    """The folders grouped by run: those of several hosts have the same start and files of different processes."""
    groups: list[_Group] = []
    for folder in folders:
        paths = find_traces([folder])
        own = _Group((folder,), starts_of(paths), frozenset(path.name for path in paths))
        for group in [each for each in groups if each.starts & own.starts and not each.files & own.files]:
            groups.remove(group)
            own = _Group(group.folders + own.folders, group.starts | own.starts, group.files | own.files)
        groups.append(own)
    return [group.folders for group in groups]


class _Group(NamedTuple):
    folders: tuple[Path, ...]
    starts: frozenset[str]
    files: frozenset[str]


def _simulation(file: RunFile, measured: Sequence[MeasuredStep]) -> Timeline:
    if not measured or file.costs is None or not file.simulated.schedule.is_asynchronous:
        return file.simulated
    return simulate(measured[-1].timeline.schedule, file.costs)


def _measured_peak(summary: dict[str, Any], measured: Sequence[MeasuredStep]) -> tuple[float, ...] | None:
    found = summary.get("peak_tensor_bytes")
    if not isinstance(found, list) or not measured or len(found) != len(measured[-1].timeline.ranks):
        return None
    return tuple(map(float, found)) if all(isinstance(each, int | float) for each in found) else None


def _parts(summary: dict[str, Any], count: int) -> int:
    """Parts in which each of the run's microbatches is one of `count`; 1 where they are not known."""
    found = summary.get("num_microbatches")
    return count // found if isinstance(found, int) and found > 0 and count % found == 0 else 1


def _told(folders: Sequence[Path]) -> str:
    return " and ".join(map(str, folders))
