"""Results of an experiment: the figures of all finished jobs, and their origin."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ...cli.options import read_file
from ...cli.train.run_folder import read_whole, write_whole
from ...partition.strict import parse_object, read_text
from ...schedules.wording import count
from .declaration import Declaration
from .figure import Figure, read_figures, write_figures
from .job import State, Status, difference, jobs_of

_NAMED = 3  # names of missing jobs, for each reason
FIGURES_FILE, ORIGIN_FILE = "results.jsonl", "origin.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Conditions of the figures, each value once."""

    codes: tuple[str, ...]  # versions of the code
    machines: tuple[str, ...]  # processor and cores, without host names
    days: tuple[str, ...]  # on which jobs began, YYYY-MM-DD
    changes: tuple[str, ...]  # changes of the declaration by command lines
    missing: tuple[str, ...]  # jobs without figures, and why
    num_jobs: int  # number of jobs with figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Figures, in the order of the declaration, and their origin."""

    figures: tuple[Figure, ...]
    origin: Origin

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_figures(folder / FIGURES_FILE, self.figures)
        origin = {key: getattr(self.origin, key) for key in Origin.__slots__}
        write_whole(folder / ORIGIN_FILE, json.dumps(origin, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Results in a folder that `write` wrote. Raises ValueError for another folder."""
        figures = read_figures(folder / FIGURES_FILE)
        record = parse_object(read_file(folder / ORIGIN_FILE, read_text), source=str(folder / ORIGIN_FILE))
        words = {key: tuple(map(str, record.items(key))) for key in Origin.__slots__ if key != "num_jobs"}
        origin = Origin(num_jobs=record.count("num_jobs"), **words)
        record.done()
        return cls(figures=tuple(figures), origin=origin)


def gather(declaration: Declaration, folder: Path) -> Results:
    """Results of the finished jobs in `folder` with the declaration's configuration, or that of a command line.

    Raises ValueError if there are none.
    """
    declared = {job.name: job for job in jobs_of(declaration)}
    works = {part.name: part.work for part in declaration.parts}
    others = {path.name for path in folder.iterdir()} - set(declared) if folder.is_dir() else set()
    figures: list[Figure] = []
    statuses: list[Status] = []
    changes: list[str] = []
    missing: dict[str, list[str]] = {}
    for name in [*declared, *sorted(others)]:
        status, config = Status.read(folder / name), read_whole(folder / name / "job.json")
        changed = str(config.get("changed", ""))
        if status.state is not State.DONE:
            if name in declared or config:
                missing.setdefault(status.state.value, []).append(name)
            continue
        differs = difference(config, declared[name].config) if name in declared else "cases"
        known = works.get(str(config.get("experiment_part"))) == config.get("work")
        if differs and not (changed and known):
            missing.setdefault(f"of another declaration ({differs})", []).append(name)
            continue
        figures += read_figures(folder / name / "figures.jsonl")
        statuses.append(status)
        changes.append(changed)
    if not statuses:
        raise ValueError(
            f"{folder}: no job is done: expected results; type `stagewright experiment run {declaration.typed}`"
        )
    return Results(
        figures=tuple(figures),
        origin=Origin(
            codes=_unique([status.code for status in statuses]),
            machines=_unique([status.machine.partition(": ")[2] for status in statuses]),
            days=_unique([datetime.fromtimestamp(s.started or 0, UTC).strftime("%Y-%m-%d") for s in statuses]),
            changes=_unique(changes),
            missing=tuple(
                f"{count(len(names), 'job')} {why}: {', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''}"
                for why, names in missing.items()
            ),
            num_jobs=len(statuses),
        ),
    )


def _unique(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted({word for word in words if word}))
