"""`stagewright simulate interleaved --ranks 4 --microbatches 8`: its cost, before anything runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ...schedules import (
    Costs,
    Schedule,
    Spread,
    Timeline,
    attribute_idle,
    ideal_makespan,
    lower_bound,
    simulate,
    simulate_spread,
)
from ...schedules.timing.sampling import StepSamples
from ...schedules.traces.run_file import NAME, RunFile
from ...schedules.transform import replicate, schedule_without
from ...schedules.wording import count, duration, wrapped
from ..options import plain_help, read
from .schedule_options import NAME_HELP, CostOptions, SynthesisOptions, made_or_found

if TYPE_CHECKING:
    from ...schedules.search.synthesize import Synthesis


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(SynthesisOptions):
    """Simulate a schedule. Costs are seconds of ONE stage action: one number, or one per stage."""

    schedule: Annotated[tyro.conf.Positional[str | None], NAME_HELP] = None
    csv: str | None = None  # The schedule's file, in place of its name.
    data: int = 1  # D, pipelines side by side: rank r of each becomes the ranks rD .. rD+D-1.
    # Ranks that died: their microbatches go to the other replicas of their stages (`Mesh(on_failure="reroute")`).
    without: tuple[int, ...] = ()
    # How durations vary: half their interquartile range over the median (0.05), a run's folder that measured it, or a
    # Spread's JSON file. Then the median and the range of many simulated steps are printed, too.
    spread: str | None = None
    # Simulate the N steps after the last that the run of --spread measured, not steps like those: the pace wanders.
    following: int = 0
    json: tyro.conf.FlagCreatePairsOff[bool] = False  # Print one JSON object.


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A schedule simulated with its costs, and with --spread steps whose durations vary; in the costs' unit of time.

    If batches overlap, the bubbles and the seconds per batch are those of the steady state. All other figures are of
    the whole program of `num_batches`, including warm-up and drain.
    """

    schedule: Schedule
    costs: Costs
    timeline: Timeline
    sampled: StepSamples | None = None

    @property
    def num_chunks(self) -> int:
        return max(map(len, self.schedule.placement))

    def to_data(self) -> dict[str, object]:
        """Figures for JSON. `predicted_range` holds 90% of the steps whose median is predicted."""
        schedule, timeline, sampled = self.schedule, self.timeline, self.sampled
        return {
            "schedule": schedule.name,
            "num_ranks": schedule.num_ranks,
            "num_chunks": self.num_chunks,
            "num_stages": schedule.num_stages,
            "num_microbatches": schedule.num_microbatches,
            "num_slices": schedule.num_slices,
            "num_batches": schedule.num_batches,
            "streams": schedule.is_asynchronous,
            "makespan": timeline.makespan,
            "batch_seconds": timeline.batch_seconds,
            "makespan_bubble": timeline.makespan_bubble,
            "span_bubble": timeline.span_bubble,
            "bubble": timeline.bubble,
            "ideal_makespan": ideal_makespan(schedule, self.costs),
            "lower_bound": lower_bound(schedule, self.costs),
            "peak_activations": timeline.peak_activations,
            "peak_versions": timeline.peak_versions,
            "staleness": timeline.staleness,
            "busy": [rank.busy for rank in timeline.ranks],
            "idle": [idle._asdict() for idle in attribute_idle(timeline)],
            "predicted_seconds": None if sampled is None else sampled.median,
            "predicted_range": None if sampled is None else sampled.range(),
        }


def run(argv: Sequence[str]) -> int:
    options = read(SimulateOptions, argv, "simulate")
    schedule, costs, found = _schedule(options)
    sampled = None
    if options.spread is not None:
        spread = read_spread(options.spread, schedule)
        if options.following:
            spread = _that_follow(spread, schedule, options)
        sampled = simulate_spread(schedule, costs, spread)
    elif options.following:
        raise ValueError(f"--following {options.following}: expected --spread and a run that measured steps, too")
    answer = Simulated(schedule=schedule, costs=costs, timeline=simulate(schedule, costs), sampled=sampled)
    if options.json:
        print(json.dumps(answer.to_data()))
    else:
        print(table(answer, options) if found is None else wrapped(f"{table(answer, options)}\n\n  {found.summary()}"))
    return 0


def read_spread(text: str, schedule: Schedule) -> Spread:
    """The spread that --spread names. Raises ValueError for a file or run without one."""
    try:
        number = float(text)
    except ValueError:
        pass
    else:
        return Spread.of_half_ranges([number] * schedule.num_stages)
    from ..train.run_folder import find_run  # numpy: a simulation without a spread needs none

    path = Path(text)
    if path.is_file() and path.name != NAME:
        return Spread.from_json(path.read_text(encoding="utf-8"))
    try:
        folder = path.parent if path.is_file() else find_run(path)
    except ValueError as error:
        raise ValueError(
            f"--spread {text}: expected a number such as 0.1, a Spread's JSON file, or a run; {error}"
        ) from None
    found = RunFile.read(folder).spread
    if found is None:
        raise ValueError(f"--spread {text}: the run measured fewer than ten steps: expected one that measured more")
    return found


def _that_follow(spread: Spread, schedule: Schedule, options: SimulateOptions) -> Spread:
    from ..pace import steps_that_follow  # numpy, likewise

    if not spread.steps:
        raise ValueError(
            f"--following {options.following}: --spread {options.spread} knows nothing of how steps differ: expected a "
            f"run that measured them"
        )
    return steps_that_follow(spread, schedule, options.following)


def _schedule(options: SimulateOptions) -> tuple[Schedule, Costs, Synthesis | None]:
    if (options.schedule is None) == (options.csv is None):
        raise ValueError(
            "expected a schedule's name or its file, once, such as `stagewright simulate 1f1b --ranks 4 --microbatches "
            "8` or `stagewright simulate mine.csv`"
        )
    name = str(options.schedule or options.csv)
    schedule, costs, found = made_or_found(name, options, command=f"simulate {name}")
    return schedule_without(replicate(schedule, options.data), options.without), costs, found


def table(answer: Simulated, options: CostOptions) -> str:
    """Figures, a row per rank, and the unit of time if no costs were given."""
    schedule, costs, timeline = answer.schedule, answer.costs, answer.timeline
    streams = schedule.is_asynchronous
    batches = f" a batch, {count(schedule.num_batches, 'batch')}" if schedule.num_batches > 1 else ""
    # The first and the last batch are not like those between them.
    steady = "of the steady state" if schedule.num_batches > 2 else "of all: give more --batches for a steady state"
    figures = [
        ("makespan", f"{duration(timeline.makespan):>10}", ""),
        ("lower bound", f"{duration(lower_bound(schedule, costs)):>10}", "   no order of this work can beat it"),
        ("ideal makespan", f"{duration(ideal_makespan(schedule, costs)):>10}", "   a rank without idle time"),
        ("makespan bubble", f"{timeline.makespan_bubble:10.2%}", ""),
        ("span bubble", f"{timeline.span_bubble:10.2%}", ""),
    ]
    if answer.sampled is not None:
        low, high = map(duration, answer.sampled.range())
        median = f"{duration(answer.sampled.median):>10}"
        figures.insert(1, ("predicted", median, f"   median of steps that vary; 90%: {low} .. {high}"))
    if streams:
        figures[-2:] = [
            ("batch seconds", f"{duration(timeline.batch_seconds):>10}", f"   from batch to batch {steady}"),
            ("bubble", f"{timeline.bubble:10.2%}", f"   {steady}"),
        ]
    fullest, whole = max(timeline.peak_activations, default=0), schedule.num_stages * schedule.num_slices
    held = f"   most stage activations on a rank: {fullest / whole:.3g} x model"
    figures.append(("held", f"{fullest:>10}", held))
    lines = [
        f"{schedule.name}: {count(schedule.num_ranks, 'rank')}, {count(answer.num_chunks, 'chunk')} per rank, "
        f"{count(schedule.num_microbatches, 'microbatch')}{batches} (simulated)",
        *(f"  {name:<16} {number}{meaning}" for name, number, meaning in figures),
        "",
        f"  rank       busy       idle  held{'  versions  staleness' * streams}  largest idle cause",
    ]
    for rank, causes in enumerate(attribute_idle(timeline)):
        idle, busy, peak = causes._asdict(), timeline.ranks[rank].busy, timeline.peak_activations[rank]
        cause, most = max(idle.items(), key=lambda item: item[1])
        why = f"{cause.replace('_', ' ')} ({duration(most)})" if most > 0 else "none"
        weights = f" {timeline.peak_versions[rank]:>9} {timeline.staleness[rank]:>10}" if streams else ""
        lines.append(f"  {rank:>4} {duration(busy):>10} {duration(sum(idle.values())):>10} {peak:>5}{weights}  {why}")
    lines += (
        [] if options.forward else ["", "  held: activations of stages; 1 s is one forward of a stage (or: --forward)"]
    )
    return "\n".join(lines)
