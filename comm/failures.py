"""The failure board: every rank that fails writes its story where the others can read it.

It stands in the rendezvous store. What a rank sees when it loses a connection, or when a wait runs out, is often
only the echo of what happened further away:

    rank 0 waits for 1, rank 1 waits for 2, rank 3 waits for 2, rank 2 says nothing  ->  rank 2 is the cause

So a rank that fails writes down whom it waited for, lets go of its links, and follows the reports to their end.
"""

from __future__ import annotations

import json
import time
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from .errors import PeerLost, PipelineError

_GRACE = 0.6  # [s] for the reports of ranks that fail at the same moment


class _Report(NamedTuple):
    peer: int | None  # whom the rank waited for; None: the error was its own
    text: str


class FailureBoard:
    """Reports of one run's ranks. Without other processes (`store` is None) nothing is read or written."""

    def __init__(self, store: Store | None, *, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def write(self, error: BaseException) -> None:
        """Write this rank's error down. Never raises: the store may be gone."""
        if self._store is None:
            return
        peer = error.peer if isinstance(error, PipelineError) else None
        text = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
        try:
            self._store.set(f"failure/{self._rank}", json.dumps([peer, text]))
        except Exception:
            return

    def explain(self, error: BaseException) -> BaseException:
        """The error to raise: this rank's own, with the cause at the end of the chain of reports."""
        if self._store is None:
            return error
        peer = error.peer if isinstance(error, PipelineError) else None
        if peer is not None or self._rank == 0:  # rank 0 may host the store: let the others read first
            time.sleep(_GRACE)
        if peer is None:
            return error
        assert isinstance(error, PipelineError)
        try:
            reports = self._read()
        except Exception:
            return error
        silent = "it died" if isinstance(error, PeerLost) else "it is stalled, or still computes"
        cause = _cause(self._rank, peer, reports, silent)
        if self._rank == 0:
            time.sleep(_GRACE)
        return type(error)(f"{error}\ncause: {cause}", peer=peer)

    def _read(self) -> dict[int, _Report]:
        assert self._store is not None
        reports = {}
        for rank in range(self._size):
            if self._store.check([f"failure/{rank}"]):
                reports[rank] = _Report(*json.loads(self._store.get(f"failure/{rank}")))
        return reports


def _cause(rank: int, peer: int, reports: dict[int, _Report], silent: str) -> str:
    """Follow who waited for whom.

    >>> _cause(0, 1, {0: _Report(1, "..."), 1: _Report(2, "...")}, "it died")
    'rank 2, which rank 1 waited for, reports nothing: it died'
    """
    path = [rank]
    while peer not in path:
        report = reports.get(peer)
        if report is None:
            return f"rank {peer}, which rank {path[-1]} waited for, reports nothing: {silent}"
        path.append(peer)
        if report.peer is None:
            return f"rank {peer} failed: {report.text}"
        peer = report.peer
    circle = " -> ".join(map(str, [*path[path.index(peer) :], peer]))
    return f"the ranks {circle} wait for each other: did all of them make the same call?"
