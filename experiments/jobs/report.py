"""The report of an experiment: pictures, tables and findings in one section of a README, between markers.

Text outside the markers is the author's. Equal results give equal files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...cli.train.run_folder import write_whole
from ...schedules.custom.user_code import load
from ...schedules.wording import count
from ...viz.palette import SERIES_HUES
from .case import Case
from .case import shown as shown_value
from .declaration import Declaration
from .figure import Figure, How, how_made
from .results import Results
from .tables import Cell, Plot, cells, markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BEGIN = "<!-- begin of what `stagewright experiment report {name}` writes -->"
_END = "<!-- end of what `stagewright experiment report {name}` writes -->"
# Lines for simulated figures; marks for the others, with the spread of measured ones.
_STYLES: dict[How, dict[str, Any]] = {
    How.SIMULATED: {"linestyle": "-", "marker": ""},
    How.CLOSED_FORM: {"linestyle": "", "marker": "+", "markersize": 6},
    How.EMULATED: {"linestyle": "", "marker": "o", "markersize": 5, "markerfacecolor": "white", "capsize": 2},
    How.MEASURED: {"linestyle": "", "marker": "s", "markersize": 5, "capsize": 2},
    How.PUBLISHED: {"linestyle": "", "marker": "x", "markersize": 6},
}
# For a grouped x, measured figures are bars, all others dashes.
_DASH: dict[str, Any] = {"linestyle": "", "marker": "_", "markersize": 9, "markeredgewidth": 2}
_PER_ROW = 4  # axes side by side


def write_report(declaration: Declaration, results: Results, folder: Path) -> Path:
    """Write results, pictures and README.md to `folder`. Returns the README's path.

    Raises ValueError if a table or plot would merge cases, or if the README has one marker without the other.
    """
    results.write(folder)
    pictures: list[tuple[str, str]] = []
    if declaration.layout.pictures is not None:
        pictures += load("pictures", declaration.layout.pictures)(results.figures, folder)
    pictures += [
        (plot.title, path.name)
        for plot in declaration.layout.plots
        if (path := _draw(plot, results.figures, folder)) is not None
    ]
    write_whole(folder / "README.md", readme(declaration, section_of(declaration, results, pictures), folder))
    return folder / "README.md"


def readme(declaration: Declaration, section: str, folder: Path) -> str:
    """Text of the folder's README. Raises ValueError if it has one marker without the other."""
    path = folder / "README.md"
    before = path.read_text(encoding="utf-8") if path.exists() else f"# {declaration.name}\n\n{declaration.question}\n"
    return with_section(before, section, name=declaration.typed, source=str(path))


def section_of(declaration: Declaration, results: Results, pictures: Sequence[tuple[str, str]]) -> str:
    """Origin, findings, pictures (title and file of each) and tables, in Markdown."""
    parts = [_origin(declaration, results)]
    if declaration.layout.findings is not None:
        find: Callable[[Sequence[Figure]], Sequence[str]] = load("findings", declaration.layout.findings)
        parts.append("\n".join(f"- {sentence}" for sentence in find(results.figures)))
    parts += [f"![{title}]({name})" for title, name in pictures]
    parts += [markdown(table, results.figures) for table in declaration.layout.tables]
    return "\n\n".join(parts)


def with_section(text: str, section: str, *, name: str, source: str) -> str:
    """The text with this section between the markers, or with markers added at its end."""
    begin, end = _BEGIN.format(name=name), _END.format(name=name)
    if (begin in text) != (end in text) or text.count(begin) > 1 or text.count(end) > 1:
        raise ValueError(f"{source}: expected both markers once, in lines of their own, or none:\n{begin}\n{end}")
    made = f"{begin}\n\n{section}\n\n{end}"
    if begin not in text:
        return f"{text.rstrip()}\n\n{made}\n"
    before, _, rest = text.partition(begin)
    return f"{before}{made}{rest.partition(end)[2]}"


def _origin(declaration: Declaration, results: Results) -> str:
    origin = results.origin
    said = [
        f"`stagewright experiment run {declaration.typed}`",
        f"{count(origin.num_jobs, 'job')}, {count(len(results.figures), 'figure')}: {how_made(results.figures)}",
        f"on {', '.join(origin.days)}",
        f"version {'; '.join(origin.codes)}",
        *origin.machines,
    ]
    text = "; ".join(said) + "."
    if origin.changes:
        text += f"\nSome jobs otherwise than declared: {'; '.join(origin.changes)}."
    if origin.missing:
        text += f"\nMissing: {'; '.join(origin.missing)}."
    return text


# --- plots: the mark shows a figure's origin, the colour its case ---


def _draw(plot: Plot, figures: Sequence[Figure], folder: Path) -> Path | None:
    from matplotlib.figure import Figure as Picture

    figures = [figure for figure in figures if plot.x in figure.case]
    found = cells(figures, names=plot.figures, keys=plot.keys, where=plot.where, what=f"plot {plot.file!r}")
    if not found:
        return None
    panels = dict.fromkeys(cell.place.get(plot.panels) if plot.panels else None for cell in found)
    lines = list(dict.fromkeys(cell.place.only(plot.lines) for cell in found))
    across = min(len(panels), _PER_ROW)
    down = -(-len(panels) // across)
    size = (max(6.4, 3.4 * across), 3.9 if down == 1 else 2.9 * down + 0.6)
    picture = Picture(figsize=size, dpi=120, layout="constrained")
    grid = picture.subplots(down, across, sharey=True, squeeze=False)
    flat = [axes for row in grid for axes in row]
    for axes, panel in zip(flat, panels, strict=False):
        own = [cell for cell in found if plot.panels is None or cell.place.get(plot.panels) == panel]
        _fill(axes, plot, own, lines)
        _scale(axes, plot, whole=all(_number(cell, plot).is_integer() for cell in own))
        if plot.panels:
            axes.set_title(f"{plot.panels} = {shown_value(panel) if panel is not None else 'none'}", fontsize=9)
    for axes in flat[len(panels) :]:
        axes.set_visible(False)
    if plot.y_scale == "linear":
        flat[0].set_ylim(0, 1.04 * flat[0].get_ylim()[1])  # all share it; room for a mark at the top
    unit = {"fraction": "%", "bytes": "GB", "ratio": ""}.get(found[0].unit, found[0].unit)
    for row in grid:
        row[0].set_ylabel(f"{plot.y} [{unit}]" if unit else plot.y)
    picture.suptitle(plot.title, fontsize=11, wrap=True)
    _legend(picture, plot, lines, {cell.how for cell in found})
    path = folder / f"{plot.file}.png"
    picture.savefig(path, metadata={"Software": None})  # equal figures give equal files
    return path


def _fill(axes: Axes, plot: Plot, found: Sequence[Cell], lines: Sequence[Case]) -> None:
    groups = sorted({_number(cell, plot) for cell in found})
    width = 0.8 / len(lines)
    for at, line in enumerate(lines):
        for how in How:
            own = [cell for cell in found if cell.how is how and cell.place.only(plot.lines) == line]
            own.sort(key=lambda cell: _number(cell, plot))
            if not own:
                continue
            x, y = [_number(cell, plot) for cell in own], [_scaled(cell.spread.median, cell) for cell in own]
            below = [_scaled(cell.spread.median - cell.spread.low, cell) for cell in own]
            above = [_scaled(cell.spread.high - cell.spread.median, cell) for cell in own]
            style = {"color": SERIES_HUES[at % len(SERIES_HUES)], "linewidth": 1.4, **_STYLES[how]}
            if plot.x_scale == "bars":
                x = [groups.index(each) + (at + 0.5) * width - 0.4 for each in x]
            if plot.x_scale == "bars" and "capsize" in style:
                axes.bar(x, y, 0.92 * width, yerr=[below, above], color=style["color"], ecolor="#555555", capsize=2)
            elif plot.x_scale == "bars":
                axes.plot(x, y, color="#202020", **_DASH)
            elif "capsize" in style:
                axes.errorbar(x, y, yerr=[below, above], **{**style, "elinewidth": 1.0})
            else:
                axes.plot(x, y, **style)
    if plot.x_scale == "bars":
        axes.set_xticks(range(len(groups)), [f"{group:g}" for group in groups])


def _scale(axes: Axes, plot: Plot, *, whole: bool) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    for scale, set_scale, axis in (
        (plot.x_scale, axes.set_xscale, axes.xaxis),
        (plot.y_scale, axes.set_yscale, axes.yaxis),
    ):
        if scale.startswith("log"):
            set_scale("log", base=2 if scale == "log2" else 10)
            axis.set_major_locator(LogLocator(2) if scale == "log2" else LogLocator(10, subs=(1, 2, 5)))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(lambda value, _: f"{value:g}")
    if plot.x_scale == "linear" and whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # no fractions of nodes
    axes.set_xlabel(plot.x)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(picture: Any, plot: Plot, lines: Sequence[Case], hows: Collection[How]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=SERIES_HUES[at % len(SERIES_HUES)], linewidth=3, label=_name(line))
        for at, line in enumerate(lines)
        if line.items
    ]
    for how in (how for how in How if how in hows):
        style = {key: value for key, value in _STYLES[how].items() if key != "capsize"}
        if plot.x_scale == "bars":
            style = {**_DASH, "marker": "s"} if "capsize" in _STYLES[how] else _DASH
        handles.append(Line2D([], [], color="#555555", label=how.value, **style))
    widest = 0.55 + 0.062 * max(len(str(handle.get_label())) for handle in handles)  # [inch], at 8 points
    columns = max(1, min(6, int(picture.get_figwidth() / widest)))
    picture.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def _name(line: Case) -> str:
    return " ".join(value if isinstance(value, str) else f"{key} = {shown_value(value)}" for key, value in line.items)


def _number(cell: Cell, plot: Plot) -> float:
    value = cell.place.get(plot.x)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"plot {plot.file!r}: {plot.x} = {value!r}: expected numbers on the x axis")
    return float(value)


def _scaled(value: float, cell: Cell) -> float:
    return 100 * value if cell.unit == "fraction" else value / 1e9 if cell.unit == "bytes" else value
