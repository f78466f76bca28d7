"""Jobs of experiments: how each one ends, what is run again, and what a kill leaves."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import Cli
from support.inside import (
    Declaration,
    How,
    Nodes,
    State,
    Status,
    alone,
    code_version,
    gather,
    intend,
    jobs_of,
    main,
    read_figures,
    run_jobs,
)
from support.inside import JobChanges as Changes
from support.inside import JobsFigureFigure as Figure
from support.inside import ProgressProgress as Progress
from support.inside import RecordsOutcome as Outcome
from support.inside import RecordsWork as Work

from .backends.nodes import gone, wait_for

WORK = '''
import os, time
from pathlib import Path
from stagewright.experiments.jobs.figure import Figure, How

HERE = Path(__file__).parent

def work(case, repetitions):
    """Figures that the case names; each start leaves a line in a file."""
    what = case.text("what")
    with (HERE / "started").open("a") as file:
        print(what, file=file)
    if what == "raises":
        raise RuntimeError("so it is")
    if what == "hangs":
        (HERE / "pid").write_text(str(os.getpid()))
        while not (HERE / "go on").exists():
            time.sleep(0.02)
    for repetition in range(repetitions if what != "nothing" else 0):
        yield Figure(
            case=case, name="x", value=repetition + 0.5, unit="s", how=How.MEASURED, repetition=repetition
        )
'''


def declaration(folder: Path, *whats: str, timeout: float = 400.0) -> Path:
    """A file of an experiment with a job for each of these; `timeout` is that of the last one."""
    (folder / "work.py").write_text(WORK)
    path = folder / "mine.toml"
    parts = [("a", whats, 400.0)] if timeout == 400.0 else [("a", whats[:-1], 400.0), ("b", whats[-1:], timeout)]
    text = 'question = "?"\n'
    for name, some, limit in parts:
        text += f'[[parts]]\nname = "{name}"\nwork = "work.py:work"\non = "cores"\nrepetitions = 2\n'
        text += f"timeout = {limit}\n[[parts.cases]]\nwhat = {json.dumps(some)}\n"
    path.write_text(text)
    return path


def started(folder: Path) -> list[str]:
    path = folder / "started"
    return sorted(path.read_text().split()) if path.exists() else []


def run(path: Path, *words: str) -> int:
    return main(["experiment", "run", str(path), "--folder", str(path.parent / "out"), *words])


def status(path: Path, what: str, part: str = "a") -> Status:
    return Status.read(path.parent / "out" / "mine" / "jobs" / f"{part}-what={what}")


@pytest.mark.thorough
def test_every_end_of_a_job(tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    path = declaration(tmp_path, "works", "raises", "nothing", "hangs", timeout=1.0)
    assert run(path, "--json", "--workers", "4") == 1
    out = capsys.readouterr()
    answer = json.loads(out.out)
    assert answer == {
        "jobs": 4,
        "ran": 4,
        "done": 1,
        "failed": 2,
        "timed out": 1,
        "figures": 2,
        "report": str(tmp_path / "out" / "mine" / "report" / "README.md"),
    }
    assert "RuntimeError: so it is" in status(path, "raises").reason
    assert status(path, "nothing").reason == "it gave no figures"
    late = status(path, "hangs", "b")
    assert (late.state, late.reason) == (State.TIMED_OUT, "not done after 1 s")
    done = status(path, "works")
    assert done.state is State.DONE
    assert "0.1.0" in done.code
    assert "a-what=raises: failed" in out.err
    readme = (tmp_path / "out" / "mine" / "report" / "README.md").read_text()
    assert "Missing: 2 jobs failed: a-what=raises, a-what=nothing; 1 job timed out: b-what=hangs." in readme
    assert "b-what=hangs    timed out in" in cli.text("experiment show", str(path), "--folder", str(tmp_path / "out"))


@pytest.mark.thorough
def test_what_would_lose_the_work_of_jobs_is_refused_before_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = declaration(tmp_path, "works")
    (tmp_path / "out").write_text("a file in place of the folder\n")
    assert run(path) == 2
    assert f"{tmp_path}/out/mine: " in (said := capsys.readouterr().err)
    assert "expected a folder to write to; type --folder PATH" in said
    (tmp_path / "out").unlink()
    readme = tmp_path / "out" / "mine" / "report" / "README.md"
    readme.parent.mkdir(parents=True)
    readme.write_text("<!-- begin of what `stagewright experiment report mine.toml` writes -->\n")
    assert run(path) == 2
    assert "README.md: expected both markers once" in capsys.readouterr().err
    assert started(tmp_path) == []
    readme.unlink()
    path.write_text(path.read_text().replace("repetitions = 2\n", 'repetitions = 2\nfigures = ["y"]\n'))
    assert run(path) == 1
    assert "figure: 'x': expected one of those that its part declares (y)" in status(path, "works").reason


@pytest.mark.thorough
def test_what_is_done_is_not_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = declaration(tmp_path, "one", "two")
    assert run(path) == 0
    first = (tmp_path / "out" / "mine" / "report" / "results.jsonl").read_bytes()
    readme = (tmp_path / "out" / "mine" / "report" / "README.md").read_bytes()
    assert b"\n`stagewright experiment run mine.toml`;" in readme
    assert run(path) == 0
    assert started(tmp_path) == ["one", "two"]
    assert "2 jobs done already" in capsys.readouterr().err
    assert (tmp_path / "out" / "mine" / "report" / "results.jsonl").read_bytes() == first
    assert (tmp_path / "out" / "mine" / "report" / "README.md").read_bytes() == readme
    # another case: only that one runs; other repetitions: all, and it is told why
    path = declaration(tmp_path, "one", "two", "three")
    jobs = jobs_of(Declaration.load(path))
    folder = tmp_path / "out" / "mine" / "jobs"
    assert [intend(job, folder / job.name).runs for job in jobs] == [False, False, True]
    changed = jobs_of(Declaration.load(path), Changes(repetitions=1))
    assert intend(changed[0], folder / changed[0].name).why == "its configuration changed: repetitions, changed"
    # other code: told and run again, unless any will do
    Status(state=State.DONE, code="0.0.9, source 12345678").write(folder / jobs[0].name)
    why = intend(jobs[0], folder / jobs[0].name).why
    assert why.startswith("the code changed: 0.0.9, source 12345678 -> 0.1.0")
    assert not intend(jobs[0], folder / jobs[0].name, any_code=True).runs
    assert intend(jobs[1], folder / jobs[1].name, fresh=True).why == "as requested"
    # so is the file that a user's own work is in
    with (tmp_path / "work.py").open("a") as file:
        file.write("# another line\n")
    code_version.cache_clear()
    assert intend(jobs[1], folder / jobs[1].name).why.startswith("the code changed: 0.1.0")
    # figures of a job that the declaration no longer has do not count
    only_two = Declaration.load(declaration(tmp_path, "two"))
    assert {figure.case.text("what") for figure in gather(only_two, folder).figures} == {"two"}
    assert gather(only_two, folder).origin.missing == ("1 job of another declaration (cases): a-what=one",)


@pytest.mark.thorough
def test_a_kill_loses_the_running_job_alone(tmp_path: Path) -> None:
    path = declaration(tmp_path, "one", "hangs", "two")
    command = [sys.executable, "-P", "-m", "stagewright", "experiment", "run", str(path), "--workers", "1"]
    with subprocess.Popen(
        [*command, "--folder", str(tmp_path / "out")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
        told = rf"process {process.pid} runs this experiment: wait for its end"
        with pytest.raises(ValueError, match=told), alone(tmp_path / "out" / "mine"):
            pass
        process.send_signal(signal.SIGKILL)
    assert [status(path, what).state for what in ("one", "hangs", "two")] == [State.DONE, State.RUNNING, State.PENDING]
    worker = int((tmp_path / "pid").read_text())
    assert gone([worker])
    (tmp_path / "go on").touch()
    assert run(path) == 0
    assert started(tmp_path) == ["hangs", "hangs", "one", "two"]
    results = read_figures(tmp_path / "out" / "mine" / "report" / "results.jsonl")
    assert [(str(f.case), f.value) for f in results] == [
        (f"what={what}", value) for what in ("one", "hangs", "two") for value in (0.5, 1.5)
    ]


class Recorded:
    """A back end that notes what it is to run, and does what the part's name says."""

    name = "recorded"

    def __init__(self) -> None:
        self.ran: list[tuple[Work, Nodes]] = []

    def check(self, nodes: Nodes) -> None:
        if nodes.num_nodes > 2:
            raise ValueError(f"{nodes.num_nodes} nodes: expected at most 2")

    def run(self, work: Work, nodes: Nodes) -> Outcome:
        self.ran.append((work, nodes))
        assert Status.read(work.folder).state is State.RUNNING
        case = jobs_of(Declaration.load(work.folder.parents[1] / "mine.toml"))[0].cases[0]
        figure = Figure(case=case, name="x", value=1.0, unit="s", how=How.MEASURED)
        (work.folder / "figures.jsonl").write_text(f"{figure.to_json()}\n")
        if nodes.num_nodes == 2:
            return Outcome(status=1, timed_out=True, report="not done after 600 s", commands=("torchrun ...",))
        return Outcome(status=0, commands=("torchrun ...",))


def test_jobs_on_ranks(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'question = "?"\n[[parts]]\nname = "a"\nwork = ".bubbles:emulated"\non = "ranks"\n'
        "[[parts.cases]]\nranks = 2\nnodes = [1, 2]\nmicrobatches = [2, 4]\n"
    )
    back_end = Recorded()
    jobs = jobs_of(Declaration.load(path))
    intents = [intend(job, tmp_path / "jobs" / job.name) for job in jobs]
    with open(os.devnull, "w") as nowhere:
        ended = run_jobs(intents, progress=Progress(total=2, stream=nowhere), make_backend=lambda name: back_end)
    assert [each.state for each in ended] == [State.DONE, State.TIMED_OUT]
    assert [len(job.cases) for job in jobs] == [2, 2]  # those of the same nodes are launched once
    (work, nodes), _ = back_end.ran
    assert nodes == Nodes(num_nodes=1, ranks_per_node=2)
    assert work.module == "stagewright.experiments.jobs.worker"
    assert work.arguments == (str(tmp_path / "jobs" / jobs[0].name), "--ranks")
    assert Status.read(tmp_path / "jobs" / jobs[0].name).commands == ("torchrun ...",)
    assert Status.read(tmp_path / "jobs" / jobs[1].name).reason == "not done after 600 s"
    too_many = jobs_of(Declaration.load(path), Changes(nodes=2))
    assert len(too_many) == 1
    refused = [intend(job, tmp_path / "jobs" / job.name, fresh=True) for job in jobs_of(_with_four_nodes(path))]
    with open(os.devnull, "w") as nowhere, pytest.raises(ValueError, match="4 nodes: expected at most 2"):
        run_jobs(refused, progress=Progress(total=1, stream=nowhere), make_backend=lambda name: back_end)


def _with_four_nodes(path: Path) -> Declaration:
    path.write_text(path.read_text().replace("ranks = 2\nnodes = [1, 2]", "ranks = 4\nnodes = 4"))
    return Declaration.load(path)


@pytest.mark.parametrize("text", ["", "{", '{"state": "lost"}', '{"state": "done", "commands": [], "x": 1}', "[1]"])
def test_a_status_that_cannot_be_read_is_pending(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert Status.read(tmp_path) == Status()
