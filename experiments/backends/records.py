"""Records of all back ends: nodes, the work on them, and its outcome.

Work ---+
        +--> Backend.run ---> on each node: torchrun --nnodes N --node-rank i ... module arguments ---> Outcome
Nodes --+
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of the links between nodes, for back ends that make them."""

    bandwidth: float | None = None  # of each node's network card, in each direction [bytes/s]; None: no limit
    latency: float = 0.0  # of a packet from node to node, one way [s]
    sites: tuple[int, ...] = ()  # the site of each node; empty: all at one site
    site_latency: float = 0.0  # of a packet from site to site, instead of `latency` [s]
    site_bandwidth: float | None = None  # of a node's card to other sites [bytes/s]; None: as `bandwidth`
    cpu_share: float | None = None  # share of the host's cores per node; None: no limit

    @property
    def is_plain(self) -> bool:
        return self == Shape()


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Nodes of a run: their number, ranks on each, and links between them."""

    num_nodes: int = 1
    ranks_per_node: int = 1
    shape: Shape = Shape()

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Program of each rank: a module as a script, under torchrun."""

    module: str  # dotted name, such as "stagewright.experiments.jobs.worker"
    arguments: tuple[str, ...] = ()  # of the script, without a shell
    folder: Path  # for logs of the nodes and files of the ranks
    environment: Mapping[str, str] = field(default_factory=dict)  # variables in addition to each node's own
    restarts: int = 0  # most restarts of the ranks by torchrun after a failure
    timeout: float = 600.0  # for the run [s]
    join_timeout: float = 60.0  # for a node to connect [s]

    def begun(self) -> Work:
        """The work with an absolute folder, and a secret for its ranks (see stagewright.comm.sealed)."""
        variables = {"STAGEWRIGHT_SECRET": secrets.token_hex(32), **self.environment}
        return replace(self, folder=self.folder.absolute(), environment=variables)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    status: int  # exit status of the run, 0 for success
    timed_out: bool = False  # whether the time limit ended it
    report: str = ""  # for the user: why it failed, or how it differs from the request; else empty
    commands: tuple[str, ...] = ()  # the torchrun line of each node, as it could be typed there


class Backend(Protocol):
    """One way to get nodes and to run work on them."""

    name: str

    def check(self, nodes: Nodes) -> None:
        """Raise ValueError, with the alternative, if it cannot run here or cannot provide such nodes."""

    def run(self, work: Work, nodes: Nodes) -> Outcome:
        """Run the work on all nodes and wait for its end; no process or link remains after any ending."""
