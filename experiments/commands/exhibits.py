"""Whatever a user names, read into an Exhibit: the one function behind every view.

runs/gpt, gpt          a run's folder, or its name           what it left: predicted and measured steps
plan.json              a plan                                its own schedule, simulated with its costs
1f1b, mine.csv, mine.json, mine.py:zigzag      a schedule    simulated with the costs of the options
timeline.json          a Timeline, or a run's pair of them   as it is
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ...partition import Plan
from ...schedules import FAMILIES, Costs, Schedule, Timeline, simulate
from ...schedules.registry import family
from ...viz import Exhibit
from ...viz.exhibit import MeasuredStep
from ..schedule_files import FORMS
from ..training.run_folder import RUNS, find_run
from ..training.traces import Traces
from .files import read_file
from .schedule_options import CostOptions

EXPECTED = f"a run (folder or name), a plan, a timeline, a schedule ({FORMS}) or its name such as 1f1b"
_NEAR = 0.6


def read_exhibits(sources: Sequence[str], options: CostOptions | None = None, *, root: Path = RUNS) -> list[Exhibit]:
    """`read_exhibit` of each, under names that differ.

    Raises ValueError as that does, and for costs and sizes that nothing here takes.
    """
    options = CostOptions() if options is None else options
    if not sources:
        raise ValueError(f"nothing to show: expected {EXPECTED}")
    exhibits = [read_exhibit(source, options, root=root) for source in sources]
    surplus = given(options)
    if surplus and not any(takes_options(source, root=root) for source in sources):
        raise ValueError(
            f"{', '.join(surplus)} beside {', '.join(sources)}: expected options for a schedule only, since a run and "
            f"a plan bring their own"
        )
    counts = Counter(each.name for each in exhibits)
    return [
        replace(each, name=source if source not in sources[:number] else f"{source} ({number + 1})")
        if counts[each.name] > 1
        else each
        for number, (each, source) in enumerate(zip(exhibits, sources, strict=True))
    ]


def read_exhibit(source: str, options: CostOptions | None = None, *, root: Path = RUNS) -> Exhibit:
    """The exhibit of one name.

    Arguments:
        source: a file, a folder, the name of a run below `root`, or of a schedule; see above. A file is told by what
            stands in it.
        options: sizes and costs of schedules; the number of microbatches of a plan that leaves it open.

    Raises ValueError that names the source, the place in it, and what was expected.
    """
    options = CostOptions() if options is None else options
    path = Path(source)
    if path.is_file():
        return _read_file(path, options)
    if path.is_dir() or _is_run(source, options, root):
        return _read_folder(find_run(path, root=root))
    if _is_schedule(source):
        return _simulated(options.make(source, command="timeline"), options)
    names = [*FAMILIES, *(each.name for each in root.iterdir())] if root.is_dir() else list(FAMILIES)
    near = difflib.get_close_matches(source, names, n=2, cutoff=_NEAR)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"{source}: no such file, run folder or schedule: expected {EXPECTED}{hint}")


def given(options: CostOptions) -> list[str]:
    """Options that were given, as they are typed."""
    names = [each.name for each in fields(CostOptions) if getattr(options, each.name) != each.default]
    return [f"--{name.replace('_', '-')}" for name in names]


def takes_options(source: str, *, root: Path = RUNS) -> bool:
    """Whether sizes and costs say something about it."""
    path = Path(source)
    if path.is_file():
        text, data = _load(path)
        kind = _kind(path, text, data)
        return kind == "schedule" or (kind == "plan" and data.get("num_microbatches") is None)
    return not path.is_dir() and _is_schedule(source)


def _is_run(source: str, options: CostOptions, root: Path) -> bool:
    """Whether a bare name is a run; a schedule's name with sizes is not."""
    return (root / source).is_dir() and not (_is_schedule(source) and options.ranks is not None)


def _is_schedule(source: str) -> bool:
    if ":" in source:
        return True
    try:
        family(source)
    except ValueError:
        return False
    return True


def _read_folder(folder: Path) -> Exhibit:
    traces = Traces.read(folder)
    return _of_traces(traces, folder.resolve().name)


def _of_traces(traces: Traces, name: str) -> Exhibit:
    return Exhibit(name=name, predicted=traces.predicted, measured=(MeasuredStep(0, traces.measured),))


def _simulated(schedule: Schedule, options: CostOptions) -> Exhibit:
    costs = options.costs()
    return Exhibit(name=schedule.name, predicted=simulate(schedule, costs), costs=costs)


def _read_file(path: Path, options: CostOptions) -> Exhibit:
    text, data = _load(path)
    name = path.name.split(".")[0]
    match _kind(path, text, data):
        case "schedule":
            return _simulated(options.read_file(str(path)), options)
        case "plan":
            return _of_plan(Plan.from_json(text, source=str(path)), name, options)
        case "run":
            return _of_traces(Traces.read(path.parent), path.parent.resolve().name)
    timeline = _from(path, text)
    if timeline.measured:
        return Exhibit(name=name, measured=(MeasuredStep(0, timeline),))
    return Exhibit(name=name, predicted=timeline)


def _load(path: Path) -> tuple[str, Any]:
    """The text, and what it says as JSON (None for a table)."""
    text = read_file(path, lambda file: file.read_text(encoding="utf-8"))
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


def _kind(path: Path, text: str, data: Any) -> str:
    """Kind of a file, by its keys."""
    if data is None:
        return "schedule"
    keys = data.keys() if isinstance(data, Mapping) else set()
    for kind, told_by in (
        ("schedule", {"programs", "placement"}),
        ("plan", {"stages", "num_devices"}),
        ("run", {"predicted", "measured"}),
        ("timeline", {"ranks", "schedule"}),
    ):
        if told_by <= keys:
            return kind
    found = f"an object with {', '.join(sorted(map(str, keys))[:6])}" if keys else f"{type(data).__name__}"
    raise ValueError(f"{path}: {found}: expected {EXPECTED}")


def _from(path: Path, text: str) -> Timeline:
    try:
        return Timeline.from_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _of_plan(plan: Plan, name: str, options: CostOptions) -> Exhibit:
    is_open = plan.num_microbatches is None  # else options of other inputs may say something else
    schedule = plan.build_schedule(num_microbatches=options.microbatches if is_open else None)
    costs = Costs(
        forward=[stage.forward_seconds for stage in plan.stages],
        backward=[stage.backward_seconds for stage in plan.stages],
        update=[stage.update_seconds for stage in plan.stages],
    )
    timeline = simulate(schedule, costs)
    notes = [f"{name}: messages take no time in this picture, since a plan's file does not keep its links"]
    if plan.simulated_step_time is not None:
        notes[0] += f"; with them the planner simulated {plan.simulated_step_time:.4g} s a batch"
    return Exhibit(name=name, predicted=timeline, costs=costs, memory=plan.stage_bytes, notes=tuple(notes))
