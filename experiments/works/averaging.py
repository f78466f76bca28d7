"""Replicas behind a slow link that average every H steps, or as `sync="adaptive"` finds: at equal time.

Two replicas learn the classes of another network, on samples drawn anew for each step; half of the classes are a
replica's own, and the other one leaves out a share `apart` of their samples. The sides take turns of a few steps, each
until its steps took as long as a number of steps with `sync=1`. Validation is of all classes, with averaged weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from ..jobs.case import Case, wanted
from ..jobs.figure import Figure, How

if TYPE_CHECKING:
    import torch

    from ...pipe import PipelineModule

SIDES = (1, 4, 16, 64, "adaptive")
IN_TURN = 8  # steps of one side before the next one's turn
_CLASSES, _INPUTS, _HIDDEN, _WIDTH, _SAMPLES, _VALIDATED, _RATE = 10, 32, 24, 256, 64, 4096, 0.1
_DRAWN = 8  # for each sample that is taken
_AHEAD = 0.2  # [s] to tell all ranks when to begin
_TIMEOUT = 120.0  # [s]


def trained(case: Case, repetitions: int) -> Iterator[Figure]:
    """Losses, bytes and H of all sides; runs on all ranks. Cases have `apart`, `seed` and `steps`."""
    from ..measure.timing import timed

    del repetitions
    seed, apart = int(case.number("seed")), case.number("apart")
    sides = {every: _pipe(seed, every) for every in SIDES}
    clocks, counts = dict.fromkeys(SIDES, 0.0), dict.fromkeys(SIDES, 0)

    def turn(every: int | str) -> None:
        pipe, first = sides[every], counts[every]
        for step in range(first, first + IN_TURN):
            pipe.train_step(*samples(seed, 2 * step + pipe.rank, apart, replica=pipe.rank))
        counts[every] += IN_TURN

    for every in SIDES:  # connects, and is not counted
        turn(every)
    while counts[1] < case.count("steps"):
        clocks[1] += timed(lambda: turn(1), ahead=_AHEAD)
        for every in SIDES[1:]:
            while clocks[every] < clocks[1]:
                clocks[every] += timed(lambda every=every: turn(every), ahead=_AHEAD)  # type: ignore[misc]
    held_out = samples(seed, -1, 0.0, replica=0, number=_VALIDATED)
    how = How.MEASURED if wanted(case).shape.is_plain else How.EMULATED
    for every, pipe in sides.items():
        loss, averaging = pipe.eval_step(*held_out).loss, pipe.averaging  # averages
        assert loss is not None
        shown, times, size = case.also(sync=str(every)), counts[every], sum(x.nbytes for x in pipe.parameters())
        if averaging is not None:
            times, sent = averaging.times, averaging.sent_bytes
        else:
            sent = size * times  # of a ring of two
        pipe.close()
        yield Figure(case=shown, name="steps", value=counts[every], unit="", how=how)
        yield Figure(case=shown, name="validation loss", value=float(loss), unit="nats", how=how)
        yield Figure(case=shown, name="sent by a process", value=sent / 1e6, unit="MB", how=how)
        yield Figure(case=shown, name="steps of an averaging", value=counts[every] / times, unit="", how=how)
    yield Figure(case=case, name="time of each side", value=clocks[1], unit="s", how=how)


def samples(
    seed: int, place: int, apart: float, *, replica: int, number: int = _SAMPLES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and classes, drawn from (seed, place); odd classes belong to replica 1."""
    import torch

    teacher, generator = (
        torch.Generator().manual_seed(seed),
        torch.Generator().manual_seed(1_000_003 * seed + place + 2),
    )
    first, last = (torch.randn(sizes, generator=teacher) for sizes in ((_INPUTS, _HIDDEN), (_HIDDEN, _CLASSES)))
    inputs = torch.randn(_DRAWN * number, _INPUTS, generator=generator)
    classes = (torch.tanh(inputs @ first * (2 / _INPUTS**0.5)) @ last).argmax(1)
    seen = (classes % 2 == replica) | (torch.rand(len(classes), generator=generator) >= apart)
    return inputs[seen][:number], classes[seen][:number]


def _pipe(seed: int, every: int | str) -> PipelineModule:
    import torch
    from torch import nn

    from ...pipe import Mesh, PipelineModule

    torch.manual_seed(seed)
    sizes = (_INPUTS, _WIDTH, _WIDTH, _CLASSES)
    layers = [each for pair in pairwise(sizes) for each in (nn.Linear(*pair), nn.GELU())][:-1]
    return PipelineModule(
        nn.Sequential(*layers),
        num_microbatches=1,
        loss_fn=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=_RATE, momentum=0.9),
        mesh=Mesh(pipe=1, data=2, sync=every),
        timeout=_TIMEOUT,
        verify=False,
    )
