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

# Text stays text: of a PDF in TrueType fonts, which publishers ask for. Ids are the same each time.
_AS_TEXT: Any = {"svg.fonttype": "none", "svg.hashsalt": "stagewright", "pdf.fonttype": 42}
_UNDATED: dict[str, dict[str, Any]] = {
    "png": {"Software": "stagewright"},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


class ShownFigure(Figure):
    @classmethod
    def of_size(cls, width: float, height: float, *, dpi: float) -> ShownFigure:
        """Empty, of this size [inch]."""
        figure = cls(figsize=(width, height), dpi=dpi, facecolor="white")
        FigureCanvasAgg(figure)
        return figure

    def as_bytes(self, kind: str) -> bytes:
        """A "png", "svg" or "pdf" file, the same each time: without a date, or the name of a version."""
        file = io.BytesIO()
        with mpl.rc_context(_AS_TEXT):
            self.savefig(file, format=kind, dpi=self.get_dpi(), metadata=_UNDATED[kind])
        return file.getvalue()

    def _repr_png_(self) -> bytes:
        return self.as_bytes("png")
