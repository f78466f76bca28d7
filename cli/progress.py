"""Progress for people: lines that stay, and on a terminal a bar of rich's below them."""

from __future__ import annotations

import time
from typing import Any, Self, TextIO

from ..schedules.wording import wrapped


class Progress:
    """Says lines on a stream, and shows a bar where that is a terminal; to be entered.

    Arguments:
        stream: None: nothing is said.
        total: of the bar, whose part is done as `show` says; seconds: in place of it, the bar moves with time.
        remaining: the time that is left stands behind the bar (else: that which has passed).
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
        self._told = time.monotonic()
        self._bar: Any = None
        self.num_lines = 0
        if stream is not None and stream.isatty():
            self._bar = _bar(stream, seconds, width=width, remaining=remaining)
            self._task = self._bar.add_task("", total=total)

    @property
    def has_bar(self) -> bool:
        """Whether what `show` says can be seen."""
        return self._bar is not None

    def note(self, text: str) -> None:
        """Say something that stays."""
        self.num_lines += 1
        self._told = time.monotonic()
        if self._bar is not None:
            self._bar.console.print(wrapped(text), markup=False)
        elif self._stream is not None:
            print(wrapped(text), file=self._stream, flush=True)

    def note_at_times(self, text: str, *, seconds: float = 1.0) -> None:
        """The same, unless the last line was said less than so many seconds before."""
        if self.num_lines == 0 or time.monotonic() - self._told >= seconds:
            self.note(text)

    def show(self, description: str, *, done: float | None = None) -> None:
        """Behind the bar, if there is one."""
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
        """Time that is spent, of that which there is."""

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
