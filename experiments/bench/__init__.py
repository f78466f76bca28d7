"""`stagewright bench`: this runtime beside torch.distributed.pipelining, in one run. See `command`."""

from __future__ import annotations

from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    """The command; loaded here, so that the processes that it starts load no more than they need."""
    from .command import run as run_command

    return run_command(argv)
