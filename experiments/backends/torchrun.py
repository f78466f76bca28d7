"""The torchrun line of a node: every back end ends in it, and it is printed, so that any other launcher can wrap it.

Two ways in which agents meet, by whether ranks may be started again:

    no restarts   static rendezvous: agents meet once, a second sooner than the other way.
    restarts      c10d rendezvous on a store at node 0, a new round for each start. The list of those who wait there
                  makes all agents start their ranks again together, and each round has a store of its own. Under static
                  rendezvous an agent does not learn that another one starts again, and all starts share one store, so
                  that a rank may find addresses of dead ones: with torch 2.13 ranks failed more often than they had to.

Agents of a c10d rendezvous are told who hosts the store (`is_host`): guessing it from the names of hosts fails in
network namespaces, which share one. They are ranked by name, therefore node 0 gives its address and all others a number
behind "~", which stands behind every character of an address.
"""

from __future__ import annotations

import math
import os
import sys

from .records import Nodes, Work


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

    Only what the agents and gloo need stands in it as variables; the others of `work.environment`, which may hold
    secrets, are the caller's to pass on.

    Arguments:
        node_rank: of this node, 0 is the one whose address is `master_address`.
        master_address: a name or address of node 0 that all nodes reach.
        master_port: a port that is free there.
        interface: the network interface that gloo takes on this node; empty: the one of the host's own name.
        python: of this node.

    Raises ValueError for a node rank, a port or a number of restarts that cannot be.
    """
    if not 0 <= node_rank < nodes.num_nodes:
        raise ValueError(f"node_rank={node_rank}: expected 0 to {nodes.num_nodes - 1} (num_nodes={nodes.num_nodes})")
    if not 0 < master_port < 2**16:
        raise ValueError(f"master_port={master_port}: expected 1 to 65535")
    if work.restarts < 0:
        raise ValueError(f"restarts={work.restarts}: expected 0 or more")
    return (
        "env",
        *(f"{name}={value}" for name, value in _variables(work, interface).items()),
        python,
        "-P",
        *("-m", "torch.distributed.run"),
        *("--nnodes", str(nodes.num_nodes)),
        *("--nproc-per-node", str(nodes.ranks_per_node)),
        *_rendezvous(work, node_rank, _bracketed(master_address), master_port),
        *("--max-restarts", str(work.restarts)),
        *("--module", work.module),
        *(word.replace("$", "$$") for word in work.arguments),  # torchrun takes them for templates
    )


def _variables(work: Work, interface: str) -> dict[str, str]:
    """Variables of the line. PYTHONSAFEPATH: the folder that a node works in may hold modules with any name."""
    variables = {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if interface:
        variables["GLOO_SOCKET_IFNAME"] = interface
    if work.restarts:
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a store of its own for each start of the ranks
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


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address and not address.startswith("[") else address
