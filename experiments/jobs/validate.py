"""Mistakes in a declaration that would show only when its jobs have run: keys, values and figures of its report."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...partition.strict import fail
from ...schedules.custom.user_code import check_call, load
from .case import Case
from .cells import fall_together
from .declaration import Declaration, Part
from .layout import Plot, Table

_KEY_FIELDS = ("rows", "columns", "x", "lines", "panels", "where")


def check_code(declaration: Declaration) -> None:
    """Raise ValueError for a function that is not there or takes other arguments; UserCodeError as `load` does."""
    layout = declaration.layout
    named = [(f"parts[{at}]: work", part.work, 2) for at, part in enumerate(declaration.parts)]
    named += [("report: findings", layout.findings or "", 1), ("report: pictures", layout.pictures or "", 2)]
    for field, name, num_arguments in named:
        if name:
            option = f"{declaration.typed}: {field}="
            check_call(option, name, load(option, name), num_arguments=num_arguments)


def check_layout(declaration: Declaration) -> None:
    """Raise ValueError for a table or plot that no part can fill; nothing is known of the values of [report]'s keys."""
    layout, where = declaration.layout, f"{declaration.typed}: report"
    all_shown: dict[str, Table | Plot] = {f"{where}: tables[{at}]": table for at, table in enumerate(layout.tables)}
    all_shown |= {f"{where}: plots[{at}]": plot for at, plot in enumerate(layout.plots)}
    for here, shown in all_shown.items():
        _check_keys(shown, declaration.parts, layout.keys, here)
        _check_figures(shown, declaration.parts, layout.keys, here)


def _check_keys(shown: Table | Plot, parts: Sequence[Part], free: Collection[str], where: str) -> None:
    values: dict[str, list[object]] = {key: [] for key in free}
    for key, value in (item for part in parts for case in part.cases for item in case.items):
        values.setdefault(key, []).append(value)
    for field in _KEY_FIELDS:
        given = getattr(shown, field, None) or ()
        for key in (given,) if isinstance(given, str) else given:
            if key not in values:
                fail(f"{where}: {field}", key, f"a key of the cases ({', '.join(sorted(values))})")
    for key, value in ((key, value) for key, some in shown.where.items() for value in some if key not in free):
        if value not in values[key]:
            known = ", ".join(map(str, dict.fromkeys(values[key])))
            fail(f"{where}: where: {key}", value, f"a value that cases have ({known})")


def _check_figures(shown: Table | Plot, parts: Sequence[Part], free: Collection[str], where: str) -> None:
    known = sorted({name for part in parts for name in part.figures})
    for name in shown.figures:
        if name not in known:
            field = "y" if isinstance(shown, Plot) else "figures"
            fail(f"{where}: {field}", name, f"a name in `figures` of [[parts]] ({', '.join(known) or 'none'})")
        of_parts = [_shown_cases(shown, part, free) for part in parts if name in part.figures]
        for cases in of_parts:
            if isinstance(shown, Plot) and shown.x not in free:
                _check_axis(shown, cases, f"{where}: x")
            if set(free).isdisjoint(shown.keys):
                fall_together(where, shown.keys, [case.only(key for key in case if key not in free) for case in cases])
        if not any(of_parts):
            fail(f"{where}: where", dict(shown.where), f"a case of a part that gives {name!r}")


def _shown_cases(shown: Table | Plot, part: Part, free: Collection[str]) -> list[Case]:
    def is_shown(case: Case) -> bool:
        has_x = isinstance(shown, Table) or shown.x in free or shown.x in case
        return has_x and all(key in free or case.get(key) in values for key, values in shown.where.items())

    return list(filter(is_shown, part.cases))


def _check_axis(plot: Plot, cases: Sequence[Case], where: str) -> None:
    is_log = plot.x_scale != "linear"
    for value in (case.values[plot.x] for case in cases):
        if isinstance(value, bool) or not isinstance(value, int | float) or (is_log and value <= 0):
            fail(f"{where}: {plot.x}", value, "numbers above 0, for that scale" if is_log else "numbers on the x axis")
