"""Nodes on this host: what ranks find, who failed, and nothing left in any ending."""

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.inside import STARTER, LocalBackend, Nodes, NodeStart, Shape, run_nodes, supervise

from .nodes import FAIL, HOSTILE, SLEEP, SUM, TELL, WITHIN, gone, parent, processes, work, written

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="no /proc here, by which processes are found"
)
TWO = Nodes(num_nodes=2)


@pytest.mark.thorough
def test_ranks_find_their_words_place_and_variables_and_the_line_is_told_before_they_run(tmp_path: Path) -> None:
    said: list[str] = []
    nodes = Nodes(num_nodes=2, ranks_per_node=2)
    given = work(tmp_path, TELL, *HOSTILE, environment={"SECRET": "not to be shown"})
    outcome = LocalBackend(say=said.append).run(given, nodes)
    assert (outcome.status, outcome.report, outcome.timed_out) == (0, "", False)
    for rank in range(4):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert told.pop("words") == list(HOSTILE)
        assert told == {
            "WORLD_SIZE": "4",
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "SECRET": "not to be shown",
            "folder": os.getcwd(),
        }
    for node in (0, 1):
        line = said.index(f"node {node}: {outcome.commands[node]}")
        assert f"--node-rank {node} " in outcome.commands[node]
        for rank in (2 * node, 2 * node + 1):
            assert said.index(f"node {node}: rank {rank} was here") > line
            assert f"rank {rank} was here" in (tmp_path / f"node{node}.log").read_text()
    assert "not to be shown" not in "".join(said)
    assert [one["facts"]["host"] for one in json.loads((tmp_path / "nodes.json").read_text())] == [
        socket.gethostname()
    ] * 2


@pytest.mark.thorough
def test_the_first_failure_is_named_and_the_other_node_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "_GRACE", 0.3)
    outcome = LocalBackend(say=lambda _: None).run(work(tmp_path, FAIL), TWO)
    assert outcome.status == 1
    assert outcome.report == (
        f"node 1: failed (exit status 1); all it said is in {tmp_path}/node1.log, its last lines:\n  no luck\n"
        "node 0: still ran 0.3 s later; stopped"
    )
    assert gone(processes(tmp_path, 1))


@pytest.mark.thorough
def test_a_run_ends_when_its_time_is_over(tmp_path: Path) -> None:
    outcome = LocalBackend(say=lambda _: None).run(work(tmp_path, SLEEP, timeout=1.0), TWO)
    assert (outcome.status, outcome.timed_out) == (124, True)
    assert outcome.report == "node 0, node 1: not done after 1 s; stopped"
    assert gone(written(tmp_path))


RUN = """
import sys
from pathlib import Path
from stagewright.experiments.backends.local import LocalBackend
from stagewright.experiments.backends.records import Nodes, Work
sys.path[:0] = [sys.argv[2], str(Path(sys.argv[2]).parents[1])]
from nodes import SLEEP, work
LocalBackend().run(work(Path(sys.argv[1]), SLEEP), Nodes(num_nodes=2))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly), signal.SIGKILL],
    ids=lambda one: one.name,
)
def test_nothing_is_left_of_a_command_that_is_interrupted_or_killed(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        ranks = processes(tmp_path, 2)
        process.send_signal(number)
        assert gone(ranks)
        assert process.wait(timeout=WITHIN) != 0


@pytest.mark.thorough(but=["starter-stand-in"])
@pytest.mark.parametrize(
    "torch", [False, pytest.param(True, marks=[pytest.mark.gloo, pytest.mark.nightly])], ids=["stand-in", "torchrun"]
)
@pytest.mark.parametrize("victim", ["agent", "starter"])
def test_ranks_do_not_outlive_an_agent_or_a_starter_that_is_killed(tmp_path: Path, victim: str, torch: bool) -> None:
    """Ranks stand in sessions of their own, and would go on."""
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(LocalBackend(say=lambda _: None).run, work(tmp_path, SLEEP, torch=torch), Nodes())
        ranks = processes(tmp_path, 1)
        agent = parent(ranks[0])
        os.kill(agent if victim == "agent" else parent(agent), signal.SIGKILL)
        assert gone(ranks)
        outcome = run.result()
    assert outcome.status == 128 + signal.SIGKILL
    assert outcome.report.startswith("node 0: failed (exit status 137)")


def start(command: tuple[str, ...], rank: int) -> NodeStart:
    return NodeStart(name=f"node {rank} (host {'ab'[rank]})", command=command, interface="lo")


def test_a_node_that_cannot_be_started_says_why(tmp_path: Path) -> None:
    starts = [start(STARTER, 0), start(("sh", "-c", "echo no such host >&2; exit 255"), 1)]
    outcome = run_nodes(starts, work(tmp_path, TELL), TWO, address="127.0.0.1", say=lambda _: None)
    assert outcome.report == "node 1 (host b): could not be started (exit status 255): no such host"


@pytest.mark.thorough
def test_a_folder_and_an_interface_that_are_not_there_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise.os, "getcwd", lambda: "/nowhere at all")
    wrong = NodeStart(name="node 0", command=STARTER, interface="wlan7")
    outcome = run_nodes([wrong], work(tmp_path, TELL), Nodes(), address="127.0.0.1", say=lambda _: None)
    names = ", ".join(sorted(name for _, name in socket.if_nameindex()))
    assert outcome.report == (
        f"node 0: no network interface 'wlan7': expected one of {names}; no folder '/nowhere at all' to work in"
    )


def test_shaped_links_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"--backend local cannot shape links .* or type --backend netns"):
        LocalBackend().check(Nodes(shape=Shape(latency=0.01)))
    with pytest.raises(ValueError, match=r"0 nodes of 1 ranks: expected at least 1 of each"):
        LocalBackend().check(Nodes(num_nodes=0))


@pytest.mark.thorough
@pytest.mark.gloo
def test_ranks_of_two_nodes_sum_under_the_real_torchrun(tmp_path: Path) -> None:
    outcome = LocalBackend().run(work(tmp_path, SUM, torch=True), TWO)
    assert (outcome.status, outcome.report) == (0, "")
    assert [(tmp_path / f"sum{rank}").read_text() for rank in (0, 1)] == ["3.0 on None"] * 2
