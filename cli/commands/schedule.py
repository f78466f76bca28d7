"""`stagewright schedule 1f1b --ranks 4 --microbatches 8`: prints or exports a schedule; checks one of your own.

stagewright schedule mine.csv                     a table or JSON: checked, shown, simulated
stagewright schedule auto --memory 6 ...          the best one found, and its gap to the lower bound
stagewright schedule mine.py:zigzag -o z.png      what a function returns, with a picture
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ...schedules import check_lowered, lower, simulate
from ...schedules.custom.user_schedules import is_own
from ..options import plain_help, read
from .outputs import TimelinePictureOptions, write_output
from .schedule_options import NAME_HELP, SynthesisOptions, made_or_found, synthesis_data, synthesis_table
from .simulate import Simulated, table

if TYPE_CHECKING:
    from ...viz import FigureStyle


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions(TimelinePictureOptions, SynthesisOptions):
    """Print a schedule as a grid (a row per rank, a column per unit of time), or export it.

    One of your own is checked, and simulated with the costs: seconds of ONE stage action, one number or one per stage.
    `auto` searches for the best for these costs within the memory, which is no worse than any named one.
    """

    schedule: Annotated[tyro.conf.Positional[str], NAME_HELP]
    # grid: for people. csv: the table of torch.distributed.pipelining (flush schedules). json: everything.
    format: Literal["grid", "csv", "json"] = "grid"
    # File to draw it in, simulated with the costs, by its suffix, as with `stagewright timeline` (.json: for Perfetto;
    # `--format json > FILE` writes the schedule); may be given several times.
    out: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(aliases=["-o"])] = ()
    # Print one JSON object: the schedule and its figures, and of `auto` bound, gap and the search.
    json: tyro.conf.FlagCreatePairsOff[bool] = False


def run(argv: Sequence[str]) -> int:
    options = read(ScheduleOptions, argv, "schedule")
    options.check_output(options.out, sources=[options.schedule])
    style = options.style() if options.out else None  # what draws is loaded only then
    if options.json and options.format != "grid":
        raise ValueError(f"--json with --format {options.format}: expected one of the two")
    schedule, costs, found = made_or_found(options.schedule, options, command=f"schedule {options.schedule}")
    answer = Simulated(schedule=schedule, costs=costs, timeline=simulate(schedule, costs))
    opens = [] if style is None else _draw(answer, options.out, style)
    if options.json:
        search = {} if found is None else {"search": synthesis_data(found)}
        data = {"schedule": schedule.to_data(), "figures": answer.to_data(), **search}
        print(json.dumps(data | {"written": list(map(str, options.out))}))
        return 0
    match options.format:
        case "grid":
            print(schedule.grid())
            if found is not None or is_own(options.schedule):
                print(f"\n{_checked(answer, options)}")
            if found is not None:
                print(f"\n{synthesis_table(found)}")
            for path, how in zip(options.out, opens, strict=True):
                print(f"{path}{how}")
        case "csv":
            print(schedule.to_csv(), end="")
        case "json":
            print(schedule.to_json())
    return 0


def _draw(answer: Simulated, paths: Sequence[Path], style: FigureStyle) -> list[str]:
    from ...viz import Exhibit

    exhibit = Exhibit(name=answer.schedule.name, simulated=answer.timeline, costs=answer.costs)
    return [write_output([exhibit], path, style) for path in paths]


def _checked(answer: Simulated, options: ScheduleOptions) -> str:
    lines = ["checked: complete, in an order that ends"]
    held = check_lowered(lower(answer.schedule)).held
    if held is not None:
        lines.append(f"not so over links that hold a sender until it is received, as NCCL's may: {held}")
    return "\n".join([*lines, table(answer, options)])
