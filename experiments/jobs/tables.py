"""Tables and plots of a report: their declaration, and the cells that figures fill.

[report]
keys = ["microbatches"]             keys that works add to figures (`Case.also`) or omit
findings = ".bubbles:findings"      findings(figures) -> sentences, each a list item of the report
pictures = ".suite:draw"            draw(figures, folder) -> (title, file name) of each picture written

[[report.tables]]
title = "..."
rows = ["schedule", "ranks"]        case keys: a row for each of their values
columns = "microbatches"            a case key with a column per value; omitted: a column per figure and origin
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

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...partition.strict import Fields, fail
from ...schedules.wording import duration, size
from .case import Case, Value
from .case import shown as shown_value
from .figure import Figure, How, Spread

SCALES = ("linear", "log2", "log10", "bars")
_WORKS = "stagewright.experiments.works"
Where = Mapping[str, Collection[Value]]  # shows cases with one of these values of each key


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    title: str
    rows: tuple[str, ...]
    figures: tuple[str, ...]
    columns: str | None = None
    where: Where = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
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
    """Contents of a report in order: findings, its own pictures, plots, tables; `keys`: that works add or omit."""

    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    findings: str | None = None
    pictures: str | None = None
    keys: tuple[str, ...] = ()


def read_layout(record: Fields | None, *, folder: Path) -> Layout:
    """The layout of [report] (None: an empty one) of a declaration in `folder`."""
    if record is None:
        return Layout()
    findings, pictures = record.optional_text("findings"), record.optional_text("pictures")
    layout = Layout(
        tables=tuple(map(_table, record.objects("tables", default=[]))),
        plots=tuple(map(_plot, record.objects("plots", default=[]))),
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


def names(record: Fields, key: str, *, needed: bool = True) -> tuple[str, ...]:
    words = record.items(key) if needed else record.items(key, default=[])
    if not all(isinstance(word, str) for word in words) or (needed and not words):
        fail(record.at(key), words, "a list of names")
    return tuple(str(word) for word in words)


def function_name(where: str, text: str, folder: Path) -> str:
    """The function named by a field's text, as `user_code.load` takes it.

    A leading dot: in stagewright.experiments.works; a file: relative to `folder`, that of the declaration. Raises
    ValueError, beginning with the field `where`, for text of another form.
    """
    module, colon, function = text.rpartition(":")
    if not (module and colon and function.isidentifier()):
        fail(where, text, "package.module:function, .module:function or file.py:function")
    if module.endswith(".py"):
        return f"{(folder / module).resolve()}:{function}"
    return f"{_WORKS}{text}" if module.startswith(".") else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Repetitions of one figure; `place`: values of the keys that distinguish cells."""

    place: Case
    name: str
    how: How
    unit: str
    spread: Spread
    is_repeated: bool

    def __str__(self) -> str:
        """The median, and the spread of repetitions."""
        median, low, high = (shown(each, self.unit) for each in (self.spread.median, self.spread.low, self.spread.high))
        return f"{median} [{low} .. {high}]" if self.is_repeated else median


def cells(
    figures: Iterable[Figure], *, names: Sequence[str], keys: Sequence[str], where: Where, what: str
) -> list[Cell]:
    """Cells, which `keys` distinguish, in the order of their first figures; `what`: the table or plot, for errors.

    Raises ValueError if several cases would share a cell, or if one figure has several units.
    """
    found: dict[tuple[Case, str, How], list[Figure]] = {}
    for figure in figures:
        if figure.name in names and all(figure.case.get(key) in values for key, values in where.items()):
            found.setdefault((figure.case.only(keys), figure.name, figure.how), []).append(figure)
    made = []
    for (place, name, how), group in found.items():
        fall_together(what, keys, [figure.case for figure in group])
        units = sorted({figure.unit for figure in group})
        if len(units) > 1:
            raise ValueError(f"{what}: {name} for {place} comes in {' and '.join(units)}: expected one unit")
        spread = Spread.of([figure.value for figure in group])
        made.append(Cell(place=place, name=name, how=how, unit=units[0], spread=spread, is_repeated=len(group) > 1))
    return made


def fall_together(what: str, keys: Sequence[str], cases: Iterable[Case]) -> None:
    firsts: dict[Case, Case] = {}
    for case in cases:
        first = firsts.setdefault(case.only(keys), case)
        if case != first:
            differing = [key for key in dict.fromkeys([*first, *case]) if first.get(key) != case.get(key)]
            raise ValueError(
                f"{what}: {first} and {case} fall together, as only {', '.join(keys)} tell cases apart: expected "
                f"{', '.join(differing)} among them, or one of its values in `where`"
            )


def shown(value: float, unit: str) -> str:
    """A value in its unit.

    >>> shown(0.1234, "fraction"), shown(1.0329, "ratio"), shown(0.0123, "s"), shown(2e9, "bytes"), shown(148, "F/s")
    ('12.3%', '1.033', '12.3 ms', '2.00 GB', '148 F/s')
    >>> shown(0.0123, "error")
    '1.23%'
    """
    match unit:
        case "error":
            return f"{value:.2%}"
        case "fraction":
            return f"{value:.1%}"
        case "ratio":
            return f"{value:.3f}"
        case "s":
            return duration(value)
        case "bytes":
            return size(value)
        case _:
            return f"{value:,.4g} {unit}".strip() if abs(value) < 1e4 else f"{value:,.0f} {unit}".strip()


def markdown(table: Table, figures: Sequence[Figure]) -> str:
    """The table with its title, or a line that there are no figures for it. Raises ValueError as `cells`."""
    found = cells(figures, names=table.figures, keys=table.keys, where=table.where, what=f"table {table.title!r}")
    if not found:
        return f"**{table.title}**\n\nNo figures yet."
    heads = {_head(cell, table): None for cell in sorted(found, key=lambda cell: _rank(cell, table))}
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for cell in found:
        rows.setdefault(_row(cell, table), {})[_head(cell, table)] = cell
    named = [*table.rows, *(["figure"] if table.columns else [])]
    lines = [[*named, *heads], ["---"] * (len(named) + len(heads))]
    lines += [[*row, *(str(own[head]) if head in own else "" for head in heads)] for row, own in rows.items()]
    return f"**{table.title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _head(cell: Cell, table: Table) -> str:
    if table.columns is None:
        return f"{cell.name}, {cell.how.value}"
    return f"{table.columns}={_value(cell.place, table.columns)}"


def _row(cell: Cell, table: Table) -> tuple[str, ...]:
    row = tuple(_value(cell.place, key) for key in table.rows)
    return row if table.columns is None else (*row, f"{cell.name}, {cell.how.value}")


def _rank(cell: Cell, table: Table) -> tuple[int, int]:
    return (0, 0) if table.columns else (table.figures.index(cell.name), list(type(cell.how)).index(cell.how))


def _value(case: Case, key: str) -> str:
    value = case.get(key)
    return "" if value is None else shown_value(value)
