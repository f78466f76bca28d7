"""Links of 80 Mbit/s and 20 ms between the stages of a GPT: exact, and packed as far as `Mesh(compress="auto")` chose.

Both train the same model on the same batches, in the same processes, a few steps each in turn. Validation is exact
either way. What auto measures and decides counts in its time to a loss, a mean over some steps of training.

Auto packs as int8 alone. With {"topk": 0.01} for a last rung, which it then took everywhere, the same runs were 0.84 to
1.48 nats behind after 20 steps (three seeds); in one process, after 150 steps of sequences of 128, the training loss
was 2.371 exactly, 2.366 with int8, and 5.19 with {"topk": 0.05} (one seed).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING

from ..jobs.case import Case, wanted
from ..jobs.figure import Figure, How, repeated

if TYPE_CHECKING:
    from ...cli.train.corpus import TokenBatch
    from ...pipe import PipelineModule

WAYS = {"exact": None, "packed": "auto"}
IN_TURN = 5  # steps of one side before the other's turn
_SEQUENCES, _LENGTH, _WIDTH, _MICROBATCHES, _RATE = 32, 256, 64, 8, 2e-3
_SMOOTHED = 10  # losses of a mean
_REACHED = 0.9  # share of the steps after which the exact run's loss is the one to come to
_VALIDATED = 4  # batches
_AHEAD = 0.2  # [s] to tell all ranks when to begin
_TIMEOUT = 120.0  # [s]


def trained(case: Case, repetitions: int) -> Iterator[Figure]:
    """Both sides' seconds, losses and bytes; runs on all ranks. Cases have a `seed`, and `steps`."""
    import torch.distributed as dist

    from ...cli.train.corpus import load_corpus
    from ..measure.timing import timed

    del repetitions
    corpus, seed, ranks, num_steps = load_corpus(), int(case.number("seed")), case.count("ranks"), case.count("steps")
    how = How.MEASURED if wanted(case).shape.is_plain else How.EMULATED
    sides = {way: _pipe(seed, ranks, compress) for way, compress in WAYS.items()}
    losses: dict[str, list[float]] = {way: [] for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    held_out = corpus.validation_batches(num_batches=_VALIDATED, batch_size=_SEQUENCES, length=_LENGTH)
    for pipe in sides.values():
        pipe.eval_step(*held_out[0])  # connects
    for first in range(0, num_steps, IN_TURN):
        steps = range(first, first + IN_TURN)
        batches = [corpus.batch(seed=seed, step=s, batch_size=_SEQUENCES, length=_LENGTH) for s in steps]
        for way, pipe in sides.items():
            some = partial(_train, pipe, batches, losses[way])
            seconds[way].append(timed(some, ahead=_AHEAD) / IN_TURN)
    target = fmean(losses["exact"][int(_REACHED * num_steps) - _SMOOTHED : int(_REACHED * num_steps)])
    reached = {way: _time_to(target, losses[way], seconds[way]) for way in WAYS}
    validated = {
        way: fmean(float(pipe.eval_step(*each).loss or 0.0) for each in held_out) for way, pipe in sides.items()
    }
    everyone: list[tuple[int, int]] = [(0, 0)] * ranks
    sent = sides["packed"].sent_bytes.values()
    dist.all_gather_object(everyone, (sum(packed for packed, _ in sent), sum(whole for _, whole in sent)))
    note = ", ".join(f"{packed / whole:.3f}" for packed, whole in sent)
    for way in WAYS:
        shown, steady = case.also(way=way), seconds[way][2:]
        yield from repeated(steady, case=shown, name="step", unit="s", how=how, note=note if way == "packed" else "")
        yield Figure(case=shown, name="validation loss", value=validated[way], unit="nats", how=how)
        if (took := reached[way]) is not None:
            yield Figure(case=shown, name="time to a loss", value=took, unit="s", how=how, note=f"{target:.3f} nats")
    faster = [one / other for one, other in zip(seconds["exact"][2:], seconds["packed"][2:], strict=True)]
    yield from repeated(faster, case=case, name="step, exact / packed", unit="ratio", how=how)
    share = sum(packed for packed, _ in everyone) / max(1, sum(whole for _, whole in everyone))
    yield Figure(case=case, name="bytes, packed / exact", value=share, unit="ratio", how=how)
    apart = validated["packed"] - validated["exact"]
    yield Figure(case=case, name="validation loss, packed - exact", value=apart, unit="nats", how=how)
    exact, packed = reached["exact"], reached["packed"]
    if exact is not None and packed is not None:
        yield Figure(case=case, name="time to a loss, exact / packed", value=exact / packed, unit="ratio", how=how)
    for pipe in sides.values():
        pipe.close()


def _train(pipe: PipelineModule, batches: Sequence[TokenBatch], losses: list[float]) -> None:
    losses += [float(pipe.train_step(*batch).loss or 0.0) for batch in batches]


def _pipe(seed: int, ranks: int, compress: object) -> PipelineModule:
    import torch

    from ...cli.train.corpus import loss_fn
    from ...cli.train.gpt import GPT, GPTConfig
    from ...pipe import Mesh, PipelineModule

    torch.manual_seed(seed)
    return PipelineModule(
        GPT(GPTConfig(layers=ranks, width=_WIDTH, length=_LENGTH)),
        num_microbatches=_MICROBATCHES,
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=_RATE),
        max_grad_norm=1.0,
        mesh=Mesh(pipe=ranks, compress=compress),
        timeout=_TIMEOUT,
        verify=False,
    )


def _time_to(target: float, losses: Sequence[float], seconds: Sequence[float]) -> float | None:
    """Seconds of the steps until the mean of some losses is no more than that; None: it never is."""
    for end in range(_SMOOTHED, len(losses) + 1):
        if fmean(losses[end - _SMOOTHED : end]) <= target:
            return sum(seconds[: end // IN_TURN]) * IN_TURN + end % IN_TURN * median(seconds)
    return None
