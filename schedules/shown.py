"""Things that show themselves: in a notebook by being the last line of a cell, elsewhere by `show()`.

The views are in `viz`, which imports this package: they load when something is shown, and never before.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def notebook() -> Any:
    """The views' module, named and not imported: nothing here depends on it."""
    return import_module("..viz.notebook", __package__)


class Displayable:
    """A schedule, a timeline or a plan, as what can be looked at."""

    __slots__ = ()

    def show(self) -> None:
        """Show the timeline page: below the cell of a notebook; else in a browser, where there is one, from a temporary
        file whose path is printed."""
        notebook().show(self)

    def _repr_html_(self) -> str:
        return str(notebook().as_html(self))

    def _exhibit(self) -> Any:
        """Exhibit of its page; ValueError where nothing can be simulated."""
        return notebook().exhibit_of(self)
