"""Memory under a timeline: a row per rank, its parts upon each other, peaks and limit as lines.

rank 0 |- - - - - - - - - - - - - - - - -|  predicted peak
       |      ___---___---___            |  activations
       |_____/                \\__________|  weights, gradients, optimizer
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from ..schedules import MemoryCurve, MemoryPart, Timeline
from ..schedules.wording import size
from .exhibit import Exhibit
from .palette import MEMORY_HUES
from .scale import TOP, Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE_STYLES: dict[str, Literal["-", "--", ":"]] = {"limit": "-", "predicted peak": "--", "measured peak": ":"}
LINE_INK = "#202020"
_HEIGHT = 0.86  # of a row
_HEADROOM = 1.06  # above the highest line
_FAR = 2.5  # times what is held: a limit further up is left out
_SMALLEST_WORDS = 14.0  # height of a row from which on its peak is written [inch / 100]


@dataclass(frozen=True, kw_only=True)
class MemoryPanel:
    """Memory over time of one timeline of an exhibit, of which stages' bytes are known."""

    caption: str
    exhibit: Exhibit
    timeline: Timeline

    @cached_property
    def curves(self) -> dict[int, MemoryCurve]:
        """By rank, less those that are missing from the timeline."""
        found = self.exhibit.curves(self.timeline) or ()
        return {rank: curve for rank, curve in enumerate(found) if rank not in self.timeline.missing}

    @property
    def length(self) -> float:
        return self.timeline.makespan

    @property
    def num_rows(self) -> int:
        return len(self.timeline.ranks)

    def title(self, unit_name: str, unit: float) -> str:
        del unit_name, unit
        if not self.curves:
            return f"{self.caption}, memory:  nothing was recorded"
        fullest = max(self.curves, key=lambda rank: self.curves[rank].peak)
        return f"{self.caption}, memory:  at most {size(self.curves[fullest].peak)}, on rank {fullest}"

    def lines(self) -> Iterator[tuple[str, int, float]]:
        """Names, ranks and bytes of the lines."""
        known = (self.exhibit.memory_limit, self.exhibit.predicted_peak, self.exhibit.measured_peak)
        for name, values in zip(LINE_STYLES, known, strict=True):
            for rank, value in enumerate(values or ()):
                if rank < self.num_rows:
                    yield name, rank, value

    def draw(self, axes: Axes, scale: Scale, ceiling: float) -> None:
        """Draw its rows, each from nothing to `ceiling` bytes."""
        for rank, curve in self.curves.items():
            self._draw_rank(axes, rank, curve, scale, ceiling)
        end = self.length / scale.unit
        for name, rank, value in self.lines():
            if value <= ceiling:
                y = _height(rank, value, ceiling)
                axes.plot([0, end], [y, y], color=LINE_INK, linestyle=LINE_STYLES[name], linewidth=0.9)

    def _draw_rank(self, axes: Axes, rank: int, curve: MemoryCurve, scale: Scale, ceiling: float) -> None:
        times = [(at - self.timeline.start) / scale.unit for at in (*curve.times, self.timeline.end)]
        below = [0.0] * len(times)
        for part, values in curve.parts.items():
            above = [a + b for a, b in zip(below, (*values, values[-1]), strict=True)]
            low, high = ([_height(rank, each, ceiling) for each in level] for level in (below, above))
            # A hair of the same colour closes the seam between two parts.
            axes.fill_between(times, low, high, step="post", color=MEMORY_HUES[part], linewidth=0.2)
            below = above
        if scale.row >= _SMALLEST_WORDS:
            axes.text(
                scale.length / scale.unit,
                rank + scale.middle,
                f"  {size(curve.peak)}",
                size=0.9 * scale.font,
                va="center",
                color="#404040",
            )


def _height(rank: int, num_bytes: float, ceiling: float) -> float:
    """Place of so many bytes on the axis of rows, which goes down."""
    return rank + TOP + _HEIGHT * (1 - num_bytes / ceiling)


def ceiling_of(panels: Sequence[MemoryPanel]) -> float:
    """Bytes at the top of each row of all panels, so that ranks compare; a limit far above what is held is left out."""
    lines = [line for panel in panels for line in panel.lines()]
    held = [curve.peak for panel in panels for curve in panel.curves.values()]
    most = max([*held, *(value for name, _, value in lines if name != "limit")], default=0.0)
    near = [value for name, _, value in lines if name == "limit" and value < _FAR * most]
    return _HEADROOM * max([most, *near]) or 1.0


def parts_of(panels: Sequence[MemoryPanel]) -> set[MemoryPart]:
    return {part for panel in panels for curve in panel.curves.values() for part in curve.parts}


def lines_of(panels: Sequence[MemoryPanel]) -> list[str]:
    ceiling = ceiling_of(panels)
    drawn = {name for panel in panels for name, _, value in panel.lines() if value <= ceiling}
    return [name for name in LINE_STYLES if name in drawn]
