"""All back ends by name, loaded on request."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ...cli.options import check_known
from .records import Backend

Say = Callable[[str], None]

# name -> module of this package, and its class: called with `say=` and the arguments of its options
BACKENDS = {
    "local": ("local", "LocalBackend"),
    "netns": ("netns", "NetnsBackend"),
    "ssh": ("ssh", "SshBackend"),
    "slurm": ("slurm", "SlurmBackend"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Access to other hosts."""

    hosts: Path | None = None  # file of hosts, for ssh
    slurm: tuple[str, ...] = ()  # options of sbatch, each "name=value", for slurm
    interface: str = ""  # network interface for gloo on these hosts; empty: the one through which a node reaches node 0

    def arguments(self, name: str) -> dict[str, Any]:
        """Arguments of a back end's class. Raises ValueError for missing or unreadable options."""
        if name == "ssh":
            from .ssh import read_hosts

            if self.hosts is None:
                raise ValueError("--backend ssh: type --hosts FILE, one host a line, such as user@host:22 slots=4")
            return {"hosts": read_hosts(self.hosts), "interface": self.interface}
        if name == "slurm":
            pairs = [option.partition("=") for option in self.slurm]
            if wrong := [option for option, pair in zip(self.slurm, pairs, strict=True) if not (pair[0] and pair[2])]:
                raise ValueError(f"--slurm {wrong[0]}: expected NAME=VALUE, such as partition=long")
            return {"options": {key: value for key, _, value in pairs}, "interface": self.interface}
        return {}


def backend(name: str, *, say: Say, access: Access | None = None) -> Backend:
    """The back end of this name. `say` prints its lines. Raises ValueError, with near matches, for an unknown name."""
    check_known("unknown back end", name, BACKENDS, listed="back ends")
    module, maker = BACKENDS[name]
    arguments = (access or Access()).arguments(name)
    made = getattr(importlib.import_module(f".{module}", __package__), maker)(say=say, **arguments)
    return cast(Backend, made)
