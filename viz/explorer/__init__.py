"""The timeline explorer: one HTML file that draws, zooms and explains, and loads nothing from outside.

    template.html + style.css + scripts in this order + page_data(exhibits) as JSON ---> out.html

The scripts share one object, `stagewright`. An extension (such as "what if") is a script that calls
`stagewright.extend(name, mount)`, and a function that returns its data for an exhibit: a line in `_EXTENSIONS`.
`mount({app, exhibit, data})` is called for every exhibit with data; `app.panels.section(id, heading)` gives it a place
at the right, and `exhibit.suppose(caption, panel)` with `app.refresh()` shows another timeline below the simulated one.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..exhibit import Exhibit
from .data import page_data
from .whatif_data import whatif_data

__all__ = ["explorer_html", "write_explorer"]

_SCRIPTS = "model words rows view frame draw layers marks panels search selection svg save link input"
# name -> its scripts, the last of which extends the page, and the function that returns the data of an exhibit
_EXTENSIONS: dict[str, tuple[str, Callable[[Exhibit], Any]]] = {
    "whatif": ("replay replay_panel whatif", whatif_data),
}
_LAST_SCRIPTS = "lists orders editor start"


def write_explorer(exhibits: Sequence[Exhibit], path: str | Path) -> None:
    """Write the page of `explorer_html` to an HTML file."""
    Path(path).write_text(explorer_html(exhibits), encoding="utf-8")


def explorer_html(exhibits: Sequence[Exhibit]) -> str:
    """One self-contained page with the exhibits below each other on one time scale.

    The same exhibits always give the same text. O(actions + messages).

    Raises ValueError without exhibits.
    """
    if not exhibits:
        raise ValueError("exhibits=[]: expected at least one Exhibit")
    data = page_data(exhibits)
    for shown, exhibit in zip(data["exhibits"], exhibits, strict=True):
        shown["extras"] = {name: give(exhibit) for name, (_, give) in _EXTENSIONS.items()}
    of_extensions = [script for own, _ in _EXTENSIONS.values() for script in own.split()]
    scripts = [f"{name}.js" for name in (*_SCRIPTS.split(), *of_extensions, *_LAST_SCRIPTS.split())]
    parts = {
        "TITLE": html.escape(" / ".join(exhibit.name for exhibit in exhibits)),
        "STYLE": _read("style.css"),
        "SCRIPT": "\n".join(
            [
                "const stagewright = { extensions: [], extend(name, mount) { this.extensions.push([name, mount]); } };",
                *map(_read, scripts),
            ]
        ),
        "DATA": _json_in_html(data),
    }
    page = _read("template.html").split("@@")  # text, name, text, name, ..., text
    return "".join(parts[piece] if at % 2 else piece for at, piece in enumerate(page))


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _json_in_html(data: object) -> str:
    """JSON in which nothing can end the script element around it, or begin a comment there."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
