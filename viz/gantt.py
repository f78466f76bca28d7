"""One timeline drawn on one pair of axes: a row per rank.

rank 0 |##0##|##1##|    |##0##|     boxes of compute; `idle` draws the time in between
       |       ---- ---             thin lanes of messages arriving
       |                ========    and of all-reduces of gradients

In a program with several batches, every other one is paler; an update too short for a box is a thin line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..schedules import Action, CriticalPath, Op, Timeline
from ..schedules.versions import derive_versions
from .idle import IdleFill, draw_idle
from .palette import ink
from .rows import LANES, LANES_HEIGHT, TOP, ActionBox, Scale, bars_of, boxes_of, corners, points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMALLEST, _LARGEST = 0.63, 1.16  # font sizes of microbatch numbers, in sizes of the words
_DIGIT, _LETTER = 0.64, 0.8  # widths of a digit and of a U of DejaVu Sans, in font sizes
_FILL = 0.82  # of a box's width, at most, for its number
_NARROW = 2.0  # an update narrower than this is a line [inch / 100]
_OUTLIERS = 0.02  # of the boxes may be too narrow for the font size that suits the others
_VERSION, _ROOM_FOR_VERSION = 0.6, 2.0  # size of a weight version, and least height of a box with one, in word sizes
PATH_INK = "#000000"
_PATH_LINE = 1.6
_ABOVE_BOXES = 1.8  # and below the numbers
_ROW_OF_NAMES = 14.0  # least height from name to name [inch / 100]


def _boxes(timeline: Timeline) -> list[ActionBox]:
    return [box for rank in range(len(timeline.ranks)) for box in boxes_of(timeline, rank)]


def draw_timeline(axes: Axes, timeline: Timeline, scale: Scale, labels: Mapping[Op, float], *, idle: IdleFill) -> None:
    """Draw the rows of all ranks; x in `scale.unit`, the timeline's first start at 0."""
    boxes = _boxes(timeline)
    draw_idle(axes, timeline, scale, idle)
    _draw_boxes(axes, boxes, scale)
    _draw_labels(axes, boxes, scale, labels)
    if shows_versions(timeline, scale, labels):
        _draw_versions(axes, timeline, scale)
    if scale.with_lanes:
        _draw_lanes(axes, timeline, scale)
    for rank in timeline.missing:
        size = min(0.85 * scale.font, 0.5 * scale.row)
        axes.text(0.0, rank + scale.middle, " nothing was recorded", size=size, va="center", color="#606060")


def name_rows(axes: Axes, names: Sequence[str], scale: Scale) -> None:
    """Names at the left of the rows, of as many as there is room for."""
    every = max(1, round(_ROW_OF_NAMES * scale.font / 9.5 / scale.row))
    rows = range(0, len(names), every)
    axes.set_yticks([row + scale.middle for row in rows], [names[row] for row in rows])
    size = min(1.05 * scale.font, max(0.74 * scale.font, 0.45 * scale.row))
    axes.tick_params(axis="y", length=0, labelsize=size)


def _draw_boxes(axes: Axes, boxes: Sequence[ActionBox], scale: Scale) -> None:
    from matplotlib.collections import PolyCollection

    narrow = [b for b in boxes if b.op is Op.U and scale.on_page(b.width) < _NARROW]
    axes.vlines(
        [(b.start + b.width / 2) / scale.unit for b in narrow],
        [b.rank + TOP for b in narrow],
        [b.rank + TOP + scale.box_height for b in narrow],
        colors="#1A1A1A",
        linewidth=1.2,
        zorder=1.5,  # over the boxes, below the numbers
    )
    boxes = [b for b in boxes if not (b.op is Op.U and scale.on_page(b.width) < _NARROW)]
    if not boxes:
        return
    places = [corners(b.start / scale.unit, b.width / scale.unit, b.rank + TOP, scale.box_height) for b in boxes]
    typical = sorted(scale.on_page(box.width) for box in boxes)[len(boxes) // 10]
    collection = PolyCollection(
        places,
        facecolors=[box.colour for box in boxes],
        edgecolors="white",
        linewidths=0.7 if typical > 6 else 0.25 if typical > 3 else 0.0,
    )
    collection.set_snap(None if typical > 3 else False)  # whole pixels would make a pattern of narrow boxes
    axes.add_collection(collection, autolim=False)


def plan_labels(timelines: Sequence[Timeline], scale: Scale) -> dict[Op, float]:
    """Font size [points] of the microbatch numbers, one for all ops that have them.

    An op has numbers if at least half of its boxes have room for the smallest font. Updates do not count for the size:
    one short box per step should not shrink all numbers.
    """
    room: dict[Op, list[float]] = {}
    for box in (box for timeline in timelines for box in _boxes(timeline)):
        room.setdefault(box.op, []).append(_largest_font(box, scale))
    sizes = {op: sorted(fonts) for op, fonts in room.items()}
    smallest, largest = _SMALLEST * scale.font, _LARGEST * scale.font
    ops = frozenset(op for op, fonts in sizes.items() if fonts[len(fonts) // 2] >= smallest)
    highest = 0.8 * points(scale.box_height * scale.row)
    wished = [sizes[op][int(_OUTLIERS * len(sizes[op]))] for op in ops if op is not Op.U]
    size = max(smallest, min([highest, largest, *wished]))
    return dict.fromkeys(ops, size) if size <= highest else {}


def _largest_font(box: ActionBox, scale: Scale) -> float:
    ems = _DIGIT * len(box.number) + (_LETTER if box.op is Op.U else 0)
    return _FILL * points(scale.on_page(box.width)) / ems


def _draw_labels(axes: Axes, boxes: Sequence[ActionBox], scale: Scale, labels: Mapping[Op, float]) -> None:
    for box in boxes:
        # Equal durations differ in the last bits.
        if box.op in labels and _largest_font(box, scale) >= 0.99 * labels[box.op]:
            axes.text(
                (box.start + box.width / 2) / scale.unit,
                box.rank + scale.middle,
                f"U{box.number}" if box.op is Op.U else box.number,
                size=labels[box.op],
                color=ink(box.colour),
                ha="center",
                va="center_baseline",
            )


def shows_versions(timeline: Timeline, scale: Scale, labels: Mapping[Op, float]) -> bool:
    """Whether forwards show their weight version: in streams, if most have room for it above a number."""
    if not timeline.schedule.is_asynchronous or points(scale.box_height * scale.row) < _ROOM_FOR_VERSION * scale.font:
        return False
    widths = sorted(scale.on_page(e - s) for r in timeline.ranks for what, s, e in r.compute if what.op is Op.F)
    room = 2.5 * _DIGIT * _VERSION * scale.font
    return bool(widths) and Op.F in labels and points(widths[len(widths) // 2]) >= room


def _draw_versions(axes: Axes, timeline: Timeline, scale: Scale) -> None:
    used = derive_versions(timeline.schedule).used
    size = _VERSION * scale.font
    for box in (box for box in _boxes(timeline) if box.op is Op.F):
        text = f"v{used.get((box.action.stage, box.action.index), 0)}"
        if points(scale.on_page(box.width)) < _DIGIT * size * (len(text) + 0.3):
            continue
        axes.text(
            (box.start + box.width) / scale.unit,
            box.rank + TOP + 0.05 * scale.box_height,
            f"{text} ",
            size=size,
            color=ink(box.colour),
            ha="right",
            va="top",
        )


def _draw_lanes(axes: Axes, timeline: Timeline, scale: Scale) -> None:
    """Thin bars below the boxes of the receiver, and of each rank of a collective, side by side if they overlap."""
    from matplotlib.collections import PolyCollection

    bars = [sorted(bars_of(trace), key=lambda bar: bar[1:]) for trace in timeline.ranks]
    height = LANES_HEIGHT / (1 + max((bar.lane for of_rank in bars for bar in of_rank), default=0))
    places, colours = [], []
    for rank, of_rank in enumerate(bars):
        for bar in of_rank:
            x, width = (bar.start - timeline.start) / scale.unit, (bar.end - bar.start) / scale.unit
            places.append(corners(x, width, rank + LANES + bar.lane * height, height))
            colours.append(bar.hue)
    if places:  # edges of their own colour keep the shortest ones in sight
        collection = PolyCollection(places, facecolors=colours, edgecolors="face", linewidths=0.4)
        axes.add_collection(collection, autolim=False)


def draw_path(axes: Axes, timeline: Timeline, path: CriticalPath, scale: Scale) -> None:
    """The critical path over the boxes: dark frames around its actions, lines along its messages and waits;
    O(steps)."""
    from matplotlib.collections import LineCollection, PolyCollection

    frames, lines = [], []
    for step in path.steps:
        start, end = ((at - timeline.start) / scale.unit for at in (step.start, step.end))
        if isinstance(step.what, Action):
            frames.append(corners(start, end - start, step.rank + TOP, scale.box_height))
        else:
            sender = step.rank if step.sender is None else step.sender
            lines.append([(start, sender + scale.middle), (end, step.rank + scale.middle)])
    if frames:
        drawn = PolyCollection(
            frames, facecolors="none", edgecolors=PATH_INK, linewidths=_PATH_LINE, zorder=_ABOVE_BOXES
        )
        axes.add_collection(drawn, autolim=False)
    if lines:
        between = LineCollection(lines, colors=PATH_INK, linewidths=_PATH_LINE, zorder=_ABOVE_BOXES)
        axes.add_collection(between, autolim=False)


def path_words(path: CriticalPath) -> str:
    """Shares of the path by kind, the largest first: `backward 61%, forward 32%, message 7%`."""
    if path.seconds <= 0:
        return "nothing"
    shares = [(kind.value, seconds / path.seconds) for kind, seconds in path.by_kind.items()]
    return ", ".join(f"{kind} {share:.0%}" for kind, share in shares if share >= 0.005)
