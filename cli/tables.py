"""Tables printed by rich."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..schedules.wording import duration

if TYPE_CHECKING:
    from rich.table import Table


def console() -> Any:
    """Console for tables: as wide as the terminal; in a file wide enough for all columns."""
    from rich.console import Console

    return Console(highlight=False) if sys.stdout.isatty() else Console(width=150, highlight=False)


def table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """An empty table with text columns `left` followed by number columns `right`."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in left:
        made.add_column(name)
    for name in right:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def signed(seconds: float) -> str:
    """A change in time, with its sign."""
    return f"{'+' if seconds > 0 else ''}{duration(seconds)}"
