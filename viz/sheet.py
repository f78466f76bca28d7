"""The page of a figure: panels below each other on one time scale, idle time at the right, the legend at the bottom.

    +-----------------------------------------------------------------+
    | 1f1b: P=4 V=1 M=8                                               |  title
    | simulated: makespan 33 s, makespan bubble 27%     idle by cause |
    | rank 0 |0|1|2|3|    | 0 | ...                     |====         |  a row per rank
    | measured: makespan 35 s (1.06 times ...) ...                    |
    | rank 0 |0|1|2|3|     | 0 | ...                    |=====        |
    |        0     10     20 ... time [s]               0   20   40   |
    | legend                                                          |
    +-----------------------------------------------------------------+

matplotlib's constrained layout allots room to titles, names and axes; the page grows until rows have their height. No
pyplot: it is global state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TypeVar

from ..schedules import Idle, MemoryPart, MessageKind, Op
from .exhibit import PREDICTED, SIMULATED
from .gantt import PATH_INK, draw_path, draw_timeline, name_rows, path_words, plan_labels, shows_versions
from .idle import IdleFill, causes_of, draw_idle_bars, idle_shares, is_window
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
from .panels import LINE_INK, LINE_STYLES, MemoryPanel, Panel, TimelinePanel, ceiling_of, lines_of, parts_of, time_unit
from .rows import UNITS_AN_INCH, Scale, collectives_of, message_kinds_of, num_chunks, ops_of, shows_batches, style_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .shown_figure import ShownFigure

T = TypeVar("T")
Key = tuple[Any, str]  # of the legend: a handle of any of matplotlib's kinds, and its words

_USUAL_FONT = 9.5  # [points]; what follows fits it, and grows and shrinks with it
_BARS, _BARS_SHARE = 2.5, 0.2  # width of the idle bars [inch], at most this share of the page
_HIGHEST_ROW, _LOWEST_ROW, _ROW = 60.0, 14.0, 100.0  # [inch / 100]
_GAP, _WORDS = 0.08, 1.0  # margins of axes, and ample room for the words of a panel [inch]
_NARROWEST, _SMALLEST_FONT = 3.0, 4.0
_RANGE_HEIGHT = 0.05  # of a panel's
_RANGE_BAND: dict[str, Any] = {"facecolor": "#202020", "alpha": 0.55, "linewidth": 0}
_INK = "#303030"  # of the legend; what follows is in font sizes
_HEADING = 8.0  # width of the column of headings
_LETTER = 0.54  # mean width of a letter of DejaVu Sans
_KEY = 4.2  # width of a key without its words: handle, padding and gap


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureStyle:
    """Look of a figure.

    Arguments:
        width: [inch].
        dpi: pixels per inch of a PNG.
        font: size of the words [points]; all others follow it.
        title: whether the schedule and its sizes are above; a paper's caption has them.
        captions: whether each timeline has its name and figures above it.
        memory: whether the memory of each rank is below each timeline, if its stages' bytes are known.
        critical_path: whether the chain of actions and messages that determines the end is marked, with its shares.
        idle: "cause": idle time in the hue of its cause; "hatch": all of it hatched, for print without colours.

    Raises ValueError for sizes too small or large to read.
    """

    width: float = 16.0
    dpi: float = 100.0
    font: float = _USUAL_FONT
    title: bool = True
    captions: bool = True
    idle: IdleFill = "cause"
    critical_path: bool = False
    memory: bool = False

    def __post_init__(self) -> None:
        if not _NARROWEST <= self.width <= 200:
            raise ValueError(f"width={self.width!r}: expected {_NARROWEST:g} to 200 inches")
        if not 30 <= self.dpi <= 1200:
            raise ValueError(f"dpi={self.dpi!r}: expected 30 to 1200 pixels an inch")
        if not _SMALLEST_FONT <= self.font <= 40:
            raise ValueError(f"font={self.font!r}: expected {_SMALLEST_FONT:g} to 40 points")
        if self.idle not in ("cause", "hatch"):
            raise ValueError(f"idle={self.idle!r}: expected 'cause' or 'hatch'")


class Sheet:
    """One figure, laid out; `draw` fills it."""

    def __init__(self, panels: Sequence[Panel], style: FigureStyle) -> None:
        self.panels, self.style = panels, style
        self.timelines = [panel.timeline for panel in panels if isinstance(panel, TimelinePanel)]
        self.memories = [panel for panel in panels if isinstance(panel, MemoryPanel)]
        self.ceiling = ceiling_of(self.memories)
        self.times = style.font / _USUAL_FONT
        longest = max(self._end_of(panel) for panel in panels)
        self.unit_name, self.unit = time_unit(longest)
        self.causes = {cause for t in self.timelines for cause in causes_of(t)}
        most = max(panel.num_rows for panel in panels)
        self.scale = Scale(
            unit=self.unit,
            length=longest or self.unit,
            width=style.width * UNITS_AN_INCH,
            row=self.times * round(min(_HIGHEST_ROW, max(_LOWEST_ROW, _ROW / most**0.5))),
            font=style.font,
            with_lanes=any(message_kinds_of(t) or collectives_of(t) for t in self.timelines),
        )
        self._lay_out()

    def _lay_out(self) -> None:
        """Axes of all panels with their words; the remaining width determines the size of the numbers."""
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        from .shown_figure import ShownFigure

        style, gap, rows = self.style, _GAP * self.times, [each.num_rows * self.scale.row / 100 for each in self.panels]
        height = sum(rows) + _WORDS * self.times * (len(rows) + 2)
        self.figure = figure = ShownFigure.of_size(style.width, height, dpi=style.dpi)
        engine = ConstrainedLayoutEngine(w_pad=gap, h_pad=gap, hspace=0.0, wspace=0.0)
        figure.set_layout_engine(engine)
        bars = min(_BARS * self.times, _BARS_SHARE * style.width)  # at the right: idle bars, peaks
        widths = [style.width - bars, bars] if self.causes or self.memories else [style.width]
        grid = figure.add_gridspec(len(rows), len(widths), width_ratios=widths, height_ratios=rows)
        self.axes = []
        for at, panel in enumerate(self.panels):
            self.axes.append(self._axes(figure.add_subplot(grid[at, 0]), panel))
            if isinstance(panel, TimelinePanel) and self.causes and panel.length > 0:
                self._draw_bars(figure.add_subplot(grid[at, 1]), panel)
        title = figure.suptitle("", ha="left", size=1.47 * style.font, weight="bold", wrap=True, parse_math=False)
        if style.title:
            headings = dict.fromkeys(p.heading for p in self.panels if not isinstance(p, MemoryPanel))
            title.set_text("   /   ".join(headings))
        engine.execute(figure)
        self.left = self.axes[0].get_position().x0
        title.set_x(self.left)
        self.scale = replace(self.scale, width=self.axes[0].get_position().width * style.width * UNITS_AN_INCH)
        self.labels = plan_labels(self.timelines, self.scale)
        self.lines = self._legend()
        self.line_height = 1.82 * style.font / 72
        foot = self.line_height * len(self.lines) + gap
        height += foot + sum(rows) - height * sum(axes.get_position().height for axes in self.axes)
        figure.set_size_inches(style.width, round(height, 2))
        engine.set(rect=(0.0, foot / height, 1.0, 1.0 - foot / height))
        engine.execute(figure)
        figure.set_layout_engine("none")  # drawing does not change it

    def _axes(self, axes: Axes, panel: Panel) -> Axes:
        title = panel.title(self.unit_name, self.unit) if self.style.captions else ""
        axes.set_title(title, loc="left", size=1.1 * self.style.font, color="#202020", wrap=True, parse_math=False)
        axes.set_xlim(0, self.scale.length / self.scale.unit)
        style_rows(axes, panel.num_rows, self.scale)
        name_rows(axes, [f"rank {rank}" for rank in range(panel.num_rows)], self.scale)
        self._time_axis(axes, f"time [{self.unit_name}]", is_last=panel is self.panels[-1])
        return axes

    def _time_axis(self, axes: Axes, label: str, *, is_last: bool) -> None:
        axes.tick_params(labelbottom=is_last)
        if is_last:
            axes.set_xlabel(label, size=self.style.font, labelpad=2, wrap=True)

    @staticmethod
    def _end_of(panel: Panel) -> float:
        """Seconds that the time axis needs for a panel, including the end that was expected."""
        if not isinstance(panel, TimelinePanel):
            return panel.length
        return max(panel.length, panel.expected_end or 0.0, *(panel.predicted_ends or ()))

    def _legend(self) -> list[tuple[str, list[Key]]]:
        """Lines of keys, the first ones of a group after its heading."""
        from matplotlib.patches import Patch

        causes = [(Patch(facecolor=CAUSE_HUES[c]), c.replace("_", " ")) for c in Idle._fields if c in self.causes]
        frame = Patch(facecolor="none", edgecolor=PATH_INK, linewidth=1.6)
        groups = {
            "timeline:": self._timeline_keys(),
            "idle by cause:": causes,
            "memory:": self._memory_keys(),
            "critical path:": [(frame, f"{panel.caption}: {path_words(panel.path)}") for panel in self._paths()],
        }
        room = 72 * self.style.width * (1.0 - self.left) / self.style.font - _HEADING
        return [line for heading, keys in groups.items() for line in _broken(heading, keys, room)]

    def _timeline_keys(self) -> Iterator[Key]:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        timelines = self.timelines
        chunks, batches = max(map(num_chunks, timelines)), 2 if any(map(shows_batches, timelines)) else 1
        shades = [f"chunk 0 to {chunks - 1}"] * (chunks > 1) + ["even, odd batches"] * (batches > 1)
        for number, op in enumerate(_in_order(Op, map(ops_of, timelines))):
            colours = (
                box_colour(op, chunk=chunk, num_chunks=chunks, batch=batch)
                for chunk in range(chunks)
                for batch in range(batches)
            )
            words = OP_WORDS.get(op, op.value)
            handle = tuple(Patch(facecolor=colour) for colour in colours)
            yield handle, f"{words} ({'; '.join(shades)})" if shades and number == 0 else words
        if self.causes and self.style.idle == "hatch":
            yield Patch(facecolor=IDLE_FILL, edgecolor=IDLE_HATCH, hatch="/////", linewidth=0), "idle"
        if any(shows_versions(each, self.scale, self.labels) for each in timelines):
            yield Line2D([], [], linestyle="", marker=r"$\mathrm{v1}$", color=_INK, markersize=11), "weight version"
        for kind in _in_order(MessageKind, map(message_kinds_of, timelines)):
            yield Line2D([], [], color=MESSAGE_HUES[kind], linewidth=3), MESSAGE_WORDS[kind]
        for op in _in_order(Op, map(collectives_of, timelines)):
            words = COLLECTIVE_WORDS.get(op, op.value)
            yield Line2D([], [], color=COLLECTIVE_HUES.get(op, OTHER_HUE), linewidth=3), words
        compared = [panel for panel in self.panels if isinstance(panel, TimelinePanel)]
        ends = {panel.predicted_ends is not None for panel in compared if panel.expected_end is not None}
        if ends:
            name = f"{' or '.join(PREDICTED if each else SIMULATED for each in sorted(ends))} end"
            yield Line2D([], [], color="#202020", linestyle="--", linewidth=0.9), name
        if any(panel.predicted_ends is not None for panel in compared):
            yield Patch(**_RANGE_BAND), "90% of predicted ends"

    def _memory_keys(self) -> Iterator[Key]:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        for part in _in_order(MemoryPart, [parts_of(self.memories)]):
            yield Patch(facecolor=MEMORY_HUES[part]), part.value
        for name in lines_of(self.memories):
            yield Line2D([], [], color=LINE_INK, linestyle=LINE_STYLES[name], linewidth=0.9), name

    def _paths(self) -> list[TimelinePanel]:
        return [p for p in self.panels if isinstance(p, TimelinePanel) and p.length > 0 and self.style.critical_path]

    def draw(self) -> ShownFigure:
        for panel, axes in zip(self.panels, self.axes, strict=True):
            self._draw_panel(panel, axes)
        for number, (heading, keys) in enumerate(self.lines):
            middle = (len(self.lines) - number - 0.5) * self.line_height + 0.5 * _GAP * self.times
            self._draw_keys(heading, keys, middle / self.figure.get_figheight())
        return self.figure

    def _draw_keys(self, heading: str, keys: Sequence[Key], middle: float) -> None:
        from matplotlib.legend_handler import HandlerTuple

        font, left, figure = self.style.font, self.left, self.figure
        figure.text(left, middle, heading, size=font, va="center", color=_INK)
        figure.legend(
            [handle for handle, _ in keys],
            [words for _, words in keys],
            loc="center left",
            bbox_to_anchor=(left + _HEADING * font / 72 / figure.get_figwidth(), middle),
            ncols=len(keys),
            fontsize=font,
            labelcolor=_INK,
            handler_map={tuple: HandlerTuple(ndivide=None, pad=0.0)},
            frameon=False,
            borderaxespad=0.0,
            handletextpad=0.5,
            columnspacing=1.6,
        )

    def _draw_panel(self, panel: Panel, axes: Axes) -> None:
        if not isinstance(panel, TimelinePanel):
            panel.draw(axes, self.scale, self.ceiling)
            return
        draw_timeline(axes, panel.timeline, self.scale, self.labels, idle=self.style.idle)
        if panel in self._paths():
            draw_path(axes, panel.timeline, panel.path, self.scale)
        if panel.predicted_ends is not None:
            low, high = panel.predicted_ends  # a bar on the time axis: actions keep their colours
            axes.axvspan(low / self.unit, high / self.unit, ymax=_RANGE_HEIGHT, zorder=3, **_RANGE_BAND)
        if panel.expected_end is not None:
            axes.axvline(panel.expected_end / self.unit, color="#202020", linestyle="--", linewidth=0.9)

    def _draw_bars(self, bars: Axes, panel: TimelinePanel) -> None:
        longest = max(sum(idle) for timeline in self.timelines for idle in idle_shares(timeline))
        draw_idle_bars(bars, panel.timeline, self.scale, limit=125 * longest)  # in per cent, with room for the numbers
        of = "time" if is_window(panel.timeline) else "makespan"
        self._time_axis(bars, f"idle [% of {of}]", is_last=panel.timeline is self.timelines[-1])


def _in_order(kinds: Iterable[T], found: Iterable[Collection[T]]) -> list[T]:
    present = set().union(*found)
    return [kind for kind in kinds if kind in present]


def _broken(heading: str, keys: Iterable[Key], room: float) -> Iterator[tuple[str, list[Key]]]:
    """Lines of keys within this width [font sizes]; longer words continue below."""
    from matplotlib.patches import Patch

    line: list[Key] = []
    left, most = room, int((room - _KEY) / _LETTER)
    parts = [(handle, wrap(words, most)) for handle, words in keys]
    for key in ((handle if at == 0 else Patch(alpha=0), part) for handle, own in parts for at, part in enumerate(own)):
        size = _KEY + _LETTER * len(key[1])
        if line and size > left:
            yield heading, line
            heading, line, left = "", [], room
        line.append(key)
        left -= size
    if line:
        yield heading, line
