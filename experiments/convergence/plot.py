"""The picture: validation loss against steps, and against seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .curves import Curve, mean_of, of_method

_COLOURS = ("#555555", "#1f77b4", "#d62728", "#2ca02c", "#7fb3d9", "#ee8f8f")


def draw(curves: Sequence[Curve], path: Path) -> Path:
    """Thin lines are seeds, thick ones their mean (dashed: with learning-rate warm-up), shaded their range."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), dpi=120, layout="constrained")
    by_steps, by_time = figure.subplots(1, 2, sharey=True)
    for method, colour in zip(dict.fromkeys(curve.method for curve in curves), _COLOURS, strict=False):
        own = of_method(curves, method)
        seconds, losses = mean_of(own)
        for axes, mean_x in ((by_steps, own[0].steps), (by_time, seconds)):
            for curve in own:
                x = curve.steps if axes is by_steps else curve.seconds
                axes.plot(x, curve.losses, color=colour, linewidth=0.6, alpha=0.5)
            low, high = ([pick(c) for c in zip(*(o.losses for o in own), strict=True)] for pick in (min, max))
            axes.fill_between(mean_x, low, high, color=colour, alpha=0.12, linewidth=0)
            style = "--" if method.endswith("warmup") else "-"
            axes.plot(mean_x, losses, style, color=colour, linewidth=2.0, label=method)
    worst = max(curve.losses[1] for curve in curves)
    best = min(min(curve.losses) for curve in curves)
    by_steps.set_ylim(best - 0.05 * (worst - best), worst)
    by_steps.set_xlabel("steps (same tokens for every method)")
    by_time.set_xlabel("seconds of training (measured, one thread a rank)")
    by_steps.set_ylabel("validation loss [nats a byte]")
    by_time.legend(frameon=False)
    for axes in (by_steps, by_time):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    return path
