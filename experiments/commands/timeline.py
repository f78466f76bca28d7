"""`stagewright timeline RUN_OR_PLAN_OR_SCHEDULE...`: everything that has a time in it, drawn in one way.

stagewright timeline runs/gpt                             beside the run: page, picture, Perfetto trace
stagewright timeline runs/gpt plan.json -o both.html      several below each other, on one scale
stagewright timeline 1f1b zb-h1 --ranks 4 --microbatches 8 -o a.svg --width 7 --font 7 --no-title
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ...viz import Exhibit, FigureStyle, comparison_figure, write_explorer, write_figure, write_perfetto
from ..help_text import plain_help
from .exhibits import read_exhibits
from .files import check_out
from .schedule_options import CostOptions

_FIRST, _STYLE = "timeline", FigureStyle()


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineOptions(CostOptions):
    """Draw runs, plans and schedules, one below the other on one scale.

    Sizes and costs are for schedules, in seconds of ONE stage action; a run and a plan bring their own.
    """

    inputs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN|PLAN|SCHEDULE")]
    """Runs (folder or name), plans, schedules (file or name) and timelines (JSON)."""
    out: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(aliases=["-o"])] = ()
    """File to write, by its end: .html to look into, .png, .svg, .json for Perfetto (ui.perfetto.dev); may be given
    several times (default: timeline.html, and beside a run .png and .perfetto.json)."""
    width: float = _STYLE.width
    """Of a picture [inch]."""
    dpi: float = _STYLE.dpi
    """Pixels an inch of a PNG."""
    font: float = _STYLE.font
    """Size of a picture's words [points]."""
    no_title: tyro.conf.FlagCreatePairsOff[bool] = False
    """Leave the title to a paper's caption."""
    idle: Literal["cause", "hatch"] = _STYLE.idle
    """cause: idle time in the hue of its cause. hatch: all alike."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object."""


def run(argv: Sequence[str]) -> int:
    """Read, write, and say what was written and what is missing."""
    options = tyro.cli(TimelineOptions, args=argv, prog="stagewright timeline")
    style = FigureStyle(
        width=options.width, dpi=options.dpi, font=options.font, title=not options.no_title, idle=options.idle
    )
    for path in options.out:
        writer_of(path)
        check_out("-o", path)
    exhibits = read_exhibits(options.inputs, options)
    notes = [note for exhibit in exhibits for note in exhibit.notes] + shape_notes(exhibits)
    written = list(options.out) or _usual_outputs(options.inputs)
    for path in written:
        writer_of(path)(exhibits, path, style)
    if options.json:
        print(json.dumps({"written": list(map(str, written)), "notes": notes, "exhibits": list(map(_facts, exhibits))}))
        return 0
    for exhibit in exhibits:
        for caption, timeline in exhibit.timelines:
            print(f"{exhibit.name}, {caption}: {timeline.batch_seconds:.6g} s a batch, bubble {timeline.bubble:.1%}")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    for path in written:
        print(f"{path}{_how_to_look(path)}")
    return 0


def shape_notes(exhibits: Sequence[Exhibit]) -> list[str]:
    """Sentences on timelines whose rows say different things."""
    notes = []
    for exhibit in exhibits:
        shapes = {
            caption: (t.schedule.num_ranks, t.schedule.num_stages, t.schedule.num_microbatches)
            for caption, t in exhibit.timelines
        }
        if len(set(shapes.values())) > 1:
            said = " and ".join(f"{c} has {r} ranks, {s} stages, {m} microbatches" for c, (r, s, m) in shapes.items())
            notes.append(f"{exhibit.name}: {said}: both are drawn, and are not to be compared row by row")
    return notes


_Writer = Callable[[Sequence[Exhibit], Path, FigureStyle], None]


def writer_of(path: Path) -> _Writer:
    """The function that writes a file of this name; ValueError where there is none."""
    writers: dict[str, _Writer] = {
        ".html": _write_page,
        ".png": _write_figure,
        ".svg": _write_figure,
        ".json": _write_perfetto,
    }
    if path.suffix.lower() not in writers:
        raise ValueError(f"-o {path}: expected a name that ends in {', '.join(writers)}")
    return writers[path.suffix.lower()]


def _write_page(exhibits: Sequence[Exhibit], path: Path, style: FigureStyle) -> None:
    del style
    write_explorer(exhibits, path)


def _write_figure(exhibits: Sequence[Exhibit], path: Path, style: FigureStyle) -> None:
    write_figure(comparison_figure(exhibits, style=style), path)


def _write_perfetto(exhibits: Sequence[Exhibit], path: Path, style: FigureStyle) -> None:
    del style
    several = len(exhibits) > 1
    named = [(f"{each.name} {c}" if several else c, t) for each in exhibits for c, t in each.timelines]
    if not named:
        raise ValueError(
            f"-o {path}: {exhibits[0].name} has no timeline, only slices of an unknown kind: expected .html, .png, .svg"
        )
    write_perfetto(named, path)


def _usual_outputs(inputs: Sequence[str]) -> list[Path]:
    """Files beside a run that stands alone; else in the current folder."""
    from ..training.run_folder import RUNS

    ends = [".png", ".perfetto.json", ".html"]
    for folder in (Path(inputs[0]), RUNS / inputs[0]):
        if len(inputs) == 1 and folder.is_dir():
            return [folder / f"{_FIRST}{end}" for end in ends]
    return [Path(f"{_FIRST}{end}") for end in ends[2:]]


def _how_to_look(path: Path) -> str:
    told = {".json": ": open it at https://ui.perfetto.dev", ".html": ": open it in a browser"}
    return told.get(path.suffix.lower(), "")


def _facts(exhibit: Exhibit) -> dict[str, object]:
    """Figures of an exhibit."""
    newest = exhibit.measured[-1].timeline if exhibit.measured else None
    found: dict[str, object] = {"name": exhibit.name}
    for name, timeline in (("predicted", exhibit.predicted), ("measured", newest)):
        if timeline is not None:
            found[name] = {
                "step_seconds": timeline.batch_seconds,
                "makespan": timeline.makespan,
                "bubble": timeline.bubble,
            }
    return found
