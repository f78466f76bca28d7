"""Figures of the partitioner and the planner: how fast they are, and how their plans ran."""

from __future__ import annotations

from collections.abc import Sequence

from .figure import GIGABYTE, Figure, Judged, Origin, Target, error_of, milliseconds
from .plan_workloads import CONTESTS, PLANNED_RUNS, CutBy, CutContest, MemoryKind, PlannedModel, PlannedRun
from .records import CutTimes, PlannedMemory, PlannedTimes, PlanningSpeed, Record, Spread
from .workloads import Case

MEMORY_LIMITS = {"partitioner": 2.0}  # [GB]


def plan_figures(case: Case, records: Sequence[Record]) -> list[Figure]:
    """The figures that answer a case about plans; none for another case."""
    found = _planning(case, [r for r in records if isinstance(r, PlanningSpeed) and r.case == case.name])
    for name in case.planned_runs:
        run = PLANNED_RUNS[name]
        found += [_step(case, run, r) for r in records if isinstance(r, PlannedTimes) and r.run == name]
        found += _memory(case, run, [r for r in records if isinstance(r, PlannedMemory) and r.run == name])
    for name in case.contests:
        for record in records:
            if isinstance(record, CutTimes) and record.contest == name:
                found += _contest(case, CONTESTS[name], record)
    return found


def _planning(case: Case, records: Sequence[PlanningSpeed]) -> list[Figure]:
    """A line a problem, for the slowest of its variants; then the largest peak of any process."""
    found = []
    for problem in dict.fromkeys(r.problem for r in records):
        variants: dict[str, list[PlanningSpeed]] = {}
        for record in records:
            if record.problem == problem:
                variants.setdefault(record.variant, []).append(record)
        spreads = {name: Spread.of([s for r in same for s in r.seconds]) for name, same in variants.items()}
        slowest = max(spreads, key=lambda name: spreads[name].median)
        first = variants[slowest][0]
        unit, scale = ("ms", 1e3) if first.limit < 1 else ("s", 1.0)
        value = spreads[slowest]
        others = [f"{name} {spread.median * scale:.4g} {unit}" for name, spread in spreads.items() if name != slowest]
        found.append(
            Figure(
                case=case.name,
                workload=problem,
                what=slowest,
                unit=unit,
                value=Spread(median=value.median * scale, low=value.low * scale, high=value.high * scale),
                target=Target(limit=first.limit * scale),
                origin=Origin.MEASURED,
                note=", ".join([*others, first.plan, *_peaks(case, variants[slowest])]),
            )
        )
    if records:
        limit = MEMORY_LIMITS.get(case.name)
        found.append(
            Figure(
                case=case.name,
                workload="the whole process",
                what="peak memory",
                unit="GB",
                value=Spread.of([r.peak_bytes / GIGABYTE for r in records]),
                target=None if limit is None else Target(limit=limit, judged=Judged.WORST),
                origin=Origin.MEASURED,
            )
        )
    return found


def _peaks(case: Case, records: Sequence[PlanningSpeed]) -> list[str]:
    """Peak memory of a problem that had a process of its own."""
    return [f"{max(r.peak_bytes for r in records) / 1e6:.0f} MB"] if case.name == "planning-scale" else []


def _step(case: Case, run: PlannedRun, times: PlannedTimes) -> Figure:
    sleeps = run.model is PlannedModel.SLEEP
    work = times.measured_work / times.planned_work - 1
    step, makespan = milliseconds(Spread.of(times.measured)), milliseconds(Spread.of(times.makespans))
    return Figure(
        case=case.name,
        workload=run.described,
        what="error of the step",
        unit="error",
        value=error_of(times.predicted, times.measured),
        target=Target(limit=run.limit),
        origin=Origin.PLANNED_OVER_EMULATED if sleeps else Origin.PLANNED_OVER_MEASURED,
        note=f"{times.predicted * 1e3:.2f} / {step}; F and B took {work:+.1%}; makespan {makespan}, simulated from its "
        f"own costs {times.simulated * 1e3:.2f}; {times.plan}",
    )


def _memory(case: Case, run: PlannedRun, records: Sequence[PlannedMemory]) -> list[Figure]:
    """A line a rank and kind; each repetition was a set of fresh processes. The plan speaks of what is in use."""
    found = []
    for kind in MemoryKind:
        same = [record for record in records if record.kind == kind]
        limit = run.memory_limit if kind is MemoryKind.IN_USE else None
        for rank, predicted in enumerate(same[0].predicted if same else ()):
            measured = [float(record.measured[rank]) for record in same]
            found.append(
                Figure(
                    case=case.name,
                    workload=run.described,
                    what=f"error of rank {rank}'s peak, {kind}",
                    unit="error",
                    value=error_of(predicted, measured),
                    target=None if limit is None else Target(limit=limit),
                    origin=Origin.PLANNED_OVER_MEASURED,
                    note=f"{predicted / 1e6:.0f} / {Spread.of(measured).median / 1e6:.0f} MB",
                )
            )
    return found


def _contest(case: Case, contest: CutContest, times: CutTimes) -> list[Figure]:
    """The other cuts' step time over the profile's; faster counts only where every repetition was."""
    own = times.seconds[CutBy.PROFILE]
    found = []
    for name in (CutBy.LAYERS, CutBy.PARAMETERS):
        theirs = times.seconds[name]
        found.append(
            Figure(
                case=case.name,
                workload=contest.described,
                what=f"step, {name} / profile",
                unit="ratio",
                value=Spread.of_ratios(theirs, own),
                target=Target(limit=1.0, at_least=True, judged=Judged.WORST),
                origin=Origin.MEASURED,
                note=f"{milliseconds(Spread.of(theirs))} / {milliseconds(Spread.of(own))} "
                f"(planned {times.predicted * 1e3:.2f}); {times.cuts[name]} / {times.cuts[CutBy.PROFILE]}",
            )
        )
    return found
