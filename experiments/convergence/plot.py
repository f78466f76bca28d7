"""The pictures: loss against tokens and against time; loss against the rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from ...viz.palette import SERIES_HUES
from ..jobs.figure import Figure
from .outcomes import MethodRuns, label, outcomes, reference, seconds_of
from .setting import Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_curves(figures: Sequence[Figure], path: Path) -> Path | None:
    """Validation loss against tokens, and against seconds of the tokens at the measured throughput.

    Methods with the most seeds, and those of a schedule and an optimizer alone, each at its best rate. Lines are means
    over the seeds, shaded: their range. None where nothing was run.
    """
    from matplotlib.figure import Figure as Picture

    found = [each for each in outcomes(figures) if each.best_curves()]
    seeds = max((len(each.best) for each in found), default=0)
    shown = [each for each in found if len(each.best) == seeds or {*each.method} == {"schedule", "optimizer"}]
    if not shown:
        return None
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
    picture.savefig(path, metadata={"Software": None})
    return path


def _curve(axes: Axes, own: MethodRuns, *, along: Callable[[float], float], colour: str) -> None:
    """`along`: x by number of updates."""
    curves = own.best_curves()
    x = [along(float(updates)) for updates in curves[0][0]]
    columns = list(zip(*(losses for _, losses in curves), strict=True))
    axes.fill_between(x, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.15, linewidth=0)
    name = f"{label(own.method)}, rate {own.best_rate:g}"
    axes.plot(x, [fmean(c) for c in columns], color=colour, linewidth=1.8, label=name)


def draw_rates(figures: Sequence[Figure], path: Path) -> Path | None:
    """Final loss against the peak rate, a line a method, mean and range of the seeds; None where nothing was run.

    Methods with one rate alone are left to tables.
    """
    from matplotlib.figure import Figure as Picture
    from matplotlib.ticker import NullLocator

    found = outcomes(figures)
    if not found:
        return None
    lines = [each for each in found if len(each.finals) > 1]
    if not lines:
        return None
    optimizers = list(dict.fromkeys(each.method.text("optimizer") for each in lines))
    best = reference(found, seeds=max(len(each.best) for each in found))
    picture = Picture(figsize=(8 * len(optimizers), 5), dpi=120, layout="constrained")
    grid = picture.subplots(1, len(optimizers), sharey=True, squeeze=False)[0]
    for axes, optimizer in zip(grid, optimizers, strict=True):
        own = [each for each in lines if each.method.text("optimizer") == optimizer]
        for at, each in enumerate(own):
            rates = sorted(each.finals)
            values = [list(each.finals[rate].values()) for rate in rates]
            means = [fmean(v) for v in values]
            spread = [[m - min(v) for m, v in zip(means, values, strict=True)]]
            spread.append([max(v) - m for m, v in zip(means, values, strict=True)])
            colour = SERIES_HUES[at % len(SERIES_HUES)]
            style = "-" if at < len(SERIES_HUES) else "--"
            axes.errorbar(rates, means, yerr=spread, fmt=f"o{style}", color=colour, capsize=3, label=label(each.method))
        if best is not None:
            axes.axhspan(min(best.best), max(best.best), color="#888888", alpha=0.2, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({rate for each in own for rate in each.finals}))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("peak rate")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    grid[0].set_ylabel("final loss [nats a byte]; grey: best 1f1b, its seeds")
    picture.savefig(path, metadata={"Software": None})
    return path
