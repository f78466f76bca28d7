"""Progress of a sweep: one bar on a terminal, a line a job elsewhere."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, TextIO

from ...schedules.wording import duration
from .status import State, Status


class Progress:
    """A line for each job that ends; for files, pipes and continuous integration."""

    def __init__(self, *, total: int, stream: TextIO) -> None:
        self.total = total
        self.num_ended = 0
        self._stream = stream
        self._running: list[str] = []
        self._lock = threading.Lock()  # jobs begin and end in threads of their own

    def began(self, name: str) -> None:
        """A job has begun."""
        with self._lock:
            self._running.append(name)
            self._show()

    def ended(self, name: str, status: Status) -> None:
        """A job has ended, or was not begun."""
        with self._lock:
            if name in self._running:
                self._running.remove(name)
            self.num_ended += 1
            spent = "" if status.seconds is None else f" in {duration(status.seconds)}"
            line = f"[{self.num_ended}/{self.total}] {name}: {status.state.value}{spent}"
            if status.state is State.DONE and not status.reason:
                self._done(line)
            else:
                self.note(f"{line}: {status.reason}" if status.reason else line)
            self._show()

    def note(self, text: str) -> None:
        """Say something that stays."""
        print(text, file=self._stream, flush=True)

    def _done(self, line: str) -> None:
        self.note(line)

    def _show(self) -> None:
        pass

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class BarProgress(Progress):
    """One bar over all jobs, with those that run; only what went wrong stays as a line."""

    def __init__(self, *, total: int, stream: TextIO) -> None:
        super().__init__(total=total, stream=stream)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        self._console = Console(file=stream, highlight=False)
        self._bar: Any = RichProgress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=self._console,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("", total=total)

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        self._console.print(text, markup=False)

    def _done(self, line: str) -> None:
        pass

    def _show(self) -> None:
        self._bar.update(self._task, completed=self.num_ended, description=", ".join(self._running))

    def __enter__(self) -> BarProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()


def make_progress(*, total: int, stream: TextIO) -> Progress:
    """A bar on a terminal, lines elsewhere."""
    return BarProgress(total=total, stream=stream) if stream.isatty() else Progress(total=total, stream=stream)
