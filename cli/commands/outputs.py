"""Files that exhibits are written to, by the suffix of the file's name. What draws is loaded with the first file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from ..options import check_out, plain_help

if TYPE_CHECKING:
    from ...viz import Exhibit, FigureStyle

PICTURES = (".png", ".svg", ".pdf")
_SUFFIXES = (*PICTURES, ".html", ".json")
_TRACE = ".perfetto.json"
_OF_RUNS = frozenset({"manifest.json", "summary.json", "plan.json", "timeline.json"})
_COLUMNS = {"one": (3.5, 6.0), "two": (7.16, 7.0)}  # inch, points


# Without slots, so that a command's options may have these and others as bases.
@plain_help
@dataclass(frozen=True, kw_only=True)
class PictureOptions:
    """How pictures are drawn."""

    # Width of a picture for a paper with two columns a page: over one of them, or over both.
    column: Literal["one", "two"] | None = None
    width: float | None = None  # Width of a picture [inch] (default: 16, of plan --check 9, or as --column says).
    dpi: float | None = None  # Pixels an inch of a PNG (default: 100).
    font: float | None = None  # Size of a picture's words [points] (default: 9.5, or as --column says).
    no_title: tyro.conf.FlagCreatePairsOff[bool] = False  # Leave the title to a paper's caption.

    def check_output(self, out: Sequence[Path], *, sources: Sequence[str], suffixes: Sequence[str] = _SUFFIXES) -> None:
        """Raise ValueError, before any work, for files that cannot be written, or are read as `sources`, and for a look
        that no file takes."""
        for path in out:
            if not path.name.lower().endswith(tuple(suffixes)):
                raise ValueError(f"-o {path}: expected a name that ends in {', '.join(suffixes)}")
            check_out("-o", path, sources=sources)
            _keep_files_of_runs(path)
        for name in ("column", "width", "dpi", "font"):
            value = getattr(self, name)
            if value is not None and not any(path.name.lower().endswith(PICTURES) for path in out):
                raise ValueError(f"--{name} {value} without a picture: expected -o with {' or '.join(PICTURES)}, too")

    def style(self, **usual: Any) -> FigureStyle:
        """The look of a picture, with fields of `FigureStyle` that are not as usual. Raises ValueError that names the
        option."""
        from ...viz import FigureStyle

        if self.column is not None:
            usual["width"], usual["font"] = _COLUMNS[self.column]
        given = {name: value for name in ("width", "dpi", "font") if (value := getattr(self, name)) is not None}
        try:
            return FigureStyle(**usual | given, title=not self.no_title)
        except ValueError as error:
            raise ValueError(f"--{str(error).replace('=', ' ', 1)}") from None


@plain_help
@dataclass(frozen=True, kw_only=True)
class TimelinePictureOptions(PictureOptions):
    """How pictures of timelines are drawn."""

    no_captions: tyro.conf.FlagCreatePairsOff[bool] = False  # Leave out the line above each timeline.

    def style(self, **usual: Any) -> FigureStyle:
        return super().style(**usual, captions=not self.no_captions)


def _keep_files_of_runs(path: Path) -> None:
    """Raise ValueError for a file that a run, or the tracer of a training loop, has written into its folder, and for a
    trace of another tool."""
    folder = path.parent
    is_of_run = (folder / "manifest.json").exists() or any(folder.glob("trace.rank*.jsonl"))
    another = f"expected another one, such as {path.with_suffix('')}{_TRACE}"
    if path.exists() and path.name.lower() in _OF_RUNS and is_of_run:
        raise ValueError(f"-o {path}: a file of the run: {another}")
    if path.exists() and path.name.lower().endswith(".json"):
        from ...viz.foreign import is_trace, read_text
        from ...viz.perfetto import OWN_KEY

        if is_trace(text := read_text(path)) and OWN_KEY not in text:
            raise ValueError(f"-o {path}: a trace of another tool, such as torch.profiler: {another}")


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
