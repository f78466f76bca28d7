"""Declaration of an experiment, a small TOML file.

question = "..."              one line

[[parts]]                     one or several, each with work of its own
name = "emulated"
work = ".bubbles:emulated"    work(case, repetitions) -> figures; a leading dot: in stagewright.experiments.works
on = "ranks"                  "cores": one process per job, as many jobs at once as there are cores;
                              "ranks": on all ranks of a back end, rank 0's figures count
figures = ["bubble"]          names of all its figures, for tables and plots
repetitions = 3
timeout = 600                 [s] of a job
together = ["ranks"]          cases with equal values of these keys are one job
backend = "netns"             of "ranks", unless --backend names another
environment = { NAME = "1" }  variables of its processes

[[parts.cases]]               one or several grids: a list means each of its members in turn
schedule = ["gpipe", "1f1b"]
ranks = [2, 4]                for "ranks", the back end must provide these: see `case.nodes_of`

[report]                      see `tables.py`
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...cli.options import check_known
from ...partition.strict import Fields, fail, printable
from ...schedules.custom.user_code import check_call, load
from ..backends.registry import BACKENDS
from .case import Case, grid, nodes_of
from .tables import Layout, Plot, Table, fall_together, function_name, names, read_layout

_CATALOG = Path(__file__).resolve().parents[1] / "catalog"
_KEY_FIELDS = ("rows", "columns", "x", "lines", "panels", "where")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Cases with one kind of work."""

    name: str  # unique in the experiment
    work: str  # "package.module:function" or "file.py:function"
    on_ranks: bool  # whether the function runs on all ranks of a back end, or in one process
    cases: tuple[Case, ...]  # at least one, no two equal
    figures: tuple[str, ...] = ()  # names of all figures of the work; empty: not declared
    repetitions: int = 1  # passed to the work
    timeout: float = 600.0  # of a job [s]
    # keys; cases with equal values of these are one job. None: in one process each case is a job; on ranks all cases
    # that need the same nodes are one.
    together: tuple[str, ...] | None = None
    backend: str = "local"
    environment: tuple[tuple[str, str], ...] = ()  # additional variables of its processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """An experiment."""

    name: str  # the file's, without ".toml"
    question: str  # in one line
    parts: tuple[Part, ...]  # at least one
    layout: Layout
    typed: str  # as for `stagewright experiment`: the name, or "NAME.toml" for the user's own file

    @classmethod
    def load(cls, path: Path) -> Declaration:
        """Read the user's own TOML file. Raises ValueError that names file, key, value and expectation."""
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror or error}: expected the declaration of an experiment") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}: expected a TOML file") from None
        return replace(read_declaration(values, name=path.stem, source=str(path)), typed=path.name)


def catalog_names() -> list[str]:
    """Names of the package's own experiments: one TOML file each in `experiments/catalog/`."""
    return sorted(path.stem for path in _CATALOG.glob("*.toml"))


def find_declaration(name: str) -> Declaration:
    """The experiment of this name or file (`my.toml`). Raises ValueError, with near matches, if there is none."""
    if name.endswith(".toml"):
        return Declaration.load(Path(name))
    check_known("unknown experiment", name, catalog_names(), listed="experiments")
    return replace(Declaration.load(_CATALOG / f"{name}.toml"), typed=name)


def read_declaration(values: Mapping[str, object], *, name: str, source: str) -> Declaration:
    """The declaration in these values. Raises ValueError that names `source`, key, value and expectation."""
    record = Fields(values, where=source)
    question = printable(record.at("question"), record.text("question"))
    parts = tuple(_part(each, folder=Path(source).parent) for each in record.objects("parts"))
    if not parts:
        fail(record.at("parts"), [], "at least one [[parts]]")
    called = [part.name for part in parts]
    if len(set(called)) < len(called):
        fail(record.at("parts"), called, "unique names")
    layout = read_layout(record.optional_object("report"), folder=Path(source).parent)
    record.done()
    return Declaration(name=name, question=question, parts=parts, layout=layout, typed=name)


def _part(record: Fields, *, folder: Path) -> Part:
    on_ranks = record.text("on", choices=("cores", "ranks")) == "ranks"
    backend = record.text("backend", choices=tuple(BACKENDS), default="local") if on_ranks else "local"
    given = {
        "name": _file_name(record),
        "work": function_name(record.at("work"), record.text("work"), folder),
        "on_ranks": on_ranks,
        "cases": _cases(record),
        "figures": names(record, "figures", needed=False),
        "together": _together(record),
        "backend": backend,
        "environment": _environment(record),
    }
    part = record.made(Part, given, positive=("timeout",))
    for case in part.cases if on_ranks else ():
        try:
            nodes_of(case)
        except ValueError as error:
            raise ValueError(f"{record.where}: {error}") from None
    for key in part.together or ():
        if all(key not in case for case in part.cases):
            known = ", ".join(sorted({key for case in part.cases for key in case}))
            fail(record.at("together"), key, f"a key of the cases ({known})")
    return part


def _file_name(record: Fields) -> str:
    name = record.text("name")
    if not name.replace("-", "").replace("_", "").isalnum():
        fail(record.at("name"), name, "letters, digits and hyphens: it names a folder")
    return name


def _cases(record: Fields) -> tuple[Case, ...]:
    cases: list[Case] = []
    for at, values in enumerate(record.items("cases")):
        where = f"{record.at('cases')}[{at}]"
        if not isinstance(values, dict):
            fail(where, values, "a table of values")
        try:
            cases += grid(values)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if not cases:
        fail(record.at("cases"), [], "at least one [[parts.cases]]")
    twice = next((case for at, case in enumerate(cases) if case in cases[:at]), None)
    if twice is not None:
        fail(record.at("cases"), str(twice), "each case once")
    return tuple(cases)


def _together(record: Fields) -> tuple[str, ...] | None:
    found = record.take("together", "a list of keys", default=None)
    if found is None:
        return None
    if not (isinstance(found, list) and all(isinstance(key, str) for key in found)):
        fail(record.at("together"), found, "a list of keys of the cases")
    return tuple(found)


def _environment(record: Fields) -> tuple[tuple[str, str], ...]:
    found = record.take("environment", "a table of variables", default={})
    if not (isinstance(found, dict) and all(isinstance(value, str) for value in found.values())):
        fail(record.at("environment"), found, "a table of variables, each a text")
    return tuple(found.items())


# --- errors that would otherwise show only after the jobs: functions, keys, values and figures of the report ---


def check_code(declaration: Declaration) -> None:
    """Raise ValueError for a missing function or one with other arguments; UserCodeError as `load` does."""
    layout = declaration.layout
    named = [(f"parts[{at}]: work", part.work, 2) for at, part in enumerate(declaration.parts)]
    named += [("report: findings", layout.findings or "", 1), ("report: pictures", layout.pictures or "", 2)]
    for field, name, num_arguments in named:
        if name:
            option = f"{declaration.typed}: {field}="
            check_call(option, name, load(option, name), num_arguments=num_arguments)


def check_layout(declaration: Declaration) -> None:
    """Raise ValueError for a table or plot that no part can fill, apart from values of [report]'s keys."""
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
