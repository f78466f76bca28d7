"""`stagewright compare runs/gpt runs/gpt-2`: what changed, and the causes of the difference in time.

stagewright compare runs/gpt                              a run, simulated, with its measurement
stagewright compare runs/gpt plan.json -o both.html       any two sources that `stagewright timeline` reads
stagewright compare gpipe zb-h1 --ranks 4 --microbatches 8
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ...partition import Plan
from ...schedules import Change, Difference, Timeline, compare
from ...schedules.wording import count, duration, size, wrapped
from ...viz import Exhibit
from ...viz.exhibit import PREDICTED, SIMULATED, HeadFigure, headline, held_activations
from ..options import plain_help, read
from ..tables import signed
from ..train.run_folder import RUNS, find_run, read_manifest
from .exhibits import read_exhibits
from .outputs import TimelinePictureOptions, write_output
from .schedule_options import CostOptions

_WIDTH = 22  # of the first column
_LEAST = 0.0005  # share of the makespan: smaller changes are not listed
_DEPARTS = 0.01  # share of an action: smaller departures are not listed
NUM_DEPARTURES = 10
# Options of a run that don't affect its steps, or that its schedule shows.
_SAID_ELSEWHERE = frozenset(
    ("name", "resume", "dry_run", "json", "timeout", "verify", "schedule", "ranks", "microbatches", "chunks")
)
_PLAN = "plan.json"


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions(TimelinePictureOptions, CostOptions):
    """Compare two runs, plans or schedules; or one run, simulated, with its measurement.

    Sizes and costs are for schedules, in seconds of ONE stage action; a run and a plan bring their own. Schedules with
    more stages than others cut the same model: equal work.
    """

    # Runs (folder or name), plans, schedules (file or name) and timelines (JSON): the one before, the one after.
    inputs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="A [B]")]
    # File to draw both in, by its suffix, as with `stagewright timeline`; may be given several times.
    out: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(aliases=["-o"])] = ()
    json: tyro.conf.FlagCreatePairsOff[bool] = False  # Print one JSON object.


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    name: str
    caption: str  # of the compared timeline: "simulated", "measured, step 43"
    timeline: Timeline
    figures: tuple[HeadFigure, ...]
    peaks: tuple[float, ...] | None  # [P] peak bytes of each rank, None if unknown
    peaks_are: str  # how they were found
    configuration: dict[str, str]  # options and sizes by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two sides and their difference; `notes` say what could not be read or compared."""

    before: Side
    after: Side
    difference: Difference
    notes: tuple[str, ...]

    @property
    def changed(self) -> dict[str, tuple[str | None, str | None]]:
        """Configuration that differs, by name; None for a side without it."""
        old, new = self.before.configuration, self.after.configuration
        return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


def run(argv: Sequence[str]) -> int:
    options = read(CompareOptions, argv, "compare")
    if not 1 <= len(options.inputs) <= 2:
        raise ValueError(
            f"{len(options.inputs)} inputs: expected two to compare, or a run alone, whose simulation is compared with "
            f"what was measured: `stagewright compare runs/gpt runs/gpt-2`"
        )
    options.check_output(options.out, sources=options.inputs)
    style = options.style()
    command = "compare" if len(options.inputs) > 1 else "compare gpipe"
    exhibits = read_exhibits(options.inputs, options, command=command)
    comparison = compare_exhibits(exhibits, options.inputs)
    for path in options.out:
        write_output(exhibits, path, style)
    if options.json:
        print(json.dumps(as_json(comparison) | {"written": list(map(str, options.out))}))
        return 0
    print(wrapped(table(comparison)))
    for path in options.out:
        print(path)
    return 0


def as_json(comparison: Comparison) -> dict[str, object]:
    found = comparison.difference
    return {
        "before": _side_json(comparison.before),
        "after": _side_json(comparison.after),
        "step_seconds": found.batch_seconds._asdict() | {"change": found.batch_seconds.seconds},
        "per_batch": found.per_batch,
        "makespan": found.makespan._asdict() | {"change": found.makespan.seconds},
        "bubble": found.bubble._asdict() | {"change": found.bubble.seconds},
        "causes": [each._asdict() | {"change": each.seconds} for each in found.causes],
        "largest_cause": found.largest_cause.name,
        "critical_path": [each._asdict() | {"change": each.seconds} for each in found.path],
        "ranks": [[each._asdict() | {"change": each.seconds} for each in rank] for rank in found.ranks],
        "departures": [
            {**each._asdict(), "action": str(each.action), "change": each.seconds} for each in found.departures
        ],
        "stragglers": [{**asdict(each), "name": each.name} for each in found.stragglers],
        "configuration": {name: list(pair) for name, pair in comparison.changed.items()},
        "notes": list(comparison.notes),
    }


def _side_json(side: Side) -> dict[str, object]:
    return {
        "name": side.name,
        "caption": side.caption,
        "figures": [figure._asdict() for figure in side.figures],
        "activations_held": held_activations(side.timeline),
        "peak_bytes": side.peaks,
        "peak_bytes_are": side.peaks_are,
        "configuration": side.configuration,
    }


def table(comparison: Comparison) -> str:
    """Both sides, what changed between them, and the causes."""
    found = comparison.difference
    each = " a batch" if found.per_batch else ""
    parts = [
        _heading(comparison),
        _row("", "A", "B", "change"),
        *_figures(comparison),
        "",
        f"a rank's time{each} (mean of {_ranks(comparison)}): what it computes, and why it idles",
        *_changes(found.causes, found.makespan),
        _row(_makespan(found), *_seconds(found.makespan)),
        *_why(comparison),
        "",
        f"critical path{each}, by what it goes through",
        *_changes(found.path, found.makespan),
        *_changes(found.links, found.makespan, indent="  "),
        *_configuration(comparison),
        *_departures(comparison),
        *_stragglers(comparison),
        *(f"note: {note}" for note in comparison.notes),
    ]
    return "\n".join(line.rstrip() for line in parts)


def _heading(comparison: Comparison) -> str:
    lines = []
    for letter, side in (("A", comparison.before), ("B", comparison.after)):
        schedule = side.timeline.schedule
        lines.append(
            f"{letter}  {side.name} ({side.caption}): {schedule.name}, {count(schedule.num_ranks, 'rank')}, "
            f"{count(schedule.num_stages, 'stage')}, {count(schedule.num_microbatches, 'microbatch')}"
        )
    return "\n".join([*lines, ""])


def _row(name: str, before: str, after: str, change: str = "", share: str = "") -> str:
    return f"  {name:<{_WIDTH}} {before:>12} {after:>12} {change:>12} {share:>9}"


def _seconds(change: Change) -> tuple[str, str, str, str]:
    share = f"{change.seconds / change.before:+.1%}" if change.before > 0 else ""
    return duration(change.before), duration(change.after), signed(change.seconds), share


def _figures(comparison: Comparison) -> list[str]:
    found = comparison.difference
    rows = [_row("step", *_seconds(found.batch_seconds))]
    points = f"{100 * found.bubble.seconds:+.1f} points"
    rows.append(_row("bubble", f"{found.bubble.before:.1%}", f"{found.bubble.after:.1%}", points))
    figures = [{each.label: each for each in side.figures} for side in (comparison.before, comparison.after)]
    measured = comparison.before.timeline.measured or comparison.after.timeline.measured
    for label in (*((SIMULATED,) if measured else ()), PREDICTED, "lower bound"):
        before, after = ("" if label not in each else duration(each[label].seconds) for each in figures)
        rows += [_row(label, before, after)] if before or after else []
    return rows + _memory(comparison.before, comparison.after)


def _memory(before: Side, after: Side) -> list[str]:
    """Activations and bytes on the fullest rank."""
    held = [held_activations(side.timeline) for side in (before, after)]
    more = f"{held[1] / held[0] - 1:+.1%}" if held[0] > 0 else ""
    row = _row("activations held", f"{held[0]:.2f}", f"{held[1]:.2f}", f"{held[1] - held[0]:+.2f}", more)
    rows = [f"{row}  fullest rank, in microbatches of the whole model"]
    old, new = (None if side.peaks is None else max(side.peaks, default=0.0) for side in (before, after))
    if old is None and new is None:
        return rows
    change = "" if old is None or new is None else f"{'+' if new > old else ''}{size(new - old)}"
    share = f"{new / old - 1:+.1%}" if old and new is not None else ""
    first, second = ("not known" if each is None else size(each) for each in (old, new))
    how = ", ".join(sorted({side.peaks_are for side in (before, after)} - {""}))
    return [*rows, f"{_row('memory, fullest rank', first, second, change, share)}  {how}"]


def _ranks(comparison: Comparison) -> str:
    old, new = (len(s.timeline.ranks) - len(s.timeline.missing) for s in (comparison.before, comparison.after))
    return count(old, "rank") if old == new else f"{count(old, 'rank')} and {new}"


def _changes(changes: Iterable[Change], whole: Change, *, indent: str = "") -> list[str]:
    least = _LEAST * max(whole.before, whole.after)
    return [
        _row(indent + each.name.replace("_", " "), *_seconds(each))
        for each in changes
        if max(each.before, each.after) > least
    ]


def _why(comparison: Comparison) -> list[str]:
    found = comparison.difference
    if abs(found.makespan.seconds) <= _LEAST * found.makespan.before:
        return []
    largest = found.largest_cause
    word = "longer" if found.makespan.seconds > 0 else "shorter"
    held = [held_activations(side.timeline) for side in (comparison.before, comparison.after)]
    change = held[1] / held[0] - 1 if held[0] > 0 else 0.0
    rows = [
        f"the {_makespan(found)} is {duration(abs(found.makespan.seconds))} {word}, most of all for "
        f"{largest.name.replace('_', ' ')} ({signed(largest.seconds)})"
    ]
    if abs(change) >= _DEPARTS:
        rows.append(
            f"the fullest rank holds {abs(change):.0%} {'more' if change > 0 else 'fewer'} activations meanwhile"
        )
    return [f"  {row}" for row in rows]


def _makespan(found: Difference) -> str:
    return "makespan a batch" if found.per_batch else "makespan"


def _configuration(comparison: Comparison) -> list[str]:
    changed = comparison.changed
    if not changed:
        return ["", "configuration: no difference"]
    rows = [(name, *("-" if each is None else each for each in pair)) for name, pair in changed.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return ["", "configuration that differs", *(f"  {n:<{widths[0]}}  {b:<{widths[1]}}  {a}" for n, b, a in rows)]


def _departures(comparison: Comparison) -> list[str]:
    found = [each for each in comparison.difference.departures if abs(each.seconds) > _DEPARTS * each.before]
    if not found:
        return []
    rows = [
        _row(f"rank {each.rank}  {each.action}", *_seconds(Change("", each.before, each.after))) for each in found[:5]
    ]
    return ["", "actions that depart most", *rows]


def _stragglers(comparison: Comparison) -> Sequence[str]:
    found = comparison.difference.stragglers
    rows = [
        f"  {each.name} takes {each.ratio:.2f} times as long, {duration(each.seconds)} in all, against {each.against}"
        for each in found
    ]
    return ["", "stragglers in B", *rows, ""] if rows else [""]


# --- two exhibits, or the simulation and the measurement of one ---


def compare_exhibits(exhibits: Sequence[Exhibit], sources: Sequence[str]) -> Comparison:
    """Comparison of two exhibits, or of one's simulation with its measurement; `sources`: what they were read from.

    Raises ValueError for an exhibit without a simulation or a measurement to compare.
    """
    notes = [note for exhibit in exhibits for note in exhibit.notes]
    first, last = exhibits[0], exhibits[-1]
    if len(exhibits) == 1:
        captions = (SIMULATED, "measured")
        lacking = "simulation" if first.simulated is None else "measurement" if not first.measured else ""
        if lacking:
            raise ValueError(f"{first.name} has no {lacking} to compare with: expected a second run, plan or schedule")
    elif first.measured and last.measured:
        captions = ("measured", "measured")
    elif first.simulated is not None and last.simulated is not None:
        captions = (SIMULATED, SIMULATED)
        alone = [each.name for each in exhibits if each.measured]
        notes += [f"only {alone[0]} was measured: what is simulated of both is compared"] if alone else []
    else:
        captions = ("measured", SIMULATED) if first.measured else (SIMULATED, "measured")
        notes.append(f"{captions[0]} figures of {first.name} with {captions[1]} ones of {last.name}")
    before = _side(first, sources[0], captions[0])
    after = _side(last, sources[-1], captions[1])
    difference = compare(before.timeline, after.timeline, num_departures=NUM_DEPARTURES)
    return Comparison(before=before, after=after, difference=difference, notes=(*notes, *difference.notes))


def _side(exhibit: Exhibit, source: str, which: str) -> Side:
    caption, timeline = which, exhibit.simulated
    if which == "measured":
        # The step in the middle: the newest may be an odd one. The first ones may have had a flush, and later ones not.
        schedules = [step.timeline.schedule for step in exhibit.measured]
        kinds = [schedule.name if schedule.is_asynchronous else "" for schedule in schedules]
        same = [step for step, kind in zip(exhibit.measured, kinds, strict=True) if kind == kinds[-1]]
        steps = sorted(same, key=lambda step: step.timeline.batch_seconds)
        number, timeline = steps[(len(steps) - 1) // 2]
        caption = f"measured, step {number}" + (f", the median of {len(steps)}" if len(steps) > 1 else "")
    assert timeline is not None
    peaks, peaks_are = exhibit.peaks(timeline)
    return Side(
        name=exhibit.name,
        caption=caption,
        timeline=timeline,
        figures=headline(exhibit),
        peaks=peaks,
        peaks_are=peaks_are,
        configuration=_configuration_of(source, timeline),
    )


def _configuration_of(source: str, timeline: Timeline) -> dict[str, str]:
    """Configuration by name: of the schedule; of a plan, cuts, recomputation and shards; of a run, options, versions
    and machine. Raises ValueError for an unreadable manifest or plan."""
    folder = _folder(source)
    path = Path(source) if folder is None else folder / _PLAN
    plan = _plan(path) if path.is_file() else None
    manifest = None if folder is None else read_manifest(folder)
    return _of_schedule(timeline) | (_of_plan(plan) if plan else {}) | (_of_run(manifest) if manifest else {})


def _folder(source: str) -> Path | None:
    path = Path(source)
    if path.is_file():
        return path.parent if (path.parent / "manifest.json").is_file() else None
    if path.is_dir() or (RUNS / source).is_dir():
        return find_run(path)
    return None


def _plan(path: Path) -> Plan | None:
    try:
        return Plan.load(path)
    except ValueError:
        if path.name == _PLAN:
            raise
        return None


def _of_schedule(timeline: Timeline) -> dict[str, str]:
    schedule = timeline.schedule
    per_rank = sorted({len(stages) for stages in schedule.placement})
    replicas = [len(owners) for owners in schedule.owners]
    return {
        "schedule": schedule.name,
        "ranks": str(schedule.num_ranks),
        "stages": str(schedule.num_stages),
        "stages a rank": " or ".join(map(str, per_rank)),
        "replicas": "-".join(map(str, replicas)) if max(replicas) > 1 else "none",
        "microbatches": str(schedule.num_microbatches),
        "batches in view": str(schedule.num_batches),
        "weight versions": schedule.weight_rule,
        "update every": str(schedule.group_size) if schedule.is_asynchronous else "batch",
    }


def _of_plan(plan: Plan) -> dict[str, str]:
    found = {
        "cut": " | ".join(" .. ".join(dict.fromkeys((s.nodes[0], s.nodes[-1]))) for s in plan.stages),
        "recompute": _each([stage.recompute for stage in plan.stages]),
        "optimizer over ranks": _each([stage.optimizer_shards for stage in plan.stages]),
        "tensor ranks": _each([stage.tensor // plan.context for stage in plan.stages]),
    }
    if plan.microbatch_size is not None:
        found["samples a microbatch"] = str(plan.microbatch_size)
    return found


def _each(values: list[object] | list[str] | list[int]) -> str:
    words = list(map(str, values))
    return words[0] if len(set(words)) == 1 else ", ".join(words)


def _of_run(manifest: Mapping[str, object]) -> dict[str, str]:
    found = {}
    config, versions, host = (manifest.get(key) for key in ("config", "versions", "host"))
    for option, value in config.items() if isinstance(config, Mapping) else ():
        if option not in _SAID_ELSEWHERE:
            found[f"--{option.replace('_', '-')}"] = _shown(value)
    for package, version in versions.items() if isinstance(versions, Mapping) else ():
        found[f"version of {package}"] = str(version)
    for what, value in host.items() if isinstance(host, Mapping) else ():
        found[f"machine's {what}"] = str(value)
    if (text := manifest.get("corpus_sha256")) is not None:
        found["data"] = f"{manifest.get('corpus_source')} ({str(text)[:12]})"
    return found


def _shown(value: object) -> str:
    if value is None or value == []:
        return "not given"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
