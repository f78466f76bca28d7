"""`stagewright compare runs/gpt runs/gpt-2`: what changed, and where the time of the change came from.

stagewright compare runs/gpt                              a run's prediction beside what was measured
stagewright compare runs/gpt plan.json -o both.html       two of anything that `stagewright timeline` reads
stagewright compare gpipe zb-h1 --ranks 4 --microbatches 8
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ...viz import FigureStyle
from ..options import check_out, plain_help, read
from .compare_table import table
from .comparison import Comparison, Side, compare_exhibits
from .exhibits import read_exhibits
from .outputs import writer_of
from .schedule_options import CostOptions


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions(CostOptions):
    """Compare two runs, plans or schedules; or, of one run, what was predicted with what was measured.

    Sizes and costs are for schedules, in seconds of ONE stage action; a run and a plan bring their own.
    """

    inputs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="A [B]")]
    """Runs (folder or name), plans, schedules (file or name) and timelines (JSON): the one before, the one after."""
    out: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(aliases=["-o"])] = ()
    """File to draw both in, by its end, as those of `stagewright timeline`; may be given several times."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object."""


def run(argv: Sequence[str]) -> int:
    """Read both, compare, print, draw."""
    options = read(CompareOptions, argv, "compare")
    if not 1 <= len(options.inputs) <= 2:
        raise ValueError(
            f"{len(options.inputs)} inputs: expected two to compare, or a run alone, whose prediction is compared with "
            f"what was measured: `stagewright compare runs/gpt runs/gpt-2`"
        )
    for path in options.out:
        writer_of(path)
        check_out("-o", path)
    exhibits = read_exhibits(options.inputs, options)
    comparison = compare_exhibits(exhibits, options.inputs)
    for path in options.out:
        writer_of(path)(exhibits, path, FigureStyle())
    if options.json:
        print(json.dumps(as_json(comparison) | {"written": list(map(str, options.out))}))
        return 0
    print(table(comparison))
    for path in options.out:
        print(path)
    return 0


def as_json(comparison: Comparison) -> dict[str, object]:
    """Everything, by name."""
    found = comparison.difference
    return {
        "before": _side_json(comparison.before),
        "after": _side_json(comparison.after),
        "step_seconds": found.batch_seconds._asdict() | {"change": found.batch_seconds.seconds},
        "per_batch": found.per_batch,
        "makespan": found.makespan._asdict() | {"change": found.makespan.seconds},
        "bubble": found.bubble._asdict() | {"change": found.bubble.seconds},
        "causes": [each._asdict() | {"change": each.seconds} for each in found.causes],
        "largest_cause": found.largest_cause.name,
        "critical_path": [each._asdict() | {"change": each.seconds} for each in found.path],
        "ranks": [[each._asdict() | {"change": each.seconds} for each in rank] for rank in found.ranks],
        "departures": [
            {**each._asdict(), "action": str(each.action), "change": each.seconds} for each in found.departures
        ],
        "stragglers": [{**asdict(each), "name": each.name} for each in found.stragglers],
        "configuration": {name: list(pair) for name, pair in comparison.changed.items()},
        "notes": list(comparison.notes),
    }


def _side_json(side: Side) -> dict[str, object]:
    return {
        "name": side.name,
        "caption": side.caption,
        "figures": [figure._asdict() for figure in side.figures],
        "peak_bytes": side.peaks,
        "peak_bytes_are": side.peaks_are,
        "configuration": side.configuration,
    }
