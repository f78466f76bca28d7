"""`stagewright timeline RUN_OR_PLAN_OR_SCHEDULE...`: draws everything that has timelines.

stagewright timeline runs/gpt                             into the run's folder: page, picture, Perfetto trace
stagewright timeline runs/gpt plan.json -o both.html      several below each other, on one scale
stagewright timeline rank*.pt.trace.json -o torch.html    traces of other tools, a file per rank
stagewright timeline 1f1b zb-h1 --ranks 4 --microbatches 8 -o a.svg --width 7 --font 7 --no-title
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ...schedules.wording import count, duration
from ...viz import Exhibit, FigureStyle
from ...viz.exhibit import PREDICTED, SIMULATED, held_activations
from ..options import plain_help, read
from .exhibits import read_exhibits
from .outputs import TimelinePictureOptions, write_output
from .schedule_options import CostOptions

_FIRST, _STYLE = "timeline", FigureStyle()


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineOptions(TimelinePictureOptions, CostOptions):
    """Draw runs, plans, schedules and traces, one below the other on one scale.

    Sizes and costs are for schedules, in seconds of ONE stage action; a run and a plan bring their own. Schedules with
    more stages than others cut the same model: equal work.
    """

    # Runs (folder or name), plans, schedules (file or name), timelines (JSON), traces (torch.profiler, Perfetto).
    inputs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN|PLAN|SCHEDULE|TRACE")]
    # File to write, by its end: .html to look into, .png, .svg, .pdf, .json for Perfetto (ui.perfetto.dev); may be
    # given several times (default: timeline.html, and in a run's folder .png and .perfetto.json).
    out: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(aliases=["-o"])] = ()
    # Mark the chain of actions and messages that determines the end.
    critical_path: tyro.conf.FlagCreatePairsOff[bool] = False
    # Below each timeline of a picture, draw the memory of each rank over time, with peaks and limit.
    memory: tyro.conf.FlagCreatePairsOff[bool] = False
    idle: Literal["cause", "hatch"] = _STYLE.idle  # cause: colour idle time by its cause. hatch: hatch all of it.
    # Draw in the terminal, and write only the files of -o; NO_COLOR=1: without colours.
    terminal: tyro.conf.FlagCreatePairsOff[bool] = False
    json: tyro.conf.FlagCreatePairsOff[bool] = False  # Print one JSON object.


def run(argv: Sequence[str]) -> int:
    options = read(TimelineOptions, argv, "timeline")
    if options.terminal and options.json:
        raise ValueError("--terminal with --json: expected one of them")
    outputs = list(options.out) or ([] if options.terminal else _usual_outputs(options.inputs))
    options.check_output(outputs, sources=options.inputs)
    style = options.style(idle=options.idle, critical_path=options.critical_path, memory=options.memory)
    exhibits = read_exhibits(options.inputs, options)
    notes = [note for exhibit in exhibits for note in exhibit.notes] + shape_notes(exhibits)
    if options.memory:
        notes += [
            f"{each.name}: no memory is drawn: nothing says what its stages hold"
            for each in exhibits
            if not each.memory
        ]
    ways = [write_output(exhibits, path, style) for path in outputs]
    if options.json:
        print(json.dumps({"written": list(map(str, outputs)), "notes": notes, "exhibits": list(map(_facts, exhibits))}))
        return 0
    if options.terminal:
        from ...viz.terminal import render_terminal

        print(render_terminal(exhibits))
    for exhibit in () if options.terminal else exhibits:
        for caption, timeline in exhibit.timelines:
            taken = f"{duration(timeline.batch_seconds)} a batch, bubble {timeline.bubble:.1%}"
            if timeline is exhibit.simulated and (sampled := exhibit.sampled) is not None:
                taken += f"; predicted {sampled}, bubble {sampled.bubble:.1%}"
            print(f"{exhibit.name}, {caption}: {taken}")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    for path, how in zip(outputs, ways, strict=True):
        print(f"{path}{how}")
    return 0


def shape_notes(exhibits: Sequence[Exhibit]) -> list[str]:
    """A note on each exhibit whose timelines have different numbers of ranks, stages or microbatches."""
    notes = []
    for exhibit in exhibits:
        shapes = {
            caption: (t.schedule.num_ranks, t.schedule.num_stages, t.schedule.num_microbatches)
            for caption, t in exhibit.timelines
        }
        if len(set(shapes.values())) > 1:
            said = " and ".join(
                f"{c} has {count(r, 'rank')}, {count(s, 'stage')}, {count(m, 'microbatch')}"
                for c, (r, s, m) in shapes.items()
            )
            notes.append(f"{exhibit.name}: {said}: both are drawn, and are not to be compared row by row")
    return notes


def _usual_outputs(inputs: Sequence[str]) -> list[Path]:
    from ..train.run_folder import RUNS

    ends = [".png", ".perfetto.json", ".html"]
    for folder in (Path(inputs[0]), RUNS / inputs[0]) if len(inputs) == 1 else ():
        if folder.is_dir():
            return [folder / f"{_FIRST}{end}" for end in ends]
    return [Path(f"{_FIRST}{end}") for end in ends[2:]]


def _facts(exhibit: Exhibit) -> dict[str, object]:
    """Figures for JSON. `predicted`, where durations vary: the median of the simulated steps, and the range of 90%."""
    newest, sampled = exhibit.measured[-1].timeline if exhibit.measured else None, exhibit.sampled
    found: dict[str, object] = {"name": exhibit.name}
    for name, timeline in ((SIMULATED, exhibit.simulated), ("measured", newest)):
        if timeline is not None:
            figures = {"step_seconds": timeline.batch_seconds, "makespan": timeline.makespan, "bubble": timeline.bubble}
            found[name] = figures | {"activations_held": held_activations(timeline)}
    if sampled is not None:
        ends = sampled.range()
        found[PREDICTED] = {"step_seconds": sampled.median, "step_range": ends, "bubble": sampled.bubble}
    return found
