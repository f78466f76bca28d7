"""Sources that a user names, read into Exhibits for every command that shows or compares timelines.

runs/gpt, gpt          a run's folder, or its name           its simulated and measured steps
plan.json              a plan                                its own schedule, simulated with its costs
1f1b, mine.csv, mine.json, mine.py:zigzag      a schedule    simulated with the costs of the options
auto                                           a schedule    the best one found for these costs
timeline.json          a Timeline; or that of a run          unchanged; like its folder

Folders of one run from several hosts are read as one.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...partition import Plan
from ...partition.plans.as_schedule import exhibit_of_plan
from ...schedules import FAMILIES, Costs, Schedule, Timeline, simulate
from ...schedules.custom.user_schedules import FORMS, is_own
from ...schedules.families.registry import family
from ...schedules.traces.trace_reader import find_traces, is_trace_file
from ...viz import Exhibit, MeasuredStep, exhibit_of_traces, read_perfetto
from ...viz.foreign import is_trace, rank_in, read_text
from ...viz.perfetto import OWN_KEY
from ..options import read_file
from ..train.run_folder import RUNS, find_run
from ..train.traces import hosts_of_runs, read_run
from .schedule_options import AUTO, CostOptions, made_or_found

EXPECTED = f"a run (folder or name), a plan, a timeline, a schedule ({FORMS}) or its name such as 1f1b"
_NEAR = 0.6
_RANK = re.compile(r"[._-]?rank[._-]?\d+")


def read_exhibits(
    sources: Sequence[str], options: CostOptions | None = None, *, command: str = "timeline"
) -> list[Exhibit]:
    """Exhibits of files, folders, names of runs and names of schedules, under distinct names.

    The kind of a file follows from its content. Schedules with different numbers of stages split the same work: a cost
    option gives one number for a stage of the schedule with the fewest stages, or one per equal piece of the model.

    Raises ValueError that names the source, the place in it, and what was expected; also for costs and sizes that no
    source takes.
    """
    options = CostOptions() if options is None else options
    if not sources:
        raise ValueError(f"nothing to show: expected {EXPECTED}")
    sources = _folders_for_trace_files(sources)
    hosts = _folders_of_hosts(sources, options)
    sources = [source for source in sources if hosts.get(source) != ()]
    groups = _groups(sources)
    read: list[Exhibit | _Made] = []
    for group in groups:
        if group[0] in hosts:
            read.append(read_run(*hosts[group[0]]))
        elif len(group) > 1:
            read.append(_of_group(group))
        else:
            read.append(_read(group[0], options, f"{command} {' '.join(sources)}"))
    stages = {each.schedule.num_stages for each in read if isinstance(each, _Made)}
    fewest = min(stages) if len(stages) > 1 else None
    exhibits = [_simulated(each, fewest, options) if isinstance(each, _Made) else each for each in read]
    surplus = set(given(options)).difference(*(takes_options(source) for source in sources))
    if surplus:
        raise ValueError(
            f"{', '.join(sorted(surplus))} with {', '.join(sources)}: expected options for a schedule only, since a "
            f"run, a plan and a trace bring their own"
        )
    counts, firsts = Counter(each.name for each in exhibits), [group[0] for group in groups]
    return [
        replace(each, name=first if first not in firsts[:number] else f"{first} ({number + 1})")
        if counts[each.name] > 1
        else each
        for number, (each, first) in enumerate(zip(exhibits, firsts, strict=True))
    ]


def _groups(sources: Sequence[str]) -> list[list[str]]:
    """Sources by run: adjacent trace files of different ranks belong to one run."""
    groups: list[list[str]] = []
    ranks: set[int] = set()
    for source in sources:
        rank = _rank_of_trace(Path(source))
        if rank is not None and ranks and rank not in ranks:
            groups[-1].append(source)
            ranks.add(rank)
        else:
            groups.append([source])
            ranks = set() if rank is None else {rank}
    return groups


def _rank_of_trace(path: Path) -> int | None:
    if not path.is_file():
        return None
    with suppress(ValueError, OSError):
        return rank_in(read_text(path))
    return None


def _of_group(group: Sequence[str]) -> Exhibit:
    paths = [Path(source) for source in group]
    name = _RANK.sub("", paths[0].name).split(".")[0] or paths[0].resolve().parent.name
    return exhibit_of_traces(paths, name=name)


def _read(source: str, options: CostOptions, command: str) -> Exhibit | _Made:
    path = Path(source)
    if path.is_file():
        return _read_file(path, options)
    if _is_folder(source, options):
        return _read_folder(find_run(path))
    if _is_schedule(source):
        if source.lower() == AUTO:
            return _Made(*made_or_found(source, options, command=command)[:2])
        return _Made(options.make(source, command=command), options.costs(), "" if is_own(source) else source)
    names = [*FAMILIES, *(each.name for each in RUNS.iterdir())] if RUNS.is_dir() else list(FAMILIES)
    near = difflib.get_close_matches(source, names, n=2, cutoff=_NEAR)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"{source}: no such file, run folder or schedule: expected {EXPECTED}{hint}")


def given(options: CostOptions) -> list[str]:
    """Options that differ from their defaults, as typed."""
    return [_typed(each.name) for each in fields(CostOptions) if getattr(options, each.name) != each.default]


def _typed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


_ALL_OPTIONS = frozenset(_typed(each.name) for each in fields(CostOptions))


def takes_options(source: str) -> frozenset[str]:
    path = Path(source)
    if path.is_file():
        _, data = _load(path)
        kind = _kind(path, data)
        if kind == "plan" and data.get("num_microbatches") is None:
            return frozenset({"--microbatches"})
        return _ALL_OPTIONS if kind == "schedule" else frozenset()
    return _ALL_OPTIONS if not path.is_dir() and _is_schedule(source) else frozenset()


def _is_folder(source: str, options: CostOptions) -> bool:
    """Whether it is a run's folder or name; the name of a schedule given with sizes is not."""
    is_name = (RUNS / source).is_dir() and not (_is_schedule(source) and options.ranks is not None)
    return Path(source).is_dir() or (is_name and not Path(source).is_file())


def _folders_for_trace_files(sources: Sequence[str]) -> list[str]:
    """The sources, with the trace files of a run's processes replaced by their folder."""
    found: list[str] = []
    folders: set[str] = set()
    for source in sources:
        folder = str(Path(source).parent)
        if not is_trace_file(Path(source)):
            found.append(source)
        elif folder not in folders:
            folders.add(folder)
            found.append(folder)
    return found


def _folders_of_hosts(sources: Sequence[str], options: CostOptions) -> dict[str, tuple[Path, ...]]:
    """Folders per source; the folders of one run from several hosts are all at the first source, none at the others."""
    folders = {find_run(Path(s)): s for s in sources if _is_folder(s, options)}
    found: dict[str, tuple[Path, ...]] = {}
    for together in hosts_of_runs(list(folders)):
        if len(together) > 1:
            found |= dict.fromkeys((folders[folder] for folder in together), ()) | {folders[together[0]]: together}
    return found


def _is_schedule(source: str) -> bool:
    if ":" in source or source.lower() == AUTO:
        return True
    try:
        family(source)
    except ValueError:
        return False
    return True


def _read_folder(folder: Path) -> Exhibit:
    name = folder.resolve().name
    names = ("timeline.json", "manifest.json")
    if not any((folder / own).exists() for own in names) and not find_traces([folder]):
        found = sorted(path for path in folder.iterdir() if path.name.endswith((".json", ".json.gz")))
        traces = [path for path in found if path.is_file() and is_trace(read_text(path))]
        if traces:
            return exhibit_of_traces(traces, name=name)
    return read_run(folder)


class _Made(NamedTuple):
    """A schedule, the costs of its stages or of other pieces of the model, and the name of its family if it has one."""

    schedule: Schedule
    costs: Costs
    name: str = ""


def _simulated(made: _Made, fewest: int | None, options: CostOptions) -> Exhibit:
    schedule, costs, name = made
    notes: tuple[str, ...] = ()
    if fewest is not None:
        from ...schedules.search.request import Request  # one alone needs no search

        pieces = Request(num_ranks=fewest, num_microbatches=schedule.num_microbatches, costs=costs).pieces()
        costs = pieces.equal_parts(schedule.num_stages).costs
    if fewest not in (None, schedule.num_stages):
        notes = (f"{schedule.name}: equal work: the model of {fewest} stages is cut into {schedule.num_stages}",)
    if name and options.made_for() is not None:
        schedule = options.make(name, command="", costs=costs)
    return Exhibit(name=schedule.name, simulated=simulate(schedule, costs), costs=costs, notes=notes)


def _read_file(path: Path, options: CostOptions) -> Exhibit | _Made:
    if is_trace_file(path):
        return read_run(path.parent)
    text, data = _load(path)
    name = path.name.split(".")[0]
    match _kind(path, data):
        case "trace":
            return exhibit_of_traces([path], name=name)
        case "own trace":
            return _of_own_trace(path, data, name)
        case "schedule":
            return _Made(options.read_file(str(path)), options.costs())
        case "plan":
            plan = Plan.from_json(text, source=str(path))
            is_open = plan.num_microbatches is None  # else --microbatches is for other sources
            return exhibit_of_plan(plan, name=name, num_microbatches=options.microbatches if is_open else None)
        case "run":
            return read_run(path.parent)
    timeline = _from(path, text)
    if timeline.measured:
        return Exhibit(name=name, measured=(MeasuredStep(0, timeline),))
    return Exhibit(name=name, simulated=timeline)


def _load(path: Path) -> tuple[str, Any]:
    text = read_file(path, read_text)
    if text.lstrip()[:1] not in ("{", "["):
        return text, None
    try:
        return text, json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{path}, line {error.lineno}, column {error.colno}"
        end = "; the file ends too early" if error.pos >= len(text.rstrip()) - 1 else ""
        raise ValueError(f"{place}: {error.msg}: expected JSON{end}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}: expected JSON") from None


def _kind(path: Path, data: Any) -> str:
    if data is None:
        return "schedule"
    if isinstance(data, list):
        return "trace"
    keys = data.keys() if isinstance(data, Mapping) else set()
    for kind, required in (
        ("own trace", {"traceEvents", OWN_KEY}),
        ("trace", {"traceEvents"}),
        ("schedule", {"programs", "placement"}),
        ("plan", {"stages", "num_devices"}),
        ("run", {"spread", "sampled"}),
        ("timeline", {"ranks", "schedule"}),
    ):
        if required <= keys:
            return kind
    found = f"an object with {', '.join(sorted(map(str, keys))[:6])}" if keys else f"{type(data).__name__}"
    raise ValueError(f"{path}: {found}: expected {EXPECTED}")


def _from(path: Path, text: str) -> Timeline:
    try:
        return Timeline.from_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _of_own_trace(path: Path, data: Mapping[str, Any], name: str) -> Exhibit:
    """The first simulated timeline of the file and all measured ones."""
    named = read_perfetto(data, source=str(path)) or []
    simulated = [timeline for _, timeline in named if not timeline.measured]
    measured = tuple(MeasuredStep(number, t) for number, t in enumerate(t for _, t in named if t.measured))
    left = f"{path}: {len(simulated)} simulated timelines: only the first one is shown"
    notes = (left,) if len(simulated) > 1 else ()
    return Exhibit(name=name, simulated=simulated[0] if simulated else None, measured=measured, notes=notes)
