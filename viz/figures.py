"""Timelines as matplotlib figures, for PNG, SVG and PDF files, papers and notebooks.

    figure = comparison_figure([exhibit, other], style=FigureStyle(width=7, font=7, title=False))
    write_figure(figure, "figure-3.svg")

As the last value of a notebook's cell a figure shows itself. The same exhibits give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..schedules import Change, Op, PredictionCheck, Timeline
from ..schedules.wording import duration
from .exhibit import SIMULATED, Exhibit
from .palette import OP_HUES
from .panels import TimelinePanel, panels_of, time_unit
from .sheet import FigureStyle, Sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .shown_figure import ShownFigure

FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
WATERFALL = FigureStyle(width=9.0)
_USUAL = FigureStyle()
_MORE, _LESS, _WHOLE, _EDGE = "#D55E00", OP_HUES[Op.I], OP_HUES[Op.F], "#5C5C5C"
_WORDS = 1.65  # room for the words after a bar [inch]
_ROW = 0.34  # height of a bar with its margins [inch]


def timeline_figure(timeline: Timeline, *, caption: str | None = None, style: FigureStyle = _USUAL) -> ShownFigure:
    """One timeline.

    Arguments:
        caption: before its figures; "measured" or "simulated" by default.
    """
    usual = "measured" if timeline.measured else SIMULATED
    return Sheet([TimelinePanel(caption=usual if caption is None else caption, timeline=timeline)], style).draw()


def comparison_figure(exhibits: Exhibit | Sequence[Exhibit], *, style: FigureStyle = _USUAL) -> ShownFigure:
    """All timelines of the exhibits below each other on one time scale, each from its own first start.

    Raises ValueError without exhibits.
    """
    panels = panels_of([exhibits] if isinstance(exhibits, Exhibit) else exhibits, memory=style.memory)
    if not panels:
        raise ValueError("exhibits=[]: expected at least one Exhibit")
    return Sheet(panels, style).draw()


def render_timeline(timeline: Timeline, path: str | Path, *, style: FigureStyle = _USUAL) -> None:
    """Draw one timeline to a file, as `write_figure` does."""
    write_figure(timeline_figure(timeline, style=style), path)


def render_comparison(
    simulated: Timeline | None, measured: Timeline | None, path: str | Path, *, style: FigureStyle = _USUAL
) -> None:
    """Draw `simulated` above `measured` on one time scale, each from its own first start, to a file.

    Arguments:
        simulated, measured: one of them may be None.

    Raises ValueError if both are None.
    """
    first = None if simulated is None else TimelinePanel(caption=SIMULATED, timeline=simulated)
    panels = [] if first is None else [first]
    if measured is not None:
        panels.append(TimelinePanel(caption="measured", timeline=measured, reference=first, is_own=first is not None))
    if not panels:
        raise ValueError("simulated=None, measured=None: expected at least one Timeline")
    write_figure(Sheet(panels, style).draw(), path)


def write_figure(figure: ShownFigure, path: str | Path) -> None:
    """Write a PNG, an SVG or a PDF, by the suffix of the path; ValueError for any other."""
    suffix = Path(path).suffix.lower()
    if suffix not in FIGURE_SUFFIXES:
        raise ValueError(f"{path}: expected a name that ends in {', '.join(FIGURE_SUFFIXES)}")
    Path(path).write_bytes(figure.as_bytes(suffix.removeprefix(".")))


# --- from a prediction to what was measured ---


def waterfall_figure(check: PredictionCheck, *, title: str = "", style: FigureStyle = WATERFALL) -> ShownFigure:
    """A simulated step and a measured one as bars, and between them the contribution of each cause.

    simulated |==============================|
    compute                                  |##|
    messages                                    |#|
    update                                     |-|
    measured  |================================|
    """
    from .shown_figure import ShownFigure

    bars = [(SIMULATED, 0.0, check.predicted), *check.causes, ("measured", 0.0, check.step_seconds)]
    scale = style.font / FigureStyle().font
    height = (_ROW * len(bars) + 1.0) * scale
    figure = ShownFigure.of_size(style.width, height, dpi=style.dpi)
    left, foot, head = 1.5 * scale / style.width, 0.55 * scale / height, 0.35 * scale / height
    width = 1.0 - left - 0.1 * scale / style.width
    axes = figure.add_axes((left, foot, width, 1.0 - foot - head))
    _draw_waterfall(axes, bars, check.predicted, style.font, words=min(0.8, _WORDS * scale / (width * style.width)))
    if style.title and title:
        figure.text(left, 1.0 - 0.1 * scale / height, title, ha="left", va="top", fontsize=style.font)
    return figure


def _draw_waterfall(
    axes: Axes, bars: Sequence[Change | tuple[str, float, float]], predicted: float, font: float, *, words: float
) -> None:
    """Bars from the top, the wholes from 0 and each change from where the one before ended. `words`: share of the width
    that stays free after the longest bar."""
    ends = [each for _, before, after in bars for each in (before, after) if each > 0]
    low, high = min(ends, default=0.0), max(ends, default=0.0)
    name, unit = time_unit(high)
    # The changes matter: the axis begins where they have room, and the wholes are cut there.
    first = max(0.0, low - 2 * (high - low)) if high - low < low / 2 else 0.0
    room = (high - first) or unit
    for row, (_, before, after) in enumerate(bars):
        is_whole = row in (0, len(bars) - 1)
        start, end = (first, after) if is_whole else sorted((before, after))
        colour = _WHOLE if is_whole else _MORE if after > before else _LESS
        axes.barh(
            row, (end - start) / unit, left=start / unit, height=0.66, color=colour, edgecolor=_EDGE, linewidth=0.5
        )
        label = duration(after) if is_whole else _change(after - before, predicted)
        axes.text((end + 0.01 * room) / unit, row, label, va="center", ha="left", fontsize=font)
        if row + 1 < len(bars):
            axes.plot([after / unit] * 2, [row + 0.33, row + 0.67], color=_EDGE, linewidth=0.8)
    axes.set_yticks(range(len(bars)), [each[0] for each in bars], fontsize=font)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(first / unit, (first + room / (1.0 - words)) / unit)
    axes.tick_params(axis="x", labelsize=font)
    cut = f", from {duration(first)} on" if first > 0 else ""
    axes.set_xlabel(f"a step [{name}]{cut}", fontsize=font)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _change(seconds: float, predicted: float) -> str:
    if seconds == 0:
        return "0"
    sign = "+" if seconds > 0 else "-"
    share = f" ({100 * seconds / predicted:+.1f}%)" if predicted > 0 else ""
    return f"{sign}{duration(abs(seconds))}{share}"
