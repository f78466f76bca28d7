"""Timelines as a PNG: the predicted one above the measured one, on one time scale.

    +-----------------------------------------------------------------+
    | 1f1b: P=4 V=1 M=8                                               |  title
    | predicted: makespan 33 s, makespan bubble 27%     idle by cause |
    | rank 0 |0|1|2|3|////| 0 | ...                     |====         |  a row a rank
    | measured: makespan 35 s (1.06 times ...) ...                 |
    | rank 0 |0|1|2|3|/////| 0 | ...                    |=====        |
    |        0     10     20 ... time [s]               0   20   40   |
    | legend                                                          |
    +-----------------------------------------------------------------+

The page is laid out in pixels, from the top, so that nothing can overlap. No pyplot: it is global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schedules import Op, Timeline
from .gantt import (
    Scale,
    batch_of,
    causes_of,
    collectives_of,
    draw_idle_bars,
    draw_timeline,
    idle_shares,
    is_window,
    message_kinds_of,
    num_chunks,
    ops_of,
    plan_labels,
    shows_batches,
)
from .legend import draw_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 100
_WIDTH, _LEFT, _RIGHT = 1600, 66, 24  # the page and its margins [pixels]
_TITLE, _PANEL_TITLE, _PANEL_GAP, _TIME_AXIS, _LEGEND_ROW = 44, 26, 18, 48, 24
_BARS, _BARS_GAP = 230, 22  # the column of idle bars
_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def render_timeline(timeline: Timeline, path: str | Path) -> None:
    """Draw one timeline as a PNG of 1600 pixels' width.

    Arguments:
        path: of the PNG.
    """
    caption = "measured" if timeline.measured else "simulated"
    _render([_Panel(caption=caption, timeline=timeline)], path)


def render_comparison(predicted: Timeline | None, measured: Timeline | None, path: str | Path) -> None:
    """Draw `predicted` above `measured` on one time scale, each from its own first start.

    Arguments:
        predicted, measured: one of them may be None; the other then stands alone.
        path: of the PNG.

    Raises ValueError when both are None.
    """
    panels = [
        _Panel(caption=caption, timeline=timeline)
        for caption, timeline in (("predicted", predicted), ("measured", measured))
        if timeline is not None
    ]
    if not panels:
        raise ValueError("predicted=None, measured=None: expected at least one Timeline")
    _render(panels, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    caption: str
    timeline: Timeline

    def title(self, unit_name: str, unit: float, before: _Panel | None) -> str:
        """The figures of this panel; `before` is what they are compared with."""
        t = self.timeline
        if not ops_of(t):
            return f"{self.caption}:  nothing ran"
        if t.schedule.is_asynchronous:
            return f"{self.caption}:  {self._steady_state(unit_name, unit, before)}"
        ratio = ""
        if before is not None and before.timeline.makespan > 0:
            ratio = f" ({t.makespan / before.timeline.makespan:.3f} times {before.caption})"
        return (
            f"{self.caption}:  makespan {t.makespan / unit:.4g} {unit_name}{ratio},  "
            f"makespan bubble {t.makespan_bubble:.1%},  span bubble {t.span_bubble:.1%}"
        )

    def _steady_state(self, unit_name: str, unit: float, before: _Panel | None) -> str:
        """The figures of a batch among others; a measured timeline shows a few batches only."""
        t = self.timeline
        ratio = ""
        if before is not None and before.timeline.schedule.is_asynchronous and before.timeline.batch_seconds > 0:
            ratio = f" ({t.batch_seconds / before.timeline.batch_seconds:.3f} times {before.caption})"
        return (
            f"a batch every {t.batch_seconds / unit:.4g} {unit_name}{ratio},  steady-state bubble {t.bubble:.1%},  "
            f"{self._num_batches()} batches in {t.makespan / unit:.4g} {unit_name}"
        )

    def _num_batches(self) -> int:
        """Number of batches of which a forward is shown."""
        spans = (span.what for rank in self.timeline.ranks for span in rank.compute)
        return len({batch_of(self.timeline, a) for a in spans if a.op is Op.F})


def _render(panels: Sequence[_Panel], path: str | Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    page = _Page(panels)
    figure = Figure(figsize=(_WIDTH / _DPI, page.height / _DPI), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    page.draw(figure)
    figure.savefig(path, format="png", dpi=_DPI, metadata={"Software": "stagewright"})


class _Page:
    """The layout of one picture."""

    def __init__(self, panels: Sequence[_Panel]) -> None:
        self.panels = panels
        timelines = [panel.timeline for panel in panels]
        ranks = max(len(t.ranks) for t in timelines)
        longest = max(t.makespan for t in timelines)
        self.unit_name, self.unit = time_unit(longest)
        self.with_bars = any(causes_of(t) for t in timelines)
        width = _WIDTH - _LEFT - _RIGHT - (_BARS + _BARS_GAP if self.with_bars else 0)
        self.scale = Scale(
            unit=self.unit,
            length=longest or self.unit,
            width=width,
            row=round(min(60.0, max(14.0, 100 / ranks**0.5))),
            dpi=_DPI,
            with_lanes=any(message_kinds_of(t) or collectives_of(t) for t in timelines),
        )
        self.labels = plan_labels(timelines, self.scale)
        self._legend = _LEGEND_ROW * (2 if self.with_bars else 1) + 10
        rows = sum(len(t.ranks) for t in timelines) * self.scale.row
        gaps = _PANEL_TITLE * len(panels) + _PANEL_GAP * (len(panels) - 1)
        self.height = round(_TITLE + gaps + rows + _TIME_AXIS + self._legend)

    def axes(self, figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
        """Axes at a place in pixels from the upper left corner."""
        box = (left / _WIDTH, 1 - (top + height) / self.height, width / _WIDTH, height / self.height)
        return figure.add_axes(box)

    def text(self, figure: Figure, baseline: float, text: str, **font: Any) -> None:
        """A line of text at the left margin."""
        figure.text(_LEFT / _WIDTH, 1 - baseline / self.height, text, color="#202020", **font)

    def draw(self, figure: Figure) -> None:
        self.text(figure, 30, _title(self.panels), size=14, weight="bold")
        top: float = _TITLE
        for number, panel in enumerate(self.panels):
            before = self.panels[number - 1] if number else None
            is_last = number == len(self.panels) - 1
            top = self._draw_panel(figure, panel, before, top, is_last=is_last) + _PANEL_GAP
        timelines = [panel.timeline for panel in self.panels]
        draw_legend(
            figure,
            ops={op for t in timelines for op in ops_of(t)},
            kinds={kind for t in timelines for kind in message_kinds_of(t)},
            together={op for t in timelines for op in collectives_of(t)},
            causes={cause for t in timelines for cause in causes_of(t)},
            chunks=max(num_chunks(t) for t in timelines),
            batches=any(map(shows_batches, timelines)),
            marks_end=any(map(self._has_end, self.panels[:-1])),
            left=_LEFT / _WIDTH,
            middles=[(self._legend - (row + 0.5) * _LEGEND_ROW) / self.height for row in range(2)],
        )

    def _draw_panel(self, figure: Figure, panel: _Panel, before: _Panel | None, top: float, *, is_last: bool) -> float:
        """Draw one panel below `top`; returns where it ends."""
        timeline, scale = panel.timeline, self.scale
        self.text(figure, top + 18, panel.title(self.unit_name, self.unit, before), size=10.5)
        top += _PANEL_TITLE
        height = len(timeline.ranks) * scale.row
        axes = self.axes(figure, _LEFT, top, scale.width, height)
        draw_timeline(axes, timeline, scale, self.labels)
        axes.tick_params(labelbottom=is_last)
        if is_last:
            axes.set_xlabel(f"time [{self.unit_name}]", size=9.5, labelpad=2)
        if before is not None and self._has_end(before):
            axes.axvline(before.timeline.makespan / self.unit, color="#202020", linestyle="--", linewidth=0.9)
        if self.with_bars and timeline.makespan > 0:
            bars = self.axes(figure, _LEFT + scale.width + _BARS_GAP, top, _BARS, height)
            draw_idle_bars(bars, timeline, scale, limit=self._bar_limit())
            bars.tick_params(labelbottom=is_last)
            if is_last:
                of = "time" if is_window(timeline) else "makespan"
                bars.set_xlabel(f"idle [% of {of}]", size=9.5, labelpad=2)
        return top + height

    @staticmethod
    def _has_end(panel: _Panel) -> bool:
        """Whether its end is one that the next panel should reach: a stream goes on."""
        return panel.timeline.makespan > 0 and not panel.timeline.schedule.is_asynchronous

    def _bar_limit(self) -> float:
        """The end of the idle bars' axis, with room for the numbers behind the bars [per cent]."""
        return 100 * 1.25 * max(sum(idle) for panel in self.panels for idle in idle_shares(panel.timeline))


def time_unit(seconds: float) -> tuple[str, float]:
    """The name and length [s] of the unit in which `seconds` is at least 1.

    >>> time_unit(0.25)
    ('ms', 0.001)
    """
    return next((unit for unit in _UNITS if seconds >= unit[1]), _UNITS[-1] if seconds > 0 else _UNITS[0])


def _title(panels: Sequence[_Panel]) -> str:
    titles = []
    for timeline in (panel.timeline for panel in panels):
        schedule = timeline.schedule
        batches = (
            f", {schedule.num_batches} batches" if schedule.num_batches > 1 and not schedule.is_asynchronous else ""
        )
        titles.append(
            f"{schedule.name}:  P={schedule.num_ranks}  V={num_chunks(timeline)}  "
            f"M={schedule.num_microbatches}{batches}"
        )
    return "   /   ".join(dict.fromkeys(titles))
