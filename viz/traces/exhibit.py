"""Trace files as one Exhibit: measured steps of a pipeline where slices have the names of actions, else rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..exhibit import Exhibit, MeasuredStep, Row, Slice
from ..lanes import assign_lanes
from .events import Event, read_trace
from .names import is_communication
from .pipeline import read_pipeline
from .processes import Process, processes_of


def exhibit_of_traces(paths: Sequence[Path], *, name: str, num_chunks: int = 1) -> Exhibit:
    """One exhibit of the trace files of all ranks.

    Arguments:
        num_chunks: V, for pipelines whose slices say neither stage nor microbatch.

    Raises ValueError for files that are no traces, hold no slice, or are of one rank twice.
    """
    files = [read_trace(path) for path in paths]
    notes = [note for file in files for note in file.notes]
    processes = processes_of(files)
    if not any(each.slices for each in processes):
        raise ValueError(f"{', '.join(map(str, paths))}: no slice with a start and a length: nothing to show")
    if any(each.ran for each in processes):
        pipeline = read_pipeline(processes, name=name, num_chunks=num_chunks)
        notes += pipeline.notes
        steps = tuple(MeasuredStep(number, timeline) for number, timeline in pipeline.steps)
        return Exhibit(name=name, measured=steps, notes=tuple(notes))
    notes.append(
        f"{name}: no slice has the name of a pipeline's action (torch's Schedule1F1B gives none): slices are shown as "
        f"they are"
    )
    return Exhibit(name=name, foreign=rows_of(processes), notes=tuple(notes))


def rows_of(processes: Sequence[Process]) -> tuple[Row, ...]:
    """A row a process, a lane a thread; what overlaps without standing in each other has lanes of its own."""
    origin = min((each.start for process in processes for each in process.slices), default=0)
    rows = []
    for process in processes:
        threads: dict[object, list[Event]] = {}
        for each in process.slices:
            threads.setdefault(each.tid, []).append(each)
        slices: list[Slice] = []
        for number, (tid, own) in enumerate(threads.items()):
            lane = process.file.thread_names.get((own[0].pid, tid), f"thread {tid}") if number else ""
            slices += _nested(own, lane, origin)
        rows.append(Row(name=process.name, slices=tuple(slices)))
    return tuple(row for row in rows if row.slices)


def _nested(events: Sequence[Event], lane: str, origin: int) -> list[Slice]:
    """Slices of a thread in lanes in which they nest. Communication under way overlaps with what goes on meanwhile."""
    inside, beside = [], []
    around: list[int] = []  # ends of the slices that the next one may stand in
    for each in events:
        while around and around[-1] <= each.start:
            around.pop()
        if is_communication(each.name) or (around and each.end > around[-1]):
            beside.append(each)
        else:
            inside.append(each)
            around.append(each.end)
    slices = [_slice(each, lane, origin) for each in inside]
    for each, number in zip(beside, assign_lanes([(e.start, e.end) for e in beside]), strict=True):
        slices.append(_slice(each, f"{lane} beside {number + 1}".strip(), origin))
    return slices


def _slice(event: Event, lane: str, origin: int) -> Slice:
    return Slice(event.name, (event.start - origin) * 1e-9, (event.end - origin) * 1e-9, lane)
