"""Files that exhibits are written to, one writer a kind, told by the end of the file's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ...viz import (
    Exhibit,
    FigureStyle,
    comparison_figure,
    write_explorer,
    write_figure,
    write_kineto,
    write_perfetto,
)
from ...viz.traces.kineto import KINETO_SUFFIXES

Writer = Callable[[Sequence[Exhibit], Path, FigureStyle], list[Path]]  # returns what it wrote


def writer_of(path: Path) -> Writer:
    """The function that writes a file of this name; ValueError where there is none."""
    writers: dict[str, Writer] = {
        **dict.fromkeys(KINETO_SUFFIXES, _write_kineto),
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
    if path.name.lower().endswith(KINETO_SUFFIXES):
        return ""
    told = {".json": ": open it at https://ui.perfetto.dev", ".html": ": open it in a browser"}
    return told.get(path.suffix.lower(), "")


def _write_page(exhibits: Sequence[Exhibit], path: Path, style: FigureStyle) -> list[Path]:
    del style
    write_explorer(exhibits, path)
    return [path]


def _write_figure(exhibits: Sequence[Exhibit], path: Path, style: FigureStyle) -> list[Path]:
    write_figure(comparison_figure(exhibits, style=style), path)
    return [path]


def _write_perfetto(exhibits: Sequence[Exhibit], path: Path, style: FigureStyle) -> list[Path]:
    del style
    several = len(exhibits) > 1
    named = [(f"{each.name} {c}" if several else c, t) for each in exhibits for c, t in each.timelines]
    if not named:
        raise _without_timeline(path, exhibits[0])
    write_perfetto(named, path)
    return [path]


def _write_kineto(exhibits: Sequence[Exhibit], path: Path, style: FigureStyle) -> list[Path]:
    """The newest measured step, or the prediction, of one exhibit: a rank has one file, and its tools know no more."""
    del style
    if len(exhibits) > 1:
        names = ", ".join(exhibit.name for exhibit in exhibits)
        raise ValueError(f"-o {path}: {names}: expected one input, since these files hold one timeline")
    exhibit = exhibits[0]
    if not exhibit.timelines:
        raise _without_timeline(path, exhibit)
    step = exhibit.measured[-1].number if exhibit.measured else 0
    return write_kineto(exhibit.timelines[-1][1], path, step=step)


def _without_timeline(path: Path, exhibit: Exhibit) -> ValueError:
    return ValueError(
        f"-o {path}: {exhibit.name} has no timeline, only slices of an unknown kind: expected .html, .png, .svg"
    )
