"""Back ends by name. The torchrun line: what it says, that words pass unharmed, and restarts over two nodes.

Nodes meet before work starts: whoever is missing, differs or cannot be reached is named on every node.
"""

import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.inside import (
    BACKENDS,
    Access,
    Meeting,
    Met,
    NodeFacts,
    Nodes,
    PreflightError,
    RunOptions,
    backend,
    code_digest,
    differences,
    free_ports,
    meet,
    preflight,
    torchrun_words,
)
from support.inside import RecordsWork as Work
from support.pool import ports_of_this_worker

from .nodes import HOSTILE, WITHIN


def words(work: Work, *, nodes: int = 2, node_rank: int = 1, **other) -> tuple[str, ...]:
    given = {"master_address": "10.0.0.1", "master_port": 29500, "python": "python", **other}
    return torchrun_words(work, Nodes(num_nodes=nodes, ranks_per_node=3), node_rank=node_rank, **given)


def test_the_line_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    work = Work(module="a.b", arguments=("--x", "1 2"), folder=Path("/f"), environment={"TOKEN": "s3cret"})
    assert shlex.join(words(work, interface="eth0")) == (
        "env PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0 python -P -m torch.distributed.run --nnodes 2 "
        "--nproc-per-node 3 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 --rdzv-conf timeout=60 "
        "--max-restarts 0 --module a.b --x '1 2'"
    )
    again = Work(module="a.b", folder=Path("/f"), restarts=2, join_timeout=0.2, environment={"OMP_NUM_THREADS": "4"})
    assert shlex.join(words(again, node_rank=0)) == (
        "env PYTHONSAFEPATH=1 OMP_NUM_THREADS=4 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 python -P -m "
        "torch.distributed.run --nnodes 2 --nproc-per-node 3 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29500 "
        "--rdzv-conf is_host=1,join_timeout=1,read_timeout=1 --local-addr 10.0.0.1 --max-restarts 2 --module a.b"
    )
    assert "--local-addr ~node00001 " in " ".join(words(again))
    assert "--master-addr [fe80::1] " in " ".join(words(work, master_address="fe80::1"))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"node_rank": 2}, r"node_rank=2: expected 0 to 1 \(num_nodes=2\)"),
        ({"master_port": 0}, r"master_port=0: expected 1 to 65535"),
        ({"work": Work(module="a", folder=Path("/f"), restarts=-1)}, "restarts=-1: expected 0 or more"),
    ],
)
def test_what_cannot_be_is_refused(wrong, told) -> None:
    with pytest.raises(ValueError, match=told):
        words(wrong.pop("work", Work(module="a", folder=Path("/f"))), **wrong)


@pytest.mark.parametrize("restarts", [0, 1])
def test_torchrun_reads_the_line_as_meant_and_hands_every_word_on(restarts: int) -> None:
    """By torchrun's own parser and its templates, behind a shell's reading of the line."""
    from torch.distributed.elastic.utils.api import macros
    from torch.distributed.run import config_from_args, parse_args

    work = Work(module="a.b", arguments=HOSTILE, folder=Path("/f"), restarts=restarts)
    line = shlex.split(shlex.join(words(work)))
    config, command, arguments = config_from_args(parse_args(line[line.index("torch.distributed.run") + 1 :]))
    assert macros.substitute(arguments, "0") == ["-u", "-m", "a.b", *HOSTILE]
    assert (command, config.max_restarts, config.nproc_per_node) == (sys.executable, restarts, 3)
    assert (config.min_nodes, config.max_nodes) == (2, 2)
    assert config.rdzv_endpoint == "10.0.0.1:29500"
    if restarts:
        assert config.rdzv_configs == config.rdzv_configs | {"is_host": "0", "join_timeout": "60", "read_timeout": "60"}
    else:
        assert config.rdzv_configs == {"timeout": "60", "rank": 1}


RESTARTED = """
import json, os, sys, torch, torch.distributed as dist
from pathlib import Path
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
dist.init_process_group("gloo")
total = torch.tensor([float(rank)])
dist.all_reduce(total)
log = Path(sys.argv[1], f"{os.environ['NODE']}.jsonl")
with log.open("a") as file:
    print(json.dumps([rank, total.item()]), file=file)
if len(log.read_text().splitlines()) < 3 and rank == int(sys.argv[2]):
    os._exit(3)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.gloo
@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_twice_is_started_again_on_both_nodes_in_their_order(tmp_path: Path, victim: int) -> None:
    """Exactly as often as it died: no start is lost to what the last one left."""
    (tmp_path / "restarted.py").write_text(RESTARTED)
    environment = {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    work = Work(
        module="restarted", arguments=(str(tmp_path), str(victim)), folder=tmp_path, environment=environment, restarts=2
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = {"master_address": "127.0.0.1", "master_port": free.getsockname()[1], "interface": "lo"}
    agents = []
    for node in (1, 0):  # the first to come is not rank 0
        line = torchrun_words(work, Nodes(num_nodes=2), node_rank=node, **where)
        agents.append(subprocess.Popen(line, env={**os.environ, **environment, "NODE": str(node)}))
        time.sleep(1.0 if node else 0.0)
    assert [agent.wait(timeout=120) for agent in agents] == [0, 0]
    for node in (0, 1):
        lines = (tmp_path / f"{node}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [[node, 1.0]] * 3


def test_every_back_end_is_made_by_its_name_and_says_it(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\nb slots=2\n")
    access = Access(hosts=tmp_path / "hosts", slurm=("partition=long",), interface="eth0")
    for name in BACKENDS:
        assert backend(name, say=print, access=access).name == name
    assert access.arguments("slurm") == {"options": {"partition": "long"}, "interface": "eth0"}
    assert [host.host for host in access.arguments("ssh")["hosts"]] == ["a", "b"]


def test_options_that_are_missing_or_cannot_be_are_told() -> None:
    with pytest.raises(ValueError, match="--backend ssh: type --hosts FILE, one host a line"):
        backend("ssh", say=print)
    with pytest.raises(ValueError, match="--slurm partition: expected NAME=VALUE, such as partition=long"):
        backend("slurm", say=print, access=Access(slurm=("partition",)))
    with pytest.raises(ValueError, match="unknown back end 'slrum'; did you mean slurm"):
        backend("slrum", say=print)
    with pytest.raises(ValueError, match="--hosts is for --backend ssh, not for --backend local"):
        RunOptions(name="x", backend="local", hosts=Path("hosts")).changes()


HOST = "127.0.0.1"
FACTS = NodeFacts(
    host="h", python="3.11.7", torch="2.13.0", stagewright="1.0", code="abc", interfaces={"lo": (HOST,)}, free_port=1
)


def meeting(node_rank: int, *, names: str = "abc", port: int, **other) -> Meeting:
    named = tuple(f"node {rank} (host {name})" for rank, name in enumerate(names))
    given = {"address": HOST, "limit": WITHIN, "token": "t", **other}
    return Meeting(node_rank=node_rank, names=named, port=port, **given)


def come(*nodes: tuple[Meeting, NodeFacts, str]) -> list[Met | str]:
    """Facts that each of the nodes comes to know, or is told."""

    def one(node: tuple[Meeting, NodeFacts, str]) -> Met | str:
        try:
            return meet(*node)
        except PreflightError as error:
            return str(error)

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(one, nodes))


def test_three_nodes_meet_and_node_0_knows_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order; clocks are compared by the round trip; a second meeting finds the port free again."""
    (port,) = free_ports(1, among=ports_of_this_worker())
    for _ in range(2):
        first, *others = come(*((meeting(rank, port=port), replace(FACTS, host=f"h{rank}"), "") for rank in (0, 2, 1)))
        assert isinstance(first, Met)
        assert [node.facts.host for node in first.nodes] == ["h0", "h1", "h2"]
        assert first.local_address == HOST
        assert others == [Met(local_address=HOST)] * 2
        for node in first.nodes[1:]:
            assert abs(node.clock_ahead) <= node.round_trip / 2 + 1e-3


def test_the_clock_of_a_node_is_ahead_by_what_it_shows_more(monkeypatch: pytest.MonkeyPatch) -> None:
    real, name = time.time, "late"
    monkeypatch.setattr(preflight.time, "time", lambda: real() + (threading.current_thread().name == name) * 100)
    (port,) = free_ports(1, among=ports_of_this_worker())

    def ahead() -> None:
        meet(meeting(1, names="ab", port=port), FACTS)

    thread = threading.Thread(target=ahead, name=name)
    thread.start()
    met = meet(meeting(0, names="ab", port=port), FACTS)
    thread.join()
    late = met.nodes[1]
    assert abs(late.clock_ahead - 100) <= late.round_trip / 2 + 1e-3


def test_whatever_differs_is_told_to_all_by_name() -> None:
    (port,) = free_ports(1, among=ports_of_this_worker())
    told = come(
        (meeting(0, port=port), FACTS, ""),
        (meeting(1, port=port), replace(FACTS, torch="2.9.0", code="other"), ""),
        (meeting(2, port=port), FACTS, "no network interface 'x'"),
    )
    assert set(told) == {
        "node 2 (host c): no network interface 'x'\n"
        "node 1 (host b): torch 2.9.0 instead of 2.13.0 as on node 0 (host a)"
    }
    assert differences(replace(FACTS, code="def"), FACTS) == [
        "other source files of stagewright 1.0 (digest def instead of abc)"
    ]


def test_nodes_that_are_silent_or_cannot_reach_node_0_are_named() -> None:
    (port,) = free_ports(1, among=ports_of_this_worker())
    told = come(*((meeting(rank, port=port, limit=3.0), FACTS, "") for rank in (0, 1)))
    assert (
        told
        == [f"node 2 (host c): silent for 3 s, expected at {HOST}:{port} (there: node 0 (host a), node 1 (host b))"] * 2
    )
    (port,) = free_ports(1, among=ports_of_this_worker())
    assert come((meeting(1, port=port, limit=0.2), FACTS, "")) == [
        f"node 1 (host b): cannot reach node 0 (host a) at {HOST}:{port}, tried for 0.2 s (Connection refused): "
        "is there a route, and does a firewall let it through?"
    ]
    (told,) = come((meeting(1, port=port, address="no-such-host.invalid", limit=1.0), FACTS, ""))
    assert "node 1 (host b): " in told
    assert "no-such-host.invalid" in told


def test_a_port_that_is_taken_is_told_by_node_0() -> None:
    with socket.create_server((HOST, 0)) as taken:
        (told,) = come((meeting(0, port=taken.getsockname()[1]), FACTS, ""))
        assert told == (
            f"node 0 (host a): cannot listen at port {taken.getsockname()[1]} (Address already in use): is another run "
            "there, or what is left of one? Type another port"
        )


def test_strangers_at_the_port_are_left_standing() -> None:
    """One of another run, one that speaks another language, one that says nothing."""
    (port,) = free_ports(1, among=ports_of_this_worker())
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(meet, meeting(0, names="ab", port=port), FACTS)
        while not listens(port):
            assert not first.done()
        other_run = pool.submit(come, (meeting(1, names="ab", port=port, token="other", limit=2.0), FACTS, ""))
        assert "did not say that all nodes have come" in other_run.result()[0]
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"token": "t", "node_rank": 7}\n', b""):
            with socket.create_connection((HOST, port)) as stranger:
                stranger.sendall(words)
        assert not first.done()
        assert pool.submit(meet, meeting(1, names="ab", port=port), FACTS).result() == Met(local_address=HOST)
        assert len(first.result().nodes) == 2


def listens(port: int) -> bool:
    """Whether somebody listens there: a stranger that says nothing."""
    try:
        socket.create_connection((HOST, port)).close()
    except OSError:
        return False
    return True


def test_two_nodes_of_one_rank_are_told() -> None:
    (port,) = free_ports(1, among=ports_of_this_worker())
    told = come(
        (meeting(0, port=port, limit=5.0), FACTS, ""),
        (meeting(1, port=port, limit=5.0), FACTS, ""),
        (meeting(1, port=port, limit=5.0), replace(FACTS, host="other"), ""),
    )
    assert "node 1 (host b): connected twice, from " in told[0]


def test_facts_of_this_host_travel_and_are_read_without_torch() -> None:
    here = NodeFacts.here()
    assert HOST in here.interfaces["lo"]
    assert here.interface_of(HOST) == "lo"
    assert here.interface_of("192.0.2.1") == ""
    assert len(code_digest()) == 12
    assert NodeFacts.from_json(asdict(here)) == here
    older = {"host": "x", "interfaces": {}, "colour": "red"}
    assert NodeFacts.from_json(older).torch == "unknown"
