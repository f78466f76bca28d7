"""Jobs of submitit: its local and debug executors here, and at night a real Slurm of one host."""

import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from support.inside import Nodes, Shape, SlurmBackend, address_of, port_of, slurm
from support.slurm_on_one_host import missing, one_host_cluster

from .nodes import FAIL, HOSTILE, SLEEP, SUM, TELL, gone, work, written

TWO = Nodes(num_nodes=2)


def test_what_slurm_needs_is_told_before_anything_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--backend slurm cannot shape links"):
        SlurmBackend().check(Nodes(shape=Shape(latency=1e-3)))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(slurm.importlib.util, "find_spec", lambda _: object())
    with pytest.raises(
        ValueError, match="no sbatch, srun, squeue, scancel on the PATH: run it where jobs are submitted"
    ):
        SlurmBackend().check(TWO)
    monkeypatch.setattr(slurm.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"needs submitit: type pip install 'stagewright\[slurm\]'"):
        SlurmBackend().check(TWO)


def test_address_and_port_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's names of nodes need not be names of hosts."""
    command(tmp_path, "scontrol", "echo NodeName=n7 NodeAddr=192.0.2.7 Port=1")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert address_of("n7.invalid") == "192.0.2.7"
    assert address_of("127.0.0.1") == "127.0.0.1"
    assert (port_of("17"), port_of("10017_3"), port_of("")) == (20017, 20000 + 100173 % 10000, 20000)


def command(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


class Job:
    job_id = "17"


def test_states_of_a_job_are_asked_for_and_waiting_is_told_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "_TELL", 0.0)
    monkeypatch.setattr(slurm, "_LOOK", 0.0)
    said: list[str] = []
    watch = slurm._Watch(Job(), "slurm", said.append)
    for answer, over in (
        ("echo 'PENDING|Resources'", False),
        ("echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1", False),
        ("echo 'RUNNING|None'", False),
        ("echo 'COMPLETING|None'", False),
        ("echo 'NODE_FAIL|None'", True),
    ):
        command(tmp_path, "squeue", answer)
        time.sleep(0.01)
        assert watch.is_over() == over
    assert watch.state == "NODE_FAIL"
    assert watch.running_since > 0
    assert [re.sub(r"\d+ s", "0 s", line) for line in said] == [
        "job 17 has waited for 0 s: Resources",
        "job 17 has waited for 0 s: slurm_load_jobs error: Unable to contact",
    ]
    command(tmp_path, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    forgotten = slurm._Watch(Job(), "slurm", said.append)
    assert forgotten.is_over()


@pytest.mark.parametrize(
    ("squeue", "statuses", "end"),
    [
        # Slurm did not answer: the work's limit ended a job that was done, and named no node.
        ("exit 1", (0, 0), (0, "")),
        ("echo 'COMPLETED|None'", (0, 0), (0, "")),
        ("echo 'COMPLETED|None'", (0, None), (1, "node 1: stopped, or ended without saying how")),
        (
            "echo 'FAILED|None'",
            (None, None),
            (1, "node 0, node 1: no end heard of; Slurm says FAILED, see {folder}/slurm"),
        ),
        ("echo 'TIMEOUT|None'", (None, None), (124, "Slurm ended the job: its time limit was over")),
        (
            "echo 'FAILED|None'",
            (3, 0),
            (3, "node 0: failed (exit status 3); all it said is in {folder}/node0.log, its last lines: none"),
        ),
    ],
)
def test_the_end_of_a_job_that_prints_nothing_is_reported(
    squeue: str, statuses: tuple[int | None, ...], end: tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(tmp_path, "squeue", squeue)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name in ("_LOOK", "_ENDED", "_GRACE"):
        monkeypatch.setattr(slurm, name, 0.0)
    for node, ended in enumerate(statuses):
        if ended is not None:
            event = {"event": "ended", "status": ended, "time": float(node)}
            (tmp_path / f"node{node}.events").write_text(json.dumps(event) + "\n")
            (tmp_path / f"node{node}.log").touch()
    said: list[str] = []
    outcome = SlurmBackend(say=said.append)._follow(Job(), work(tmp_path, TELL, timeout=1.0), TWO)
    assert (outcome.status, outcome.report) == (end[0], end[1].format(folder=tmp_path))
    assert said == []


@pytest.fixture
def submitit():
    return pytest.importorskip("submitit")


@pytest.mark.thorough
def test_tasks_of_the_local_executor_run_the_line(tmp_path: Path, submitit) -> None:
    said: list[str] = []
    given = work(tmp_path, TELL, *HOSTILE, environment={"SECRET": "hidden"})
    outcome = SlurmBackend(cluster="local", say=said.append).run(given, TWO)
    assert (outcome.status, outcome.report) == (0, "")
    for rank in range(2):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert (told["words"], told["SECRET"], told["WORLD_SIZE"]) == (list(HOSTILE), "hidden", "2")
        assert [line for line in said if line.endswith(f": rank {rank} was here")]
        assert [line for line in said if line.endswith(outcome.commands[rank])]
    holding = [path.name for path in tmp_path.rglob("*") if path.is_file() and b"hidden" in path.read_bytes()]
    assert sorted(holding) == ["rank0.json", "rank1.json"]  # where the program wrote it


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["interrupt", pytest.param("time", marks=pytest.mark.nightly)])
def test_a_job_is_cancelled_when_this_side_ends_or_its_time_is_over(tmp_path: Path, submitit, how: str) -> None:
    def interrupt(_: str) -> None:
        if how == "interrupt" and len(list(tmp_path.glob("pid*"))) == 2:
            raise KeyboardInterrupt

    program = SLEEP.replace("time.sleep(120)", "sys.stdout.write('here\\n')\ntime.sleep(120)")
    given = work(tmp_path, program, timeout=400.0 if how == "interrupt" else 3.0)
    if how == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            SlurmBackend(cluster="local", say=interrupt).run(given, TWO)
    else:
        outcome = SlurmBackend(cluster="local", say=interrupt).run(given, TWO)
        assert (outcome.status, outcome.timed_out) == (124, True)
        assert outcome.report.endswith("not done after 3 s; stopped")
    assert gone(written(tmp_path))


@pytest.mark.gloo
@pytest.mark.nightly
@pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")
def test_a_real_slurm_runs_and_cancels_and_tells_why_a_job_waits(
    tmp_path: Path, submitit, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    backend = SlurmBackend(say=said.append)
    with one_host_cluster(2) as cluster:
        monkeypatch.setenv("SLURM_CONF", str(cluster / "slurm.conf"))

        outcome = backend.run(work(fresh(tmp_path, "sum"), SUM, torch=True), TWO)
        assert (outcome.status, outcome.report) == (0, ""), said
        assert [(tmp_path / "sum" / f"sum{rank}").read_text() for rank in (0, 1)] == ["3.0 on n1", "3.0 on n2"]
        assert "node 1 (host " in said[-1] or "node 0 (host " in said[-1]

        outcome = backend.run(work(fresh(tmp_path, "fail"), FAIL), TWO)
        assert outcome.status == 1
        assert "no luck" in outcome.report

        outcome = backend.run(work(fresh(tmp_path, "late"), SLEEP, timeout=4.0), TWO)
        assert (outcome.status, outcome.timed_out) == (124, True)
        assert gone(written(tmp_path / "late"))

        monkeypatch.setattr(slurm, "_TELL", 0.5)
        hold = ["sbatch", "-N2", "--wrap", "sleep 6", "-o", os.devnull]
        subprocess.run(hold, check=True, capture_output=True)
        outcome = backend.run(work(fresh(tmp_path, "waits"), TELL), TWO)
        assert outcome.status == 0
        assert [line for line in said if " has waited for " in line and line.endswith(": Resources")]
        asked = subprocess.run(["squeue", "-h"], check=True, capture_output=True, text=True)
        assert asked.stdout == ""
    assert not cluster.exists()


def fresh(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


@pytest.mark.parametrize("where", ["folder", "option"])
def test_names_that_would_be_lines_of_the_script_are_refused(where: str, tmp_path: Path, submitit) -> None:
    """submitit writes them into comments, quoted as words: a line break ends the comment."""
    hostile = "x\ntouch pwned"
    backend = SlurmBackend(cluster="local", options={"comment": hostile} if where == "option" else {})
    folder = tmp_path / (hostile if where == "folder" else "fine")
    folder.mkdir()
    with pytest.raises(ValueError, match=r"--backend slurm: '.*x\\ntouch pwned': expected printable text in one line"):
        backend.run(work(folder, TELL), TWO)
