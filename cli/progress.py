"""Progress as lines, and on a terminal a bar of rich's below them."""

from __future__ import annotations

import time
from typing import Any, Self, TextIO

from ..schedules.wording import wrapped


class Progress:
    """A context that prints lines on a stream, and shows a bar on a terminal.

    Arguments:
        stream: None: prints nothing.
        total: of the bar, which `show` advances; seconds: instead of it, the bar advances with time.
        remaining: show the remaining time after the bar (else: the elapsed time).
    """

    def __init__(
        self,
        *,
        stream: TextIO | None,
        total: float | None = None,
        seconds: float | None = None,
        width: int = 24,
        remaining: bool = False,
    ) -> None:
        self._stream = stream
        self._noted_at = time.monotonic()
        self._bar: Any = None
        self.num_lines = 0
        if stream is not None and stream.isatty():
            self._bar = _bar(stream, seconds, width=width, remaining=remaining)
            self._task = self._bar.add_task("", total=total)

    @property
    def has_bar(self) -> bool:
        """Whether the text of `show` is visible."""
        return self._bar is not None

    def note(self, text: str) -> None:
        self.num_lines += 1
        self._noted_at = time.monotonic()
        if self._bar is not None:
            self._bar.console.print(wrapped(text), markup=False)
        elif self._stream is not None:
            print(wrapped(text), file=self._stream, flush=True)

    def note_at_times(self, text: str, *, seconds: float = 1.0) -> None:
        """Print a line, unless the last one is more recent than `seconds`."""
        if self.num_lines == 0 or time.monotonic() - self._noted_at >= seconds:
            self.note(text)

    def show(self, description: str, *, done: float | None = None) -> None:
        """Show the description after the bar, if there is one, and advance it to `done`."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=description)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(stream: TextIO, seconds: float | None, *, width: int, remaining: bool) -> Any:
    from rich import progress
    from rich.console import Console
    from rich.progress_bar import ProgressBar
    from rich.table import Column

    class TimeBar(progress.ProgressColumn):
        def render(self, task: progress.Task) -> ProgressBar:
            assert seconds is not None
            return ProgressBar(total=seconds, completed=min(task.elapsed or 0.0, seconds), width=width)

    one_line = Column(no_wrap=True, overflow="ellipsis")
    parts = [TimeBar()] if seconds is not None else [progress.BarColumn(width), progress.MofNCompleteColumn()]
    return progress.Progress(
        *parts,
        progress.TimeRemainingColumn() if remaining else progress.TimeElapsedColumn(),
        progress.TextColumn("{task.description}", markup=False, table_column=one_line),
        console=Console(file=stream, highlight=False),
        refresh_per_second=4,  # no more: the cores belong to the ranks
        transient=seconds is not None,
    )
