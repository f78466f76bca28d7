"""Loss without a flush: settings of the convergence experiment, trained and timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from ..convergence.outcomes import CURVE, FINAL, SPEED, label, method_of, outcomes, reference, sentence
from ..convergence.setting import Setting
from ..jobs.case import Case
from ..jobs.figure import Figure, How

_TIMED, _WARM = 40, 10  # updates


def loss(case: Case, repetitions: int) -> Iterator[Figure]:
    """Validation loss [nats a byte] of a setting behind its updates, in one process; the seed stands as repetition."""
    from ..convergence.training import losses

    setting = _setting(case)
    place = Case(tuple((key, value) for key, value in case.items if key != "seed"))
    for point in losses(setting):
        name, at = (FINAL, place) if point.whole else (CURVE, place.also(updates=point.updates))
        yield Figure(case=at, name=name, value=point.loss, unit="nats", how=How.MEASURED, repetition=setting.seed)


def speed(case: Case, repetitions: int) -> Iterator[Figure]:
    """Tokens a second of a setting, a process a rank."""
    from ..convergence.training import speed as tokens_per_second

    setting = _setting(case)
    for repetition in range(repetitions):
        value = tokens_per_second(setting, updates=_TIMED, warm=_WARM)
        yield Figure(case=case, name=SPEED, value=value, unit="tokens/s", how=How.MEASURED, repetition=repetition)


def _setting(case: Case) -> Setting:
    try:
        return Setting.of(case.values)
    except ValueError as error:
        raise ValueError(f"case {case}: {error}") from None


def findings(figures: Sequence[Figure]) -> list[str]:
    """How each method ends beside synchronous training at its best, and its throughput beside 1f1b's."""
    found = outcomes(figures)
    seeds = max((len(each.best) for each in found), default=0)
    best = reference(found, seeds=seeds) or reference(found)
    if best is None:
        return []
    said = [sentence(each, best) for each in found]
    speeds: dict[Case, list[float]] = {}
    for figure in figures:
        if figure.name == SPEED:
            speeds.setdefault(method_of(figure.case), []).append(figure.value)
    flush = [median(values) for method, values in speeds.items() if method.text("schedule") == "1f1b"]
    return said + [
        f"{label(method)}: {median(values):,.0f} tokens/s, {median(values) / max(flush):.2f} times the fastest 1f1b."
        for method, values in speeds.items()
        if flush
    ]


def draw(figures: Sequence[Figure], folder: Path) -> list[tuple[str, str]]:
    """Pictures of the report: curves, and rates."""
    from ..convergence.plot import draw_curves, draw_rates

    made = [
        ("Validation loss against tokens and against time", draw_curves(figures, folder / "convergence.png")),
        ("Final loss against the peak rate", draw_rates(figures, folder / "rates.png")),
    ]
    return [(title, path.name) for title, path in made if path is not None]
