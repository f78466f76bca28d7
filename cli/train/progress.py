"""Progress of a run: a bar on a terminal, plain lines elsewhere, nothing on ranks other than 0."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from .. import progress
from .run_folder import Metrics

PLAIN_LINES = 20  # in a whole run


class Progress(progress.Progress):
    """Progress of a run, on rank 0; with `json` on standard error, since the object is on standard output."""

    def __init__(self, *, rank: int, steps: int, json: bool) -> None:
        stream = (sys.stderr if json else sys.stdout) if rank == 0 else None
        super().__init__(stream=stream, total=steps, width=12, remaining=True)
        self.steps = steps
        self.every = max(1, steps // PLAIN_LINES)
        self.started = time.perf_counter()
        self._shown_bubble: int | None = None  # step of the newest bubble in a line

    def step(self, metrics: Metrics) -> None:
        done = metrics.step + 1
        self.show(describe(metrics), done=done)
        if not self.has_bar and (done % self.every == 0 or done == self.steps):
            minutes, seconds = divmod(int(time.perf_counter() - self.started), 60)
            if metrics.bubble_step is not None and metrics.bubble_step == self._shown_bubble:  # was shown
                metrics = replace(metrics, bubble=None)
            self._shown_bubble = metrics.bubble_step
            self.note(f"step {done:>{len(str(self.steps))}}/{self.steps}  {minutes}:{seconds:02}  {describe(metrics)}")


def speed(*, samples_per_s: float, tokens_per_s: float | None) -> str:
    if tokens_per_s is not None:
        return f"{tokens_per_s:,.0f} tokens/s"
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 100 else f"{samples_per_s:.3g} samples/s"


def describe(metrics: Metrics) -> str:
    text = f"loss {metrics.loss:.3f}  {speed(samples_per_s=metrics.samples_per_s, tokens_per_s=metrics.tokens_per_s)}"
    if metrics.bubble is not None and metrics.simulated_bubble is not None:
        of_step = "" if metrics.bubble_step in (None, metrics.step) else f" in step {metrics.bubble_step + 1}"
        text += f"  bubble {metrics.bubble:.1%}{of_step} (simulated {metrics.simulated_bubble:.1%})"
    return text
