"""Errors between ranks, each with its story."""

from __future__ import annotations

from collections.abc import Sequence


class PipelineError(RuntimeError):
    """A run that cannot go on. The message names the ranks and actions concerned.

    peers: the ranks that were waited for.
    is_explained: whether the message names the cause, which was looked for.
    """

    def __init__(self, message: str, *, peers: Sequence[int] = (), is_explained: bool = False) -> None:
        super().__init__(message)
        self.peers = tuple(peers)
        self.is_explained = is_explained


class PipelineTimeout(PipelineError):  # noqa: N818 - a time-out says it all
    """A message did not come in time: names who waited for which action of whom, and how long."""


class PeerLost(PipelineError):  # noqa: N818 - likewise
    """The connection to a rank broke: it died, or stopped after an error of its own."""


def short_reason(error: BaseException) -> str:
    """A backend's error message without source paths and addresses.

    >>> short_reason(RuntimeError("[/a/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3. x"))
    'Connection closed by peer'
    """
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if line.startswith("[/"):
        line = line.partition("] ")[2]
    return line.partition(" [")[0].partition(". ")[0][:160]
