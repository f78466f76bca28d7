"""Reports of experiments: cells, tables, sections between markers, and the committed ones."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure as Picture
from support.inside import (
    Case,
    Declaration,
    How,
    Judged,
    Origin,
    Results,
    Table,
    Target,
    catalog_names,
    cells,
    find_declaration,
    jobs_of,
    markdown,
    read_declaration,
    read_figures,
    section_of,
    with_section,
    write_figures,
    write_report,
)
from support.inside import JobsFigureFigure as Figure

import stagewright

RESULTS = Path(stagewright.__file__).parent / "experiments" / "results"


def figure(value: float, how: How = How.SIMULATED, *, repetition: int = 0, **case: str | int) -> Figure:
    return Figure(
        case=Case.of(case), name="bubble", value=value, unit="fraction", how=how, repetition=repetition, note="a | b"
    )


FIGURES = [
    figure(0.25, schedule="1f1b", ranks=2),
    figure(0.26, How.EMULATED, schedule="1f1b", ranks=2),
    figure(0.30, How.EMULATED, schedule="1f1b", ranks=2, repetition=1),
    figure(0.28, How.EMULATED, schedule="1f1b", ranks=2, repetition=2),
    figure(0.5, schedule="gpipe", ranks=4),
]


def test_a_table_keeps_the_ways_of_getting_a_figure_apart() -> None:
    table = Table(title="Bubble", rows=("schedule", "ranks"), figures=("bubble",))
    assert markdown(table, FIGURES).splitlines() == [
        "**Bubble**",
        "",
        "| schedule | ranks | bubble, emulated | bubble, simulated |",
        "| --- | --- | --- | --- |",
        "| 1f1b | 2 | 28.0% [26.0% .. 30.0%] | 25.0% |",
        "| gpipe | 4 |  | 50.0% |",
    ]
    across = Table(title="Bubble", rows=("schedule",), figures=("bubble",), columns="ranks")
    assert markdown(across, FIGURES).splitlines()[2:] == [
        "| schedule | figure | ranks=2 | ranks=4 |",
        "| --- | --- | --- | --- |",
        "| 1f1b | bubble, simulated | 25.0% |  |",
        "| 1f1b | bubble, emulated | 28.0% [26.0% .. 30.0%] |  |",
        "| gpipe | bubble, simulated |  | 50.0% |",
    ]
    assert markdown(Table(title="T", rows=("ranks",), figures=("other",)), FIGURES) == "**T**\n\nNo figures yet."


def test_cases_are_not_thrown_together() -> None:
    both = [figure(0.1, schedule="1f1b", ranks=2), figure(0.9, schedule="gpipe", ranks=2)]
    told = r"table 'x': schedule=1f1b ranks=2 and schedule=gpipe ranks=2 fall together, as only ranks tell .*: "
    with pytest.raises(ValueError, match=told + "expected schedule among them"):
        cells(both, names=("bubble",), keys=("ranks",), where={}, what="table 'x'")
    (cell,) = cells(both, names=("bubble",), keys=("ranks",), where={"schedule": ["gpipe"]}, what="x")
    assert (cell.spread.median, str(cell)) == (0.9, "90.0%")
    others = [both[0], Figure(case=both[0].case, name="bubble", value=1.0, unit="s", how=How.SIMULATED)]
    with pytest.raises(ValueError, match=r"bubble for ranks=2 comes in fraction and s: expected one unit"):
        cells(others, names=("bubble",), keys=("ranks",), where={}, what="x")


def test_what_stands_outside_the_markers_stays() -> None:
    first = with_section("# Mine\n\nWords.\n", "one", name="x", source="README.md")
    mine = first.replace("Words.", "Other words.") + "\nBelow.\n"
    second = with_section(mine, "two", name="x", source="README.md")
    assert second.startswith("# Mine\n\nOther words.\n\n<!-- begin")
    assert second.endswith("-->\n\nBelow.\n")
    assert ("one" in second, "two" in second) == (False, True)
    assert with_section(second, "two", name="x", source="README.md") == second
    for broken in (second.replace("<!-- end", "<!-- nde"), second + second):
        with pytest.raises(ValueError, match=r"README.md: expected both markers once"):
            with_section(broken, "three", name="x", source="README.md")


def declared(keys: Sequence[str] = ("schedule", "ranks")) -> Declaration:
    part = {
        "name": "a",
        "work": ".bubbles:simulated",
        "on": "cores",
        "figures": ["bubble"],
        "cases": [dict.fromkeys(keys, 1)],
    }
    plot = {"file": "bubble", "title": "Bubble", "x": "ranks", "y": "bubble", "lines": ["schedule"]}
    table = {"title": "Bubble", "rows": list(keys), "figures": ["bubble"]}
    values = {"question": "How long?", "parts": [part], "report": {"plots": [plot], "tables": [table]}}
    return read_declaration(values, name="mine", source="mine.toml")


def test_the_same_results_give_the_same_files(tmp_path: Path) -> None:
    origin = Origin(codes=("0.1.0",), machines=("m",), days=("2026-01-01",), changes=(), missing=(), num_jobs=1)
    results = Results(figures=tuple(FIGURES), origin=origin)
    readme = write_report(declared(), results, tmp_path / "one")
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert sorted(files) == ["README.md", "bubble.png", "origin.json", "results.jsonl"]
    assert "# mine\n\nHow long?\n" in readme.read_text()
    write_report(declared(), Results.read(tmp_path / "one"), tmp_path / "one")
    assert {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()} == files


def test_grouped_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar for what a clock said, in the group of its x and the place and colour of its line; a dash for the rest."""
    seen: list[Picture] = []
    monkeypatch.setattr(Picture, "savefig", lambda picture, path, **options: seen.append(picture))
    grouped = declared()
    plot = replace(grouped.layout.plots[0], x_scale="bars")
    grouped = replace(grouped, layout=replace(grouped.layout, plots=(plot,), tables=()))
    origin = Origin(codes=(), machines=(), days=(), changes=(), missing=(), num_jobs=1)
    values = {("1f1b", 4): 0.3, ("1f1b", 16): 0.1, ("gpipe", 4): 0.5, ("gpipe", 16): 0.2}
    figures = [
        figure(v, how, schedule=s, ranks=r) for (s, r), v in values.items() for how in (How.EMULATED, How.SIMULATED)
    ]
    write_report(grouped, Results(figures=tuple(figures), origin=origin), tmp_path)
    (axes,) = seen[0].axes
    bars = sorted((bar.get_x() + bar.get_width() / 2, bar.get_height(), bar.get_facecolor()) for bar in axes.patches)
    assert [x for x, _, _ in bars] == pytest.approx([-0.2, 0.2, 0.8, 1.2])
    assert [y for _, y, _ in bars] == pytest.approx([30.0, 50.0, 10.0, 20.0])
    assert bars[0][2] == bars[2][2] != bars[1][2] == bars[3][2]
    dashes = {
        (x, y)
        for line in axes.lines
        if line.get_marker() == "_" and line.get_markersize() == 9
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }
    assert len(dashes) == 4
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4", "16"]


def test_figures_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    judged = Target(limit=1.0, at_least=True, judged=Judged.WORST)
    written = [*FIGURES, figure(1 / 3, sites="x", ranks=1), replace(figure(1.0, ranks=True), target=judged)]
    write_figures(path, written)
    assert [str(f.case) for f in read_figures(path)] == [str(f.case) for f in written]
    assert read_figures(path)[-1] == written[-1]
    assert read_figures(path)[-2].value == pytest.approx(1 / 3, rel=1e-8)
    good = FIGURES[0].to_json()
    for broken, message in [
        (good.replace("simulated", "guessed"), "line 2: how: 'guessed': expected one of measured, emulated"),
        (good.replace("0.25", '"much"'), "line 2: value: 'much': expected a number"),
        (good.replace("0.25", "NaN"), "expected a finite number"),
        (good[:-2], "line 2, line 1, column"),
        (good.replace('"unit"', '"units"'), "line 2: unit: missing"),
    ]:
        path.write_text(f"{good}\n{broken}\n")
        with pytest.raises(ValueError, match=re.escape(message)):
            read_figures(path)


@pytest.mark.thorough(but=["links"])
@pytest.mark.parametrize(
    "name", [name for name in catalog_names() if (RESULTS / name / "results.jsonl").exists()]
)  # of the others' the code went
def test_committed_reports_say_what_their_figures_say(name: str) -> None:
    declaration, results = find_declaration(name), Results.read(RESULTS / name)
    text = (RESULTS / name / "README.md").read_text(encoding="utf-8")
    pictures = re.findall(r"^!\[(.*)\]\((.*)\)$", text, flags=re.M)
    assert with_section(text, section_of(declaration, results, pictures), name=name, source=name) == text
    assert {file for _, file in pictures} == {path.name for path in (RESULTS / name).glob("*.png")}
    titles = {(plot.title, f"{plot.file}.png") for plot in declaration.layout.plots}
    if declaration.layout.pictures is None:  # it draws none of its own
        assert set(pictures) <= titles


@pytest.mark.thorough(but=["links"])
@pytest.mark.parametrize("name", catalog_names())
def test_every_declared_job_has_its_results(name: str) -> None:
    """A job that is not run leaves the declaration, so that a report never says less than was asked."""
    declaration, results = find_declaration(name), Results.read(RESULTS / name)
    assert (results.origin.missing, results.origin.num_jobs) == ((), len(jobs_of(declaration)))
    free = declaration.layout.keys
    for part in declaration.parts:
        own = [figure for figure in results.figures if figure.name in part.figures]
        found = {figure.case.only(key for key in case if key not in free) for case in part.cases for figure in own}
        wanted = {case.only(key for key in case if key not in free) for case in part.cases}
        assert wanted <= found, [str(case) for case in wanted - found]
    assert {figure.name for figure in results.figures} == {each for part in declaration.parts for each in part.figures}
