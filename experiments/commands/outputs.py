"""Files that exhibits are written to, one writer a kind, told by the end of the file's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ...viz import Exhibit, FigureStyle, comparison_figure, write_explorer, write_figure, write_perfetto

Writer = Callable[[Sequence[Exhibit], Path, FigureStyle], None]


def writer_of(path: Path) -> Writer:
    """The function that writes a file of this name; ValueError where there is none."""
    writers: dict[str, Writer] = {
        ".html": _write_page,
        ".png": _write_figure,
        ".svg": _write_figure,
        ".json": _write_perfetto,
    }
    for suffix, write in writers.items():
        if path.name.lower().endswith(suffix):
            return write
    raise ValueError(f"-o {path}: expected a name that ends in {', '.join(reversed(writers))}")


def how_to_look(path: Path) -> str:
    """Words behind a file's name that say what to open it with."""
    told = {".json": ": open it at https://ui.perfetto.dev", ".html": ": open it in a browser"}
    return told.get(path.suffix.lower(), "")


def _write_page(exhibits: Sequence[Exhibit], path: Path, style: FigureStyle) -> None:
    del style
    write_explorer(exhibits, path)


def _write_figure(exhibits: Sequence[Exhibit], path: Path, style: FigureStyle) -> None:
    write_figure(comparison_figure(exhibits, style=style), path)


def _write_perfetto(exhibits: Sequence[Exhibit], path: Path, style: FigureStyle) -> None:
    del style
    several = len(exhibits) > 1
    named = [(f"{each.name} {c}" if several else c, t) for each in exhibits for c, t in each.timelines]
    write_perfetto(named, path)
