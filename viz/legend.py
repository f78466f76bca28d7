"""The legend below a figure: what the colours mean, in as many lines as it takes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..schedules import Idle, MemoryPart, MessageKind, Op
from .gantt import PATH_INK
from .idle import IdleFill
from .memory_panel import LINE_INK, LINE_STYLES
from .palette import (
    CAUSE_HUES,
    COLLECTIVE_HUES,
    COLLECTIVE_WORDS,
    IDLE_FILL,
    IDLE_HATCH,
    MEMORY_HUES,
    MESSAGE_HUES,
    MESSAGE_WORDS,
    OP_WORDS,
    OTHER_HUE,
    box_colour,
)
from .scale import UNITS_AN_INCH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANGE_BAND: dict[str, Any] = {"facecolor": "#202020", "alpha": 0.55, "linewidth": 0}
_INK = "#303030"
_HEADING = 8.0  # width of the column of headings, in font sizes
_LETTER = 0.54  # mean width of a letter of DejaVu Sans, in font sizes
_AROUND = 4.2  # width of a key beside its words: handle, padding and gap, in font sizes


class Key(NamedTuple):
    """A handle of any of matplotlib's kinds, and its words."""

    handle: Any
    words: str


class Line(NamedTuple):
    """One line of keys."""

    heading: str
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Things that a figure shows, which its legend explains.

    Arguments:
        ops, kinds: of actions and messages.
        together: ops of collectives.
        causes: of idle time.
        chunks: the most of any rank.
        batches: True where every other batch is paler.
        marks_end: True where a dashed line marks the predicted end; marks_range: where a band has 90% of them.
        versions: True where forwards wear their weight version.
        memory, memory_lines: parts of what ranks hold, and names of the lines over them.
        paths: a sentence on each critical path that is marked.
    """

    ops: Collection[Op]
    kinds: Collection[MessageKind]
    together: Collection[Op]
    causes: Collection[str]
    chunks: int
    batches: bool
    marks_end: bool
    marks_range: bool
    versions: bool = False
    memory: Collection[MemoryPart] = ()
    memory_lines: Sequence[str] = ()
    paths: Sequence[str] = ()


def legend_lines(shown: Shown, *, idle: IdleFill, font: float, width: float) -> list[Line]:
    """Lines no wider than `width` [points], in words of `font` points."""
    causes = [Key(_patch(CAUSE_HUES[c]), c.replace("_", " ")) for c in Idle._fields if c in shown.causes]
    room = width / font - _HEADING
    paths = [Key(_frame(), words) for words in shown.paths]
    return [
        *_broken("timeline:", list(_timeline_keys(shown, idle)), room),
        *_broken("idle by cause:", causes, room),
        *_broken("memory:", list(_memory_keys(shown)), room),
        *_broken("critical path:", paths, room),
    ]


def _broken(heading: str, keys: Sequence[Key], room: float) -> Iterator[Line]:
    """Lines of keys; `room`: for them, in font sizes."""
    line: list[Key] = []
    left = room
    for key in keys:
        size = _AROUND + _LETTER * len(key.words)
        if line and size > left:
            yield Line(heading, tuple(line))
            heading, line, left = "", [], room
        line.append(key)
        left -= size
    if line:
        yield Line(heading, tuple(line))


def _timeline_keys(shown: Shown, idle: IdleFill) -> Iterator[Key]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shades = [f"chunk 0 to {shown.chunks - 1}"] * (shown.chunks > 1) + ["even, odd batches"] * shown.batches
    for number, op in enumerate(op for op in Op if op in shown.ops):
        words = OP_WORDS.get(op, op.value)
        yield Key(_op_handle(op, shown), f"{words} ({'; '.join(shades)})" if shades and number == 0 else words)
    if shown.causes and idle == "hatch":
        yield Key(Patch(facecolor=IDLE_FILL, edgecolor=IDLE_HATCH, hatch="/////", linewidth=0), "idle")
    if shown.versions:
        yield Key(Line2D([], [], linestyle="", marker=r"$\mathrm{v1}$", color=_INK, markersize=11), "weight version")
    for kind in (kind for kind in MessageKind if kind in shown.kinds):
        yield Key(Line2D([], [], color=MESSAGE_HUES[kind], linewidth=3), MESSAGE_WORDS[kind])
    for op in (op for op in Op if op in shown.together):
        words = COLLECTIVE_WORDS.get(op, op.value)
        yield Key(Line2D([], [], color=COLLECTIVE_HUES.get(op, OTHER_HUE), linewidth=3), words)
    if shown.marks_end:
        yield Key(Line2D([], [], color="#202020", linestyle="--", linewidth=0.9), "predicted end")
    if shown.marks_range:
        yield Key(Patch(**RANGE_BAND), "90% of predicted ends")


def _memory_keys(shown: Shown) -> Iterator[Key]:
    from matplotlib.lines import Line2D

    for part in (part for part in MemoryPart if part in shown.memory):
        yield Key(_patch(MEMORY_HUES[part]), part.value)
    for name in shown.memory_lines:
        yield Key(Line2D([], [], color=LINE_INK, linestyle=LINE_STYLES[name], linewidth=0.9), name)


def _patch(colour: Any) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour)


def _frame() -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor="none", edgecolor=PATH_INK, linewidth=1.6)


def _op_handle(op: Op, shown: Shown) -> Any:
    """Swatches of all shades of an op."""
    return tuple(
        _patch(box_colour(op, chunk=chunk, num_chunks=shown.chunks, batch=batch))
        for chunk in range(shown.chunks)
        for batch in range(2 if shown.batches else 1)
    )


def draw_line(figure: Figure, line: Line, *, font: float, left: float, middle: float) -> None:
    """Draw one line; left, middle: its place in fractions of the figure."""
    from matplotlib.legend_handler import HandlerTuple

    figure.text(left, middle, line.heading, size=font, va="center", color=_INK)
    inches = _HEADING * font / 72
    figure.legend(
        [key.handle for key in line.keys],
        [key.words for key in line.keys],
        loc="center left",
        bbox_to_anchor=(left + inches / figure.get_figwidth(), middle),
        ncols=len(line.keys),
        fontsize=font,
        labelcolor=_INK,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.0)},
        frameon=False,
        borderaxespad=0.0,
        handletextpad=0.5,
        columnspacing=1.6,
    )


def line_height(font: float) -> float:
    """Height of a line [inch / 100]."""
    return 1.82 * font / 72 * UNITS_AN_INCH
