"""Timelines in a terminal: a row per rank, a column per interval of time, exhibits below each other on one scale.

    simulated:  makespan 27 s,  makespan bubble 33.3%
    rank 0 |F0F1....::::B0----F2B1----...B2----| 33%  late peer 22, drain 11     without colours
    rank 1 |  ..F0F1B0----

A column shows what takes most of its time: an action, in the colour of its op and chunk, or idle time by its cause. An
action has its number if there is room. Without colours each begins with the letter of its op.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from ..schedules import Idle
from .exhibit import Exhibit
from .idle import causes_of, idle_shares, idle_stretches
from .palette import CAUSE_HUES, OP_HUES, OP_WORDS, hex_of, ink
from .panels import TimelinePanel, panels_of, time_unit
from .rows import boxes_of, ops_of

_NARROWEST = 40
_IDLE = {  # without colours, by cause
    "data": "%",
    "warm_up": ".",
    "drain": ".",
    "late_peer": ":",
    "imbalance": ":",
    "transfer": "~",
    "update": "_",
    "unexplained": "?",
}
_SHADE, _BLOCK = "\u2592", "\u2588"  # in colours: idle time, and bars of it


class _Look(NamedTuple):
    """The look of a piece of a row; pieces of equal look are merged where columns are narrow."""

    letter: str
    fill: str  # of columns without colours, after the letter
    style: str  # of `rich`
    coloured_fill: str = " "


class _Piece(NamedTuple):
    """A part of a row [s]; `label` is written where it fits."""

    start: float
    end: float
    look: _Look
    label: str = ""


_Row = tuple[list[_Piece], Idle | None]  # of a rank; idle None: it was not recorded


def render_terminal(exhibits: Sequence[Exhibit], *, width: int | None = None, colour: bool | None = None) -> str:
    """The exhibits as lines of text, without a line break at the end.

    Arguments:
        width: columns, at least 40; the terminal's by default.
        colour: with ANSI colours; False: ASCII only. By default if standard output is a terminal, and NO_COLOR is not
            set.

    Raises ValueError without exhibits, and for a width below 40.
    """
    if not exhibits:
        raise ValueError("exhibits=[]: expected at least one Exhibit")
    if width is None:
        width = max(_NARROWEST, shutil.get_terminal_size().columns)
    if isinstance(width, bool) or not isinstance(width, int) or width < _NARROWEST:
        raise ValueError(f"width={width!r}: expected a number of columns, at least {_NARROWEST}")
    panels = [panel for panel in panels_of(exhibits) if isinstance(panel, TimelinePanel)]
    page = _Page(panels, width, _wants_colour() if colour is None else colour)
    return page.text()


def _wants_colour() -> bool:
    stream = sys.stdout
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return False
    try:
        _SHADE.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


class _Page:
    def __init__(self, panels: Sequence[TimelinePanel], width: int, colour: bool) -> None:
        self.panels, self.width = panels, width
        self.console = Console(
            file=io.StringIO(), width=width, force_terminal=True, no_color=False, legacy_windows=False
        )
        self.colour = colour and self.console.color_system is not None
        self.rows = [_rows(panel) for panel in panels]
        self.length = max((panel.length for panel in panels), default=0.0)
        self.unit_name, self.unit = time_unit(self.length)
        self.most = max((sum(idle) for rows in self.rows for _, idle in rows if idle is not None), default=0.0)
        names = [_name(rank) for rows in self.rows for rank in range(len(rows))]
        self.names = min(max(map(len, names), default=0), width // 5)
        # Room for "33%", a bar, or the causes with most of it.
        self.side = 5 if width < 60 else 20 if width < 100 or self.colour else 32
        self.columns = width - self.names - 3 - self.side

    def text(self) -> str:
        lines: list[Text] = []
        said = ""
        for panel, rows in zip(self.panels, self.rows, strict=True):
            if panel.heading != said:
                lines += [Text(part, style="bold") for part in self._wrapped(_visible(panel.heading))]
            said = panel.heading
            lines += [Text(part) for part in self._wrapped(_visible(panel.title(self.unit_name, self.unit)))]
            lines += [self._line(_name(rank), *row) for rank, row in enumerate(rows)]
            lines.append(Text(""))
        lines[-1] = self._axis()
        lines += self._legend()
        if not self.colour:
            return (
                "\n".join(line.plain.rstrip() for line in lines).replace("µ", "u").encode("ascii", "replace").decode()
            )
        for line in lines:
            self.console.print(line, no_wrap=True, overflow="ignore", crop=False)
        file = self.console.file
        assert isinstance(file, io.StringIO)
        return file.getvalue().rstrip("\n")

    def _wrapped(self, text: str) -> list[str]:
        """Lines of whole figures, which are two spaces apart."""
        lines = [""]
        for part in text.split("  "):
            joined = f"{lines[-1]}  {part}" if lines[-1] else part
            if len(joined) > self.width and lines[-1]:
                lines.append(part)
            else:
                lines[-1] = joined
        return [line[: self.width] for line in lines]

    # --- rows ---

    def _line(self, name: str, pieces: Sequence[_Piece], idle: Idle | None) -> Text:
        line = Text(f"{name[: self.names]:<{self.names}} |")
        if idle is None:
            return line.append(f"{'not recorded':<{self.columns}}"[: self.columns] + "|")
        for style, text in self._runs(pieces):
            line.append(text, style=style if self.colour else None)
        return line.append("|").append_text(self._side(idle))

    def _runs(self, pieces: Sequence[_Piece]) -> Iterator[tuple[str, str]]:
        """Consecutive columns that show the same piece (or one look, for many small ones), as (style, text)."""
        column = self.length / self.columns if self.length > 0 else 1.0
        shown = _columns(pieces, column, self.columns)
        at = 0
        while at < self.columns:
            piece = shown[at]
            end = at + 1
            while end < self.columns and shown[end] is piece:
                end += 1
            if piece is None:
                yield "", " " * (end - at)
            else:
                whole = piece.end - piece.start > 0.6 * column
                yield piece.look.style, self._filled(piece, end - at, with_label=whole)
            at = end

    def _filled(self, piece: _Piece, room: int, *, with_label: bool) -> str:
        letter, fill, _, coloured = piece.look
        label = piece.label if with_label else ""
        if self.colour:
            # Numbers of several digits need a column between them.
            text = label if len(label) < room or len(label) == 1 == room else ""
            return text.ljust(room, coloured)
        text = letter + label if len(letter) + len(label) <= room else letter
        return text.ljust(room, fill)[:room]

    def _side(self, idle: Idle) -> Text:
        """Idle time in per cent: a bar by cause, or the largest causes in words."""
        shares = sorted(((share, cause) for cause, share in idle._asdict().items() if share >= 0.005), reverse=True)
        side = Text(f"{sum(idle):4.0%}")
        if self.side <= 5 or not shares:
            return side
        room = self.side - 6
        side.append("  ")
        if self.colour:
            for count, (_, cause) in zip(_parts([share / self.most for share, _ in shares], room), shares, strict=True):
                side.append(_BLOCK * count, style=CAUSE_HUES[cause])
            return side
        words = ""
        for share, cause in shares:
            more = f"{', ' if words else ''}{_words(cause)} {100 * share:.0f}"
            if len(words) + len(more) > room:
                break
            words += more
        return side.append(words)

    # --- below the rows ---

    def _axis(self) -> Text:
        length = self.length / self.unit
        line = [" "] * (self.names + 2 + self.columns + 12)
        step = _round_step(length / max(self.columns / 12, 1))
        number = 0
        while step > 0 and number * step <= length * (1 + 1e-9):
            text = f"{number * step:.6g}"
            at = self.names + 2 + round(number * step / length * self.columns)
            if at + len(text) <= self.names + 2 + self.columns:
                line[at : at + len(text)] = text
            number += 1
        return Text("".join(line).rstrip() + f" {self.unit_name}")

    def _legend(self) -> list[Text]:
        timelines = [panel.timeline for panel in self.panels]
        ops = set().union(*map(ops_of, timelines))
        causes = {cause for timeline in timelines for cause in causes_of(timeline)}
        keys: list[tuple[str, str, str]] = []  # sample, its style, words
        for op in (op for op in OP_WORDS if op in ops):
            keys.append(("  " if self.colour else "", f"on {OP_HUES[op]}", OP_WORDS[op]))
        drawn: dict[str, list[str]] = {}
        for cause in (cause for cause in Idle._fields if cause in causes):
            drawn.setdefault(cause if self.colour else _IDLE[cause], []).append(cause)
        for sign, several in drawn.items():
            sample = 2 * _BLOCK if self.colour else sign
            keys.append((sample, CAUSE_HUES[several[0]], ", ".join(map(_words, several))))
        lines = [Text("")]
        for sample, style, words in keys:
            key = Text().append(sample, style=style if self.colour else None).append(f"{' ' if sample else ''}{words}")
            if len(lines[-1]) + len(key) + 2 > self.width and len(lines[-1]):
                lines.append(Text(""))
            if len(lines[-1]):
                lines[-1].append("  ")
            lines[-1].append_text(key)
        return lines if keys else []


def _columns(pieces: Sequence[_Piece], column: float, count: int) -> list[_Piece | None]:
    """By column, the longest piece of the look with most of its time; None if idle or empty time is more."""
    times: list[dict[_Look, float]] = [{} for _ in range(count)]
    longest: list[dict[_Look, tuple[float, _Piece]]] = [{} for _ in range(count)]
    for piece in pieces:
        first = min(int(piece.start / column), count - 1)
        for at in range(first, min(max(ceil(piece.end / column), first + 1), count)):
            seconds = min(piece.end, (at + 1) * column) - max(piece.start, at * column)
            if seconds > 0:
                times[at][piece.look] = times[at].get(piece.look, 0.0) + seconds
                if piece.look not in longest[at] or seconds > longest[at][piece.look][0]:
                    longest[at][piece.look] = (seconds, piece)
    found: list[_Piece | None] = []
    for looks, best in zip(times, longest, strict=True):
        look = max(looks, key=looks.__getitem__, default=None)
        is_some = look is not None and looks[look] >= column - sum(looks.values())
        found.append(best[look][1] if look is not None and is_some else None)
    return found


def _name(rank: int) -> str:
    return f"rank {rank}"


def _rows(panel: TimelinePanel) -> list[_Row]:
    timeline = panel.timeline
    rows: list[_Row] = []
    for rank, (shares, idle) in enumerate(zip(idle_shares(timeline), idle_stretches(timeline), strict=True)):
        pieces = []
        for box in boxes_of(timeline, rank):
            look = _Look(box.op.value[0], "-", f"{ink(box.colour)} on {hex_of(box.colour)}")
            pieces.append(_Piece(box.start, box.end, look, box.number))
        for cause, start, end in idle:
            look = _Look(_IDLE[cause], _IDLE[cause], CAUSE_HUES[cause], _SHADE)
            pieces.append(_Piece(start - timeline.start, end - timeline.start, look))
        rows.append((pieces, None if rank in timeline.missing else shares))
    return rows


def _words(cause: str) -> str:
    return cause.replace("_", " ")


def _visible(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _parts(shares: Sequence[float], room: int) -> list[int]:
    """Columns of the parts of a bar, rounded to the right sum.

    >>> _parts([0.25, 0.25, 0.1], 10)
    [2, 3, 1]
    """
    ends, total = [0], 0.0
    for share in shares:
        total += share
        ends.append(round(total * room))
    return [end - begin for begin, end in pairwise(ends)]


def _round_step(least: float) -> float:
    """The least 1, 2 or 5 times a power of ten that is at least this.

    >>> _round_step(0.3), _round_step(12)
    (0.5, 20.0)
    """
    if not least > 0:
        return 0.0
    power = 10.0 ** (len(f"{least:.0f}") + 1)
    while power / 10 >= least:
        power /= 10
    return next((power / part for part in (5, 2) if power / part >= least), power)
