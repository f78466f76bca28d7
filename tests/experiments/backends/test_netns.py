"""Back end of network namespaces: what ranks find there, every ending, and what is refused by name."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.inside import (
    NetnsBackend,
    Nodes,
    Shape,
    cpu_share,
    descendants,
    needs,
    supervise,
    what_is_missing,
    why_no_wire,
)

from .nodes import SLEEP, network_of, processes_in, wait_for, work

WHY_NOT = what_is_missing() or why_no_wire()
needs_root = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
needs_groups = pytest.mark.skipif(
    bool(WHY_NOT) or cpu_share.group_root() is None, reason=WHY_NOT or "control groups cannot be made here"
)
TWO = Nodes(num_nodes=2)
DELAYED = Nodes(num_nodes=2, shape=Shape(latency=0.001))

LOOK = """
import json, os, socket, sys
from pathlib import Path
rank = os.environ["RANK"]
told = {name: os.environ.get(name) for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "WORLD_SIZE")}
told |= {"host": socket.gethostname(), "interfaces": sorted(os.listdir("/sys/class/net")), "folder": os.getcwd()}
Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(told))
print(f"rank {rank} was here\\n", end="")  # in one piece: ranks of a node share a pipe
"""


def backend(capacity: float = 1e9) -> NetnsBackend:
    return NetnsBackend(say=lambda _: None, measured_capacity=lambda _: capacity)


def networks(process: int) -> set[int]:
    """Network namespaces of what a process has started, other than its own."""
    own = os.stat("/proc/self/ns/net").st_ino
    return {inode for below in descendants(process) if (inode := network_of(below)) not in (0, own)}


@pytest.mark.thorough
@needs_root
def test_every_node_runs_the_line_with_an_address_and_a_name_of_its_own(tmp_path: Path) -> None:
    nodes = Nodes(num_nodes=2, ranks_per_node=2, shape=Shape(latency=0.001))
    outcome = backend().run(work(tmp_path, LOOK), nodes)
    assert (outcome.status, outcome.timed_out) == (0, False), outcome.report
    for rank in range(4):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert told == {
            "MASTER_ADDR": "10.66.1.1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "WORLD_SIZE": "4",
            "host": f"node{rank // 2}",
            "interfaces": ["eth0", "lo"],
            "folder": os.getcwd(),
        }
        assert f"rank {rank} was here" in (tmp_path / f"node{rank // 2}.log").read_text()
    assert all("--master-addr 10.66.1.1" in command for command in outcome.commands)
    assert json.loads((tmp_path / "wire.json").read_text())["packets"] > 0
    # The nodes' clocks are one clock: the exchange before the start says how long the way is.
    assert json.loads((tmp_path / "nodes.json").read_text())[1]["round_trip"] >= 0.002
    assert networks(os.getpid()) == set()


@pytest.mark.thorough
@needs_root
def test_a_wire_that_breaks_ends_the_run_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "_GRACE", 0.3)

    class Cut(NetnsBackend):
        def _network(self, stack, nodes):  # type: ignore[no-untyped-def]
            net = super()._network(stack, nodes)
            net.wire._process.kill()
            return net

    outcome = Cut(say=lambda _: None).run(work(tmp_path, SLEEP), DELAYED)
    assert outcome.status != 0
    assert outcome.report.startswith("the wire between the nodes ended (status -9)")


OWNER = """
import sys
from pathlib import Path
from stagewright.experiments.backends.netns import NetnsBackend
from stagewright.experiments.backends.records import Nodes, Shape, Work
folder, path, share = sys.argv[1:]
work = Work(module="program", arguments=(folder,), folder=Path(folder), environment={"PYTHONPATH": path})
share = float(share) if share else None
NetnsBackend().run(work, Nodes(num_nodes=2, shape=Shape(latency=0.001, cpu_share=share)))
"""


def owner(folder: Path, share: str = "") -> subprocess.Popen[bytes]:
    """A process that owns a run of two nodes, once the ranks there have started."""
    given = work(folder, SLEEP)
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), given.environment["PYTHONPATH"], share], stderr=subprocess.DEVNULL
    )
    wait_for(lambda: len(list(folder.glob("pid*"))) == 2)
    return process


@pytest.mark.thorough
@needs_groups
def test_a_killed_owner_leaves_groups_that_the_next_run_removes_and_no_others(tmp_path: Path) -> None:
    root = cpu_share.group_root()
    there = set(root.glob("stagewright-*"))
    foreign = root / f"stagewright-of-others-{os.getpid()}"
    foreign.mkdir()
    (tmp_path / "killed").mkdir()
    (tmp_path / "next").mkdir()
    try:
        process = owner(tmp_path / "killed", "0.25")
        nodes = networks(process.pid)
        left = set(root.glob("stagewright-*")) - there - {foreign}
        assert len(left) == 2
        process.kill()
        process.wait()
        wait_for(lambda: not any(map(processes_in, nodes)))
        assert backend().run(work(tmp_path / "next", LOOK), TWO).status == 0
        assert not any(group.exists() for group in left)
        assert foreign.exists()
    finally:
        foreign.rmdir()


def test_only_groups_whose_owner_is_gone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_share, "group_root", lambda: tmp_path)
    with cpu_share.shares(0.5, 1) as (prefix,):
        own = Path(prefix[-1]).parent
        process, start = own.name.split("-")[1:3]
        earlier = (
            tmp_path / f"stagewright-{process}-{int(start) - 1}-0"
        )  # a process of the same number, which has ended
        others = [tmp_path / name for name in ("stagewright", "stagewright-1", "stagewright-a-b-c", "other-1-1-1")]
        for folder in (earlier, *others):
            folder.mkdir()
        assert cpu_share.remove_leftovers() == [earlier.name]
        assert own.exists()
        assert all(folder.exists() for folder in others)


SPIN = """
import time
began, before = time.perf_counter(), time.process_time()
while time.perf_counter() < began + 0.3:
    pass
print(time.process_time() - before, time.perf_counter() - began)
"""


@needs_groups
def test_a_share_of_the_processor_is_what_it_says() -> None:
    with cpu_share.shares(0.2 / len(os.sched_getaffinity(0)), 1) as (prefix,):
        spun = subprocess.run([*prefix, sys.executable, "-I", "-S", "-c", SPIN], capture_output=True, check=True)
    taken, seconds = map(float, spun.stdout.split())
    assert 0 < taken < 0.2 * seconds + 0.04  # a fifth, less what others took; and a slice that it had saved
    assert cpu_share.leftovers() == []


# What is refused


@needs_root
def test_a_rate_that_this_machine_does_not_carry_is_refused() -> None:
    fast = Nodes(num_nodes=2, shape=Shape(bandwidth=1.25e9, latency=0.001))
    with pytest.raises(ValueError, match=r"links of 10 Gbit/s: .* 8 Gbit/s between two nodes here, measured .*latency"):
        backend(capacity=1e9).check(fast)
    backend(capacity=2e9).check(fast)


@needs_root
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (Shape(sites=(0, 1, 1)), r"sites \(0, 1, 1\): expected a number from 0 to 249 for each of 2 nodes"),
        (Shape(bandwidth=0.0), r"bandwidth=0: expected at least 1000 bytes/s"),
        (Shape(latency=-1.0), r"latency=-1: expected 0 to 10 s"),
        (Shape(cpu_share=1.5), r"cpu_share=1.5: expected a part of this machine's cores"),
    ],
)
def test_shapes_that_cannot_be_are_refused(shape: Shape, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        backend().check(Nodes(num_nodes=2, shape=shape))


def test_without_root_it_says_what_to_type_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match=r"need root, and this is user 1000; type `sudo .*--backend local"):
        backend().check(TWO)


def test_missing_programs_are_named_with_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name in ("tc", "nsenter") else f"/usr/bin/{name}")
    assert needs.what_is_missing() == "not found: tc, nsenter (Debian: apt install iproute2 util-linux)"


def test_shares_without_control_groups_are_whole_cores_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_share, "group_root", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 6, 7})
    with cpu_share.shares(0.5, 2) as prefixes:
        assert prefixes == (("taskset", "--cpu-list", "3,4"), ("taskset", "--cpu-list", "6,7"))
    assert cpu_share.why_no_share(0.5, 2) == ""
    assert cpu_share.why_no_share(0.3, 2).startswith("cpu_share=0.3: 1.2 of 4 cores for each of 2 nodes needs control")
    assert cpu_share.why_no_share(0.5, 3).startswith("cpu_share=0.5: 2 of 4 cores for each of 3 nodes needs control")
