"""What can go wrong between ranks, each with its story."""

from __future__ import annotations


class PipelineError(RuntimeError):
    """A run that cannot go on. The message names the ranks and actions concerned."""


class PipelineTimeout(PipelineError):
    """A message did not come in time: names who waited for which action of whom, and how long."""


class PeerLost(PipelineError):
    """The connection to a rank broke: it died, or stopped after an error of its own."""


class RankFailed(PipelineError):
    """Another rank reported an error of its own; the message carries it."""
