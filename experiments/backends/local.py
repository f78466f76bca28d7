"""Back end `local`: every node is an agent on this host, connected over loopback."""

from __future__ import annotations

from ...cli.host import loopback
from .node import STARTER
from .records import Nodes, Outcome, Work
from .supervise import NodeStart, Say, run_nodes, to_stderr

_ADDRESS = "127.0.0.1"


class LocalBackend:
    """Nodes that are processes of this host, for tests and experiments without shaped links. `say` prints lines."""

    name = "local"

    def __init__(self, *, say: Say = to_stderr) -> None:
        self._say = say

    def check(self, nodes: Nodes) -> None:
        refuse_shape(self.name, nodes)

    def run(self, work: Work, nodes: Nodes) -> Outcome:
        self.check(nodes)
        ranks = range(nodes.num_nodes)
        starts = [NodeStart(name=f"node {rank}", command=STARTER, interface=loopback()) for rank in ranks]
        return run_nodes(starts, work, nodes, address=_ADDRESS, say=self._say)


def refuse_shape(name: str, nodes: Nodes) -> None:
    """Raise ValueError for shaped links, which the back end `name` cannot make, and for less than one node."""
    if nodes.num_nodes < 1 or nodes.ranks_per_node < 1:
        raise ValueError(f"{nodes.num_nodes} nodes of {nodes.ranks_per_node} ranks: expected at least 1 of each")
    if not nodes.shape.is_plain:
        raise ValueError(
            f"--backend {name} cannot shape links or share out cores ({nodes.shape}): expected none of --bandwidth, "
            f"--latency, --sites, --cpu-share, or type --backend netns"
        )
