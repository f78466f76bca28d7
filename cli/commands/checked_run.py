"""A run read and compared with the plan that it carried out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from ...partition import Plan
from ...partition.plans.as_schedule import SimulatedPlan, simulated
from ...schedules import PredictionCheck, Schedule, Timeline, check_prediction, simulate
from ...schedules.timing.sampling import StepSamples
from ...schedules.traces.trace_reader import find_traces, newest_cut_since, processes_by_host
from ...schedules.transform import on_ranks, replicate
from ...schedules.wording import count
from ...viz import Exhibit
from ..options import read_file
from ..train.run_folder import find_run, read_whole
from ..train.traces import read_run

# Of two plans that one run may carry out.
_SAME = ("schedule", "num_chunks", "num_microbatches", "microbatch_size", "overlaps")
_SAME_STAGE = ("nodes", "ranks", "tensor", "recompute", "optimizer_shards")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """A run compared with its plan."""

    name: str
    plan: Plan
    check: PredictionCheck
    # by process, (predicted, measured) bytes of tensors at the peak; empty if not measured
    tensor_bytes: tuple[tuple[float, float], ...]
    sampled: StepSamples | None  # steps drawn from the run's own spread of durations; None with too few measured steps
    # processes on each host of the run, by the trace files; those without files count as one more host
    ranks_by_host: tuple[int, ...]
    config: Mapping[str, Any]  # options of the run; empty without a manifest
    notes: tuple[str, ...]  # what could not be read or compared


def check_run(sources: Sequence[str]) -> CheckedRun:
    """Compares a run with its plan. `sources`: folders of the run, and at most one file of a plan.

    Raises ValueError for a run that cannot be found, has no plan, traced no step, or carried out another plan.
    """
    files = [Path(each) for each in sources if Path(each).is_file()]
    folders = [find_run(Path(each)) for each in sources if Path(each) not in files]
    if not folders or len(files) > 1:
        raise ValueError(
            f"--check {' '.join(sources)}: {count(len(folders), 'run')} and {count(len(files), 'plan')}: expected a "
            f"run and at most one plan, as in `stagewright plan --check runs/gpt plan.json`"
        )
    exhibit = read_run(*folders)
    plan = _plan(folders, files)
    if not exhibit.measured:
        raise ValueError(f"{exhibit.name} has no traced step: {'; '.join(exhibit.notes)}")
    ran = exhibit.measured[-1].timeline.schedule
    promised = _promised(plan, ran)
    since = newest_cut_since(find_traces(folders))
    steps, notes = _steps(exhibit, promised.timeline.schedule, since)
    summary = next((found for folder in folders if (found := read_whole(folder / "summary.json"))), {})
    step_seconds = _step_seconds(folders, since) if since else summary.get("step_seconds")
    check = check_prediction(
        promised.timeline,
        steps,
        costs=promised.costs,
        links=promised.links,
        known=exhibit.costs,
        step_seconds=step_seconds if isinstance(step_seconds, float) else None,
    )
    configs = (read_whole(folder / "manifest.json").get("config") for folder in folders)
    return CheckedRun(
        name=exhibit.name,
        plan=plan,
        check=check,
        tensor_bytes=_tensor_bytes(plan, summary),
        sampled=exhibit.sampled,
        ranks_by_host=tuple(map(len, processes_by_host(find_traces(folders)).values())),
        config=next((each for each in configs if isinstance(each, dict)), {}),
        notes=(*exhibit.notes, *notes, *check.notes),
    )


def _promised(plan: Plan, ran: Schedule) -> SimulatedPlan:
    """The plan's simulation; of one that divides sequences with all members of each context group, as `ran` has them,
    each of which runs its part of every microbatch."""
    parts = plan.context
    M = ran.num_microbatches // parts if plan.num_microbatches is None else None
    found = simulated(plan, num_microbatches=M)
    whole = replicate(found.timeline.schedule, parts)
    if parts == 1 or [*map(len, whole.owners)] != [*map(len, ran.owners)]:  # of another plan, as the error says
        return found
    places = dict(chain(*map(zip, whole.owners, ran.owners)))
    schedule = on_ranks(whole, [places[rank] for rank in range(whole.num_ranks)], num_ranks=whole.num_ranks)
    links = plan.links and plan.links.on([schedule.owners[s] for s in plan.firsts])
    return SimulatedPlan(simulate(schedule, plan.costs, links), plan.costs, links)


def _plan(folders: Sequence[Path], files: Sequence[Path]) -> Plan:
    kept = next((folder / "plan.json" for folder in folders if (folder / "plan.json").exists()), None)
    if not files:
        if kept is None:
            _refuse_other_hosts(folders)
            raise ValueError(
                f"{folders[0]} has no plan.json: it ran without a plan, or was ended before its end; expected the "
                f"plan's file after it, as in `stagewright plan --check {folders[0]} plan.json`"
            )
        return read_file(kept, Plan.load)
    plan = read_file(files[0], Plan.load)
    if kept is not None:
        differs = _difference(plan, read_file(kept, Plan.load))
        if differs is not None:
            raise ValueError(
                f"{files[0]} is another plan than {kept}, which was carried out: {differs}; expected one that differs "
                f"in seconds and bytes alone, or a run of this one: `stagewright train --plan {files[0]}`"
            )
    return plan


def _refuse_other_hosts(folders: Sequence[Path]) -> None:
    by_host = processes_by_host(find_traces(folders))
    there = set().union(*(each for host, each in by_host.items() if host))
    if there and 0 not in there:
        hosts = ", ".join(host for host in by_host if host)
        shown = " ".join(map(str, folders))
        raise ValueError(
            f"{shown}: what {count(len(there), 'process')} left on {hosts}; plan and figures are where process 0 ran: "
            f"expected that host's folder, too, as in `stagewright plan --check PROCESS_0/{folders[0]} {shown}`"
        )


def _difference(plan: Plan, kept: Plan) -> str | None:
    for name in _SAME:
        if getattr(plan, name) != getattr(kept, name):
            return f"{name.replace('_', ' ')} {getattr(plan, name)}, not {getattr(kept, name)}"
    if len(plan.stages) != len(kept.stages):
        return f"{count(len(plan.stages), 'stage')}, not {len(kept.stages)}"
    for number, (one, other) in enumerate(zip(plan.stages, kept.stages, strict=True)):
        for name in _SAME_STAGE:
            if getattr(one, name) != getattr(other, name):
                return f"{name.replace('_', ' ')} of stage {number}: {getattr(one, name)}, not {getattr(other, name)}"
    return None


def _step_seconds(folders: Sequence[Path], since: int) -> float | None:
    taken = []
    for path in (folder / "metrics.jsonl" for folder in folders if (folder / "metrics.jsonl").exists()):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, KeyError, TypeError):  # a line that was cut off
                logged = json.loads(line)
                if logged["step"] >= since:
                    taken.append(float(logged["step_seconds"]))
    return median(taken) if taken else None


def _steps(exhibit: Exhibit, schedule: Schedule, since: int) -> tuple[list[Timeline], list[str]]:
    newest = [each for each in exhibit.measured if each.number >= since]
    steps = [each for each in newest if _fits(each.timeline.schedule, schedule)]
    if not steps:
        raise ValueError(
            f"{exhibit.name} ran {exhibit.measured[-1].timeline.schedule!r}, the plan is for {schedule!r}: expected "
            f"the plan that the run carried out, or a run of this one"
        )
    notes = []
    if len(newest) < len(exhibit.measured):
        before = count(len(exhibit.measured) - len(newest), "traced step")
        notes.append(f"{before} of before step {since}, where the run went on with other stages: left out")
    if len(steps) < len(newest):
        notes.append(f"{count(len(newest) - len(steps), 'step')} ran under another schedule: left out")
    if not schedule.is_asynchronous and any(
        each.timeline.schedule.compute_programs != schedule.compute_programs for each in steps
    ):
        notes.append("steps ran in another order than the plan's: that is in what no input explains")
    return [each.timeline for each in steps], notes


def _fits(ran: Schedule, planned: Schedule) -> bool:
    names: tuple[str, ...] = ("placement", "owners", "num_microbatches", "weight_rule", "update_every")
    if planned.is_asynchronous:
        names = (*names, "name")  # the first batches may have had a flush after each update
    return all(getattr(ran, name) == getattr(planned, name) for name in names)


def _tensor_bytes(plan: Plan, summary: Mapping[str, Any]) -> tuple[tuple[float, float], ...]:
    held, by_rank = summary.get("peak_tensor_bytes"), plan.memory_bytes
    if not isinstance(held, list) or not by_rank:
        return ()
    if len(held) == 1:
        return ((sum(by_rank.values()), float(held[0])),)
    return tuple((by_rank.get(rank, 0.0), float(there)) for rank, there in enumerate(held))
