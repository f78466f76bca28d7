"""Panels of a figure: a timeline, or its memory: a row per rank, its parts stacked, peaks and limit as lines.

rank 0 |- - - - - - - - - - - - - - - - -|  predicted peak
       |      ___---___---___            |  activations
       |_____/                \\__________|  weights, gradients, optimizer
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from ..schedules import CriticalPath, MemoryCurve, MemoryPart, Op, StepSamples, Timeline, critical_path
from ..schedules.wording import size
from .exhibit import PREDICTED, SIMULATED, Exhibit
from .palette import MEMORY_HUES
from .rows import TOP, Scale, batch_of, num_chunks, ops_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE_STYLES: dict[str, Literal["-", "--", ":"]] = {"limit": "-", "predicted peak": "--", "measured peak": ":"}
LINE_INK = "#202020"
_HEIGHT = 0.86  # of a row
_HEADROOM = 1.06  # above the highest line
_FAR = 2.5  # times what is held: a limit further up is left out
_SMALLEST_WORDS = 14.0  # height of a row from which on its peak is written [inch / 100]


@dataclass(frozen=True, kw_only=True)
class _TimelineRows:
    """A row per rank of one timeline under its caption."""

    caption: str
    timeline: Timeline

    @property
    def length(self) -> float:
        return self.timeline.makespan

    @property
    def num_rows(self) -> int:
        return len(self.timeline.ranks)


@dataclass(frozen=True, kw_only=True)
class MemoryPanel(_TimelineRows):
    """Memory over time of one timeline of an exhibit, if its stages' bytes are known."""

    exhibit: Exhibit

    @cached_property
    def curves(self) -> dict[int, MemoryCurve]:
        """By rank, without missing ones."""
        found = self.exhibit.curves(self.timeline) or ()
        return {rank: curve for rank, curve in enumerate(found) if rank not in self.timeline.missing}

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
        """Draw its rows, each from 0 to `ceiling` bytes."""
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
            # A thin line of the same colour closes the seam between two parts.
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
    return rank + TOP + _HEIGHT * (1 - num_bytes / ceiling)


def ceiling_of(panels: Sequence[MemoryPanel]) -> float:
    """Bytes at the top of each row of all panels, so that ranks compare; a limit far above the memory is left out."""
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


UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


@dataclass(frozen=True, kw_only=True)
class TimelinePanel(_TimelineRows):
    """One timeline under its caption."""

    reference: TimelinePanel | None = None  # the panel with which it is compared, if any
    is_own: bool = False  # whether the reference is its own simulation, whose end is marked
    sampled: StepSamples | None = None  # of a simulation: steps with varying durations; `timeline` has their medians
    context: int = 1  # see Exhibit

    @property
    def seconds(self) -> float:
        """Time from batch to batch [s], by which panels compare: as predicted, else as simulated or measured."""
        return self.timeline.batch_seconds if self.sampled is None else self.sampled.median

    @property
    def seconds_are(self) -> str:
        """Name of `seconds`: the caption, or the same with "predicted"."""
        return self.caption if self.sampled is None else f"{self.caption.removesuffix(SIMULATED)}{PREDICTED}"

    @property
    def heading(self) -> str:
        """Name and sizes of its schedule."""
        schedule = self.timeline.schedule
        several = schedule.num_batches > 1 and not schedule.is_asynchronous
        slices = f", {schedule.num_slices} slices each" if schedule.num_slices > 1 else ""
        batches = f", {schedule.num_batches} batches" if several else ""
        parts = f", {self.context} parts each" if self.context > 1 else ""
        return (
            f"{schedule.name}:  P={schedule.num_ranks}  V={num_chunks(self.timeline)}  "
            f"M={schedule.num_microbatches // self.context}{parts}{slices}{batches}"
        )

    def title(self, unit_name: str, unit: float) -> str:
        t = self.timeline
        if not ops_of(t):
            return f"{self.caption}:  nothing ran"
        rows = "" if t.busiest_member is None else f",  busiest member of experts {t.busiest_member:.2f} x mean"
        predicted = rows if self.sampled is None else f"{rows};  predicted {self.sampled}"
        if t.schedule.is_asynchronous:
            return f"{self.caption}:  {self._steady_state(unit_name, unit)}{predicted}"
        ratio = ""
        if (other := self.reference) is not None:
            is_stream = other.timeline.schedule.is_asynchronous
            before, name = (other.timeline.makespan, other.caption) if is_stream else (other.seconds, other.seconds_are)
            ratio = _times(t.batch_seconds, before, name)
        return (
            f"{self.caption}:  makespan {t.makespan / unit:.4g} {unit_name}{ratio},  "
            f"makespan bubble {t.makespan_bubble:.1%},  span bubble {t.span_bubble:.1%}{predicted}"
        )

    def _steady_state(self, unit_name: str, unit: float) -> str:
        """Figures per batch; a measured timeline shows only a few batches."""
        t, ratio = self.timeline, ""
        forwards = (span.what for rank in t.ranks for span in rank.compute if span.what.op is Op.F)
        if self.reference is not None and self.reference.timeline.schedule.is_asynchronous:
            ratio = _times(t.batch_seconds, self.reference.seconds, self.reference.seconds_are)
        return (
            f"a batch every {t.batch_seconds / unit:.4g} {unit_name}{ratio},  steady-state bubble {t.bubble:.1%},  "
            f"{len({batch_of(t, a) for a in forwards})} batches in {t.makespan / unit:.4g} {unit_name}"
        )

    @cached_property
    def path(self) -> CriticalPath:
        return critical_path(self.timeline)

    @property
    def expected_end(self) -> float | None:
        """The predicted, else simulated end [s]; None for a stream, which continues."""
        if not self.is_own or self.reference is None:
            return None
        before = self.reference
        if before.length <= 0 or before.timeline.schedule.is_asynchronous:
            return None
        return before.seconds - before.timeline.around

    @property
    def predicted_ends(self) -> tuple[float, float] | None:
        """The interval with 90% of predicted ends [s]; None if not known."""
        if self.expected_end is None or self.reference is None or self.reference.sampled is None:
            return None
        low, high = self.reference.sampled.range()
        return low - self.reference.timeline.around, high - self.reference.timeline.around


def _times(seconds: float, before: float, name: str) -> str:
    return f" ({seconds / before:.3f} times {name})" if before > 0 else ""


Panel = TimelinePanel | MemoryPanel


def panels_of(exhibits: Sequence[Exhibit], *, memory: bool = False) -> list[Panel]:
    """Panels of all exhibits, from the top. A measured one is compared with its own prediction or simulation, others
    with the first of all. `memory`: whether each timeline's memory is below it, if its stages' bytes are known."""
    panels: list[Panel] = []
    first: TimelinePanel | None = None
    for exhibit in exhibits:
        own: TimelinePanel | None = None
        for caption, timeline in exhibit.timelines:
            name = caption if len(exhibits) == 1 else f"{exhibit.name}, {caption}"
            panel = TimelinePanel(caption=name, timeline=timeline, reference=own or first, is_own=own is not None)
            sampled = exhibit.sampled if timeline is exhibit.simulated else None
            panel = replace(panel, sampled=sampled, context=exhibit.context)
            panels.append(panel)
            if memory and exhibit.memory:
                panels.append(MemoryPanel(caption=name, exhibit=exhibit, timeline=timeline))
            own, first = own or panel, first or panel
    return panels


def time_unit(seconds: float) -> tuple[str, float]:
    """The name and length [s] of the largest unit in which `seconds` is at least 1.

    >>> time_unit(0.25)
    ('ms', 0.001)
    """
    return next((unit for unit in UNITS if seconds >= unit[1]), UNITS[-1] if seconds > 0 else UNITS[0])
