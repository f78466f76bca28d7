"""The gate at which updates wait before they write weights: copies of them that are still being made."""

from __future__ import annotations

from collections.abc import Callable


class UpdateGate:
    """Stands in front of everything in a pipeline that writes weights or optimizer state; open at first."""

    def __init__(self) -> None:
        self._wait: Callable[[], None] | None = None

    def hold(self, wait: Callable[[], None]) -> None:
        """The next one to pass calls `wait` first."""
        self._wait = wait

    def enter(self) -> None:
        """Weights are about to be written."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()
