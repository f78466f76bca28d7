"""Report of the convergence experiment: the best rate of each method, its seeds and its curve, as text and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from ...viz.palette import SERIES_HUES
from ..jobs.case import Case, Value
from ..jobs.figure import Figure
from .convergence import CURVE, FEEDBACK, FINAL, FLUSH, NONE, SPEED, Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NOT_OF_THE_METHOD = ("rate", "seed", "updates", "evaluate_every")  # updates: of a point of a curve
_OPTIMIZERS = {"adamw": "AdamW", "nadam": "NAdam", "muon": "Muon"}
_DEFAULTS: dict[str, Value] = {"schedule": FLUSH, "ranks": 2, "optimizer": "adamw", "correction": NONE}


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRuns:
    """All runs of one method."""

    method: Case  # the case without its rate and seed
    finals: Mapping[float, Mapping[int, float]]  # final losses [nats] by rate, then by seed
    # validation losses by rate, then by seed, then by the number of updates
    curves: Mapping[float, Mapping[int, Mapping[int, float]]]

    @property
    def best_rate(self) -> float:
        """Rate with the least mean final loss among those with the most seeds."""
        most = max(len(by_seed) for by_seed in self.finals.values())
        settled = [rate for rate, by_seed in self.finals.items() if len(by_seed) == most]
        return min(settled, key=lambda rate: fmean(self.finals[rate].values()))

    @property
    def is_bracketed(self) -> bool:
        """Whether the next rate on either side of the best was run and is worse for each seed that both have."""
        rates, found = sorted(self.finals), self.finals[self.best_rate]
        at = rates.index(self.best_rate)
        next_to = [self.finals[rate] for rate in rates[max(0, at - 1) : at + 2] if rate != self.best_rate]
        worse = (loss > found[seed] for other in next_to for seed, loss in other.items() if seed in found)
        return len(next_to) == 2 and all(worse)

    @property
    def best(self) -> list[float]:
        found = self.finals[self.best_rate]
        return [found[seed] for seed in sorted(found)]

    @property
    def mean(self) -> float:
        return fmean(self.best)

    def best_curves(self) -> list[tuple[list[int], list[float]]]:
        found = self.curves.get(self.best_rate, {})
        return [(list(found[seed]), list(found[seed].values())) for seed in sorted(found)]


def outcomes(figures: Iterable[Figure]) -> list[MethodRuns]:
    """The runs by method, in the order of the methods' first figures."""
    finals: dict[Case, dict[float, dict[int, float]]] = {}
    curves: dict[Case, dict[float, dict[int, dict[int, float]]]] = {}
    for figure in figures:
        if figure.name not in (FINAL, CURVE):
            continue
        method, rate, seed = _method_of(figure.case), figure.case.number("rate"), figure.repetition
        if figure.name == FINAL:
            finals.setdefault(method, {}).setdefault(rate, {})[seed] = figure.value
        else:
            by_updates = curves.setdefault(method, {}).setdefault(rate, {}).setdefault(seed, {})
            by_updates[figure.case.count("updates")] = figure.value
    return [MethodRuns(method=each, finals=finals[each], curves=curves.get(each, {})) for each in finals]


def reference(found: Sequence[MethodRuns], *, seeds: int = 1) -> MethodRuns | None:
    """The best synchronous training with any optimizer and correction, of methods with at least `seeds` seeds."""
    flush = [each for each in found if each.method.text("schedule") == FLUSH and len(each.best) >= seeds]
    return min(flush, key=lambda each: each.mean, default=None)


def _method_of(case: Case) -> Case:
    return Case(tuple((key, value) for key, value in case.items if key not in _NOT_OF_THE_METHOD))


def label(method: Case) -> str:
    """A method's name in the report.

    >>> label(Case.of({"schedule": "pipedream", "ranks": 4, "optimizer": "muon", "correction": "error-feedback"}))
    'pipedream, P = 4, Muon, feedback x 1'
    """
    words = [method.text("schedule")]
    if method.count("ranks", 2) != 2:
        words.append(f"P = {method.count('ranks')}")
    words.append(_OPTIMIZERS[method.text("optimizer")])
    correction = str(method.get("correction", NONE))
    if correction != NONE:
        words.append(f"{'feedback' if correction == FEEDBACK else correction} x {method.number('factor', 1.0):g}")
    known = ("schedule", "ranks", "optimizer", "correction", "factor")
    others = [f"{key} {value}" for key, value in method.items if key not in known]
    words += [f"{other.split()[1]} updates" if other.startswith("total_updates") else other for other in others]
    return ", ".join(words)


def seconds_of(figures: Sequence[Figure], method: Case) -> Callable[[float], float] | None:
    """Seconds of a method's updates at the measured throughputs, by their number; None if the method was not timed.

    The first updates, with a flush, take as long as those of the flush schedule with the same optimizer and correction.
    """

    def throughputs(case: Case) -> list[float]:
        wanted = {key: case.get(key, default) for key, default in _DEFAULTS.items()}
        speeds = [figure for figure in figures if figure.name == SPEED]
        return [x.value for x in speeds if {key: x.case.get(key, _DEFAULTS[key]) for key in _DEFAULTS} == wanted]

    setting, first = Setting.of(method.values), method.count("flush_first", 0)
    own = throughputs(method)
    flush = throughputs(method.also(schedule=FLUSH)) if first else own
    if not (own and flush):
        return None
    tokens, flushed, streamed = setting.sequences * setting.length, median(flush), median(own)
    return lambda updates: tokens * (min(updates, first) / flushed + max(0.0, updates - first) / streamed)


def _sentence(own: MethodRuns, best_flush: MethodRuns) -> str:
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


def findings(figures: Sequence[Figure]) -> list[str]:
    """Final loss of each method compared with the best synchronous training, and throughput compared with 1f1b's."""
    found = outcomes(figures)
    seeds = max((len(each.best) for each in found), default=0)
    best = reference(found, seeds=seeds) or reference(found)
    if best is None:
        return []
    said = [_sentence(each, best) for each in found]
    speeds: dict[Case, list[float]] = {}
    for figure in figures:
        if figure.name == SPEED:
            speeds.setdefault(_method_of(figure.case), []).append(figure.value)
    flush = [median(values) for method, values in speeds.items() if method.text("schedule") == "1f1b"]
    return said + [
        f"{label(method)}: {median(values):,.0f} tokens/s, {median(values) / max(flush):.2f} times the fastest 1f1b."
        for method, values in speeds.items()
        if flush
    ]


def draw(figures: Sequence[Figure], folder: Path) -> list[tuple[str, str]]:
    """Validation loss against tokens, and against seconds of the tokens at the measured throughput.

    Shows methods with the most seeds, and those of a schedule and an optimizer alone, each at its best rate. Lines are
    means over the seeds; the shaded area is their range. Draws nothing without runs.
    """
    from matplotlib.figure import Figure as Picture

    found = [each for each in outcomes(figures) if each.best_curves()]
    seeds = max((len(each.best) for each in found), default=0)
    shown = [each for each in found if len(each.best) == seeds or {*each.method} == {"schedule", "optimizer"}]
    if not shown:
        return []
    timed = [(each, seconds_of(figures, each.method)) for each in shown]
    has_time = any(seconds is not None for _, seconds in timed)
    picture = Picture(figsize=(13 if has_time else 8, 5.4), dpi=120, layout="constrained")
    grid = picture.subplots(1, 2 if has_time else 1, sharey=True, squeeze=False)[0]
    for at, (each, seconds) in enumerate(timed):
        colour = SERIES_HUES[at % len(SERIES_HUES)]
        setting = Setting.of(each.method.values)
        thousands = setting.sequences * setting.length / 1e3
        _curve(grid[0], each, along=thousands.__mul__, colour=colour)
        if seconds is not None:
            _curve(grid[1], each, along=seconds, colour=colour)
    ends = [(losses[-1], losses[min(1, len(losses) - 1)]) for each in shown for _, losses in each.best_curves()]
    best, worst = min(last for last, _ in ends), max(early for _, early in ends)
    grid[0].set_ylim(best - 0.05 * (worst - best), worst)
    grid[0].set_xlabel("thousand tokens")
    grid[0].set_ylabel("validation loss, a quarter of the sequences [nats a byte]")
    if has_time:
        grid[1].set_xlabel("seconds on two processes: tokens / measured throughput")
    for axes in grid:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = grid[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=3 if has_time else 2, frameon=False, fontsize=9)
    picture.savefig(folder / "convergence.png", metadata={"Software": None})
    return [("Validation loss against tokens and against time", "convergence.png")]


def _curve(axes: Axes, own: MethodRuns, *, along: Callable[[float], float], colour: str) -> None:
    curves = own.best_curves()
    x = [along(float(updates)) for updates in curves[0][0]]
    columns = list(zip(*(losses for _, losses in curves), strict=True))
    axes.fill_between(x, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.15, linewidth=0)
    name = f"{label(own.method)}, rate {own.best_rate:g}"
    axes.plot(x, [fmean(c) for c in columns], color=colour, linewidth=1.8, label=name)
