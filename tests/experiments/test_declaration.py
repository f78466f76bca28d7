"""Declarations of experiments: what they say, and what is refused by file, key, value and expectation.

Reports of experiments: cells, tables, sections between markers, and the committed ones.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import Cli
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
    check_code,
    check_layout,
    find_declaration,
    jobs_of,
    jobs_with,
    latency,
    markdown,
    read_declaration,
    read_figures,
    section_of,
    with_section,
    write_figures,
    write_report,
)
from support.inside import JobChanges as Changes
from support.inside import JobsFigureFigure as Figure
from support.inside import quantities_bandwidth as bandwidth

import stagewright

TEXT = """
question = "Which one is faster?"

[[parts]]
name = "simulated"
work = "work.py:simulated"
on = "cores"

[[parts.cases]]
schedule = ["gpipe", "1f1b"]
ranks = [2, 4]

[[parts.cases]]
schedule = "2bw"
ranks = 8

[[parts]]
name = "emulated"
work = ".bubbles:emulated"
on = "ranks"
repetitions = 3
backend = "netns"
together = ["schedule"]

[[parts.cases]]
schedule = ["gpipe", "1f1b"]
microbatches = [4, 8]
ranks = 4
nodes = 2
bandwidth = "1gbit"
latency = "1ms"
"""


def declared(tmp_path: Path, text: str = TEXT) -> Declaration:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return Declaration.load(path)


def test_a_declaration(tmp_path: Path) -> None:
    found = declared(tmp_path)
    simulated, emulated = found.parts
    assert (found.name, found.question) == ("mine", "Which one is faster?")
    assert simulated.work == f"{tmp_path / 'work.py'}:simulated"
    assert [str(case) for case in simulated.cases][-2:] == ["schedule=1f1b ranks=4", "schedule=2bw ranks=8"]
    assert (emulated.work, emulated.repetitions) == ("stagewright.experiments.works.bubbles:emulated", 3)
    jobs = jobs_of(found)
    assert [job.name for job in jobs[:2]] == ["simulated-schedule=gpipe-ranks=2", "simulated-schedule=gpipe-ranks=4"]
    assert [len(job.cases) for job in jobs] == [1, 1, 1, 1, 1, 2, 2]
    nodes = jobs[-1].nodes
    assert (nodes.num_nodes, nodes.ranks_per_node, nodes.shape.bandwidth, nodes.shape.latency) == (2, 2, 125e6, 1e-3)


def test_what_the_command_line_changes(tmp_path: Path) -> None:
    jobs = jobs_of(declared(tmp_path), Changes(backend="ssh", nodes=4, bandwidth="10gbit", repetitions=1))
    simulated, emulated = jobs[0], jobs[-1]
    assert simulated.changed == ""  # as declared
    assert emulated.changed == "backend=ssh nodes=4 bandwidth=10gbit repetitions=1"
    assert (emulated.nodes.num_nodes, emulated.nodes.shape.bandwidth, emulated.part.backend) == (4, 1.25e9, "ssh")
    with pytest.raises(ValueError, match=r"ranks: 4: expected a multiple of its 3 nodes"):
        jobs_of(declared(tmp_path), Changes(nodes=3))


def test_only_some_of_it(tmp_path: Path) -> None:
    jobs = jobs_of(declared(tmp_path))

    def names(*words: str) -> list[str]:
        return [job.name for job in jobs_with(jobs, words)]

    assert len(names()) == 7
    assert len(names("simulated")) == 5
    assert names("simulated", "ranks=2", "ranks=8") == [jobs[0].name, jobs[2].name, jobs[4].name]
    for words, message in [
        (["simulatd"], "unknown part 'simulatd'; did you mean simulated"),
        (["rank=2"], "unknown key 'rank'; did you mean ranks"),
        (["ranks=3"], "no case with ranks '3'"),
        (["emulated", "schedule=2bw"], "no job has all of these"),
    ]:
        with pytest.raises(ValueError, match=message):
            names(*words)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('question = "', 'questions = "', r"mine.toml: question: missing: expected text"),
        ('question = "W', 'typo = 1\nquestion = "W', r"mine.toml: unknown field typo: expected only question, parts"),
        ('on = "cores"', 'on = "gpus"', r"parts\[0\]: on: 'gpus': expected one of cores, ranks"),
        ('"netns"', '"nets"', r"parts\[1\]: backend: 'nets': expected one of local, netns, ssh, slurm"),
        ('work = ".bub', 'wrok = ".bub', r"parts\[1\]: work: missing"),
        ('"work.py:simulated"', '"work.py"', r"parts\[0\]: work: 'work.py': expected package.module:function"),
        ('["gpipe", "1f1b"]\nranks', "[]\nranks", r"cases\[0\]: schedule: \[\]: expected at least one value"),
        ("ranks = 8", "ranks = [[1.5]]", r"cases\[1\]: ranks: \[1.5\]: expected text in one line, a number"),
        ("ranks = 8", "Ranks = 8", r"cases\[1\]: 'Ranks': expected a key of lower-case"),
        ('schedule = "2bw"\nranks = 8', 'schedule = "gpipe"\nranks = 2', r"expected each case once"),
        ("nodes = 2", "nodes = 3", r"parts\[1\]: case .*: ranks: 4: expected a multiple of its 3 nodes"),
        ('"1gbit"', '"1gbps"', r"parts\[1\]: case .*: bandwidth: '1gbps': expected a number and a unit"),
        ("nodes = 2", "nodes = 2\nsites = [[0]]", r"sites: \(0,\): expected the site of each of its 2 nodes"),
        ('["schedule"]', '["mesh"]', r"parts\[1\]: together: 'mesh': expected a key of the cases \(bandwidth, "),
        ("repetitions = 3", "repetitions = 0", r"parts\[1\]: repetitions: 0: expected a whole number of at least 1"),
        ('"emulated"', '"simulated"', r"parts: \['simulated', 'simulated'\]: expected unique names"),
        ('"emulated"', '"../e"', r"parts\[1\]: name: '../e': expected letters"),
        ('question = "', 'question "', r"mine.toml: Expected '=' after a key .*: expected a TOML file"),
        ('"1ms"', '"1ms"\n[report]\nplot = 1', r"report: unknown field plot: expected only"),
    ],
)
def test_what_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert TEXT.count(old) == 1
    with pytest.raises(ValueError, match=message):
        declared(tmp_path, TEXT.replace(old, new))


REPORT = """
[report]
findings = "work.py:findings"

[[report.plots]]
file = "bubbles"
title = "Bubble"
x = "microbatches"
x_scale = "log2"
y = "bubble"
lines = ["schedule"]

[[report.tables]]
title = "Bubble, four ranks"
rows = ["schedule", "microbatches"]
figures = ["bubble"]
where = { ranks = [4, 8] }
"""
SHOWN = TEXT.replace("repetitions = 3", 'repetitions = 3\nfigures = ["bubble"]') + REPORT


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"log2"\ny = "bubble"', '"log2"\ny = "bubbles"', "plots[0]: y: 'bubbles': expected a name in `figures` of"),
        ("ranks = [4, 8] }", "ranks = [4, 9] }", "tables[0]: where: ranks: 9: expected a value that cases have (2, 4,"),
        ("ranks = [4, 8] }", "ranks = 8 }", "tables[0]: where: {'ranks': [8]}: expected a case of a part that gives '"),
        ('x = "microbatches"', 'x = "latency"', "plots[0]: x: latency: '1ms': expected numbers above 0, for that scal"),
        ('lines = ["schedule"]', "", "plots[0]: schedule=gpipe microbatches=4 ranks=4 nodes=2 bandwidth=1gbit latency"),
        ('"work.py:simulated"', '"work.py:simulate"', "parts[0]: work='{}/work.py:simulate': {}/work.py has no 'simul"),
        ('"work.py:findings"', '"work.py:simulated"', "report: findings='{}/work.py:simulated': needs repetitions, wh"),
        ('".bubbles:emulated"', '".bubles:emulated"', "parts[1]: work='stagewright.experiments.works.bubles:emulated'"),
    ],
)
def test_a_report_that_cannot_be_made_is_refused_before_the_first_job(
    tmp_path: Path, cli: Cli, old: str, new: str, message: str
) -> None:
    (tmp_path / "work.py").write_text(
        "def simulated(case, repetitions):\n    raise AssertionError\n\n\ndef findings(figures):\n    return []\n"
    )
    assert SHOWN.count(old) == 1
    (tmp_path / "mine.toml").write_text(SHOWN.replace(old, new))
    said = cli.refused("experiment run", str(tmp_path / "mine.toml"), "--folder", str(tmp_path / "out"))
    assert "mine.toml: " in said
    assert message.replace("{}", str(tmp_path)) in said
    assert not (tmp_path / "out").exists()


def test_what_a_case_says() -> None:
    case = Case.of({"ranks": 4, "bandwidth": "1gbit", "latency": "2ms", "part": 0.5})
    assert (case.count("ranks"), case.bandwidth("bandwidth"), case.seconds("latency")) == (4, 125e6, 2e-3)
    assert (case.number("part"), case.count("nodes", 1)) == (0.5, 1)
    with pytest.raises(ValueError, match=r"case ranks=4 .*: no schedule: expected one in the declaration's cases"):
        case.text("schedule")
    with pytest.raises(ValueError, match=r": part: 0.5: expected a whole number"):
        case.count("part")


def test_bandwidths_and_latencies() -> None:
    values = {"1gbit": 125e6, "10Gbit/s": 1.25e9, "125MB/s": 125e6, "100mbit": 12.5e6, "1GiB/s": 2.0**30}
    assert {text: bandwidth("--bandwidth", text) for text in values} == values
    for text in ("1Gb/s", "1gbps", "1GB", "-1gbit", "1 gbit", "gbit", "0gbit", "1gib/s"):
        with pytest.raises(ValueError, match=r"^--bandwidth: "):
            bandwidth("--bandwidth", text)
    assert (latency("--latency", "1.5ms"), latency("--latency", "20us")) == (1.5e-3, pytest.approx(2e-5))
    with pytest.raises(ValueError, match=r"--latency: '1': expected a number and a unit"):
        latency("--latency", "1")


@pytest.mark.parametrize("name", catalog_names())
def test_the_catalog_can_be_read_and_its_functions_are_there(name: str) -> None:
    found = find_declaration(name)
    assert jobs_of(found)
    check_layout(found)
    check_code(found)


@pytest.mark.thorough(but=["argv2---set Layers=2: 'Layers': expected a key of lower-case letters"])
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "buble"], "unknown experiment 'buble'; did you mean bubbles"),
        (["bubbles", "--set", "layers"], "--set layers: expected KEY=VALUE, such as ranks=2"),
        (["bubbles", "--set", "Layers=2"], "--set Layers=2: 'Layers': expected a key of lower-case letters"),
        (["run", "bubbles", "--backend", "slrum"], "--backend: unknown back end 'slrum'; did you mean slurm"),
        (["run", "bubbles", "--nodes", "0"], "--nodes 0: expected at least 1"),
        (["run", "bubbles", "--only", "emulated", "--backend", "ssh"], "--backend ssh: type --hosts FILE"),
        (["run", "bubbles", "--only", "emulated", "--bandwidth", "1gbit"], "--backend local cannot shape links"),
        (["run", "bubbles", "--only", "measured"], "--only: unknown part 'measured'"),
        (["run", "none.toml"], "none.toml: No such file or directory: expected the declaration"),
        (["report", "bubbles", "--folder", "/nowhere"], "no job is done: expected results; type `stagewright exper"),
    ],
)
def test_a_users_mistake(
    argv: list[str], message: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # jobs would go to runs/
    assert message in cli.refused("experiment", *argv)


def test_experiments_are_listed(cli: Cli) -> None:
    out = cli.text("experiment list")
    assert all(name in out for name in catalog_names())


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


def reported(keys: Sequence[str] = ("schedule", "ranks")) -> Declaration:
    part = {
        "name": "a",
        "work": ".bubbles:simulated",
        "on": "cores",
        "figures": ["bubble"],
        "cases": [dict.fromkeys(keys, 1)],
    }
    plot = {"file": "bubble", "title": "Bubble", "x": "ranks", "y": "bubble", "lines": ["schedule"]}
    table = {"title": "Bubble", "rows": list(keys), "figures": ["bubble"]}
    bars = plot | {"file": "bars", "x_scale": "bars"}
    values = {"question": "How long?", "parts": [part], "report": {"plots": [plot, bars], "tables": [table]}}
    return read_declaration(values, name="mine", source="mine.toml")


@pytest.mark.thorough
def test_the_same_results_give_the_same_files(tmp_path: Path) -> None:
    origin = Origin(codes=("0.1.0",), machines=("m",), days=("2026-01-01",), changes=(), missing=(), num_jobs=1)
    results = Results(figures=tuple(FIGURES), origin=origin)
    readme = write_report(reported(), results, tmp_path / "one")
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert sorted(files) == ["README.md", "bars.png", "bubble.png", "origin.json", "results.jsonl"]
    assert "# mine\n\nHow long?\n" in readme.read_text()
    write_report(reported(), Results.read(tmp_path / "one"), tmp_path / "one")
    assert {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()} == files


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


@pytest.mark.thorough(but=["predictions"])
@pytest.mark.parametrize("name", catalog_names())
def test_committed_reports_say_what_their_figures_say_and_every_declared_job_has_its_own(name: str) -> None:
    """A job that is not run leaves the declaration, so that a report never says less than was asked."""
    declaration, results = find_declaration(name), Results.read(RESULTS / name)
    text = (RESULTS / name / "README.md").read_text(encoding="utf-8")
    pictures = re.findall(r"^!\[(.*)\]\((.*)\)$", text, flags=re.M)
    assert with_section(text, section_of(declaration, results, pictures), name=name, source=name) == text
    assert {file for _, file in pictures} == {path.name for path in (RESULTS / name).glob("*.png")}
    if declaration.layout.pictures is None:  # it draws none of its own
        assert set(pictures) <= {(plot.title, f"{plot.file}.png") for plot in declaration.layout.plots}
    assert (results.origin.missing, results.origin.num_jobs) == ((), len(jobs_of(declaration)))
    free = declaration.layout.keys
    for part in declaration.parts:
        own = [figure for figure in results.figures if figure.name in part.figures]
        found = {figure.case.only(key for key in case if key not in free) for case in part.cases for figure in own}
        wanted = {case.only(key for key in case if key not in free) for case in part.cases}
        assert wanted <= found, [str(case) for case in wanted - found]
    assert {figure.name for figure in results.figures} == {each for part in declaration.parts for each in part.figures}
