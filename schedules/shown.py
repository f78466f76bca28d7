"""Things that show themselves: in a notebook by being the last line of a cell, elsewhere by `show()`.

The views are in `viz`, which imports this package: they load when something is shown, and never before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..viz.exhibit import Exhibit


class Shown:
    """A schedule, a timeline or a plan, as what can be looked at."""

    __slots__ = ()

    def show(self) -> None:
        """Show the timeline page: below the cell of a notebook; else in a browser, where there is one, from a temporary
        file whose path is printed."""
        from ..viz.notebook import show

        show(self)

    def _repr_html_(self) -> str:
        from ..viz.notebook import as_html

        return as_html(self)

    def _exhibit(self) -> Exhibit:
        """Exhibit of its page; ValueError where nothing can be simulated."""
        from ..viz.notebook import exhibit_of

        return exhibit_of(self)
