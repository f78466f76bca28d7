"""Timelines as figures and Perfetto traces. Pure: no torch; matplotlib loads when something is drawn."""

from .exhibit import Exhibit
from .figures import comparison_figure, render_comparison, render_timeline, timeline_figure, write_figure
from .perfetto import write_perfetto
from .sheet import FigureStyle

__all__ = [
    "Exhibit",
    "FigureStyle",
    "comparison_figure",
    "render_comparison",
    "render_timeline",
    "timeline_figure",
    "write_figure",
    "write_perfetto",
]
