"""Additions to a run from outside: by default they have no say anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class Addition:
    """One thing around a run, such as compression; a subclass overrides what it has a say in.

    Attributes:
        sums: a way in which sums of gradients begin, as `SharedSum` takes it.
        may_split: whether it may split any stage's backward.
        sent: bytes by link that this process has sent, and those of the same tensors as they were.
    """

    sums: Any = None
    may_split = False
    sent: Mapping[Any, tuple[int, int]] = {}

    def connected(self, pipeline: Any, links: Any) -> None:
        """The pipeline is complete, but for what is around it."""

    def exact(self) -> AbstractContextManager[object]:
        """Within, nothing is changed by it, and nothing is under way at either end."""
        return nullcontext()

    def loaded(self) -> None:
        """Another state was loaded."""

    def lost(self) -> str | None:
        """For people, the state that a checkpoint does not hold; None: there is none."""
        return None
