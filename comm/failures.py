"""The failure board: the first rank that fails writes its story where every other rank can read it.

It stands in the rendezvous store. A rank that loses a connection, or times out, reads the board before it
raises: what it saw is often only the echo of what happened further away.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from .errors import PeerLost, PipelineError, PipelineTimeout, RankFailed

_GRACE = 0.5  # [s] for the report of the rank that failed first to reach the board


class FailureBoard:
    """Reports of one run's ranks. Without other processes there is nothing to read or write."""

    def __init__(self, store: dist.Store | None, rank: int) -> None:
        self._store = store
        self._rank = rank

    def report(self, error: BaseException) -> BaseException:
        """Write this rank's error down; returns the error to raise, with the first report in it."""
        if self._store is None:
            return error
        try:
            secondhand = isinstance(error, PeerLost | PipelineTimeout)
            if secondhand and not self._count():
                time.sleep(_GRACE)
            number = self._store.add("failures", 1)
            text = f"{type(error).__name__}: {error}" if not isinstance(error, PipelineError) else str(error)
            self._store.set(f"failure/{number}", f"{self._rank}\n{text}")
            if number == 1:
                return error
            first_rank, _, first = self._store.get("failure/1").decode().partition("\n")
        except Exception:
            return error  # the store itself is gone: what this rank saw must do
        if not secondhand:
            return error
        story = f"{error}. First report, by rank {first_rank}: {first}"
        return RankFailed(story) if isinstance(error, PeerLost) else type(error)(story)

    def _count(self) -> int:
        assert self._store is not None
        return self._store.add("failures", 0)
