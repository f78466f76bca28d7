"""Data of the page: what is drawn and said, as compact JSON. Everything is computed here or below, not in the page.

Times are whole ticks from each timeline's own start; `tick` is their length in seconds. Long lists are columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...schedules import Idle, MemoryPart, MessageKind
from ...schedules.timing.critical_path import PathKind
from ..exhibit import Exhibit
from ..headline import headline
from ..palette import (
    CAUSE_HUES,
    COLLECTIVE_HUES,
    COLLECTIVE_WORDS,
    MEMORY_HUES,
    MESSAGE_HUES,
    MESSAGE_WORDS,
    OP_HUES,
    OP_WORDS,
    OTHER_HUE,
)
from .difference_data import difference_columns
from .panel_data import Programs, timeline_panel

_TICKS = 1e8  # at least as many on the whole scale: finer than a pixel of the deepest zoom that anyone reads


def page_data(exhibits: Sequence[Exhibit]) -> dict[str, Any]:
    """Data that the scripts read (`model.js` says how)."""
    tick = _tick(max(map(_length, exhibits)))
    programs = Programs()
    shown = [_exhibit(exhibit, tick, programs) for exhibit in exhibits]
    return {"tick": tick, "palette": _palette(), "programs": programs.columns, "exhibits": shown}


def _exhibit(exhibit: Exhibit, tick: float, programs: Programs) -> dict[str, Any]:
    predicted = exhibit.predicted
    return {
        "name": exhibit.name,
        "notes": list(exhibit.notes),
        "figures": [list(figure) for figure in headline(exhibit)],
        "predicted": None if predicted is None else timeline_panel(exhibit, predicted, tick, programs),
        "measured": [
            {
                "step": step.number,
                **timeline_panel(exhibit, step.timeline, tick, programs),
                "difference": difference_columns(predicted, step.timeline),
            }
            for step in exhibit.measured
        ],
    }


def _length(exhibit: Exhibit) -> float:
    timelines = [step.timeline for step in exhibit.measured]
    timelines += [] if exhibit.predicted is None else [exhibit.predicted]
    return max(timeline.makespan for timeline in timelines)


def _tick(longest: float) -> float:
    return float(10.0 ** math.floor(math.log10(longest / _TICKS))) if longest > 0 else 1e-9


def _palette() -> dict[str, Any]:
    """Colours and words, by the short names under which the data has them."""
    return {
        "ops": {op.value: [OP_HUES[op], OP_WORDS[op]] for op in OP_HUES},
        "other": OTHER_HUE,
        "messages": [[kind.value, MESSAGE_HUES[kind], MESSAGE_WORDS[kind]] for kind in MessageKind],
        "collectives": {
            op.value: [COLLECTIVE_HUES.get(op, OTHER_HUE), COLLECTIVE_WORDS.get(op, op.value)] for op in COLLECTIVE_HUES
        },
        "memory": [[MEMORY_HUES[part], part.value] for part in MemoryPart],
        "path_kinds": [kind.value for kind in PathKind],
        "causes": [[CAUSE_HUES[cause], cause.replace("_", " ")] for cause in Idle._fields],
    }
