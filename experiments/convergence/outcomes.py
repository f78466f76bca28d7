"""Results of the experiment: the best rate of each method, its seeds, its curve. Pure: no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from ..jobs.case import Case, Value
from ..jobs.figure import Figure
from .setting import FEEDBACK, FLUSH, NONE, Setting

CURVE, FINAL, SPEED = "validation loss", "final loss", "throughput"
_NOT_OF_THE_METHOD = ("rate", "seed", "updates")  # the last: of a point of a curve
_OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
_CORRECTIONS = {FEEDBACK: "feedback"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRuns:
    """All runs of one method.

    Arguments:
        method: the case without its rate and seed.
        finals: final losses [nats] by rate, then by seed.
        curves: validation losses by rate, then by seed, then by the number of updates.
    """

    method: Case
    finals: Mapping[float, Mapping[int, float]]
    curves: Mapping[float, Mapping[int, Mapping[int, float]]]

    @property
    def best_rate(self) -> float:
        """Rate with the least mean final loss, of those that were run with the most seeds."""
        most = max(len(by_seed) for by_seed in self.finals.values())
        settled = [rate for rate, by_seed in self.finals.items() if len(by_seed) == most]
        return min(settled, key=lambda rate: fmean(self.finals[rate].values()))

    @property
    def is_bracketed(self) -> bool:
        """Whether the next rate on either side of the best was run, and is worse for each seed that both have."""
        rates, found = sorted(self.finals), self.finals[self.best_rate]
        at = rates.index(self.best_rate)
        beside = [self.finals[rate] for rate in rates[max(0, at - 1) : at + 2] if rate != self.best_rate]
        return len(beside) == 2 and all(
            loss > found[seed] for other in beside for seed, loss in other.items() if seed in found
        )

    @property
    def best(self) -> list[float]:
        """Final losses at the best rate, by seed."""
        found = self.finals[self.best_rate]
        return [found[seed] for seed in sorted(found)]

    @property
    def mean(self) -> float:
        """Mean of the best."""
        return fmean(self.best)

    def best_curves(self) -> list[tuple[list[int], list[float]]]:
        """(updates, losses) of each seed at the best rate."""
        found = self.curves.get(self.best_rate, {})
        return [(list(found[seed]), list(found[seed].values())) for seed in sorted(found)]


def outcomes(figures: Iterable[Figure]) -> list[MethodRuns]:
    """An outcome a method, in the order in which they first come."""
    finals: dict[Case, dict[float, dict[int, float]]] = {}
    curves: dict[Case, dict[float, dict[int, dict[int, float]]]] = {}
    for figure in figures:
        if figure.name not in (FINAL, CURVE):
            continue
        method, rate, seed = method_of(figure.case), figure.case.number("rate"), figure.repetition
        if figure.name == FINAL:
            finals.setdefault(method, {}).setdefault(rate, {})[seed] = figure.value
        else:
            by_updates = curves.setdefault(method, {}).setdefault(rate, {}).setdefault(seed, {})
            by_updates[figure.case.count("updates")] = figure.value
    return [MethodRuns(method=each, finals=finals[each], curves=curves.get(each, {})) for each in finals]


def reference(found: Sequence[MethodRuns], *, seeds: int = 1) -> MethodRuns | None:
    """Synchronous training at its best, with whatever optimizer and correction, of those run with so many seeds."""
    flush = [each for each in found if each.method.text("schedule") == FLUSH and len(each.best) >= seeds]
    return min(flush, key=lambda each: each.mean, default=None)


def method_of(case: Case) -> Case:
    """The case without what is varied within a method."""
    return Case(tuple((key, value) for key, value in case.items if key not in _NOT_OF_THE_METHOD))


def label(method: Case) -> str:
    """A method for people.

    >>> label(Case.of({"schedule": "pipedream", "ranks": 4, "optimizer": "muon", "correction": "error-feedback"}))
    'pipedream, P = 4, Muon, feedback x 1'
    """
    words = [method.text("schedule")]
    if method.count("ranks", 2) != 2:
        words.append(f"P = {method.count('ranks')}")
    words.append(_OPTIMIZERS[method.text("optimizer")])
    correction = str(method.get("correction", NONE))
    if correction != NONE:
        words.append(f"{_CORRECTIONS.get(correction, correction)} x {method.number('factor', 1.0):g}")
    known = ("schedule", "ranks", "optimizer", "correction", "factor")
    others = [f"{key} {value}" for key, value in method.items if key not in known]
    words += [f"{other.split()[1]} updates" if other.startswith("total_updates") else other for other in others]
    return ", ".join(words)


def tokens_per_second(figures: Iterable[Figure], method: Case) -> list[float]:
    """Measured throughputs of a method; empty where it was not timed."""
    kinds = ("schedule", "ranks", "optimizer", "correction")
    wanted = {key: method.get(key, _DEFAULTS[key]) for key in kinds}
    return [
        figure.value
        for figure in figures
        if figure.name == SPEED and {key: figure.case.get(key, _DEFAULTS[key]) for key in kinds} == wanted
    ]


def seconds_of(figures: Sequence[Figure], method: Case) -> Callable[[float], float] | None:
    """Seconds of a method's updates at the measured throughputs, by their number; None where it was not timed.

    The first ones with a flush take as long as those of the flush schedule with the same optimizer and correction.
    """
    setting, first = Setting.of(method.values), method.count("flush_first", 0)
    own = tokens_per_second(figures, method)
    flush = tokens_per_second(figures, Case.of({**method.values, "schedule": FLUSH})) if first else own
    if not (own and flush):
        return None
    tokens, flushed, streamed = setting.sequences * setting.length, median(flush), median(own)
    return lambda updates: tokens * (min(updates, first) / flushed + max(0.0, updates - first) / streamed)


_DEFAULTS: dict[str, Value] = {"schedule": FLUSH, "ranks": 2, "optimizer": "adamw", "correction": NONE}


def sentence(own: MethodRuns, best_flush: MethodRuns) -> str:
    """How a method ends, beside synchronous training at its best."""
    low, high = min(own.best), max(own.best)
    spread = f" ({low:.3f} to {high:.3f} over {len(own.best)} seeds)" if len(own.best) > 1 else " (one seed)"
    others = [f"{rate:g}" for rate in sorted(own.finals) if rate != own.best_rate]
    tried = f" ({'worse on either side' if own.is_bracketed else 'also tried'}: {', '.join(others)})" if others else ""
    said = f"{label(own.method)}: {own.mean:.3f} nats{spread} at rate {own.best_rate:g}{tried}"
    if own is best_flush:
        return f"{said}: synchronous training at its best."
    shared = sorted(set(own.finals[own.best_rate]) & set(best_flush.finals[best_flush.best_rate]))
    gap = fmean(own.finals[own.best_rate][seed] - best_flush.finals[best_flush.best_rate][seed] for seed in shared)
    within = ", within its seed spread" if own.mean <= max(best_flush.best) else ""
    return f"{said}; {gap:+.3f} to synchronous training at its best over {len(shared)} shared seeds{within}."
