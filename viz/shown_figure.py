"""A figure of matplotlib that shows itself in notebooks, without pyplot. Loads matplotlib when it is imported."""

from __future__ import annotations

import io
from typing import Any

try:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("pictures need matplotlib: pip install 'stagewright[cli]'", name=error.name) from error

_SVG: Any = {"svg.fonttype": "none", "svg.hashsalt": "stagewright"}  # text stays text; ids that are the same each time


class ShownFigure(Figure):
    """A figure on a white page."""

    @classmethod
    def of_size(cls, width: float, height: float, *, dpi: float) -> ShownFigure:
        """Empty, of this size [inch]."""
        figure = cls(figsize=(width, height), dpi=dpi, facecolor="white")
        FigureCanvasAgg(figure)
        return figure

    def as_bytes(self, kind: str) -> bytes:
        """A "png" or "svg" file, the same each time: without a date, or the name of a version."""
        file = io.BytesIO()
        metadata: dict[str, Any] = {"Software": "stagewright"} if kind == "png" else {"Date": None, "Creator": None}
        with mpl.rc_context(_SVG):
            self.savefig(file, format=kind, dpi=self.get_dpi(), metadata=metadata)
        return file.getvalue()

    def _repr_png_(self) -> bytes:
        return self.as_bytes("png")
