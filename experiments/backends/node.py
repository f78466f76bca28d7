"""The starter of a node, `python -P -m stagewright.experiments.backends.node`: runs the preflight, then torchrun.

    stdin    one line with the order; then empty lines as signs of life: when it closes, or over a network is silent,
             the sender of the order is gone
    stdout   events, a JSON object per line: up (with this node's facts), reached (facts of all nodes), line, failed
    stderr   output of agents and ranks, one stream

torchrun's agent starts each rank in its own session, so that killing the agent or its group leaves ranks running.
Therefore the starter adopts orphans among its descendants (PR_SET_CHILD_SUBREAPER) and, after any ending, kills all
that remain. Its exit status is the agent's.

The torchrun line of a node, used by every back end and printed, so that any other launcher can wrap it.

Two kinds of rendezvous of the agents, by whether ranks may be restarted:

    no restarts   static: one rendezvous, a second faster than the other kind.
    restarts      c10d on a store at node 0, with a new round for each start. The list of waiting agents makes all of
                  them restart their ranks together, and each round has its own store. Under a static rendezvous an
                  agent does not learn that another one restarts, and all starts share one store, so that a rank may
                  find addresses of dead ones: with torch 2.13 ranks failed more often than necessary.

`is_host` names the host of the store to agents of a c10d rendezvous: guessing it from host names fails in network
namespaces, which share one. Agents are ranked by name, therefore node 0 uses its address and all others a number after
"~", which sorts after every character of an address.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...cli.processes import Supervision, die_with_parent, exit_with_stdin
from .facts import NodeFacts
from .preflight import Meeting, PreflightError, meet
from .records import Nodes, Shape, Work

STARTER = (sys.executable, "-P", "-m", "stagewright.experiments.backends.node")
TOKEN = ".token"  # a file in the work's folder, by which a node checks that all share the folder
TIMED_OUT = 124  # exit status of a run, as of timeout(1)
UNAVAILABLE = 69  # exit status if the nodes cannot work together (EX_UNAVAILABLE of sysexits.h)
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_LIBC = ctypes.CDLL(None)
_ASKED = 3.0  # [s] between asking processes to end and killing them
_KILLED = 5.0  # [s] for killed processes to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Task of a node."""

    work: Work
    nodes: Nodes
    meeting: Meeting
    folder: str  # working folder
    interface: str = ""  # for gloo; empty: the one through which this node reaches node 0
    silence: float = 0.0  # longest time between signs of life [s]; 0: none are expected

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, line: str) -> Order:
        read = json.loads(line)
        work, nodes, meeting = (read.pop(name) for name in ("work", "nodes", "meeting"))
        shape = Shape(**nodes["shape"] | {"sites": tuple(nodes["shape"]["sites"])})
        return cls(
            work=Work(**work | {"arguments": tuple(work["arguments"]), "folder": Path(work["folder"])}),
            nodes=Nodes(**nodes | {"shape": shape}),
            meeting=Meeting(**meeting | {"names": tuple(meeting["names"])}),
            **read,
        )


def main() -> int:
    facts = NodeFacts.here()
    _say("up", facts=asdict(facts))
    line = sys.stdin.buffer.readline()
    if not line:
        return 128 + signal.SIGHUP
    order = Order.from_json(line.decode())
    exit_with_stdin(lambda: os.kill(os.getpid(), signal.SIGHUP), silence=order.silence)
    try:
        words = _prepared(order, facts)
    except PreflightError as error:
        _say("failed", report=str(error))
        return UNAVAILABLE
    wake = _wake_on_signals()  # until here each of them ends this process
    _say("line", words=words)
    try:
        return _run(words, order, wake)
    finally:
        _end_descendants()


def _prepared(order: Order, facts: NodeFacts) -> tuple[str, ...]:
    met = meet(order.meeting, facts, _own_problem(order, facts))
    if met.nodes:
        _say("reached", nodes=[asdict(node) for node in met.nodes])
    return torchrun_words(
        order.work,
        order.nodes,
        node_rank=order.meeting.node_rank,
        master_address=order.meeting.address,
        master_port=order.meeting.port,
        interface=order.interface or facts.interface_of(met.local_address),
    )


def _own_problem(order: Order, facts: NodeFacts) -> str:
    found = []
    if order.interface and order.interface not in facts.interfaces:
        found.append(f"no network interface {order.interface!r}: expected one of {', '.join(sorted(facts.interfaces))}")
    if not os.path.isdir(order.folder):
        found.append(f"no folder {order.folder!r} to work in")
    folder = order.work.folder
    with suppress(OSError):
        if (folder / TOKEN).read_text() != order.meeting.token or not os.access(folder, os.W_OK):
            raise FileNotFoundError
        return "; ".join(found)
    found.append(f"the folder {str(folder)!r} is not here, or not to be written: expected one that all nodes share")
    return "; ".join(found)


def _run(words: tuple[str, ...], order: Order, wake: int) -> int:
    agent = subprocess.Popen(
        words,
        env={**os.environ, **order.work.environment},
        cwd=order.folder,
        stdin=subprocess.DEVNULL,
        stdout=2,  # this process's own stderr
        stderr=2,
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),  # noqa: PLW1509 - one system call, and the other thread only reads
    )
    while agent.poll() is None:
        for number in os.read(wake, 512):
            if number != signal.SIGCHLD:
                return 128 + number
    return agent.returncode if agent.returncode >= 0 else 128 - agent.returncode


def _wake_on_signals() -> int:
    """A descriptor to read the numbers of signals from: those that end this process, and SIGCHLD."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    _LIBC.prctl(_SUBREAPER, 1)
    return reading


def _end_descendants() -> None:
    for number, patience in ((signal.SIGTERM, _ASKED), (signal.SIGKILL, _KILLED)):
        asked: set[int] = set()
        for _ in Supervision(patience):
            if not (left := descendants(os.getpid())):
                return
            for process in left - asked:
                with suppress(ProcessLookupError):
                    os.kill(process, number)
            asked |= left
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def descendants(process: int) -> set[int]:
    """All descendants of a process, by /proc, including zombies."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {process}
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {process}


def _say(event: str, **values: Any) -> None:
    with suppress(OSError):  # no reader is left, which stdin shows, too
        print(json.dumps({"event": event, **values}), flush=True)


def torchrun_words(
    work: Work,
    nodes: Nodes,
    *,
    node_rank: int,
    master_address: str,
    master_port: int,
    interface: str = "",
    python: str = sys.executable,
) -> tuple[str, ...]:
    """Words of the command that runs a node's ranks; `shlex.join` makes a line of them.

    It sets only variables for the agents and gloo; the caller passes the others of `work.environment`, which may hold
    secrets. `interface`: the network interface that gloo takes on this node; empty: the one of the host's own name.

    Raises ValueError for an invalid node rank, port or number of restarts.
    """
    if not 0 <= node_rank < nodes.num_nodes:
        raise ValueError(f"node_rank={node_rank}: expected 0 to {nodes.num_nodes - 1} (num_nodes={nodes.num_nodes})")
    if not 0 < master_port < 2**16:
        raise ValueError(f"master_port={master_port}: expected 1 to 65535")
    if work.restarts < 0:
        raise ValueError(f"restarts={work.restarts}: expected 0 or more")
    is_bare_ipv6 = ":" in master_address and not master_address.startswith("[")
    address = f"[{master_address}]" if is_bare_ipv6 else master_address
    return (
        "env",
        *(f"{name}={value}" for name, value in _variables(work, interface).items()),
        python,
        "-P",
        *("-m", "torch.distributed.run"),
        *("--nnodes", str(nodes.num_nodes)),
        *("--nproc-per-node", str(nodes.ranks_per_node)),
        *_rendezvous(work, node_rank, address, master_port),
        *("--max-restarts", str(work.restarts)),
        *("--module", work.module),
        *(word.replace("$", "$$") for word in work.arguments),  # torchrun expands templates
    )


def _variables(work: Work, interface: str) -> dict[str, str]:
    """Variables of the line. PYTHONSAFEPATH: the folder that a node works in may hold modules with any name."""
    variables = {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if interface:
        variables["GLOO_SOCKET_IFNAME"] = interface
    if work.restarts:
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a new store for each start of the ranks
    return {name: work.environment.get(name, value) for name, value in variables.items()}


def _rendezvous(work: Work, node_rank: int, address: str, port: int) -> tuple[str, ...]:
    limit = max(1, math.ceil(work.join_timeout))
    if not work.restarts:
        where = ("--master-addr", address, "--master-port", str(port))
        return ("--node-rank", str(node_rank), *where, "--rdzv-conf", f"timeout={limit}")
    is_host = int(node_rank == 0)
    return (
        *("--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"{address}:{port}"),
        *("--rdzv-conf", f"is_host={is_host},join_timeout={limit},read_timeout={limit}"),
        *("--local-addr", address if is_host else f"~node{node_rank:05d}"),
    )


if __name__ == "__main__":
    sys.exit(main())
