"""Records that every back end takes and gives: nodes, the work that each of them starts, and how it ended.

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
    """Shape of the links between nodes, where a back end makes them.

    Arguments:
        bandwidth: of each node's network card, in each direction [bytes/s]; None: not limited.
        latency: of a packet from node to node, one way [s].
        sites: the site of each node; empty: all stand at one.
        site_latency: of a packet from site to site, in place of `latency` [s].
        site_bandwidth: of a node's card, for what goes to other sites [bytes/s]; None: as `bandwidth`.
        cpu_share: of the host's cores, per node; None: not limited.
    """

    bandwidth: float | None = None
    latency: float = 0.0
    sites: tuple[int, ...] = ()
    site_latency: float = 0.0
    site_bandwidth: float | None = None
    cpu_share: float | None = None

    @property
    def is_plain(self) -> bool:
        return self == Shape()


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Nodes of a run: how many, ranks on each, and links between them."""

    num_nodes: int = 1
    ranks_per_node: int = 1
    shape: Shape = Shape()

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Program of each rank: a module as a script, under torchrun.

    Arguments:
        module: dotted name, such as "stagewright.experiments.jobs.worker".
        arguments: of the script, each one word; nothing is left to a shell.
        folder: where logs of the nodes go, and what the ranks write.
        environment: variables on top of each node's own.
        restarts: how often torchrun may start the ranks again after a failure.
        timeout: for the whole [s].
        join_timeout: for a node to come [s].
    """

    module: str
    arguments: tuple[str, ...] = ()
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    timeout: float = 600.0
    join_timeout: float = 60.0

    def begun(self) -> Work:
        """With an absolute folder, and a secret of its ranks (see stagewright.comm.sealed)."""
        variables = {"STAGEWRIGHT_SECRET": secrets.token_hex(32), **self.environment}
        return replace(self, folder=self.folder.absolute(), environment=variables)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended.

    Arguments:
        status: exit status for the whole, 0 when all is well.
        timed_out: whether it was stopped since its time was over.
        report: for the user: why it failed, or what was not as asked for; empty when all is well.
        commands: the torchrun line of each node, as it could be typed there.
    """

    status: int
    timed_out: bool = False
    report: str = ""
    commands: tuple[str, ...] = ()


class Backend(Protocol):
    """One way to get nodes and to run work on them."""

    name: str

    def check(self, nodes: Nodes) -> None:
        """ValueError where it cannot run here or cannot give such nodes: what is missing, and what to type instead."""

    def run(self, work: Work, nodes: Nodes) -> Outcome:
        """Run the work on all nodes and wait for its end; leaves nothing behind, however it ends."""
