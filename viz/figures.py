"""Timelines as figures of matplotlib, for PNG and SVG files, papers and notebooks.

    figure = comparison_figure([exhibit, other], style=FigureStyle(width=7, font=7, title=False))
    write_figure(figure, "figure-3.svg")

As the last value of a notebook's cell a figure shows itself. The same exhibits give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..schedules import Timeline
from .exhibit import Exhibit
from .panels import Panel, TimelinePanel, panels_of
from .sheet import FigureStyle, Sheet

if TYPE_CHECKING:
    from .shown_figure import ShownFigure

FIGURE_SUFFIXES = (".png", ".svg")
_USUAL = FigureStyle()


def timeline_figure(timeline: Timeline, *, caption: str | None = None, style: FigureStyle = _USUAL) -> ShownFigure:
    """One timeline.

    Arguments:
        caption: in front of its figures; "measured" or "simulated" where not given.
    """
    usual = "measured" if timeline.measured else "simulated"
    return _figure([TimelinePanel(caption=usual if caption is None else caption, timeline=timeline)], style)


def comparison_figure(exhibits: Exhibit | Sequence[Exhibit], *, style: FigureStyle = _USUAL) -> ShownFigure:
    """All timelines of the exhibits below each other on one time scale, each from its own first start.

    Raises ValueError for no exhibit.
    """
    panels = panels_of([exhibits] if isinstance(exhibits, Exhibit) else exhibits, memory=style.memory)
    if not panels:
        raise ValueError("exhibits=[]: expected at least one Exhibit")
    return _figure(panels, style)


def render_timeline(timeline: Timeline, path: str | Path, *, style: FigureStyle = _USUAL) -> None:
    """Draw one timeline to a file, as `write_figure` does."""
    write_figure(timeline_figure(timeline, style=style), path)


def render_comparison(
    predicted: Timeline | None, measured: Timeline | None, path: str | Path, *, style: FigureStyle = _USUAL
) -> None:
    """Draw `predicted` above `measured` on one time scale, each from its own first start, to a file.

    Arguments:
        predicted, measured: one of them may be None; the other then stands alone.

    Raises ValueError when both are None.
    """
    given = [(c, t) for c, t in (("predicted", predicted), ("measured", measured)) if t is not None]
    if not given:
        raise ValueError("predicted=None, measured=None: expected at least one Timeline")
    panels = [TimelinePanel(caption=caption, timeline=timeline) for caption, timeline in given]
    if len(panels) == 2:
        panels[1] = TimelinePanel(
            caption="measured", timeline=panels[1].timeline, reference=panels[0], is_predicted=True
        )
    write_figure(_figure(panels, style), path)


def write_figure(figure: ShownFigure, path: str | Path) -> None:
    """Write a PNG or an SVG, as the path ends; ValueError for any other end."""
    suffix = Path(path).suffix.lower()
    if suffix not in FIGURE_SUFFIXES:
        raise ValueError(f"{path}: expected a name that ends in {' or '.join(FIGURE_SUFFIXES)}")
    Path(path).write_bytes(figure.as_bytes(suffix.removeprefix(".")))


def _figure(panels: Sequence[Panel], style: FigureStyle) -> ShownFigure:
    from .shown_figure import ShownFigure

    sheet = Sheet(panels, style)
    figure = ShownFigure.of_size(style.width, sheet.height / 100, dpi=style.dpi)
    sheet.draw(figure)
    return figure
