"""The report of an experiment: pictures, tables and findings in one section of a README, between markers.

What stands outside the markers is the author's. The same results give the same files, to the last byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ...schedules.user_code import load
from ...schedules.wording import count
from . import plots
from .cells import markdown
from .declaration import Declaration
from .figure import Figure, ways
from .results import Results
from .status import write_whole

_BEGIN = "<!-- begin of what `stagewright experiment report {name}` writes -->"
_END = "<!-- end of what `stagewright experiment report {name}` writes -->"


def write_report(declaration: Declaration, results: Results, folder: Path) -> Path:
    """Results, pictures and README.md in `folder`; the README's path.

    Raises ValueError where a table or plot would throw cases together, or the README has one marker without the other.
    """
    results.write(folder)
    pictures = _own_pictures(declaration, results.figures, folder)
    pictures += [
        (plot.title, path.name)
        for plot in declaration.layout.plots
        if (path := plots.draw(plot, results.figures, folder)) is not None
    ]
    path = folder / "README.md"
    section = section_of(declaration, results, pictures)
    before = path.read_text(encoding="utf-8") if path.exists() else f"# {declaration.name}\n\n{declaration.question}\n"
    write_whole(path, with_section(before, section, name=declaration.typed, source=str(path)))
    return path


def section_of(declaration: Declaration, results: Results, pictures: Sequence[tuple[str, str]]) -> str:
    """Origin, findings, pictures (title and file of each) and tables, in Markdown."""
    parts = [_origin(declaration, results)]
    parts += _findings(declaration, results.figures)
    parts += [f"![{title}]({name})" for title, name in pictures]
    parts += [markdown(table, results.figures) for table in declaration.layout.tables]
    return "\n\n".join(parts)


def with_section(text: str, section: str, *, name: str, source: str) -> str:
    """The text with this section between the markers, at its end where there are none yet."""
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
        f"{count(origin.num_jobs, 'job')}, {count(len(results.figures), 'figure')}: {ways(results.figures)}",
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


def _own_pictures(declaration: Declaration, figures: Sequence[Figure], folder: Path) -> list[tuple[str, str]]:
    if declaration.layout.pictures is None:
        return []
    draw: Callable[[Sequence[Figure], Path], list[tuple[str, str]]] = load("pictures", declaration.layout.pictures)
    return draw(figures, folder)


def _findings(declaration: Declaration, figures: Sequence[Figure]) -> list[str]:
    if declaration.layout.findings is None:
        return []
    find: Callable[[Sequence[Figure]], Sequence[str]] = load("findings", declaration.layout.findings)
    return ["\n".join(f"- {sentence}" for sentence in find(figures))]
