"""Declarations of experiments: what they say, and what is refused by file, key, value and expectation."""

from pathlib import Path

import pytest
from support.commands import Cli
from support.inside import (
    Case,
    Declaration,
    catalog_names,
    check_code,
    check_layout,
    find_declaration,
    grid,
    jobs_of,
    jobs_with,
    latency,
)
from support.inside import JobChanges as Changes
from support.inside import quantities_bandwidth as bandwidth

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


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.toml: No such file or directory: expected the declaration"):
        find_declaration(str(tmp_path / "none.toml"))


def test_a_grid_runs_fastest_over_its_last_key() -> None:
    assert [case.count("b") for case in grid({"a": [1, 2], "b": [3, 4]})] == [3, 4, 3, 4]
    assert grid({"sites": [[0, 0, 1]]})[0].get("sites") == (0, 0, 1)


def test_what_a_case_says() -> None:
    case = Case.of({"ranks": 4, "bandwidth": "1gbit", "latency": "2ms", "part": 0.5})
    assert (case.count("ranks"), case.bandwidth("bandwidth"), case.seconds("latency")) == (4, 125e6, 2e-3)
    assert (case.number("part"), case.count("nodes", 1)) == (0.5, 1)
    with pytest.raises(ValueError, match=r"case ranks=4 .*: no schedule: expected one in the declaration's cases"):
        case.text("schedule")
    with pytest.raises(ValueError, match=r": part: 0.5: expected a whole number"):
        case.count("part")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1gbit", 125e6), ("10Gbit/s", 1.25e9), ("125MB/s", 125e6), ("100mbit", 12.5e6), ("1GiB/s", 2.0**30)],
)
def test_bandwidths(text: str, value: float) -> None:
    assert bandwidth("--bandwidth", text) == value


@pytest.mark.parametrize("text", ["1Gb/s", "1gbps", "1GB", "-1gbit", "1 gbit", "gbit", "0gbit", "1gib/s"])
def test_what_is_no_bandwidth(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--bandwidth: "):
        bandwidth("--bandwidth", text)


def test_latencies() -> None:
    assert (latency("--latency", "1.5ms"), latency("--latency", "20us")) == (1.5e-3, pytest.approx(2e-5))
    with pytest.raises(ValueError, match=r"--latency: '1': expected a number and a unit"):
        latency("--latency", "1")


@pytest.mark.parametrize("name", catalog_names())
def test_the_catalog_can_be_read_and_its_functions_are_there(name: str) -> None:
    found = find_declaration(name)
    assert jobs_of(found)
    check_layout(found)
    check_code(found)


@pytest.mark.thorough(but=["argv1---set layers: expected KEY=VALUE, such as ranks=2"])
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
