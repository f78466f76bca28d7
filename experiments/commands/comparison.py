"""Two exhibits side by side, or the prediction and the measurement of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...partition import Plan
from ...schedules import Difference, Timeline, compare
from ...viz import Exhibit
from ...viz.headline import HeadFigure, headline
from ..training.run_folder import RUNS, find_run
from ..training.same_run import read_manifest

NUM_DEPARTURES = 10
# Options of a run that say nothing of its steps, or that its schedule says better.
_SAID_ELSEWHERE = frozenset(
    ("name", "resume", "dry_run", "json", "timeout", "verify", "schedule", "ranks", "microbatches", "chunks")
)
_PLAN = "plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two.

    Arguments:
        name: for people.
        caption: of the timeline that is compared: "predicted", "measured, step 43".
        peaks: [P] bytes at the peak of each rank, None where nobody knows them; peaks_are: how they were found.
        configuration: what it was set up with, by name.
    """

    name: str
    caption: str
    timeline: Timeline
    figures: tuple[HeadFigure, ...]
    peaks: tuple[float, ...] | None
    peaks_are: str
    configuration: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two sides, and what lies between them.

    Arguments:
        notes: what could not be read or compared.
    """

    before: Side
    after: Side
    difference: Difference
    notes: tuple[str, ...]

    @property
    def changed(self) -> dict[str, tuple[str | None, str | None]]:
        """Configuration that differs, by name; None where one side does not say."""
        old, new = self.before.configuration, self.after.configuration
        return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


def compare_exhibits(exhibits: Sequence[Exhibit], sources: Sequence[str]) -> Comparison:
    """The comparison of two exhibits, or of one's prediction with its measurement.

    Arguments:
        sources: the names under which they were read.

    Raises ValueError for an exhibit without what is to be compared.
    """
    notes = [note for exhibit in exhibits for note in exhibit.notes]
    first, last = exhibits[0], exhibits[-1]
    if len(exhibits) == 1:
        captions = ("predicted", "measured")
        lacking = "prediction" if first.predicted is None else "measurement" if not first.measured else ""
        if lacking:
            raise ValueError(f"{first.name} has no {lacking} to compare with: expected a second run, plan or schedule")
    elif first.measured and last.measured:
        captions = ("measured", "measured")
    elif first.predicted is not None and last.predicted is not None:
        captions = ("predicted", "predicted")
        alone = [each.name for each in exhibits if each.measured]
        notes += [f"only {alone[0]} was measured: what was predicted of both is compared"] if alone else []
    else:
        captions = tuple("measured" if each.measured else "predicted" for each in exhibits)  # type: ignore[assignment]
        notes.append(f"{captions[0]} figures of {first.name} beside {captions[1]} ones of {last.name}")
    before = _side(first, sources[0], captions[0])
    after = _side(last, sources[-1], captions[1])
    difference = compare(before.timeline, after.timeline, num_departures=NUM_DEPARTURES)
    return Comparison(before=before, after=after, difference=difference, notes=(*notes, *difference.notes))


def _side(exhibit: Exhibit, source: str, which: str) -> Side:
    caption, timeline = which, exhibit.predicted
    if which == "measured":
        # The step in the middle: the newest may be an odd one. The first ones may have had a flush, and later ones not.
        schedules = [step.timeline.schedule for step in exhibit.measured]
        kinds = [schedule.name if schedule.is_asynchronous else "" for schedule in schedules]
        same = [step for step, kind in zip(exhibit.measured, kinds, strict=True) if kind == kinds[-1]]
        steps = sorted(same, key=lambda step: step.timeline.batch_seconds)
        number, timeline = steps[(len(steps) - 1) // 2]
        caption = f"measured, step {number}" + (f", the median of {len(steps)}" if len(steps) > 1 else "")
    assert timeline is not None
    peaks, peaks_are = _peaks(exhibit, timeline)
    return Side(
        name=exhibit.name,
        caption=caption,
        timeline=timeline,
        figures=headline(exhibit),
        peaks=peaks,
        peaks_are=peaks_are,
        configuration=configuration(source, timeline),
    )


def _peaks(exhibit: Exhibit, timeline: Timeline) -> tuple[tuple[float, ...] | None, str]:
    """Bytes by rank, the surest first."""
    if timeline.measured and exhibit.measured_peak is not None:
        return exhibit.measured_peak, "measured"
    if exhibit.predicted_peak is not None:
        return exhibit.predicted_peak, "predicted by the plan"
    curves = exhibit.curves(timeline)
    return (None, "") if curves is None else (tuple(curve.peak for curve in curves), "of the timeline")


def configuration(source: str, timeline: Timeline, *, root: Path = RUNS) -> dict[str, str]:
    """Figures of what stands behind one of the sources of `read_exhibit`.

    Of any one the schedule's; of a plan, or a run with one, its cuts and what is done about memory; of a run its
    options, versions and machine.

    Raises ValueError for a manifest or plan that cannot be read.
    """
    found = _of_schedule(timeline)
    folder = _folder(source, root)
    if folder is None:
        plan = _plan(Path(source)) if Path(source).is_file() else None
        return found | ({} if plan is None else _of_plan(plan))
    plan = _plan(folder / _PLAN) if (folder / _PLAN).is_file() else None
    manifest = read_manifest(folder)
    return found | ({} if plan is None else _of_plan(plan)) | ({} if manifest is None else _of_run(manifest))


def _folder(source: str, root: Path) -> Path | None:
    """The run's folder, where the source is one, or a file in one."""
    path = Path(source)
    if path.is_file():
        return path.parent if (path.parent / "manifest.json").is_file() else None
    if path.is_dir() or (root / source).is_dir():
        return find_run(path, root=root)
    return None


def _plan(path: Path) -> Plan | None:
    """The plan of a file; None where it is something else, which its reader told."""
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
        "tensor ranks": _each([stage.tensor for stage in plan.stages]),
    }
    if plan.microbatch_size is not None:
        found["samples a microbatch"] = str(plan.microbatch_size)
    return found


def _each(values: list[object] | list[str] | list[int]) -> str:
    """One value where all stages have the same, else one a stage."""
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
