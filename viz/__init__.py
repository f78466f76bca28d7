"""Timelines as pages, figures and Perfetto traces. Pure: no torch; matplotlib loads when something is drawn."""

from ..schedules.timing.timeline import MeasuredStep as MeasuredStep
from .exhibit import Exhibit as Exhibit
from .explorer import explorer_html as explorer_html
from .explorer import write_explorer as write_explorer
from .figures import comparison_figure as comparison_figure
from .figures import render_comparison as render_comparison
from .figures import render_timeline as render_timeline
from .figures import timeline_figure as timeline_figure
from .figures import write_figure as write_figure
from .foreign import exhibit_of_traces as exhibit_of_traces
from .notebook import show as show
from .perfetto import read_perfetto as read_perfetto
from .perfetto import write_perfetto as write_perfetto
from .sheet import FigureStyle as FigureStyle

# A type checker would take names that it cannot read for none.
globals()["__all__"] = [n for n, v in [*globals().items()] if n[0] != "_" and not hasattr(v, "__spec__")]
