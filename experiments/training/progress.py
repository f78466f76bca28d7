"""Progress of a run: a bar on a terminal, plain lines elsewhere, nothing where a rank is silent."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from .run_folder import Metrics

PLAIN_LINES = 20  # in a whole run


class Progress:
    """No output: ranks above 0."""

    def step(self, metrics: Metrics) -> None:
        """One training step is done."""

    def note(self, text: str) -> None:
        """Say something that stays."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class PlainProgress(Progress):
    """A line every now and then; for files, pipes and continuous integration."""

    def __init__(self, *, steps: int, stream: TextIO) -> None:
        self.steps = steps
        self.stream = stream
        self.every = max(1, steps // PLAIN_LINES)
        self.started = time.perf_counter()

    def step(self, metrics: Metrics) -> None:
        done = metrics.step + 1
        if done % self.every and done != self.steps:
            return
        minutes, seconds = divmod(int(time.perf_counter() - self.started), 60)
        self.note(f"step {done:>{len(str(self.steps))}}/{self.steps}  {minutes}:{seconds:02}  {describe(metrics)}")

    def note(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


class BarProgress(Progress):
    """A rich progress bar."""

    def __init__(self, *, steps: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        self.console = Console(file=stream, highlight=False)
        # Four redraws a second: the cores belong to the ranks.
        self.bar = RichProgress(
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=self.console,
            refresh_per_second=4,
        )
        self.task = self.bar.add_task("starting", total=steps)

    def step(self, metrics: Metrics) -> None:
        self.bar.update(self.task, completed=metrics.step + 1, description=describe(metrics))

    def note(self, text: str) -> None:
        self.console.print(text, markup=False)

    def __enter__(self) -> BarProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.bar.stop()


def make_progress(*, rank: int, steps: int, json: bool) -> Progress:
    """Progress display for this rank and its output; with `json` the standard output is kept free for the object."""
    if rank != 0:
        return Progress()
    stream = sys.stderr if json else sys.stdout
    if stream.isatty():
        return BarProgress(steps=steps, stream=stream)
    return PlainProgress(steps=steps, stream=stream)


def speed(*, samples_per_s: float, tokens_per_s: float | None) -> str:
    """In tokens where they are counted, else in samples."""
    if tokens_per_s is not None:
        return f"{tokens_per_s:,.0f} tokens/s"
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 100 else f"{samples_per_s:.3g} samples/s"


def describe(metrics: Metrics) -> str:
    """Figures of a step in one line."""
    text = f"loss {metrics.loss:.3f}"
    if metrics.bits_per_byte is not None:
        text += f" = {metrics.bits_per_byte:.2f} bits/byte"
    text += f"  {speed(samples_per_s=metrics.samples_per_s, tokens_per_s=metrics.tokens_per_s)}"
    if metrics.bubble is not None and metrics.predicted_bubble is not None:
        of_step = "" if metrics.bubble_step in (None, metrics.step) else f" in step {metrics.bubble_step + 1}"
        text += f"  bubble {metrics.bubble:.1%}{of_step} (predicted {metrics.predicted_bubble:.1%})"
    return text
