"""Boxes, lanes and arrows between ranks, defined once for all views; and their scale in pictures.

rank 0 |##0##|##1##|    |##0##|     boxes of compute
       |       ---- ---             lanes of messages arriving, of collectives and moves, side by side

In a picture the boxes of row r begin at r + TOP, and its lanes, if any, at r + LANES.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from ..schedules import Action, Collective, Message, MessageKind, Op, RankTrace, Timeline
from ..schedules.dependencies import Delivery
from ..schedules.timing.waits import waits
from .palette import COLLECTIVE_HUES, MESSAGE_HUES, OTHER_HUE, RGB, box_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class ActionBox(NamedTuple):
    """One action on its rank, from `start` to `end` [s] relative to the timeline's own start."""

    rank: int
    action: Action
    start: float
    end: float
    width: float  # end less start as stamped [s]
    number: str  # of its microbatch or update; empty for the only update
    colour: RGB

    @property
    def op(self) -> Op:
        return self.action.op


class Bar(NamedTuple):
    """A message, collective or move, from `start` to `end` [s] as stamped, in a lane of the rank."""

    what: Message | Collective | Action
    start: float
    end: float
    hue: str
    lane: int


def boxes_of(timeline: Timeline, rank: int) -> list[ActionBox]:
    chunk_of = {stage: chunk for chunk, stage in enumerate(timeline.schedule.placement[rank])}
    several, chunks, origin = shows_batches(timeline), num_chunks(timeline), timeline.start
    boxes = []
    for action, start, end in timeline.ranks[rank].compute:
        chunk, odd = chunk_of.get(action.stage, 0), batch_of(timeline, action) % 2 if several else 0
        number = "" if action.op is Op.U and not several else str(action.index)
        colour = box_colour(action.op, chunk=chunk, num_chunks=chunks, batch=odd)
        boxes.append(ActionBox(rank, action, start - origin, end - origin, end - start, number, colour))
    return boxes


def bars_of(trace: RankTrace) -> list[Bar]:
    """Messages that arrive on a rank, then collectives, exchanges and moves, each in the lowest free lane."""
    bars = [Bar(what, start, end, MESSAGE_HUES[what.kind], 0) for what, start, end in trace.comm]
    bars += [Bar(what, start, end, COLLECTIVE_HUES.get(what.op, OTHER_HUE), 0) for what, start, end in trace.transfers]
    # Of those with the same times the first by name comes first, as in `explorer/replay_panel.js`.
    names = [" ".join(map(str, what)) if isinstance(what, Message) else str(what) for what, *_ in bars]
    order = sorted(range(len(bars)), key=lambda at: (bars[at].start, bars[at].end, names[at]))
    for at, lane in zip(order, assign_lanes((bars[at].start, bars[at].end) for at in order), strict=True):
        bars[at] = bars[at]._replace(lane=lane)
    return bars


def assign_lanes(spans: Iterable[tuple[float, float]]) -> list[int]:
    """The lane of each (start, end), so that no two spans of a lane overlap; they may touch.

    The fewest possible lanes, each span in the lowest free one (greedy interval partitioning). Starts must ascend.
    O(spans * log lanes).

    >>> assign_lanes([(0, 2), (1, 3), (2, 4)])
    [0, 1, 0]
    """
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # (end, lane)
    lanes = []
    for start, end in spans:
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else len(busy)
        heappush(busy, (end, lane))
        lanes.append(lane)
    return lanes


def find_arrows(timeline: Timeline) -> list[Delivery]:
    """The messages of a timeline that contains their makers, in the order of the users' ranks and programs."""
    return [each for own in waits(timeline).values() for each, made, _ in own if made is not None]


def num_chunks(timeline: Timeline) -> int:
    """V: the most stages of any rank."""
    return max(len(stages) for stages in timeline.schedule.placement)


def shows_batches(timeline: Timeline) -> bool:
    return timeline.schedule.num_batches > 1


def batch_of(timeline: Timeline, action: Action) -> int:
    schedule = timeline.schedule
    return action.index // (schedule.groups_per_batch if action.op is Op.U else schedule.batch_indices)


def ops_of(timeline: Timeline) -> set[Op]:
    return {span.what.op for trace in timeline.ranks for span in trace.compute}


def message_kinds_of(timeline: Timeline) -> set[MessageKind]:
    return {span.what.kind for trace in timeline.ranks for span in trace.comm}


def collectives_of(timeline: Timeline) -> set[Op]:
    """Kinds of collectives, exchanges and moves of activations."""
    return {span.what.op for trace in timeline.ranks for span in trace.transfers}


TOP = 0.07  # of a row: where its boxes begin
LANES, LANES_HEIGHT = 0.77, 0.18
_COMPUTE_ALONE, _COMPUTE_ABOVE = 0.86, 0.66  # height of the boxes without and with lanes below
POINTS_AN_INCH = 72
UNITS_AN_INCH = 100  # a page is laid out in hundredths of an inch


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Scale from seconds to the page, in hundredths of an inch."""

    unit: float  # seconds of one unit of the x axis
    length: float  # of the x axis [s]
    width: float  # of the axes [inch / 100]
    row: float  # height of one rank [inch / 100]
    font: float  # size of the words [points]
    with_lanes: bool  # whether messages and collectives are drawn below the boxes

    def on_page(self, seconds: float) -> float:
        """Width on the page [inch / 100]."""
        return seconds / self.length * self.width

    @property
    def box_height(self) -> float:
        """Height of a compute box, in rows."""
        return _COMPUTE_ABOVE if self.with_lanes else _COMPUTE_ALONE

    @property
    def middle(self) -> float:
        """Middle of a compute box, in rows below the row's top."""
        return TOP + self.box_height / 2


def points(size: float) -> float:
    """Points of a size on the page [inch / 100]."""
    return size * POINTS_AN_INCH / UNITS_AN_INCH


def corners(x: float, width: float, y: float, height: float) -> list[tuple[float, float]]:
    return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]


def style_rows(axes: Axes, num_rows: int, scale: Scale) -> None:
    """Rows from the top, and only the frame of the time axis."""
    axes.set_ylim(num_rows, 0)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#808080")
    axes.tick_params(axis="x", colors="#404040", labelsize=0.95 * scale.font)
