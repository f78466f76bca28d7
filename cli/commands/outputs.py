"""Files that exhibits are written to, by the suffix of the file's name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...viz import Exhibit, FigureStyle, comparison_figure, write_explorer, write_figure, write_perfetto
from ..options import check_out

_SUFFIXES = (".json", ".svg", ".png", ".html")


def check_output(path: Path) -> None:
    """Raise ValueError, before any work, for another suffix or a missing folder."""
    if not path.name.lower().endswith(_SUFFIXES):
        raise ValueError(f"-o {path}: expected a name that ends in {', '.join(_SUFFIXES)}")
    check_out("-o", path)


def write_output(exhibits: Sequence[Exhibit], path: Path, style: FigureStyle) -> str:
    """Write the file. Returns the text to print after its name: what opens it."""
    if path.name.lower().endswith(".html"):
        write_explorer(exhibits, path)
        return ": open it in a browser"
    if path.name.lower().endswith(".json"):
        several = len(exhibits) > 1
        named = [(f"{each.name} {c}" if several else c, t) for each in exhibits for c, t in each.timelines]
        write_perfetto(named, path)
        return ": open it at https://ui.perfetto.dev"
    write_figure(comparison_figure(exhibits, style=style), path)
    return ""
