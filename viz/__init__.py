"""Timelines as pages, figures and Perfetto traces. Pure: no torch; matplotlib loads when something is drawn."""

from ..schedules.timing.timeline import MeasuredStep
from .exhibit import Exhibit
from .explorer import explorer_html, write_explorer
from .figures import comparison_figure, render_comparison, render_timeline, timeline_figure, write_figure
from .foreign import exhibit_of_traces
from .notebook import show
from .perfetto import read_perfetto, write_perfetto
from .sheet import FigureStyle

__all__ = [
    "Exhibit",
    "FigureStyle",
    "MeasuredStep",
    "comparison_figure",
    "exhibit_of_traces",
    "explorer_html",
    "read_perfetto",
    "render_comparison",
    "render_timeline",
    "show",
    "timeline_figure",
    "write_explorer",
    "write_figure",
    "write_perfetto",
]
