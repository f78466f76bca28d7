"""Hosts files, and nodes behind a real sshd of loopback, with keys that the test makes.

Nodes on this host: what ranks find, who failed, and nothing left in any ending.
"""

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.inside import (
    STARTER,
    LocalBackend,
    Nodes,
    NodeStart,
    RemoteHost,
    Shape,
    SshBackend,
    descendants,
    free_ports,
    read_hosts,
    run_nodes,
    ssh,
    supervise,
)
from support.pool import ports_of_this_worker

from .nodes import FAIL, HOSTILE, SLEEP, SUM, TELL, WITHIN, closed_port, gone, parent, processes, work, written

TWO = Nodes(num_nodes=2)
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def parsed(tmp_path: Path, text: str) -> tuple[RemoteHost, ...]:
    (tmp_path / "hosts").write_text(text)
    return read_hosts(tmp_path / "hosts")


def test_a_hosts_file_names_hosts_and_what_runs_there(tmp_path: Path) -> None:
    text = """# a comment, then nothing

    node-1.example.org
    ada@10.0.0.2:2222 slots=4 python='/opt/a b/python' address=192.168.0.2  # the second
    [fe80::1]:22
    """
    assert parsed(tmp_path, text) == (
        RemoteHost(host="node-1.example.org"),
        RemoteHost(host="10.0.0.2", user="ada", port=2222, slots=4, python="/opt/a b/python", address="192.168.0.2"),
        RemoteHost(host="[fe80::1]", port=22),
    )


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("-oProxyCommand=touch${IFS}x", r"host '-oProxyCommand=touch\$\{IFS\}x': expected a name of letters"),
        ("a;b", "host 'a;b': expected a name"),
        ("$(reboot)", "expected a name"),
        ("-l@host", "user '-l': expected a name"),
        ("@host", "'@host': expected a user's name before '@'"),
        ("host:", "port '': expected a whole number"),
        ("host:99999", "port 99999: expected 1 to 65535"),
        ("host slots=many", "slots 'many': expected a whole number"),
        ("host slots=0", "slots=0: expected at least 1"),
        ("host slot=2", "'slot=2': expected slots=N, python=PATH or address=ADDRESS"),
        ("host 'a", "No closing quotation"),
    ],
)
def test_a_line_that_cannot_be_is_named(tmp_path: Path, line: str, told: str) -> None:
    with pytest.raises(ValueError, match=rf"hosts:2: .*{told}"):
        parsed(tmp_path, f"good\n{line}\n")


def test_a_hosts_file_without_hosts_or_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names no host: expected one a line"):
        parsed(tmp_path, "# nobody\n")
    with pytest.raises(ValueError, match=r"hosts file '/nowhere/hosts' cannot be read: .*No such file"):
        read_hosts(Path("/nowhere/hosts"))


def test_what_ssh_cannot_give_is_refused_before_any_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh.shutil, "which", lambda _: "/usr/bin/ssh")
    backend = SshBackend((RemoteHost(host="a", slots=2),))
    with pytest.raises(ValueError, match="2 nodes, but the hosts file names 1: add hosts, or type --nodes 1"):
        backend.check(TWO)
    with pytest.raises(ValueError, match="host a: slots=2, but 3 ranks are to run there: type slots=3"):
        backend.check(Nodes(ranks_per_node=3))
    with pytest.raises(ValueError, match="--backend ssh cannot shape links"):
        backend.check(Nodes(shape=Shape(bandwidth=1e9)))
    monkeypatch.setattr(ssh.shutil, "which", lambda _: None)
    with pytest.raises(ValueError, match="no `ssh` on the PATH"):
        backend.check(Nodes())


class Server:
    """An sshd of loopback, its one user this one."""

    def __init__(self, folder: Path) -> None:
        (self.port,) = free_ports(1, among=ports_of_this_worker())
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        (folder / "authorized").write_text((folder / "user.pub").read_text())
        key = (folder / "host.pub").read_text().split()[:2]
        (folder / "known").write_text(f"[127.0.0.1]:{self.port} {' '.join(key)}\n")
        config = {
            "Port": self.port,
            "ListenAddress": "127.0.0.1",
            "HostKey": folder / "host",
            "PidFile": "none",
            "AuthorizedKeysFile": folder / "authorized",
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
        }
        (folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in config.items()))
        self.log = (folder / "sshd.log").open("wb")
        self.process = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=self.log)
        self.options = ("-F", "none", "-i", str(folder / "user"), "-o", f"UserKnownHostsFile={folder / 'known'}")

    def host(self, **values) -> RemoteHost:
        return RemoteHost(**{"host": "127.0.0.1", "port": self.port, "user": getpass.getuser(), **values})

    def answers(self) -> bool:
        command = SshBackend((), options=self.options)._ssh(self.host())
        until = time.monotonic() + WITHIN
        while time.monotonic() < until and self.process.poll() is None:
            if subprocess.run([*command, "true"], check=False, capture_output=True).returncode == 0:
                return True
            time.sleep(0.05)
        return False

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("no sshd or ssh here")
    privileges = Path("/run/sshd")  # sshd wants it, as an empty folder
    made = not privileges.exists() and os.getuid() == 0
    if made:
        privileges.mkdir(mode=0o755)
    server = Server(tmp_path_factory.mktemp("sshd"))
    try:
        if not server.answers():
            pytest.skip("this sshd lets its own user not in")
        yield server
    finally:
        server.close()
        if made:
            privileges.rmdir()


def test_words_variables_and_folders_reach_ranks_behind_ssh_unharmed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a folder; $(with) 'quotes'"
    folder.mkdir()
    monkeypatch.chdir(folder)
    said: list[str] = []
    given = work(folder, TELL, *HOSTILE, environment={"SECRET": "a'b\n$c"})
    outcome = SshBackend([server.host(slots=1)] * 2, options=server.options, say=said.append).run(given, TWO)
    assert (outcome.status, outcome.report) == (0, "")
    for rank in range(2):
        told = json.loads((folder / f"rank{rank}.json").read_text())
        assert (told["words"], told["SECRET"], told["folder"]) == (list(HOSTILE), "a'b\n$c", str(folder))
        assert told["GLOO_SOCKET_IFNAME"] == "lo"  # found by the way to node 0
        assert f"node {rank} (host 127.0.0.1): rank {rank} was here" in said
    assert len(outcome.commands) == 2


def test_hosts_that_cannot_be_reached_or_lack_something_are_named(server: Server, tmp_path: Path) -> None:
    def report(*hosts: RemoteHost) -> str:
        backend = SshBackend(hosts, options=server.options, say=lambda _: None)
        return backend.run(work(tmp_path, TELL), Nodes(num_nodes=len(hosts))).report

    with closed_port() as closed:
        assert report(server.host(), server.host(port=closed)).startswith(
            "node 1 (host 127.0.0.1): could not be started (exit status 255): ssh: connect to host 127.0.0.1 port "
            f"{closed}: Connection refused; `ssh 127.0.0.1` must work without a question"
        )
    assert "Permission denied" in report(server.host(user="nobody-of-that-name"))  # and no prompt
    assert "/no/such/python: " in report(server.host(python="/no/such/python"))
    assert "Host key verification failed" in report(server.host(host="localhost"))


@pytest.mark.parametrize(
    "how", ["kill", "connection", *(pytest.param(how, marks=pytest.mark.nightly) for how in ("interrupt", "silence"))]
)
def test_ranks_behind_ssh_end_with_this_side_and_with_the_connection(server: Server, tmp_path: Path, how: str) -> None:
    """Ctrl-C, kill -9 of the command, an ssh that dies, and one that says nothing any more, as over a dead network."""
    program = tmp_path / "program_here.py"
    program.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        f"sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[2])]!r}\n"
        "from nodes import SLEEP, work\n"
        "from stagewright.experiments.backends import ssh, supervise\n"
        "from stagewright.experiments.backends.ssh import RemoteHost\n"
        "from stagewright.experiments.backends.records import Nodes\n"
        "ssh._SILENCE, supervise._GRACE = 1.0, 0.3\n"
        f"host = RemoteHost(host='127.0.0.1', port={server.port}, user={getpass.getuser()!r})\n"
        f"backend = ssh.SshBackend([host, host], options={server.options!r})\n"
        "outcome = backend.run(work(Path(sys.argv[1]), SLEEP), Nodes(num_nodes=2))\n"
        "print(outcome.report)\n"
    )
    with subprocess.Popen(
        [sys.executable, str(program), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        ranks = processes(tmp_path, 2)
        _, client = sorted(descendants(process.pid))
        if how == "interrupt":
            process.send_signal(signal.SIGINT)
        elif how == "kill":
            process.kill()
        elif how == "silence":
            os.kill(client, signal.SIGSTOP)
            assert gone(ranks[1:])  # by itself, since nobody here knows
        if how in ("silence", "connection"):
            os.kill(client, signal.SIGKILL)
        assert gone(ranks)
        out, _ = process.communicate(timeout=WITHIN)
    if how in ("silence", "connection"):
        assert "node 1 (host 127.0.0.1): failed (exit status 137)" in out


pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="no /proc here, by which processes are found"
)


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
