"""Trace files of a run: each process writes what its ranks did in some of the steps, and gathers nothing.

    tracer = pipe.tracer(folder)      clocks of hosts are compared: collective
    tracer.step()                     after each train_step: sometimes a line in this process's own file
    tracer.close()                    the last step, clocks again, timeline.json: collective

"auto" traces step 3, then every 20th, and doubles the distance after each eight: some hundred steps of a million.
"""

from __future__ import annotations

import platform
import secrets
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from ...schedules import Costs, Spread, StageBytes, StepSamples, flushed, simulate, simulate_spread
from ...schedules.timing.records import RankRecord
from ...schedules.traces.run_file import RunFile
from ...schedules.traces.trace_file import (
    WHOLE_SCHEDULE,
    TraceHeader,
    clock_line,
    digest,
    end_line,
    header_line,
    short_digest,
    step_line,
    trace_path,
)
from ..build import Pipeline

TraceEvery = int | Literal["auto"]
Snapshots = Mapping[int, Callable[[], RankRecord]]  # by local rank

FIRST_TRACED = 3  # the steps before warm up caches and allocators
_DISTANCE = 20  # steps
_ALIKE = 8  # traced steps at one distance under "auto"
_MOST_BYTES = 1 << 26  # of a file, since its process was started


def is_traced(step: int, every: TraceEvery) -> bool:
    """Whether a step is traced, which depends on its number alone, so that a resumed run traces the same steps."""
    at = step - FIRST_TRACED
    if at < 0 or every == 0:
        return False
    if every != "auto":
        return at % every == 0
    distance = _DISTANCE
    while at >= _ALIKE * distance:
        at -= _ALIKE * distance
        distance *= 2
    return at % distance == 0


def check_every(every: object) -> None:
    if every != "auto" and (isinstance(every, bool) or not isinstance(every, int) or every < 0):
        raise ValueError(f"every={every!r}: expected a number of steps, 0 for the last one only, or 'auto'")


class Tracer:
    """Writes `trace.rankN.jsonl`, N the number of this process, and in process 0 `timeline.json`.

    Made by `PipelineModule.tracer`. The file is continued if steps were trained on before (a checkpoint was loaded),
    and else begins anew. If the disk is full, tracing ends with a warning, and the run continues.
    """

    def __init__(self, folder: Path, pipeline: Pipeline, *, every: TraceEvery) -> None:
        self._folder = folder
        self._every = every
        self._pipeline = pipeline
        self._context = pipeline.state.run
        self._path = trace_path(folder, self._context.collectives.rank)
        self._is_open = True
        self._written = 0  # bytes
        self._last_written = -1  # step
        self._newest: tuple[int, Snapshots] | None = None  # unless it is written
        self._compared = float("-inf")  # time of the newest comparison of clocks in the file
        self._next = pipeline.training.num_steps  # first step that `step` has not seen; -1 once closed
        self._stages: tuple[StageBytes, ...] = ()
        with self._context.guard.together():
            pipeline.measurement.clocks.compare()
            mine = (secrets.token_hex(4), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
            self._run, started = self._context.collectives.gather(mine, what="beginning a trace")[0]
        self._begin(started)

    def step(self) -> bool:
        """Call it after each `train_step`: traces the step if it is due, and returns whether it did. Never waits."""
        step = self._pipeline.training.num_steps - 1
        if step < self._next:
            return False
        self._next = step + 1
        self._newest = (step, self._pipeline.training.snapshots())
        return self._write_newest() if is_traced(step, self._every) else False

    def note_bytes(self, stages: Sequence[StageBytes]) -> None:
        """Sets the stages' memory, for timeline.json, where no plan has it. `stages`: [S] result of
        `PipelineModule.stage_bytes`."""
        self._stages = tuple(stages)

    def write_simulation(self, costs: Costs, spread: Spread | None = None) -> StepSamples | None:
        """Writes timeline.json in process 0, simulated from these costs; does nothing in others.

        Simulated is the stream, or, if each batch so far was flushed, flushed batches. `costs`: result of
        `PipelineModule.measured_costs`. `spread`: result of `PipelineModule.measured_spread`.

        Returns, in process 0, steps drawn from the spread, if there is one; else None.
        """
        if self._context.collectives.rank != 0:
            return None
        schedule, plan = self._pipeline.schedule, self._context.layout.plan
        is_flushed = 0 < self._pipeline.training.num_steps <= self._context.options.flush_first
        ran = flushed(schedule) if is_flushed else schedule
        sampled = None if spread is None else simulate_spread(ran, costs, spread)
        mesh = self._context.layout.place.mesh
        firsts = [mesh.members(rank)[0] for rank in range(mesh.num_ranks)]
        file = RunFile(
            schedule=schedule,
            simulated=simulate(ran, costs),
            costs=costs,
            memory=self._stages if plan is None or not plan.stage_bytes else plan.stage_bytes,
            memory_limit=None if plan is None else plan.by_group(plan.memory_limits, firsts),
            predicted_peak=None if plan is None else plan.by_group(plan.memory_bytes, firsts),
            spread=spread,
            sampled=sampled,
        )
        try:
            file.write(self._folder)
        except OSError as error:
            self._give_up(error)
        return sampled

    def close(self) -> StepSamples | None:
        """Traces the last step, compares the clocks of hosts once more, and writes the simulation. Collective.

        Returns, in process 0, steps drawn from the spread of the measured durations, if enough were measured; else
        None.
        """
        if self._next < 0:
            return None
        self._write_newest()
        self._next = -1
        with self._context.guard.together():
            self._pipeline.measurement.clocks.compare()
        self._append(self._clock_lines())
        try:
            costs = self._pipeline.measurement.costs()
        except ValueError:  # on all ranks alike: no step was run
            return None
        return self.write_simulation(costs, self._pipeline.measurement.spread())

    def __enter__(self) -> Tracer:
        """A `with` block closes it at its end; after an error it only writes the last step."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self._write_newest()

    def _begin(self, started: str) -> None:
        number = self._context.collectives.rank
        machines = self._pipeline.measurement.clocks.machines
        schedule, mine = self._pipeline.schedule, machines[number]
        is_first = machines.index(mine) == number
        header = TraceHeader(
            run=self._run,
            started=started,
            process=number,
            num_processes=len(machines),
            ranks=self._context.layout.place.local_ranks,
            machine=mine,
            origin=machines[0],
            host=platform.node(),
            first_step=self._next,
            digest=digest(schedule),
            schedule=schedule if is_first or len(schedule.to_json()) <= WHOLE_SCHEDULE else None,
            flush_first=self._context.options.flush_first,
            cut=short_digest(self._pipeline.cut_in_words()),
            versions={"python": platform.python_version()} | {name: version(name) for name in ("stagewright", "torch")},
        )
        before = b"\n" if self._next else b""  # the last line of a continued file may have been cut off
        self._append(before + header_line(header) + self._clock_lines(), anew=self._next == 0)

    def _clock_lines(self) -> bytes:
        """Readings that are not in the file: those at both ends, and of timelines between."""
        readings = list(self._pipeline.measurement.clocks.readings)
        fresh = [reading for reading in readings if reading.at > self._compared]
        self._compared = max((reading.at for reading in readings), default=self._compared)
        return b"".join(clock_line(self._run, reading) for reading in fresh)

    def _write_newest(self) -> bool:
        if self._newest is None or not self._is_open:
            return False
        (step, snapshots), self._newest = self._newest, None
        line = step_line(self._run, step, {rank: read() for rank, read in snapshots.items()})
        if self._written + len(line) > _MOST_BYTES:
            self._append(end_line(self._run, self._last_written))
            self._is_open = False
            return False
        self._append(self._clock_lines() + line)
        self._last_written = step
        return self._is_open

    def _append(self, data: bytes, *, anew: bool = False) -> None:
        if not self._is_open or not data:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._path.open("wb" if anew else "ab") as file:
                file.write(data)
        except OSError as error:
            self._give_up(error)
        self._written += len(data)

    def _give_up(self, error: OSError) -> None:
        self._is_open = False
        warnings.warn(f"{self._path}: cannot write: {error.strerror or error}; nothing more is traced", stacklevel=3)
