"""Figures gathered into cells, a cell for each thing that a table or a plot shows: median and spread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...schedules.wording import duration, size
from .case import Case
from .case import shown as shown_value
from .figure import Figure, How, Spread
from .layout import Table, Where


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Repetitions of one figure.

    Arguments:
        place: the values of the keys that tell cells apart.
    """

    place: Case
    name: str
    how: How
    unit: str
    spread: Spread
    is_repeated: bool

    def __str__(self) -> str:
        """The median, and the spread where there are repetitions."""
        median, low, high = (shown(each, self.unit) for each in (self.spread.median, self.spread.low, self.spread.high))
        return f"{median} [{low} .. {high}]" if self.is_repeated else median


def cells(
    figures: Iterable[Figure], *, names: Sequence[str], keys: Sequence[str], where: Where, what: str
) -> list[Cell]:
    """Cells in the order in which their figures first come.

    Arguments:
        names: of the figures.
        keys: that tell cells apart.
        where: which cases.
        what: is made of them, for errors.

    Raises ValueError where several cases would share a cell, or one figure comes in several units.
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
    """Raise ValueError where several cases have the same values of `keys`."""
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
    """
    match unit:
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
    """The table with its title; ValueError as `cells`. A table for which there is no figure says so."""
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
    """Columns of figures stand in the table's order and by how they were got; others as they come."""
    return (0, 0) if table.columns else (table.figures.index(cell.name), list(type(cell.how)).index(cell.how))


def _value(case: Case, key: str) -> str:
    value = case.get(key)
    return "" if value is None else shown_value(value)
