"""All ranks must have built the same pipeline: otherwise their messages would not fit, or never come."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from ...comm import Collectives
from ...schedules import Schedule
from ..stages.shapes import Signature


def describe(schedule: Schedule, names: Sequence[str], microbatch: Signature, **options: object) -> str:
    """Description of all that must be the same on every rank, in a line that people can compare.

    >>> from ...schedules import build
    >>> import torch
    >>> from ...partition.graph.forms import Arguments
    >>> microbatch = Signature.of(Arguments.of([torch.ones(3)]))
    >>> describe(build("gpipe", num_ranks=1, num_microbatches=2), ["0 .. 3"], microbatch, seed=0)
    "schedule 'gpipe' (order 9aaf733a), P=1, M=2, microbatches of ((3,) torch.float32), stages 0 .. 3, seed=0"
    """
    order = zlib.crc32("\n".join(" ".join(map(str, program)) for program in schedule.programs).encode())
    parts = [
        f"schedule {schedule.name!r} (order {order:08x})",
        f"P={schedule.num_ranks}",
        f"M={schedule.num_microbatches}",
        f"microbatches of {microbatch}",
        f"stages {'; '.join(names)}",
        *(f"{name}={value}" for name, value in options.items()),
    ]
    return ", ".join(parts)


def check_agreement(mine: str, collectives: Collectives, *, rank: int) -> None:
    """ValueError on every rank unless all give the same description. Collective over the processes."""
    for other, its in enumerate(collectives.gather(mine, what="comparing the pipelines of all ranks")):
        if its != mine:
            raise ValueError(
                f"rank {other} has {its}; rank {rank} has {mine}: expected the same model, schedule, options and batch "
                f"sizes on every rank"
            )
