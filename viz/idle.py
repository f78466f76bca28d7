"""Idle time: drawn in place, coloured by cause, and summed at the end of the rows.

rank 0 |#########|    late peer    | transfer |?|#########|      as in `schedules.timing.waits`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from ..schedules import Idle, Span, Timeline, attribute_idle
from ..schedules.timing.waits import find_gaps
from .palette import CAUSE_HUES, IDLE_FILL, IDLE_HATCH, OTHER_HUE, RGB, mixed, rgb
from .rows import TOP, Scale, corners, style_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IdleFill = Literal["cause", "hatch"]
_ROOM_FOR_TOTALS = 18.0  # height of a row from which on its total is written [inch / 100]


def idle_stretches(timeline: Timeline) -> list[list[Span[str]]]:
    """Per rank, its idle time by cause, in order. Late peers and imbalance are one: only sums distinguish them.

    In a window of a stream (see `is_window`) a rank's time begins and ends with its own actions. A missing rank has
    none.
    """
    within = is_window(timeline)
    found: list[list[Span[str]]] = []
    for trace, gaps in zip(timeline.ranks, find_gaps(timeline), strict=True):
        own: list[Span[str]] = []
        for what, start, _ in trace.compute:
            if what in gaps and not (within and gaps[what].warm_up):
                own += _parts(start, {c: s for c, s in gaps[what]._asdict().items() if s > 0})
        end = trace.compute[-1].end if trace.compute else timeline.start
        if timeline.end > end and not within and len(found) not in timeline.missing:
            own.append(Span("drain", end, timeline.end))
        found.append(own)
    return found


def _parts(end: float, seconds: dict[str, float]) -> Iterator[Span[str]]:
    """Stretches of one gap that ends at `end`; the fields of `Idle` have the order in which causes follow each
    other."""
    at = end - sum(seconds.values())
    for cause, length in seconds.items():
        yield Span(cause, at, at + length)
        at += length


def draw_idle(axes: Axes, timeline: Timeline, scale: Scale, fill: IdleFill) -> None:
    """Idle time as boxes: pale in the hue of the cause, or all hatched."""
    from matplotlib.collections import PolyCollection

    boxes, colours, causes = [], [], []
    for rank, stretches in enumerate(idle_stretches(timeline)):
        for cause, start, end in stretches:
            x, width = (start - timeline.start) / scale.unit, (end - start) / scale.unit
            boxes.append(corners(x, width, rank + TOP, scale.box_height))
            causes.append(cause)
            colours.append(_mixed(cause, 0.8) if fill == "cause" else IDLE_FILL)  # pale: compute stands out
    if boxes:
        lines = [_mixed(cause, 0.55) for cause in causes] if fill == "cause" else IDLE_HATCH
        collection = PolyCollection(boxes, facecolors=colours, edgecolors=lines, hatch="/////", linewidths=0)
        axes.add_collection(collection, autolim=False)


def _mixed(cause: str, white: float) -> RGB:
    return mixed(rgb(CAUSE_HUES.get(cause, OTHER_HUE)), white)


def draw_idle_bars(axes: Axes, timeline: Timeline, scale: Scale, *, limit: float) -> None:
    """Each rank's idle time, stacked by cause, in per cent (see `idle_shares`); the x axis ends at `limit`."""
    left = [0.0] * len(timeline.ranks)
    rows = [rank + scale.middle for rank in range(len(timeline.ranks))]
    idle = idle_shares(timeline)
    for cause in Idle._fields:
        shares = [100 * getattr(rank, cause) for rank in idle]
        axes.barh(rows, shares, height=scale.box_height, left=left, color=CAUSE_HUES[cause])
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.set_xlim(0, limit)
    axes.set_yticks([])
    style_rows(axes, len(timeline.ranks), scale)
    if scale.row >= _ROOM_FOR_TOTALS:
        for rank, (y, total) in enumerate(zip(rows, left, strict=True)):
            if rank in timeline.missing:
                continue
            size = 0.85 * scale.font
            axes.text(total + 0.02 * limit, y, f"{total:.0f}%", size=size, va="center", color="#404040")


def causes_of(timeline: Timeline) -> list[str]:
    """The causes of idle time that are visible in a picture of it (0.1%, on any rank)."""
    idle = idle_shares(timeline)
    return [c for c in Idle._fields if any(getattr(rank, c) > 1e-3 for rank in idle)]


def is_window(timeline: Timeline) -> bool:
    """Whether it shows a few batches of a stream, each rank from the first forward of the first one."""
    return timeline.measured and timeline.schedule.is_asynchronous


def idle_shares(timeline: Timeline) -> list[Idle]:
    """Per rank, the share of the makespan of each cause; in a window, of the rank's own time in it.

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
