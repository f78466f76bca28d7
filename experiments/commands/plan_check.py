"""`stagewright plan --check RUN`: what a plan promised beside what was measured, by cause; what to measure again.

stagewright plan --check gpt                              the plan that the run carried out
stagewright plan --check runs/gpt plan.json -o check.png  of a run that keeps none, or one that was made again
stagewright plan --check hostA/runs/gpt hostB/runs/gpt    folders that hosts have left of one run
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ...viz import FigureStyle, write_figure
from ...viz.figures import FIGURE_SUFFIXES
from ...viz.waterfall import waterfall_figure
from ..options import check_out, plain_help, read
from .check_table import advice, heading, table
from .checked_run import CheckedRun, check_run


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """Hold a plan against the run that carried it out: where the difference of the step comes from, and which input of
    the plan to measure again."""

    check: Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN [PLAN]")]
    """The run (folder or name, or the folders that hosts left of it), and the file of the plan where it is not the one
    that the run keeps."""
    out: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(aliases=["-o"])] = ()
    """Picture of the step from predicted to measured, cause by cause: .png or .svg; may be given several times."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object."""


def run(argv: Sequence[str]) -> int:
    """Read run and plan, compare, print, draw."""
    options = read(CheckOptions, argv, "plan")
    for path in options.out:
        if path.suffix.lower() not in FIGURE_SUFFIXES:
            raise ValueError(f"-o {path}: expected a name that ends in {' or '.join(FIGURE_SUFFIXES)}")
        check_out("-o", path)
    found = check_run(options.check)
    for path in options.out:
        write_figure(waterfall_figure(found.check, title=heading(found), style=FigureStyle(width=9.0)), path)
    if options.json:
        print(json.dumps(as_json(found) | {"written": list(map(str, options.out))}))
        return 0
    table(found)
    for path in options.out:
        print(path)
    return 0


def as_json(found: CheckedRun) -> dict[str, object]:
    """Everything, by name; seconds and bytes."""
    check = found.check
    return {
        "run": found.name,
        "predicted": check.predicted,
        "measured": check.measured,
        "step_seconds": check.step_seconds,
        "num_steps": check.num_steps,
        "causes": [each._asdict() | {"change": each.seconds} for each in check.causes],
        "inputs": [
            {
                "name": str(each.what),
                "cause": each.what.cause,
                "kind": each.what.kind,
                "at": list(each.what.at),
                **{key: value for key, value in each._asdict().items() if key != "what"},
                "ratio": each.ratio,
            }
            for each in check.inputs
        ],
        "ranks": [[each._asdict() for each in rank] for rank in check.ranks],
        "step_range": None if found.sampled is None else list(found.sampled.range()),
        "tensor_bytes": [list(pair) for pair in found.tensor_bytes],
        "measure_again": [asdict(each) for each in advice(found)],
        "notes": list(found.notes),
    }
