"""Guards of a record: what its code has read, compared before each batch, so that nothing of it is frozen."""

from __future__ import annotations

import warnings
from collections.abc import Collection

from .reads import Reads
from .walk import Walk

_OFTEN = 5  # recordings in a row


class RecordingWarning(UserWarning):
    """The code between a model's modules reads what changes before each batch, or what cannot be compared."""


class Guards:
    """What a record's code has read, as it is when this is made.

    Arguments:
        training: whether flags of modules count; an evaluation has its own.
    """

    def __init__(self, reads: Reads, *, training: bool) -> None:
        self._reads = reads
        self._ignored = frozenset() if training else frozenset({"training"})
        self._walk = Walk(reads, self._ignored)

    def tell_unknown(self) -> None:
        """Warn, when the stages are built, of what is compared by identity alone, though the code may look into it."""
        if unknown := self._walk.unknown:
            warnings.warn(
                f"the code between the modules reads {', '.join(unknown[:5])}{', ...' * (len(unknown) > 5)}, which "
                f"cannot be compared: should that change, the stages go on with what it was. Expected plain "
                f"attributes, or that code in a module of its own, which runs as it is",
                RecordingWarning,
                stacklevel=2,
            )

    def differing(self) -> list[str]:
        """Paths at which something else was read now; none where the record is right."""
        if self._walk.is_same():
            return []
        before, now = self._walk, Walk(self._reads, self._ignored)
        paths = {**before.texts, **now.texts}
        found = [p for p in paths if (before.texts.get(p), before.pins.get(p)) != (now.texts.get(p), now.pins.get(p))]
        if not found:
            self._walk = now
        return found


class Changes:
    """Tells, once, of what changes so often that recording it again takes longer than it should."""

    def __init__(self) -> None:
        self._times: dict[object, dict[str, int]] = {}  # by path, in a row
        self._is_told = False

    def note(self, inputs: object, paths: Collection[str]) -> None:
        """In front of a batch of such inputs the code is recorded again, since these have changed; none: it is not."""
        before = self._times.get(inputs, {})
        self._times[inputs] = {path: before.get(path, 0) + 1 for path in paths}
        often = [path for path, times in self._times[inputs].items() if times >= _OFTEN]
        if often and not self._is_told:
            self._is_told = True
            warnings.warn(
                f"{often[0]} has changed before each of {_OFTEN} batches, and the code between the modules, which "
                f"reads it, was recorded again each time: right, but slow. Expected what changes with each batch as an "
                f"input, a buffer, or in a module of its own, which runs as it is",
                RecordingWarning,
                stacklevel=2,
            )
