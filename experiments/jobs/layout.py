"""Parts of a report, as the declaration says.

[report]
keys = ["microbatches"]             that works set in figures (`Case.also`) or leave out
findings = ".bubbles:findings"      findings(figures) -> sentences, each a list item of the report
pictures = ".schedule_map:draw"     draw(figures, folder) -> (title, name of the file) of each picture that it wrote

[[report.tables]]
title = "..."
rows = ["schedule", "ranks"]        case keys: a row for each of their values
columns = "microbatches"            a case key, whose values go across; left away: figures by how they were got
figures = ["bubble"]                names of figures
where = { ranks = [2, 4, 8] }       only these cases

[[report.plots]]
file = "bubbles"                    bubbles.png
title = "..."
x = "microbatches"                  a case key
y = "bubble"                        name of a figure
lines = ["schedule"]                case keys: a colour for each of their values
panels = "ranks"                    a case key: axes side by side
where = { ranks = [2, 4, 8] }
x_scale = "log2"                    "linear" (the default), "log2", "log10" or "bars": grouped; likewise y_scale
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...partition.strict import Fields, fail
from .case import Value

SCALES = ("linear", "log2", "log10", "bars")
_WORKS = "stagewright.experiments.works"
Where = Mapping[str, Collection[Value]]  # cases that are shown have one of these values of each key


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    title: str
    rows: tuple[str, ...]
    figures: tuple[str, ...]
    columns: str | None = None
    where: Where = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        """Names that tell its cells apart."""
        return (*self.rows, *([self.columns] if self.columns else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    file: str
    title: str
    x: str
    y: str
    lines: tuple[str, ...] = ()
    panels: str | None = None
    where: Where = field(default_factory=dict)
    x_scale: str = "linear"
    y_scale: str = "linear"

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.x, *self.lines, *([self.panels] if self.panels else []))

    @property
    def figures(self) -> tuple[str, ...]:
        return (self.y,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All that a report shows, in order: findings, pictures of its own, plots, tables.

    Arguments:
        keys: that works set in figures, or leave out.
    """

    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    findings: str | None = None
    pictures: str | None = None
    keys: tuple[str, ...] = ()


def read_layout(record: Fields | None, *, folder: Path) -> Layout:
    """The layout of [report], None: an empty one.

    Arguments:
        folder: of the declaration.
    """
    if record is None:
        return Layout()
    findings, pictures = record.optional_text("findings"), record.optional_text("pictures")
    layout = Layout(
        tables=tuple(map(_table, _objects(record, "tables"))),
        plots=tuple(map(_plot, _objects(record, "plots"))),
        findings=None if findings is None else function_name(record.at("findings"), findings, folder),
        pictures=None if pictures is None else function_name(record.at("pictures"), pictures, folder),
        keys=names(record, "keys", needed=False),
    )
    record.done()
    files = [plot.file for plot in layout.plots]
    if len(set(files)) < len(files):
        fail(record.at("plots"), files, "unique names of files")
    return layout


def _table(record: Fields) -> Table:
    given = {"rows": names(record, "rows"), "figures": names(record, "figures"), "where": _where(record)}
    return record.made(Table, given)


def _plot(record: Fields) -> Plot:
    given = {"lines": names(record, "lines", needed=False), "where": _where(record)}
    plot = record.made(Plot, given, choices={"x_scale": SCALES, "y_scale": SCALES[:-1]})
    if not plot.file.replace("-", "").isalnum():
        fail(record.at("file"), plot.file, "letters, digits and hyphens, without an ending: it is a PNG")
    return plot


def _where(record: Fields) -> Where:
    given = record.take("where", "a table of case keys and values", default={})
    if not isinstance(given, dict):
        fail(record.at("where"), given, "a table of case keys and values")
    return {key: values if isinstance(values, list) else [values] for key, values in given.items()}


def _objects(record: Fields, key: str) -> list[Fields]:
    return [Fields(value, where=f"{record.at(key)}[{i}]") for i, value in enumerate(record.items(key, default=[]))]


def names(record: Fields, key: str, *, needed: bool = True) -> tuple[str, ...]:
    """A field that is a list of names; empty where it is missing and not needed."""
    words = record.items(key) if needed else record.items(key, default=[])
    if not all(isinstance(word, str) for word in words) or (needed and not words):
        fail(record.at(key), words, "a list of names")
    return tuple(str(word) for word in words)


def function_name(where: str, text: str, folder: Path) -> str:
    """The function that a field's text names, as `user_code.load` takes it.

    A leading dot: in stagewright.experiments.works; a file: seen from `folder`, that of the declaration. ValueError
    begins with `where`, the field, for text of no such form.
    """
    module, colon, function = text.rpartition(":")
    if not (module and colon and function.isidentifier()):
        fail(where, text, "package.module:function, .module:function or file.py:function")
    if module.endswith(".py"):
        return f"{(folder / module).resolve()}:{function}"
    return f"{_WORKS}{text}" if module.startswith(".") else text
