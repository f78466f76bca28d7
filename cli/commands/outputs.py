"""Files that exhibits are written to, by the suffix of the file's name. What draws is loaded with the first file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from ..options import check_out, plain_help

if TYPE_CHECKING:
    from ...viz import Exhibit, FigureStyle

_PICTURES = (".png", ".svg", ".pdf")
_SUFFIXES = (*_PICTURES, ".html", ".json")
_COLUMNS = {"one": (3.5, 6.0), "two": (7.16, 7.0)}  # inch, points


# Without slots, so that a command's options may have these and others as bases.
@plain_help
@dataclass(frozen=True, kw_only=True)
class PictureOptions:
    """How pictures are drawn."""

    column: Literal["one", "two"] | None = None
    """Width of a picture for a paper with two columns a page: over one of them, or over both."""
    width: float | None = None
    """Width of a picture [inch] (default: 16, of plan --check 9, or as --column says)."""
    dpi: float | None = None
    """Pixels an inch of a PNG (default: 100)."""
    font: float | None = None
    """Size of a picture's words [points] (default: 9.5, or as --column says)."""
    no_title: tyro.conf.FlagCreatePairsOff[bool] = False
    """Leave the title to a paper's caption."""

    def style(self, usual: FigureStyle | None = None) -> FigureStyle:
        """The look of a picture, which without these options is `usual`."""
        from ...viz import FigureStyle

        usual = FigureStyle() if usual is None else usual
        width, font = _COLUMNS[self.column] if self.column else (usual.width, usual.font)
        return replace(
            usual,
            width=width if self.width is None else self.width,
            dpi=usual.dpi if self.dpi is None else self.dpi,
            font=font if self.font is None else self.font,
            title=not self.no_title,
        )


@plain_help
@dataclass(frozen=True, kw_only=True)
class TimelinePictureOptions(PictureOptions):
    """How pictures of timelines are drawn."""

    no_captions: tyro.conf.FlagCreatePairsOff[bool] = False
    """Leave out the line above each timeline."""

    def style(self, usual: FigureStyle | None = None) -> FigureStyle:
        return replace(super().style(usual), captions=not self.no_captions)


def check_output(path: Path, *, sources: Sequence[str] = ()) -> None:
    """Raise ValueError, before any work, for another suffix, a missing folder, or a file that is read, too."""
    if any(path.exists() and Path(each).exists() and path.samefile(each) for each in sources):
        raise ValueError(f"-o {path}: expected another file than the one that is read")
    if not path.name.lower().endswith(_SUFFIXES):
        raise ValueError(f"-o {path}: expected a name that ends in {', '.join(_SUFFIXES)}")
    check_out("-o", path)


def check_picture(path: Path) -> None:
    """ValueError, before any work, for a file that is no picture, or is in no folder."""
    if path.suffix.lower() not in _PICTURES:
        raise ValueError(f"-o {path}: expected a name that ends in {', '.join(_PICTURES)}")
    check_out("-o", path)


def write_output(exhibits: Sequence[Exhibit], path: Path, style: FigureStyle) -> str:
    """Write the file. Returns the text to print after its name: what opens it."""
    from ...viz import comparison_figure, write_explorer, write_figure, write_perfetto

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
