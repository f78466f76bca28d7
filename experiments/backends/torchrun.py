"""The torchrun line of a node, used by every back end and printed, so that any other launcher can wrap it.

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

    It sets only variables for the agents and gloo; the caller passes the others of `work.environment`, which may hold
    secrets.

    Arguments:
        node_rank: of this node; 0 is the node at `master_address`.
        master_address: a name or address of node 0 that all nodes reach.
        master_port: a port that is free there.
        interface: the network interface that gloo takes on this node; empty: the one of the host's own name.
        python: of this node.

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
