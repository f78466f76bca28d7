"""Back ends by name. The torchrun line: what it says, that words pass unharmed, and restarts over two nodes."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.inside import BACKENDS, Access, Nodes, RunOptions, backend, torchrun_words
from support.inside import RecordsWork as Work

from .nodes import HOSTILE


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
