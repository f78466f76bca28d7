"""The legend below a picture: what the colours mean."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ..schedules import Idle, MessageKind, Op
from .palette import (
    CAUSE_HUES,
    COLLECTIVE_HUES,
    COLLECTIVE_WORDS,
    IDLE_FILL,
    IDLE_HATCH,
    MESSAGE_HUES,
    MESSAGE_WORDS,
    OP_HUES,
    OP_WORDS,
    OTHER_HUE,
    batch_shade,
    shade,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZE = 9.5  # of the words [points]
_INK = "#303030"
_HEADING = 104  # width of the column of headings [pixels]


_Key = tuple[Any, str]  # a handle of any of matplotlib's kinds, and its words


def draw_legend(
    figure: Figure,
    *,
    ops: Collection[Op],
    kinds: Collection[MessageKind],
    together: Collection[Op],
    causes: Collection[str],
    chunks: int,
    batches: bool,
    marks_end: bool,
    left: float,
    middles: Sequence[float],
) -> None:
    """Two rows of keys: what is drawn over time (the shades of a swatch are the chunks), and why ranks idle.

    Arguments:
        together: ops of collectives.
        batches: True where every other batch is paler.
        marks_end: True where a dashed line marks the predicted end.
        left: of both rows, in fractions of the figure.
        middles: heights of the rows, in fractions of the figure.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    keys = [_op_key(op, chunks, batches=batches) for op in Op if op in ops]
    shades = [f"chunk 0 to {chunks - 1}"] * (chunks > 1) + ["even, odd batches"] * batches
    if shades and keys:
        keys[0] = keys[0][0], f"{keys[0][1]} ({'; '.join(shades)})"
    if causes:
        keys.append((Patch(facecolor=IDLE_FILL, edgecolor=IDLE_HATCH, hatch="/////", linewidth=0), "idle"))
    for kind in (kind for kind in MessageKind if kind in kinds):
        keys.append((Line2D([], [], color=MESSAGE_HUES[kind], linewidth=3), MESSAGE_WORDS[kind]))
    for op in (op for op in Op if op in together):
        words = COLLECTIVE_WORDS.get(op, op.value)
        keys.append((Line2D([], [], color=COLLECTIVE_HUES.get(op, OTHER_HUE), linewidth=3), words))
    if marks_end:
        keys.append((Line2D([], [], color="#202020", linestyle="--", linewidth=0.9), "predicted end"))
    if keys:
        _draw_row(figure, "timeline:", keys, left=left, middle=middles[0])
    if causes:
        idle: list[_Key] = [(Patch(facecolor=CAUSE_HUES[c]), c.replace("_", " ")) for c in Idle._fields if c in causes]
        _draw_row(figure, "idle by cause:", idle, left=left, middle=middles[1])


def _op_key(op: Op, chunks: int, *, batches: bool) -> _Key:
    from matplotlib.patches import Patch

    hue = OP_HUES.get(op, OTHER_HUE)
    colours = [
        batch_shade(shade(hue, chunk=chunk, num_chunks=chunks), batch)
        for chunk in range(chunks)
        for batch in range(2 if batches else 1)
    ]
    return tuple(Patch(facecolor=colour) for colour in colours), OP_WORDS.get(op, op.value)


def _draw_row(figure: Figure, heading: str, keys: Sequence[_Key], *, left: float, middle: float) -> None:
    from matplotlib.legend_handler import HandlerTuple

    figure.text(left, middle, heading, size=_SIZE, va="center", color=_INK)
    figure.legend(
        [handle for handle, _ in keys],
        [words for _, words in keys],
        loc="center left",
        bbox_to_anchor=(left + _HEADING / figure.bbox.width, middle),
        ncols=len(keys),
        fontsize=_SIZE,
        labelcolor=_INK,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.0)},
        frameon=False,
        borderaxespad=0.0,
        handletextpad=0.5,
        columnspacing=1.6,
    )
