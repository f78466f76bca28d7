"""One timeline drawn on one pair of axes: a row per rank, and beside it the row's idle time by cause.

rank 0 |##0##|##1##|////|##0##|     boxes of compute, hatched where the rank is idle
       |       ---- ---             thin lanes of messages arriving
       |                ========    and of sums of gradients under way

Where a program has several batches, every other one is paler; an update too short for a box is a thin line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..schedules import Action, Idle, MessageKind, Op, RankTrace, Timeline, attribute_idle
from .lanes import assign_lanes
from .palette import (
    CAUSE_HUES,
    COLLECTIVE_HUES,
    IDLE_FILL,
    IDLE_HATCH,
    MESSAGE_HUES,
    OP_HUES,
    OTHER_HUE,
    RGB,
    batch_shade,
    ink,
    shade,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TOP = 0.07  # of a row: where its boxes begin
_COMPUTE_ALONE, _COMPUTE_ABOVE = 0.86, 0.66  # height of the boxes without and with lanes below
_LANES_TOP, _LANES_HEIGHT = 0.77, 0.18
_SMALLEST, _LARGEST = 6.0, 11.0  # font sizes of microbatch numbers [points]
_DIGIT, _LETTER = 0.64, 0.8  # widths of a digit and of a U of DejaVu Sans, in font sizes
_FILL = 0.82  # of a box's width, at the most, goes to its number
_NARROW = 2.0  # an update of fewer pixels is a line
_OUTLIERS = 0.02  # of the boxes may be too narrow for the font size that suits the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Scale from seconds to pixels.

    Arguments:
        unit: seconds of one unit of the x axis.
        length: of the x axis [s].
        width: of the axes [pixels].
        row: height of one rank [pixels].
        dpi: pixels an inch.
        with_lanes: True where messages and collectives are drawn below the boxes.
    """

    unit: float
    length: float
    width: float
    row: float
    dpi: float
    with_lanes: bool

    def pixels(self, seconds: float) -> float:
        """Width on the page."""
        return seconds / self.length * self.width

    @property
    def box_height(self) -> float:
        """Height of a compute box, in rows."""
        return _COMPUTE_ABOVE if self.with_lanes else _COMPUTE_ALONE


def num_chunks(timeline: Timeline) -> int:
    """V: the most stages of any rank."""
    return max(len(stages) for stages in timeline.schedule.placement)


def shows_batches(timeline: Timeline) -> bool:
    """Whether batches are told apart."""
    return timeline.schedule.num_batches > 1


def batch_of(timeline: Timeline, action: Action) -> int:
    """The batch to which an action belongs."""
    schedule = timeline.schedule
    return action.index // (schedule.groups_per_batch if action.op is Op.U else schedule.num_microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    rank: int
    start: float  # [s] from the timeline's own start
    width: float  # [s]
    op: Op
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
            boxes.append(_Box(rank=rank, start=at, width=width, op=action.op, label=label, colour=colour))
    return boxes


def draw_timeline(axes: Axes, timeline: Timeline, scale: Scale, labels: Labels) -> None:
    """Draw the rows of all ranks; x in `scale.unit`, the timeline's first start at 0."""
    boxes = _boxes(timeline)
    _draw_idle(axes, timeline, scale)
    _draw_boxes(axes, boxes, scale)
    _draw_labels(axes, boxes, scale, labels)
    if scale.with_lanes:
        _draw_lanes(axes, timeline, scale)
    axes.set_xlim(0, scale.length / scale.unit)
    _style_rows(axes, len(timeline.ranks), scale)
    every = max(1, round(14 / scale.row))
    ranks = range(0, len(timeline.ranks), every)
    middle = _TOP + scale.box_height / 2
    axes.set_yticks([rank + middle for rank in ranks], [f"rank {rank}" for rank in ranks])
    axes.tick_params(axis="y", length=0, labelsize=min(10.0, max(7.0, 0.45 * scale.row)))


def _style_rows(axes: Axes, num_rows: int, scale: Scale) -> None:
    axes.set_ylim(num_rows, 0)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#808080")
    axes.tick_params(axis="x", colors="#404040", labelsize=9)


def _draw_idle(axes: Axes, timeline: Timeline, scale: Scale) -> None:
    """A hatched band a rank, from the first start to the last end of all (in a window, of its own); boxes will cover
    what was busy."""
    from matplotlib.patches import Rectangle

    for rank, trace in enumerate(timeline.ranks):
        start, end = 0.0, timeline.makespan
        if is_window(timeline) and trace.compute:
            start, end = trace.compute[0].start - timeline.start, trace.compute[-1].end - timeline.start
        band = Rectangle(
            (start / scale.unit, rank + _TOP),
            (end - start) / scale.unit,
            scale.box_height,
            facecolor=IDLE_FILL,
            edgecolor=IDLE_HATCH,
            hatch="/////",
            linewidth=0,
        )
        axes.add_patch(band)


def _draw_boxes(axes: Axes, boxes: Sequence[_Box], scale: Scale) -> None:
    from matplotlib.collections import PolyCollection

    narrow = [b for b in boxes if b.op is Op.U and scale.pixels(b.width) < _NARROW]
    axes.vlines(
        [(b.start + b.width / 2) / scale.unit for b in narrow],
        [b.rank + _TOP for b in narrow],
        [b.rank + _TOP + scale.box_height for b in narrow],
        colors="#1A1A1A",
        linewidth=1.2,
        zorder=1.5,  # over the boxes, below the numbers
    )
    boxes = [b for b in boxes if not (b.op is Op.U and scale.pixels(b.width) < _NARROW)]
    if not boxes:
        return
    corners = [_corners(b.start / scale.unit, b.width / scale.unit, b.rank + _TOP, scale.box_height) for b in boxes]
    typical = sorted(scale.pixels(box.width) for box in boxes)[len(boxes) // 10]
    collection = PolyCollection(
        corners,
        facecolors=[box.colour for box in boxes],
        edgecolors="white",
        linewidths=0.7 if typical > 6 else 0.25 if typical > 3 else 0.0,
    )
    collection.set_snap(None if typical > 3 else False)  # whole pixels would make a pattern of narrow boxes
    axes.add_collection(collection, autolim=False)


def _corners(x: float, width: float, y: float, height: float) -> list[tuple[float, float]]:
    return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]


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
    ops = frozenset(op for op, fonts in sizes.items() if fonts[len(fonts) // 2] >= _SMALLEST)
    highest = 0.8 * scale.box_height * scale.row * 72 / scale.dpi
    wished = [sizes[op][int(_OUTLIERS * len(sizes[op]))] for op in ops if op is not Op.U]
    size = max(_SMALLEST, min([highest, _LARGEST, *wished]))
    return Labels(size=size, ops=ops if size <= highest else frozenset())


def _largest_font(box: _Box, scale: Scale) -> float:
    ems = _LETTER + _DIGIT * (len(box.label) - 1) if box.op is Op.U else _DIGIT * len(box.label)
    return _FILL * scale.pixels(box.width) / ems * 72 / scale.dpi


def _draw_labels(axes: Axes, boxes: Sequence[_Box], scale: Scale, labels: Labels) -> None:
    middle = _TOP + scale.box_height / 2
    for box in boxes:
        # Equal durations differ in the last bits.
        if box.op in labels.ops and _largest_font(box, scale) >= 0.99 * labels.size:
            axes.text(
                (box.start + box.width / 2) / scale.unit,
                box.rank + middle,
                box.label,
                size=labels.size,
                color=ink(box.colour),
                ha="center",
                va="center_baseline",
            )


def _draw_lanes(axes: Axes, timeline: Timeline, scale: Scale) -> None:
    """Thin bars below the boxes of the receiver, and of each rank of a collective, beside each other where they
    overlap."""
    from matplotlib.collections import PolyCollection

    bars = [_bars(trace) for trace in timeline.ranks]
    lanes = [assign_lanes([(start, end) for start, end, _ in own]) for own in bars]
    height = _LANES_HEIGHT / (1 + max((lane for ranks in lanes for lane in ranks), default=0))
    corners, colours = [], []
    for rank, own in enumerate(bars):
        for (start, end, colour), lane in zip(own, lanes[rank], strict=True):
            x, width = (start - timeline.start) / scale.unit, (end - start) / scale.unit
            corners.append(_corners(x, width, rank + _LANES_TOP + lane * height, height))
            colours.append(colour)
    if corners:  # edges of their own colour keep the shortest ones in sight
        collection = PolyCollection(corners, facecolors=colours, edgecolors="face", linewidths=0.4)
        axes.add_collection(collection, autolim=False)


def _bars(trace: RankTrace) -> list[tuple[float, float, str]]:
    """Bars of a rank's lanes: start, end, colour."""
    messages = [(start, end, MESSAGE_HUES[message.kind]) for message, start, end in trace.comm]
    together = [(start, end, COLLECTIVE_HUES.get(what.op, OTHER_HUE)) for what, start, end in trace.collectives]
    return sorted(messages + together)


def draw_idle_bars(axes: Axes, timeline: Timeline, scale: Scale, *, limit: float) -> None:
    """Each rank's idle time, stacked by cause, in per cent (see `idle_shares`); the x axis ends at `limit`."""
    left = [0.0] * len(timeline.ranks)
    rows = [rank + _TOP + scale.box_height / 2 for rank in range(len(timeline.ranks))]
    idle = idle_shares(timeline)
    for cause in Idle._fields:
        shares = [100 * getattr(rank, cause) for rank in idle]
        axes.barh(rows, shares, height=scale.box_height, left=left, color=CAUSE_HUES[cause])
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.set_xlim(0, limit)
    axes.set_yticks([])
    _style_rows(axes, len(timeline.ranks), scale)
    if scale.row >= 18:
        for y, total in zip(rows, left, strict=True):
            axes.text(total + 0.02 * limit, y, f"{total:.0f}%", size=8, va="center", color="#404040")


def causes_of(timeline: Timeline) -> list[str]:
    """The causes of idle time that show in a picture of it (0.1%, on any rank)."""
    idle = idle_shares(timeline)
    return [c for c in Idle._fields if any(getattr(rank, c) > 1e-3 for rank in idle)]


def is_window(timeline: Timeline) -> bool:
    """Whether it shows a few batches of a stream, each rank from the first forward of the first one."""
    return timeline.measured and timeline.schedule.is_asynchronous


def idle_shares(timeline: Timeline) -> list[Idle]:
    """Per rank, what each cause takes of the makespan; in a window, of the rank's own time in it.

    Ranks enter and leave a window one after the other, which is neither warm-up nor drain.
    """
    shares = []
    for rank, idle in zip(timeline.ranks, attribute_idle(timeline), strict=True):
        length = timeline.makespan
        if is_window(timeline):
            length = rank.compute[-1].end - rank.compute[0].start if rank.compute else 0.0
            idle = idle._replace(warm_up=0.0, drain=0.0)
        shares.append(Idle(*(seconds / length if length > 0 else 0.0 for seconds in idle)))
    return shares


def ops_of(timeline: Timeline) -> set[Op]:
    """The ops that were run."""
    return {span.what.op for trace in timeline.ranks for span in trace.compute}


def message_kinds_of(timeline: Timeline) -> set[MessageKind]:
    """The messages that arrived."""
    return {span.what.kind for trace in timeline.ranks for span in trace.comm}


def collectives_of(timeline: Timeline) -> set[Op]:
    """Kinds of what ranks did together."""
    return {span.what.op for trace in timeline.ranks for span in trace.collectives}
