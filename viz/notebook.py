"""Schedules, timelines and plans in notebooks, and in a browser from a terminal.

last line of a cell ---> `as_html` ---> the page in a sandboxed frame, or a sentence if it is too large
show(thing)         ---> the same in a notebook; else a temporary file, a browser, and the path

The package's `__init__` registers `as_html` with IPython, so that `schedules` does not depend on the views.
"""

from __future__ import annotations

import html
import os
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Protocol, TypeAlias

from ..schedules import Costs, Schedule, Timeline, simulate
from ..schedules.timing.timeline import MeasuredStep
from .exhibit import Exhibit
from .explorer import explorer_html, write_explorer

_MAX_ACTIONS = 10_000  # in a cell: a notebook keeps its page, about 2 MB
_HEADER, _PANEL, _ROW, _LEAST, _MOST = 300, 42, 40, 540, 900  # height of a frame [pixels]


class Exhibited(Protocol):
    """An object that makes its own exhibit: a plan."""

    def exhibit(self) -> Exhibit: ...


Displayable: TypeAlias = Schedule | Timeline | Exhibited


def _exhibit_of(shown: Displayable) -> Exhibit:
    match shown:
        case Schedule():
            costs = Costs()
            note = f"{shown.name}: a forward takes 1 s here and a backward 2 s, with free links"
            return Exhibit(name=shown.name, simulated=simulate(shown, costs), costs=costs, notes=(note,))
        case Timeline(measured=True):
            return Exhibit(name=shown.schedule.name, measured=(MeasuredStep(0, shown),))
        case Timeline():
            return Exhibit(name=shown.schedule.name, simulated=shown)
    return shown.exhibit()


def as_html(shown: Displayable) -> str:
    """The page of a thing in a frame, or a sentence without one: what a notebook shows."""
    try:
        exhibit = _exhibit_of(shown)
    except ValueError as error:
        return _sentence(f"{shown!r}: {error}")
    actions = sum(len(trace.compute) for _, timeline in exhibit.timelines for trace in timeline.ranks)
    if actions > _MAX_ACTIONS:
        return _sentence(
            f"{shown!r} has {actions:,} actions, too many for a notebook, which takes {_MAX_ACTIONS:,}: "
            f"write_explorer([Exhibit(...)], path) writes them as a page, comparison_figure draws a picture."
        )
    # Scripts may run in the frame, and reach nothing outside of it: neither the notebook nor a network.
    return (
        f'<iframe title="{html.escape(f"Timeline of {exhibit.name}")}" sandbox="allow-scripts" '
        f'style="width: 100%; height: {_height(exhibit)}px; border: 1px solid #e1e5ea; border-radius: 6px" '
        f'srcdoc="{html.escape(explorer_html([exhibit]))}"></iframe>'
    )


def show(shown: Displayable) -> None:
    """Show the timeline page: below the cell of a notebook; else in a browser, if there is one, from a temporary file
    whose path is printed."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if ipython is not None and hasattr(shell, "kernel"):
        ipython.display.display(shown)
        return
    descriptor, name = tempfile.mkstemp(prefix="stagewright-", suffix=".html")
    os.close(descriptor)
    write_explorer([_exhibit_of(shown)], name)
    # Without a window, a browser would take over the terminal.
    has_screen = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    opened = has_screen and webbrowser.open(Path(name).as_uri())
    print(f"{name}{'' if opened else ': open it in a browser'}")


def _height(exhibit: Exhibit) -> int:
    rows = sum(len(timeline.ranks) for _, timeline in exhibit.timelines)
    return min(max(_HEADER + _PANEL * len(exhibit.timelines) + _ROW * rows, _LEAST), _MOST)


def _sentence(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"
