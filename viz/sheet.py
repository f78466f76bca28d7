"""The page of a figure: panels below each other on one time scale, idle time beside them, the legend at the foot.

    +-----------------------------------------------------------------+
    | 1f1b: P=4 V=1 M=8                                               |  title
    | predicted: makespan 33 s, makespan bubble 27%     idle by cause |
    | rank 0 |0|1|2|3|    | 0 | ...                     |====         |  a row a rank
    | measured: makespan 35 s (1.06 times ...) ...                    |
    | rank 0 |0|1|2|3|     | 0 | ...                    |=====        |
    |        0     10     20 ... time [s]               0   20   40   |
    | legend                                                          |
    +-----------------------------------------------------------------+

It is laid out in hundredths of an inch, from the top, so that nothing can overlap. No pyplot: it is global state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..schedules import Idle, MemoryPart, MessageKind, Op
from .gantt import PATH_INK, draw_path, draw_timeline, path_words, plan_labels, shows_versions
from .idle import IdleFill, causes_of, draw_idle_bars, idle_shares, is_window
from .memory_panel import LINE_INK, LINE_STYLES, MemoryPanel, ceiling_of, lines_of, parts_of
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
from .panels import Panel, TimelinePanel, time_unit
from .rows import collectives_of, message_kinds_of, num_chunks, ops_of, shows_batches
from .scale import UNITS_AN_INCH, Scale, points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")
Key = tuple[Any, str]  # of the legend: a handle of any of matplotlib's kinds, and its words

_USUAL_FONT = 9.5  # [points]; what follows fits it, and grows and shrinks with it [inch / 100]
_LEFT, _RIGHT = 66, 24
_TITLE, _NO_TITLE, _PANEL_TITLE, _PANEL_GAP, _TIME_AXIS, _FOOT = 44, 8, 26, 18, 48, 10
_BARS, _BARS_GAP, _BARS_SHARE = 230, 22, 0.18  # width of the idle bars, at most this share of the page
_HIGHEST_ROW, _LOWEST_ROW, _ROW = 60.0, 14.0, 100.0
_NARROWEST, _SMALLEST_FONT = 3.0, 4.0
_BOLD = 0.66  # width of a bold character, of the font's size
_RANGE_HEIGHT = 0.05  # of a panel's
_RANGE_BAND: dict[str, Any] = {"facecolor": "#202020", "alpha": 0.55, "linewidth": 0}
_INK = "#303030"  # of the legend; what follows is in font sizes
_HEADING = 8.0  # width of the column of headings
_LETTER = 0.54  # mean width of a letter of DejaVu Sans
_AROUND = 4.2  # width of a key beside its words: handle, padding and gap


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureStyle:
    """Look of a figure.

    Arguments:
        width: [inch].
        dpi: pixels an inch of a PNG.
        font: size of the words [points]; all others follow it.
        title: whether the schedule and its sizes stand above all; a paper's caption says that.
        memory: whether what each rank holds over time stands below each timeline, where stages' bytes are known.
        critical_path: whether the chain of actions and messages that determines the end is marked, with its shares.
        idle: "cause": idle time in the hue of its cause; "hatch": all of it hatched, for print without colours.

    Raises ValueError for sizes at which nothing could be read.
    """

    width: float = 16.0
    dpi: float = 100.0
    font: float = _USUAL_FONT
    title: bool = True
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
    """The layout of one figure."""

    def __init__(self, panels: Sequence[Panel], style: FigureStyle) -> None:
        self.panels, self.style = panels, style
        self.timelines = [panel.timeline for panel in panels if isinstance(panel, TimelinePanel)]
        self.memories = [panel for panel in panels if isinstance(panel, MemoryPanel)]
        self.ceiling = ceiling_of(self.memories)
        self.times = style.font / _USUAL_FONT
        self.width = style.width * UNITS_AN_INCH
        longest = max(self._end_of(panel) for panel in panels)
        self.unit_name, self.unit = time_unit(longest)
        self.causes = {cause for t in self.timelines for cause in causes_of(t)}
        has_side = bool(self.causes or self.memories)  # at the right: idle bars, peaks
        self.bars = min(_BARS * self.times, _BARS_SHARE * self.width) if has_side else 0.0
        self.left, right = _LEFT * self.times, _RIGHT * self.times
        self.scale = Scale(
            unit=self.unit,
            length=longest or self.unit,
            width=self.width - self.left - right - (self.bars + _BARS_GAP * self.times if has_side else 0),
            row=self.times * round(min(_HIGHEST_ROW, max(_LOWEST_ROW, _ROW / self._num_rows() ** 0.5))),
            font=style.font,
            with_lanes=any(message_kinds_of(t) or collectives_of(t) for t in self.timelines),
        )
        self.labels = plan_labels(self.timelines, self.scale)
        self.lines = self._legend()
        rows = sum(panel.num_rows for panel in panels) * self.scale.row
        gaps = (_PANEL_TITLE * len(panels) + _PANEL_GAP * (len(panels) - 1) + _TIME_AXIS + _FOOT) * self.times
        self.line_height = 1.82 * style.font / 72 * UNITS_AN_INCH
        self.foot = self.line_height * len(self.lines)
        self.height = round(self._top() + gaps + rows + self.foot)

    @staticmethod
    def _end_of(panel: Panel) -> float:
        """Seconds that the time axis needs for a panel: what ran, and where it was predicted to end."""
        if not isinstance(panel, TimelinePanel):
            return panel.length
        return max(panel.length, panel.predicted_end or 0.0, *(panel.predicted_ends or ()))

    def _num_rows(self) -> int:
        return max(panel.num_rows for panel in self.panels)

    def _top(self) -> float:
        return (_TITLE if self.style.title else _NO_TITLE) * self.times

    def _legend(self) -> list[tuple[str, list[Key]]]:
        """Lines of keys, the first ones of a group behind its heading."""
        from matplotlib.patches import Patch

        causes = [(Patch(facecolor=CAUSE_HUES[c]), c.replace("_", " ")) for c in Idle._fields if c in self.causes]
        frame = Patch(facecolor="none", edgecolor=PATH_INK, linewidth=1.6)
        groups = {
            "timeline:": self._timeline_keys(),
            "idle by cause:": causes,
            "memory:": self._memory_keys(),
            "critical path:": [(frame, f"{panel.caption}: {path_words(panel.path)}") for panel in self._paths()],
        }
        room = points(self.width - self.left) / self.style.font - _HEADING
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
        if any(panel.predicted_end is not None for panel in compared):
            yield Line2D([], [], color="#202020", linestyle="--", linewidth=0.9), "predicted end"
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
        """Panels whose critical path is marked."""
        return [p for p in self.panels if isinstance(p, TimelinePanel) and p.length > 0 and self.style.critical_path]

    def axes(self, figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
        """Axes at a place from the upper left corner."""
        box = (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        return figure.add_axes(box)

    def text(self, figure: Figure, baseline: float, text: str, **font: Any) -> None:
        x, y = self.left / self.width, 1 - baseline / self.height
        figure.text(x, y, text, color="#202020", parse_math=False, **font)

    def draw(self, figure: Figure) -> None:
        if self.style.title:
            headings = list(dict.fromkeys(p.heading for p in self.panels if not isinstance(p, MemoryPanel)))
            size = 1.47 * self.style.font
            most = 72 * self.style.width / (_BOLD * size)
            self.text(figure, 30 * self.times, one_line(headings, most=most), size=size, weight="bold")
        top: float = self._top()
        for panel in self.panels:
            top = self._draw_panel(figure, panel, top) + _PANEL_GAP * self.times
        for number, (heading, keys) in enumerate(self.lines):
            middle = (self.foot + 0.5 * _FOOT * self.times - (number + 0.5) * self.line_height) / self.height
            self._draw_keys(figure, heading, keys, middle)

    def _draw_keys(self, figure: Figure, heading: str, keys: Sequence[Key], middle: float) -> None:
        """One line of the legend, `middle` a fraction of the figure."""
        from matplotlib.legend_handler import HandlerTuple

        font, left = self.style.font, self.left / self.width
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

    def _draw_panel(self, figure: Figure, panel: Panel, top: float) -> float:
        """Draw one panel below `top`; returns where it ends."""
        scale, is_last = self.scale, panel is self.panels[-1]
        title = panel.title(self.unit_name, self.unit)
        self.text(figure, top + 18 * self.times, title, size=1.1 * self.style.font)
        top += _PANEL_TITLE * self.times
        height = panel.num_rows * scale.row
        axes = self.axes(figure, self.left, top, scale.width, height)
        if isinstance(panel, TimelinePanel):
            draw_timeline(axes, panel.timeline, scale, self.labels, idle=self.style.idle)
            if panel in self._paths():
                draw_path(axes, panel.timeline, panel.path, scale)
            if panel.predicted_ends is not None:
                low, high = panel.predicted_ends  # a bar on the time axis: actions keep their colours
                axes.axvspan(low / self.unit, high / self.unit, ymax=_RANGE_HEIGHT, zorder=3, **_RANGE_BAND)
            if panel.predicted_end is not None:
                axes.axvline(panel.predicted_end / self.unit, color="#202020", linestyle="--", linewidth=0.9)
            if self.causes and panel.length > 0:
                is_lowest = panel.timeline is self.timelines[-1]
                self._draw_bars(figure, panel, top, height, is_last=is_lowest)
        else:
            panel.draw(axes, scale, self.ceiling)
        axes.tick_params(labelbottom=is_last)
        if is_last:
            axes.set_xlabel(f"time [{self.unit_name}]", size=self.style.font, labelpad=2)
        return top + height

    def _draw_bars(self, figure: Figure, panel: TimelinePanel, top: float, height: float, *, is_last: bool) -> None:
        left = self.left + self.scale.width + _BARS_GAP * self.times
        bars = self.axes(figure, left, top, self.bars, height)
        draw_idle_bars(bars, panel.timeline, self.scale, limit=self._bar_limit())
        bars.tick_params(labelbottom=is_last)
        if is_last:
            of = "time" if is_window(panel.timeline) else "makespan"
            bars.set_xlabel(f"idle [% of {of}]", size=self.style.font, labelpad=2)

    def _bar_limit(self) -> float:
        """The end of the idle bars' axis, with room for the numbers behind the bars [per cent]."""
        return 100 * 1.25 * max(sum(idle) for timeline in self.timelines for idle in idle_shares(timeline))


def _in_order(kinds: Iterable[T], found: Iterable[Collection[T]]) -> list[T]:
    """Members of an enumeration that are in any of what was found."""
    present = set().union(*found)
    return [kind for kind in kinds if kind in present]


def _broken(heading: str, keys: Iterable[Key], room: float) -> Iterator[tuple[str, list[Key]]]:
    """Lines of keys, for which there is so much room [font sizes]."""
    line: list[Key] = []
    left = room
    for key in keys:
        size = _AROUND + _LETTER * len(key[1])
        if line and size > left:
            yield heading, line
            heading, line, left = "", [], room
        line.append(key)
        left -= size
    if line:
        yield heading, line


def one_line(headings: list[str], *, most: float) -> str:
    """As many headings as have room in a line of so many characters, one at least, and how many more there are.

    >>> one_line(["1f1b", "gpipe", "zb-h1"], most=30), one_line(["1f1b", "gpipe", "zb-h1"], most=26)
    ('1f1b   /   gpipe   /   zb-h1', '1f1b   /   and 2 more')
    """
    for number in range(len(headings), 0, -1):
        more = [f"and {len(headings) - number} more"] if number < len(headings) else []
        line = "   /   ".join([*headings[:number], *more])
        if len(line) <= most:
            break
    return line
