"""Loss without a flush: `stagewright experiment convergence` as jobs, one a method, its seeds as repetitions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from ..convergence.command import REFERENCE, ConvergenceOptions
from ..convergence.curves import Curve, summarize
from ..convergence.methods import METHODS
from ..jobs.case import Case
from ..jobs.figure import Figure, How
from ..names import check_known

_LOSS, _SECONDS = "validation loss", "seconds of training"


def curve(case: Case, repetitions: int) -> Iterator[Figure]:
    """Validation loss [nats] and seconds of training after each evaluation of a `method`; on all of its ranks.

    Further keys of the case are options of the command, such as `steps`.
    """
    from ..convergence.worker import RunOptions, train

    method = case.text("method")
    check_known(f"case {case}: unknown method", method, METHODS, listed="methods")
    if case.count("ranks", 1) != METHODS[method].num_ranks:
        raise ValueError(f"case {case}: ranks: expected {METHODS[method].num_ranks}")
    known = {field.name: getattr(_DEFAULTS, field.name) for field in fields(_DEFAULTS)}
    options = {key: value for key, value in known.items() if key in RunOptions.__slots__}
    options |= {key: value for key, value in case.values.items() if key in options}
    for seed in range(repetitions):
        found = train(RunOptions(**{**options, "method": method, "seed": seed, "out": Path()}))
        for step, loss, seconds in zip(found.steps, found.losses, found.seconds, strict=True):
            at = case.also(step=step)
            yield Figure(case=at, name=_LOSS, value=loss, unit="nats", how=How.MEASURED, repetition=seed)
            yield Figure(case=at, name=_SECONDS, value=seconds, unit="s", how=How.MEASURED, repetition=seed)
        tokens = found.tokens_per_second
        yield Figure(case=case, name="throughput", value=tokens, unit="tokens/s", how=How.MEASURED, repetition=seed)
        yield Figure(
            case=case, name="final loss", value=found.final_loss, unit="nats", how=How.MEASURED, repetition=seed
        )


_DEFAULTS = ConvergenceOptions()


def findings(figures: Sequence[Figure]) -> list[str]:
    """How each method ends beside 1f1b, and when it reaches a loss that both reach."""
    points: dict[tuple[str, int], dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for figure in figures:
        if figure.name in (_LOSS, _SECONDS):
            key = figure.case.text("method"), figure.repetition
            points[key][int(figure.case.number("step"))][figure.name] = figure.value
    curves = [
        Curve(
            method=method,
            seed=seed,
            tokens_per_step=1,
            steps=list(by_step),
            seconds=[each[_SECONDS] for each in by_step.values()],
            losses=[each[_LOSS] for each in by_step.values()],
        )
        for (method, seed), by_step in points.items()
    ]
    if not any(curve.method == REFERENCE for curve in curves):
        return []
    return [
        f"{r.method}: {r.final:.3f} nats at the end ({r.low:.3f} to {r.high:.3f} over {r.seeds} seeds); at "
        f"{r.common_loss:.3f} nats after {r.seconds_to_common:.1f} s, {REFERENCE} after {r.reference_seconds:.1f} s."
        for r in summarize(curves, reference=REFERENCE)
    ]
