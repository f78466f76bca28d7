"""Checkpoints of a run: written while it trains, and loaded when it resumes.

runs/<name>/checkpoints/  (--checkpoint-dir)
  latest, step-.../       see pipe.save
  layout.json             layout of the run when they were written: ranks, schedule, predicted step
  plan.json               its plan, under --plan
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ...pipe import PipelineModule
from ...pipe.checkpoint.checkpointer import Checkpointer
from ...schedules.wording import count, duration
from .options import PLAN, TrainOptions
from .pipeline import gather, own_microbatches
from .run_folder import Metrics, Resume, RunFolder, write_whole
from .task import Batches

_LATEST = "latest"
_LAYOUT = "layout.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLayout:
    """Layout of a run, as far as results depend on it."""

    num_ranks: int
    schedule: str
    num_stages: int
    num_microbatches: int
    weight_rule: str
    planned_step_seconds: float | None  # by its plan; None without one
    flush_first: int = 0  # number of first batches with a flush; 0 in layouts without the field
    correction: str | None = None  # of late gradients; None in layouts without the field

    @classmethod
    def read(cls, path: Path) -> RunLayout | None:
        """The format of a file, of later versions too; None if missing or unreadable: it is only used for messages."""
        try:
            read, known = json.loads(path.read_text()), {each.name for each in fields(cls)}
            return cls(**{name: value for name, value in read.items() if name in known})
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    @classmethod
    def of(cls, pipe: PipelineModule, options: TrainOptions) -> RunLayout:
        schedule = pipe.schedule
        factor = 1.0 if options.delay_factor is None else options.delay_factor
        corrects = options.delay_correction not in (None, "none")
        return cls(
            num_ranks=schedule.num_ranks,
            schedule=schedule.name,
            num_stages=schedule.num_stages,
            num_microbatches=own_microbatches(pipe, options),
            weight_rule=schedule.weight_rule,
            planned_step_seconds=None if pipe.plan is None else pipe.plan.simulated_step_time,
            flush_first=options.flush_first or 0,
            correction=f"{options.delay_correction} x {factor:g}" if corrects else "none",
        )

    def changes_to(self, now: RunLayout) -> tuple[str, ...]:
        """A sentence for each difference from the layout `now`."""
        told = []
        if (self.num_ranks, self.schedule, self.num_stages) != (now.num_ranks, now.schedule, now.num_stages):
            told.append(
                f"{self.schedule} in {count(self.num_stages, 'stage')} on {count(self.num_ranks, 'rank')} before, "
                f"{now.schedule} in {count(now.num_stages, 'stage')} on {count(now.num_ranks, 'rank')} now: the same "
                f"state, and sums in another order from here on"
            )
        if self.num_microbatches != now.num_microbatches:
            told.append(
                f"{count(self.num_microbatches, 'microbatch')} before, {now.num_microbatches} now: random numbers "
                f"(dropout) are others from here on"
            )
        if self.weight_rule != now.weight_rule:
            told.append(
                f"weights follow the rule {now.weight_rule!r}, before {self.weight_rule!r}: the newest were kept"
            )
        elif self.flush_first != now.flush_first:
            told.append(
                f"the first {count(now.flush_first, 'step')} with a flush (--flush-first), before {self.flush_first}"
            )
        if self.weight_rule == now.weight_rule and self.correction not in (None, now.correction):
            told.append(
                f"late gradients are corrected by {now.correction} (--delay-correction), before {self.correction}"
            )
        if self.planned_step_seconds is not None and now.planned_step_seconds is not None and told:
            before, after = self.planned_step_seconds, now.planned_step_seconds
            more = f"{after / before - 1:+.0%}"
            told.append(f"a step is planned to take {duration(after)} now, {duration(before)} before ({more})")
        return tuple(told)


class Checkpoints:
    """Checkpoints of one run, with the position of its batches, on one rank; its calls are collective. `run`: its
    folder, on rank 0."""

    def __init__(self, options: TrainOptions, pipe: PipelineModule, batches: Batches, run: RunFolder | None) -> None:
        self._options = options
        self._pipe = pipe
        self._batches = batches
        self._run = run
        self._path = options.checkpoints
        self._saver: Checkpointer | None = None
        self.first_step = 0
        self.known: list[Metrics] = []  # of the steps before, on rank 0
        self.notes: list[str] = []  # to print

    def go_on(self) -> None:
        """Load the last checkpoint, if there is one, and discard the log of later steps."""
        if self._options.resume:
            if self._is_there():
                self._pipe.load(self._path, loader=self._batches)
                self.first_step = self._pipe.num_steps
                with suppress(ValueError):  # measures a link's latency, while nothing is under way
                    self._pipe.measured_costs()
            if self._run is not None:
                self._tell(self._run)
        every = self._options.checkpoint_every
        if every is None:
            return
        self._saver = self._pipe.checkpointer(
            self._path, every=every, overhead=self._options.checkpoint_overhead, loader=self._batches
        )
        if self._run is not None:
            if self._pipe.plan is not None:
                write_whole(self._path / PLAN, self._pipe.plan.to_json())
            write_whole(self._path / _LAYOUT, json.dumps(asdict(RunLayout.of(self._pipe, self._options))))

    def after(self, step: int, log: Callable[[], object]) -> None:
        """After step number `step`: save if due, after `log` has logged the step."""
        if self._saver is None or step + 1 == self._options.steps:
            return
        if self._saver.is_due:
            self._pipe.flush()
            log()  # a resumed run has the lines of all steps before its checkpoint
        self._saver.step()

    def end(self) -> None:
        """Save the last state of a finished run."""
        if self._saver is not None:
            self._saver.save()
            self._saver.close()

    @property
    def summary(self) -> dict[str, Any]:
        """Fields of `Summary` about checkpoints; none if none are written."""
        if self._saver is None:
            return {}
        return {
            "checkpoints": sum(record.path is not None for record in self._saver.records),
            "failed_checkpoints": sum(record.path is None for record in self._saver.records),
            "checkpoint_every": self._saver.every,
            "checkpoint_overhead": self._saver.overhead,
        }

    def _is_there(self) -> bool:
        found = gather(int(may_go_on(self._options)))
        if len(set(found)) > 1:
            blind = [rank for rank, one in enumerate(found) if not one]
            raise ValueError(
                f"{self._path} has a checkpoint for some ranks, and none for {blind}: expected one folder that all "
                f"ranks share (--checkpoint-dir on a network file system)"
            )
        return bool(found[0])

    def _tell(self, run: RunFolder) -> None:
        self.known, lost = run.keep_before(self.first_step)
        before, now = RunLayout.read(self._path / _LAYOUT), RunLayout.of(self._pipe, self._options)
        changes = before.changes_to(now) if before is not None and self.first_step else ()
        if self.first_step == 0 and not lost:
            return
        run.log_resume(
            Resume(
                step=self.first_step,
                lost_steps=lost,
                started=time.strftime("%Y-%m-%dT%H:%M:%S"),
                command=tuple(sys.argv),
                host=platform.node(),
                num_ranks=now.num_ranks,
                schedule=now.schedule,
                planned_step_seconds=now.planned_step_seconds,
                planned_before=None if before is None else before.planned_step_seconds,
                changes=changes,
            )
        )
        where = f"from the checkpoint after step {self.first_step}" if self.first_step else "from the first step"
        again = f"; {count(lost, 'step')} after it {'is' if lost == 1 else 'are'} run again" if lost else ""
        self.notes = [f"the run resumes {where}{again}", *changes]


def may_go_on(options: TrainOptions) -> bool:
    """Whether this process sees a checkpoint to resume from."""
    return options.resume and (options.checkpoints / _LATEST).exists()
