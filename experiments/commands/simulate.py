"""`stagewright simulate interleaved --ranks 4 --microbatches 8`: its cost, before anything runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from ...schedules import (
    Costs,
    Schedule,
    Timeline,
    attribute_idle,
    ideal_makespan,
    lower_bound,
    simulate,
)
from ...schedules.wording import count
from ..help_text import plain_help
from .schedule_options import NAME_HELP, LimitedOptions


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(LimitedOptions):
    """Simulate a schedule. Costs are seconds of ONE stage action: one number, or one a stage."""

    schedule: Annotated[tyro.conf.Positional[str | None], NAME_HELP] = None
    csv: str | None = None
    """The schedule's file, in place of its name."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSummary:
    """Answer of `stagewright simulate`; times in the unit of the costs.

    Where batches overlap (`streams`), the bubbles and `batch_seconds` are those of the steady state, all else is of the
    whole program of `num_batches`, its warm-up and drain included.
    """

    schedule: str
    num_ranks: int
    num_chunks: int
    num_stages: int
    num_microbatches: int
    num_batches: int
    streams: bool
    makespan: float
    batch_seconds: float
    makespan_bubble: float
    span_bubble: float
    bubble: float
    ideal_makespan: float
    lower_bound: float
    peak_activations: list[int]
    peak_versions: list[int]
    staleness: list[int]
    busy: list[float]
    idle: list[dict[str, float]]


def run(argv: Sequence[str]) -> int:
    """Build or read, check, simulate, print."""
    options = tyro.cli(SimulateOptions, args=argv, prog="stagewright simulate")
    schedule = _schedule(options)
    costs = options.costs()
    answer = summarise(schedule, costs, simulate(schedule, costs))
    if options.json:
        # not asdict: its deep copies are of no use here
        print(json.dumps({name: getattr(answer, name) for name in SimulationSummary.__slots__}))
    else:
        print(table(answer))
    return 0


def summarise(schedule: Schedule, costs: Costs, timeline: Timeline) -> SimulationSummary:
    """The figures of one simulated batch, or of a program of several."""
    return SimulationSummary(
        schedule=schedule.name,
        num_ranks=schedule.num_ranks,
        num_chunks=max(map(len, schedule.placement)),
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        num_batches=schedule.num_batches,
        streams=schedule.is_asynchronous,
        makespan=timeline.makespan,
        batch_seconds=timeline.batch_seconds,
        makespan_bubble=timeline.makespan_bubble,
        span_bubble=timeline.span_bubble,
        bubble=timeline.bubble,
        ideal_makespan=ideal_makespan(schedule, costs),
        lower_bound=lower_bound(schedule, costs),
        peak_activations=list(timeline.peak_activations),
        peak_versions=list(timeline.peak_versions),
        staleness=list(timeline.staleness),
        busy=[rank.busy for rank in timeline.ranks],
        idle=[idle._asdict() for idle in attribute_idle(timeline)],
    )


def _schedule(options: SimulateOptions) -> Schedule:
    if (options.schedule is None) == (options.csv is None):
        raise ValueError(
            "expected a schedule's name or its file, once, such as `stagewright simulate 1f1b --ranks 4 --microbatches "
            "8` or `stagewright simulate mine.csv`"
        )
    return options.make(str(options.schedule or options.csv), command="simulate")


def table(answer: SimulationSummary) -> str:
    """The figures for people."""
    batches = f" a batch, {count(answer.num_batches, 'batch')}" if answer.num_batches > 1 else ""
    # The first and the last batch are not like those between them.
    steady = "of the steady state" if answer.num_batches > 2 else "of all: give more --batches for a steady state"
    figures = [
        ("makespan", f"{answer.makespan:10.6g}", ""),
        ("lower bound", f"{answer.lower_bound:10.6g}", "   no order of this work can beat it"),
        ("ideal makespan", f"{answer.ideal_makespan:10.6g}", "   a rank without idle time"),
        ("makespan bubble", f"{answer.makespan_bubble:10.2%}", ""),
        ("span bubble", f"{answer.span_bubble:10.2%}", ""),
    ]
    if answer.streams:
        figures[3:] = [
            ("batch seconds", f"{answer.batch_seconds:10.6g}", f"   from batch to batch {steady}"),
            ("bubble", f"{answer.bubble:10.2%}", f"   {steady}"),
        ]
    lines = [
        f"{answer.schedule}: {count(answer.num_ranks, 'rank')}, {count(answer.num_chunks, 'chunk')} a rank, "
        f"{count(answer.num_microbatches, 'microbatch')}{batches} (simulated)",
        *(f"  {name:<16} {number}{meaning}" for name, number, meaning in figures),
        "",
        f"  rank       busy       idle  activations{'  versions  staleness' * answer.streams}  largest idle cause",
    ]
    for rank, (busy, idle, peak) in enumerate(zip(answer.busy, answer.idle, answer.peak_activations, strict=True)):
        cause, most = max(idle.items(), key=lambda item: item[1])
        why = f"{cause.replace('_', ' ')} ({most:.6g})" if most > 0 else "none"
        weights = f" {answer.peak_versions[rank]:>9} {answer.staleness[rank]:>10}" if answer.streams else ""
        lines.append(f"  {rank:>4} {busy:10.6g} {sum(idle.values()):10.6g} {peak:>12}{weights}  {why}")
    return "\n".join(lines)
