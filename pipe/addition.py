"""Additions to a run, such as compression: hooks that by default do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..comm import LinkName


class Addition:
    """One addition to a run; a subclass overrides the hooks that it needs.

    Attributes:
        sums: starts sums of gradients in place of the usual way, as `SharedSum` takes it.
        may_split: whether it may split any stage's backward.
        sent: by link, bytes that this process has sent, and bytes of the same tensors unpacked.
    """

    sums: Any = None
    may_split = False
    sent: Mapping[LinkName, tuple[int, int]] = {}

    def connected(self, pipeline: Any, links: Any) -> None:
        """Called once the pipeline is complete but for its additions.

        Arguments:
            pipeline, links: `build.Pipeline` and `run.ranks.RankLinks`, whose modules import this one.
        """

    def exact(self) -> AbstractContextManager[object]:
        """Context within which the addition changes no value; nothing is in flight when it begins and ends."""
        return nullcontext()

    def loaded(self) -> None:
        """Called after another state was loaded."""

    def lost(self) -> str | None:
        """State that a checkpoint does not hold, as text for a warning; None: there is none."""
        return None
