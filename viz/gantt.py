"""One timeline drawn on one pair of axes: a row per rank.

rank 0 |##0##|##1##|    |##0##|     boxes of compute; what is idle in between, `idle` draws
       |       ---- ---             thin lanes of messages arriving
       |                ========    and of sums of gradients under way

Where a program has several batches, every other one is paler; an update too short for a box is a thin line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..schedules import Action, MessageKind, Op, RankTrace, Timeline
from ..schedules.versions import derive_versions
from .idle import IdleFill, draw_idle
from .lanes import assign_lanes
from .palette import (
    COLLECTIVE_HUES,
    MESSAGE_HUES,
    OP_HUES,
    OTHER_HUE,
    RGB,
    batch_shade,
    ink,
    shade,
)
from .scale import LANES, LANES_HEIGHT, TOP, Scale, corners, points, style_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMALLEST, _LARGEST = 0.63, 1.16  # font sizes of microbatch numbers, in sizes of the words
_DIGIT, _LETTER = 0.64, 0.8  # widths of a digit and of a U of DejaVu Sans, in font sizes
_FILL = 0.82  # of a box's width, at the most, goes to its number
_NARROW = 2.0  # an update narrower than this is a line [inch / 100]
_OUTLIERS = 0.02  # of the boxes may be too narrow for the font size that suits the others
_VERSION, _ROOM_FOR_VERSION = 0.6, 2.0  # size of a weight version, and least height of a box with one, in word sizes
_ROW_OF_NAMES = 14.0  # least height from name to name [inch / 100]


def num_chunks(timeline: Timeline) -> int:
    """V: the most stages of any rank."""
    return max(len(stages) for stages in timeline.schedule.placement)


def shows_batches(timeline: Timeline) -> bool:
    """Whether batches are told apart."""
    return timeline.schedule.num_batches > 1


def batch_of(timeline: Timeline, action: Action) -> int:
    """The batch to which an action belongs."""
    schedule = timeline.schedule
    return action.index // (schedule.groups_per_batch if action.op is Op.U else schedule.batch_indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    rank: int
    start: float  # [s] from the timeline's own start
    width: float  # [s]
    op: Op
    stage: int
    index: int
    label: str
    colour: RGB


def _boxes(timeline: Timeline) -> list[_Box]:
    chunk_of = [{stage: c for c, stage in enumerate(stages)} for stages in timeline.schedule.placement]
    chunks = num_chunks(timeline)
    boxes = []
    for rank, trace in enumerate(timeline.ranks):
        for action, start, end in trace.compute:
            hue = OP_HUES.get(action.op, OTHER_HUE)
            colour = shade(hue, chunk=chunk_of[rank].get(action.stage, 0), num_chunks=chunks)
            if shows_batches(timeline):
                colour = batch_shade(colour, batch_of(timeline, action))
            number = "" if action.op is Op.U and not shows_batches(timeline) else str(action.index)
            label = f"U{number}" if action.op is Op.U else number
            at, width = start - timeline.start, end - start
            boxes.append(
                _Box(
                    rank=rank,
                    start=at,
                    width=width,
                    op=action.op,
                    stage=action.stage,
                    index=action.index,
                    label=label,
                    colour=colour,
                )
            )
    return boxes


def draw_timeline(axes: Axes, timeline: Timeline, scale: Scale, labels: Labels, *, idle: IdleFill) -> None:
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
    axes.set_xlim(0, scale.length / scale.unit)
    style_rows(axes, len(timeline.ranks), scale)
    name_rows(axes, [f"rank {rank}" for rank in range(len(timeline.ranks))], scale)


def name_rows(axes: Axes, names: Sequence[str], scale: Scale) -> None:
    """Names at the left of the rows, of as many as there is room for."""
    every = max(1, round(_ROW_OF_NAMES * scale.font / 9.5 / scale.row))
    rows = range(0, len(names), every)
    axes.set_yticks([row + scale.middle for row in rows], [names[row] for row in rows])
    size = min(1.05 * scale.font, max(0.74 * scale.font, 0.45 * scale.row))
    axes.tick_params(axis="y", length=0, labelsize=size)


def _draw_boxes(axes: Axes, boxes: Sequence[_Box], scale: Scale) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The microbatch numbers of a picture: one font size [points] for all, and the ops that have them."""

    size: float
    ops: frozenset[Op]


def plan_labels(timelines: Sequence[Timeline], scale: Scale) -> Labels:
    """Numbers for each op of which at least half of the boxes have room for the smallest font.

    Updates do not count for the size: one short box a step should not shrink all numbers.
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
    return Labels(size=size, ops=ops if size <= highest else frozenset())


def _largest_font(box: _Box, scale: Scale) -> float:
    ems = _LETTER + _DIGIT * (len(box.label) - 1) if box.op is Op.U else _DIGIT * len(box.label)
    return _FILL * points(scale.on_page(box.width)) / ems


def _draw_labels(axes: Axes, boxes: Sequence[_Box], scale: Scale, labels: Labels) -> None:
    for box in boxes:
        # Equal durations differ in the last bits.
        if box.op in labels.ops and _largest_font(box, scale) >= 0.99 * labels.size:
            axes.text(
                (box.start + box.width / 2) / scale.unit,
                box.rank + scale.middle,
                box.label,
                size=labels.size,
                color=ink(box.colour),
                ha="center",
                va="center_baseline",
            )


def shows_versions(timeline: Timeline, scale: Scale, labels: Labels) -> bool:
    """Whether forwards wear the version of their weights: in streams, where most have room for it above a number."""
    if not timeline.schedule.is_asynchronous or points(scale.box_height * scale.row) < _ROOM_FOR_VERSION * scale.font:
        return False
    widths = sorted(scale.on_page(e - s) for r in timeline.ranks for what, s, e in r.compute if what.op is Op.F)
    room = 2.5 * _DIGIT * _VERSION * scale.font
    return bool(widths) and Op.F in labels.ops and points(widths[len(widths) // 2]) >= room


def _draw_versions(axes: Axes, timeline: Timeline, scale: Scale) -> None:
    """Small in the upper right corner of each forward: `v2`."""
    used = derive_versions(timeline.schedule).used
    size = _VERSION * scale.font
    for box in (box for box in _boxes(timeline) if box.op is Op.F):
        text = f"v{used.get((box.stage, box.index), 0)}"
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
    """Thin bars below the boxes of the receiver, and of each rank of a collective, beside each other where they
    overlap."""
    from matplotlib.collections import PolyCollection

    bars = [_bars(trace) for trace in timeline.ranks]
    lanes = [assign_lanes([(start, end) for start, end, _ in own]) for own in bars]
    height = LANES_HEIGHT / (1 + max((lane for ranks in lanes for lane in ranks), default=0))
    places, colours = [], []
    for rank, own in enumerate(bars):
        for (start, end, colour), lane in zip(own, lanes[rank], strict=True):
            x, width = (start - timeline.start) / scale.unit, (end - start) / scale.unit
            places.append(corners(x, width, rank + LANES + lane * height, height))
            colours.append(colour)
    if places:  # edges of their own colour keep the shortest ones in sight
        collection = PolyCollection(places, facecolors=colours, edgecolors="face", linewidths=0.4)
        axes.add_collection(collection, autolim=False)


def _bars(trace: RankTrace) -> list[tuple[float, float, str]]:
    """Bars of a rank's lanes: start, end, colour."""
    messages = [(start, end, MESSAGE_HUES[message.kind]) for message, start, end in trace.comm]
    together = [(start, end, COLLECTIVE_HUES.get(what.op, OTHER_HUE)) for what, start, end in trace.beside]
    return sorted(messages + together)


def ops_of(timeline: Timeline) -> set[Op]:
    """The ops that were run."""
    return {span.what.op for trace in timeline.ranks for span in trace.compute}


def message_kinds_of(timeline: Timeline) -> set[MessageKind]:
    """The messages that arrived."""
    return {span.what.kind for trace in timeline.ranks for span in trace.comm}


def collectives_of(timeline: Timeline) -> set[Op]:
    """Kinds of what ranks did together, and of moves of activations."""
    return {span.what.op for trace in timeline.ranks for span in trace.beside}
