"""Program of a Slurm task, one per node: the node's starter, with rank, master and port from Slurm's environment.

task i (submitit) --- stdin: the order, then held open -----> starter of node i --> torchrun line
                 <-- events, at last the exit status ------- folder/nodeI.events, which the command follows
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time

from ...cli.processes import Process, let_go
from .node import STARTER, Order
from .preflight import Meeting
from .records import Nodes, Work

_PORTS = range(20000, 30000)  # below Linux's ports of outgoing connections
_LET_GO = 10.0  # [s] for a starter to end its ranks


def run_task(work: Work, nodes: Nodes, folder: str, interface: str, token: str) -> int:
    """Run this task's node to its end. Raises RuntimeError after a failure, so that Slurm ends the others."""
    import submitit

    place = submitit.JobEnvironment()
    rank = place.global_rank
    hosts = list(place.hostnames)
    hosts += hosts[-1:] * (nodes.num_nodes - len(hosts))  # submitit's local executor: several tasks on this host
    order = Order(
        work=work,
        nodes=nodes,
        meeting=Meeting(
            node_rank=rank,
            names=tuple(f"node {number} (host {host})" for number, host in enumerate(hosts)),
            address=address_of(hosts[0]) if place.num_nodes > 1 else "127.0.0.1",
            port=port_of(place.job_id),
            limit=work.join_timeout,
            token=token,
        ),
        folder=folder,
        interface=interface,
    )
    log, events = (work.folder / f"node{rank}.{ending}" for ending in ("log", "events"))
    with log.open("wb") as said, events.open("wb") as told:
        status = _run_starter(order, said.fileno(), told.fileno())
    ended = time.time()
    with events.open("a") as told:
        print(json.dumps({"event": "ended", "status": status, "time": ended}), file=told)
    if status:
        raise RuntimeError(f"{order.meeting.names[rank]}: exit status {status}")
    return status


def _run_starter(order: Order, said: int, told: int) -> int:
    starter = Process.begin(STARTER, None, out=told, err=said)
    assert starter.process.stdin is not None
    try:
        starter.process.stdin.write(order.to_json().encode() + b"\n")
        starter.process.stdin.flush()
        return starter.process.wait()
    finally:
        let_go([starter], patience=_LET_GO)


def port_of(job_id: str) -> int:
    """Port of a job's node 0, different for the next job."""
    return _PORTS[int("".join(re.findall(r"\d+", job_id)) or 0) % len(_PORTS)]


def address_of(name: str) -> str:
    """Address of a Slurm node: its name if that resolves, else its address according to Slurm."""
    try:
        socket.getaddrinfo(name, None)
        return name
    except OSError:
        asked = subprocess.run(
            ["scontrol", "show", "node", "-o", name], capture_output=True, text=True, check=False, timeout=30
        )
        found = re.search(r"\bNodeAddr=(\S+)", asked.stdout)
        return found[1] if found else name
