"""The legend below a picture: what the colours mean."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ..schedules import Idle, MessageKind, Op
from .palette import (
    CAUSE_HUES,
    IDLE_FILL,
    IDLE_HATCH,
    MESSAGE_HUES,
    MESSAGE_WORDS,
    OP_HUES,
    OP_WORDS,
    OTHER_HUE,
    shade,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_legend(
    figure: Figure,
    *,
    ops: Collection[Op],
    kinds: Collection[MessageKind],
    causes: Collection[str],
    chunks: int,
    left: float,
    rows: Sequence[float],
    marks_end: bool,
) -> None:
    """Two rows of keys: ops and messages (the shades of a swatch are the chunks), then the causes of idle time.

    Arguments:
        left: of both rows, in fractions of the figure.
        rows: upper edges, in fractions of the figure.
        marks_end: True where a dashed line marks the predicted end.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    keys: list[tuple[Any, str]] = []
    for op in (op for op in Op if op in ops):
        hue = OP_HUES.get(op, OTHER_HUE)
        shades = [shade(hue, chunk=chunk, num_chunks=chunks) for chunk in range(chunks)]
        words = OP_WORDS.get(op, op.value)
        keys.append((tuple(Patch(facecolor=colour) for colour in shades), words))
    if chunks > 1 and keys:
        keys[0] = keys[0][0], f"{keys[0][1]}"
    keys.append((Patch(facecolor=IDLE_FILL, edgecolor=IDLE_HATCH, hatch="/////", linewidth=0), "idle"))
    for kind in (kind for kind in MessageKind if kind in kinds):
        keys.append((Line2D([], [], color=MESSAGE_HUES[kind], linewidth=3), MESSAGE_WORDS[kind]))
    if marks_end:
        keys.append((Line2D([], [], color="#202020", linestyle="--", linewidth=1.2), "predicted end"))
    _draw_row(figure, keys, left=left, top=rows[0])
    if causes:
        idle = [(Patch(facecolor=CAUSE_HUES[c]), c.replace("_", " ")) for c in Idle._fields if c in causes]
        _draw_row(figure, [(Line2D([], [], linewidth=0), "idle by cause:"), *idle], left=left, top=rows[1])
