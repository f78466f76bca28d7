"""All ranks must have built the same pipeline: otherwise their messages would not fit, or never come."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import takewhile, zip_longest

import torch

from ...comm import Collectives
from ...partition.graph.recorded.words import digest
from ...partition.graph.units import Step, Steps
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


class SamePrograms:
    """Compares what all processes are to run; see `Agree`.

    Arguments:
        microbatch: processes whose microbatches have these shapes are compared.
    """

    def __init__(self, collectives: Collectives, microbatch: Signature) -> None:
        self._collectives: Collectives | None = collectives
        self._microbatch = str(microbatch)
        self._differed: dict[bool, bool] = {}  # by mode: training or evaluation

    def __call__(self, own: Steps, canonical: Steps | None = None, *, training: bool = True) -> bool:
        """See Agree."""
        together = self._collectives
        if together is None:
            return self._differed.get(training, False)
        steps = own()
        digests = digest(steps), digest(steps if canonical is None else canonical())
        given = together.gather((self._microbatch, *digests), what="comparing what all ranks run")
        first = {microbatch: digests for microbatch, *digests in reversed(given)}
        self._differed[training] = any(its != first[microbatch][0] for microbatch, its, _ in given)
        if any(its != first[microbatch][1] for microbatch, _, its in given):
            everyone = together.gather((self._microbatch, steps), what="comparing what all ranks run")
            raise ValueError(_first_difference(everyone, together))
        return self._differed[training]

    def settled(self) -> None:
        """All is built: from now on nobody is asked."""
        self._collectives = None


def _first_difference(everyone: Sequence[tuple[str, Sequence[Step]]], collectives: Collectives) -> str:
    by_microbatch: dict[str, tuple[int, Sequence[Step]]] = {}
    for process, (microbatch, theirs) in enumerate(everyone):
        one, steps = by_microbatch.setdefault(microbatch, (process, theirs))
        pairs = enumerate(zip_longest(steps, theirs, fillvalue=Step("nothing more")))
        at, (mine, other) = next(((i, pair) for i, pair in pairs if pair[0].text != pair[1].text), (0, (None, None)))
        if mine is not None and other is not None:
            alike = takewhile(lambda pair: pair[0] == pair[1], zip(mine.text, other.text, strict=False))
            begin = max(0, sum(1 for _ in alike) - 60)
            texts = [f"{'...' * (begin > 0)}{each.text[begin : begin + 160]}{each.line}" for each in (mine, other)]
            return (
                f"{collectives.name_of(one)} and {collectives.name_of(process)} run different programs; the first "
                f"difference, at step {at}: {texts[0]} there, {texts[1]} here. Expected a model that does the same in "
                f"every process. One that goes through a set of strings does not, since strings hash differently: type "
                f"sorted(...) around the set, or PYTHONHASHSEED=0 in front of the command. Numbers that differ come "
                f"from generators without a seed, from ranks or the environment"
            )
    raise AssertionError("no two programs differ")


def check_same_batch(batch: Batch, collectives: Collectives, *, device: torch.device) -> None:
    """ValueError on every member of a tensor group unless all passed the same batch. Collective over the group."""
    members = collectives.tensor_members
    if len(members) == 1:
        return
    sums = torch.tensor(batch.checksums[:2], dtype=torch.float64, device=device)
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
