"""Configuration of a run, plan or schedule, as far as it says: figures by name, to be put side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...partition import Plan
from ...schedules import Timeline
from ..training.run_folder import RUNS, find_run
from ..training.same_run import read_manifest

# Options of a run that say nothing of its steps, or that its schedule says better.
_SAID_ELSEWHERE = frozenset(
    ("name", "resume", "dry_run", "json", "timeout", "verify", "schedule", "ranks", "microbatches", "chunks")
)
_PLAN = "plan.json"


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
