"""`stagewright schedule 1f1b --ranks 4 --microbatches 8`: print a schedule, or export it; check one of your own.

stagewright schedule mine.csv                 a table or JSON: checked, shown, simulated
stagewright schedule mine.py:zigzag --png z.png   what a function returns; drawn, too
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ...schedules import Schedule, simulate
from ..help_text import plain_help
from ..schedule_files import is_file
from .files import check_out
from .schedule_options import NAME_HELP, CostOptions
from .simulate import summarise, table


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions(CostOptions):
    """Print a schedule as a grid (a row a rank, a column a unit of time), or export it.

    One of your own is checked, and simulated with the costs: seconds of ONE stage action, one number or one a stage.
    """

    schedule: Annotated[tyro.conf.Positional[str], NAME_HELP]
    format: Literal["grid", "csv", "json"] = "grid"
    """grid: for people. csv: the table of torch.distributed.pipelining (flush schedules). json: everything."""
    png: Path | None = None
    """Draw it, simulated with the costs, to this file."""


def run(argv: Sequence[str]) -> int:
    """Build or read, check, print and draw."""
    options = tyro.cli(ScheduleOptions, args=argv, prog="stagewright schedule")
    schedule = options.make(options.schedule, command="schedule")
    if options.png is not None:
        check_out("--png", options.png)
        from ...viz import render_timeline

        render_timeline(simulate(schedule, options.costs()), options.png)
    match options.format:
        case "grid":
            print(schedule.grid())
            if is_file(options.schedule):
                print(f"\n{_simulated(schedule, options)}")
        case "csv":
            print(schedule.to_csv(), end="")
        case "json":
            print(schedule.to_json())
    return 0


def _simulated(schedule: Schedule, options: ScheduleOptions) -> str:
    costs = options.costs()
    return f"checked: complete, in an order that ends\n{table(summarise(schedule, costs, simulate(schedule, costs)))}"
