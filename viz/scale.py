"""Scale of one pair of axes, and where a row's parts stand on it.

row r:   r + TOP      boxes of compute
         r + LANES    lanes of messages and collectives, where there are any
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOP = 0.07  # of a row: where its boxes begin
LANES, LANES_HEIGHT = 0.77, 0.18
_COMPUTE_ALONE, _COMPUTE_ABOVE = 0.86, 0.66  # height of the boxes without and with lanes below
POINTS_AN_INCH = 72
UNITS_AN_INCH = 100  # a page is laid out in hundredths of an inch


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Scale from seconds to the page, which is measured in hundredths of an inch.

    Arguments:
        unit: seconds of one unit of the x axis.
        length: of the x axis [s].
        width: of the axes [inch / 100].
        row: height of one rank [inch / 100].
        font: size of the words [points].
        with_lanes: True where messages and collectives are drawn below the boxes.
    """

    unit: float
    length: float
    width: float
    row: float
    font: float
    with_lanes: bool

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
    """Points of a size on the page [inch / 100].

    >>> points(100.0)
    72.0
    """
    return size * POINTS_AN_INCH / UNITS_AN_INCH


def corners(x: float, width: float, y: float, height: float) -> list[tuple[float, float]]:
    """Corners of a box."""
    return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]


def style_rows(axes: Axes, num_rows: int, scale: Scale) -> None:
    """Rows from the top, and a frame of the time axis alone."""
    axes.set_ylim(num_rows, 0)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#808080")
    axes.tick_params(axis="x", colors="#404040", labelsize=0.95 * scale.font)
