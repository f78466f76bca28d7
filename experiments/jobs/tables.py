"""Tables of a report, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from .case import Case
from .case import shown as shown_value
from .cells import Cell, cells
from .figure import Figure
from .layout import Table


def markdown(table: Table, figures: Sequence[Figure]) -> str:
    """The table with its title; ValueError as `cells`. A table for which there is no figure says so."""
    keys = (*table.rows, *([table.columns] if table.columns else []))
    found = cells(figures, names=table.figures, keys=keys, where=table.where, what=f"table {table.title!r}")
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
