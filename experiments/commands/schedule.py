"""`stagewright schedule 1f1b --ranks 4 --microbatches 8`: print a schedule, or export it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from .schedule_options import NAME_HELP, BuildOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions(BuildOptions):
    """Print a schedule as a grid (a row a rank, a column a unit of time), or export it."""

    schedule: Annotated[tyro.conf.Positional[str], NAME_HELP]
    ranks: int
    """P, pipeline ranks."""
    microbatches: int
    """M, microbatches of a batch."""
    format: Literal["grid", "csv", "json"] = "grid"
    """grid: for people. csv: the table of torch.distributed.pipelining (flush schedules). json: everything."""


def run(argv: Sequence[str]) -> int:
    """Build, check and print."""
    options = tyro.cli(ScheduleOptions, args=argv, prog="stagewright schedule")
    schedule = options.build(options.schedule, ranks=options.ranks, microbatches=options.microbatches)
    match options.format:
        case "grid":
            print(schedule.grid())
        case "csv":
            print(schedule.to_csv(), end="")
        case "json":
            print(schedule.to_json())
    return 0
