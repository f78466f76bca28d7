"""Files that exhibits are written to, by the suffix of the file's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from ...viz import Exhibit, FigureStyle, comparison_figure, write_explorer, write_figure, write_perfetto
from ...viz.figures import FIGURE_SUFFIXES
from ..options import check_out, plain_help
from .schedule_options import CostOptions

_SUFFIXES = (".json", ".svg", ".pdf", ".png", ".html")
_STYLE = FigureStyle()
_COLUMNS = {"one": (3.5, 6.0), "two": (7.16, 7.0)}  # inch, points


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class PictureOptions(CostOptions):
    """How pictures are drawn."""

    column: Literal["one", "two"] | None = None
    """Width of a picture for a paper with two columns a page: over one of them, or over both."""
    width: float | None = None
    """Width of a picture [inch] (default: 16, or as --column says)."""
    dpi: float = _STYLE.dpi
    """Pixels an inch of a PNG."""
    font: float | None = None
    """Size of a picture's words [points] (default: 9.5, or as --column says)."""
    no_title: tyro.conf.FlagCreatePairsOff[bool] = False
    """Leave the title to a paper's caption."""
    no_captions: tyro.conf.FlagCreatePairsOff[bool] = False
    """Leave out the line above each timeline."""

    def style(self) -> FigureStyle:
        width, font = _COLUMNS[self.column] if self.column else (_STYLE.width, _STYLE.font)
        return FigureStyle(
            width=width if self.width is None else self.width,
            dpi=self.dpi,
            font=font if self.font is None else self.font,
            title=not self.no_title,
            captions=not self.no_captions,
        )


def check_output(path: Path) -> None:
    """Raise ValueError, before any work, for another suffix or a missing folder."""
    if not path.name.lower().endswith(_SUFFIXES):
        raise ValueError(f"-o {path}: expected a name that ends in {', '.join(_SUFFIXES)}")
    check_out("-o", path)


def check_picture(option: str, path: Path) -> None:
    """ValueError, before any work, for a file that is no picture, or is in no folder."""
    if path.suffix.lower() not in FIGURE_SUFFIXES:
        raise ValueError(f"{option} {path}: expected a name that ends in {', '.join(FIGURE_SUFFIXES)}")
    check_out(option, path)


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
