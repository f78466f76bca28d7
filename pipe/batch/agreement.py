"""All ranks must have built the same pipeline: otherwise their messages would not fit, or never come."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from ...comm import Collectives
from ...schedules import Schedule
from ..stages.shapes import Signature
from .batches import Batch
from .checksum import UNKNOWN


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
        f"M={schedule.num_microbatches}{'' if schedule.num_slices == 1 else f', {schedule.num_slices} slices each'}",
        f"microbatches of {microbatch}",
        f"stages {'; '.join(names)}",
        *(f"{name}={value}" for name, value in options.items()),
    ]
    return ", ".join(parts)


def check_agreement(mine: str, collectives: Collectives, *, rank: int) -> None:
    """ValueError on every rank unless all give the same description. Collective over the processes.

    Arguments:
        rank: of this process.
    """
    for other, its in enumerate(collectives.gather(mine, what="comparing the pipelines of all ranks")):
        if its != mine:
            one, another = collectives.name_of(other), collectives.name_of(rank)
            raise ValueError(
                f"{one} has {its}; {another} has {mine}: expected the same model, schedule, options and batch sizes on "
                f"every rank"
            )


def check_same_batch(batch: Batch, collectives: Collectives, *, device: torch.device) -> None:
    """ValueError on every member of a tensor group unless all passed the same batch. Collective over the group."""
    members = collectives.tensor_members
    if len(members) == 1:
        return
    sums = torch.tensor(batch.checksums, dtype=torch.float64, device=device)
    first, *others = (one.tolist() for one in collectives.tensor_gather(sums, what="comparing batches"))
    for member, theirs in zip(members[1:], others, strict=True):
        for what, one, other in zip(("inputs", "targets"), first, theirs, strict=True):
            if one != other and UNKNOWN not in (one, other):
                raise ValueError(
                    f"{collectives.name_of(member)} passed other {what} to step {batch.step} than "
                    f"{collectives.name_of(members[0])}: the members of a tensor group run one rank together. Expected "
                    f"the same batch in all of them: pipe.loader(dataset, batch_size=...), or "
                    f"DataLoader(..., generator=torch.Generator().manual_seed(0)) alike in every process"
                )
