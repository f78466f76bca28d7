"""`stagewright timeline runs/<name>`: draw a run again from its timeline.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from ..training.run_folder import find_run
from ..training.traces import Traces


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineOptions:
    """Draw a run's timeline (predicted above measured) and export it for Perfetto (ui.perfetto.dev)."""

    folder: tyro.conf.Positional[Path]
    """Folder of the run, runs/<name>, or its name."""
    json: bool = False
    """Print one JSON object."""


def run(argv: Sequence[str]) -> int:
    """Read timeline.json, write the picture and the Perfetto trace."""
    options = tyro.cli(TimelineOptions, args=argv, prog="stagewright timeline")
    folder = find_run(options.folder)
    traces = Traces.read(folder)
    picture, trace = traces.draw(folder)
    if options.json:
        answer = {
            "picture": str(picture),
            "perfetto": str(trace),
            "bubble": traces.measured.bubble,
            "predicted_bubble": traces.predicted.bubble,
            "step_seconds": traces.measured.batch_seconds,
            "predicted_step_seconds": traces.predicted.batch_seconds,
        }
        print(json.dumps(answer))
    else:
        print(f"{picture}: bubble {traces.measured.bubble:.1%} measured, {traces.predicted.bubble:.1%} predicted")
        print(f"{trace}: open it at https://ui.perfetto.dev")
    return 0
