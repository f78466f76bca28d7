"""Additions to a run, such as compression: hooks that by default do nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..comm import LinkName

# (tensors by name, Collectives, ranks=, what=) -> a function that waits, and returns their sums, the same on all ranks
BeginSum = Callable[..., Callable[[], list[torch.Tensor]]]


class Addition:
    """One addition to a run; a subclass overrides the hooks that it needs.

    Attributes:
        sums: begins this batch's sums of gradients, of one stage each, in place of all-reduces of buckets.
        may_split: whether it may split any stage's backward.
        sent: by link, bytes that this process has sent, and bytes of the same tensors unpacked.
    """

    sums: BeginSum | None = None
    may_split = False
    sent: Mapping[LinkName, tuple[int, int]] = {}

    def connected(self, pipeline: Any, links: Any) -> None:
        """Called once the pipeline is complete but for its additions. `pipeline`, `links`: `build.Pipeline` and
        `run.ranks.RankLinks`, whose modules import this one."""

    def exact(self) -> AbstractContextManager[object]:
        """Context within which the addition changes no value; nothing is in flight when it begins and ends."""
        return nullcontext()

    def loaded(self) -> None:
        """Called after another state was loaded."""

    def lost(self) -> str | None:
        """State that a checkpoint does not hold, as text for a warning; None: there is none."""
        return None
