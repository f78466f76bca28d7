"""Back end `ssh`: every node is a host that ssh reaches without a prompt, with stagewright and a shared folder.

The host's shell only reads a fixed command. Arguments and variables of the work are sent over ssh's stdin, so that they
need no quoting and are in no list of processes. That stream also keeps the ranks alive: when this side ends or the
network fails, the starter there ends them.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .local import refuse_shape
from .records import Nodes, Outcome, Work
from .supervise import NodeStart, Say, run_nodes, to_stderr

_SILENCE = 30.0  # [s] without a sign of life from this side after which a node ends its ranks
_ALIVE = 5  # [s] between ssh's keep-alive messages
_CONNECT = 10  # [s] for a connection
_LOOKUP = 10.0  # [s] for `ssh -G`, which does not connect


class SshBackend:
    """Nodes that are the first hosts of a hosts file.

    Arguments:
        hosts: in the order of their node ranks.
        interface: for gloo, on each host; empty: the one through which it reaches node 0.
        options: of ssh, such as ("-i", "key").
        say: prints lines.
    """

    name = "ssh"

    def __init__(
        self,
        hosts: Sequence[RemoteHost],
        *,
        interface: str = "",
        options: Sequence[str] = (),
        say: Say = to_stderr,
    ) -> None:
        self._hosts = tuple(hosts)
        self._interface = interface
        self._options = tuple(options)
        self._say = say

    def check(self, nodes: Nodes) -> None:
        refuse_shape(self.name, nodes)
        if shutil.which("ssh") is None:
            raise ValueError("--backend ssh: no `ssh` on the PATH: install OpenSSH's client, or type --backend local")
        if nodes.num_nodes > len(self._hosts):
            raise ValueError(
                f"{nodes.num_nodes} nodes, but the hosts file names {len(self._hosts)}: add hosts, or type --nodes "
                f"{len(self._hosts)}"
            )
        for host in self._hosts[: nodes.num_nodes]:
            if host.slots is not None and host.slots < nodes.ranks_per_node:
                raise ValueError(
                    f"host {host.host}: slots={host.slots}, but {nodes.ranks_per_node} ranks are to run there: type "
                    f"slots={nodes.ranks_per_node} in the hosts file, or fewer ranks per node"
                )

    def run(self, work: Work, nodes: Nodes) -> Outcome:
        self.check(nodes)
        hosts = self._hosts[: nodes.num_nodes]
        starts = [
            NodeStart(
                name=f"node {rank} (host {host.host})",
                command=self.command(host),
                interface=self._interface,
                silence=_SILENCE,
                hint=(
                    f"; `ssh {host.host}` must work without a question, and {host.python} there have stagewright "
                    f"(python=PATH in the hosts file)"
                ),
            )
            for rank, host in enumerate(hosts)
        ]
        address = hosts[0].address or self._address(hosts[0])
        return run_nodes(starts, work, nodes, address=address, say=self._say)

    def command(self, host: RemoteHost) -> tuple[str, ...]:
        starter = f"exec {shlex.quote(host.python)} -P -m stagewright.experiments.backends.node"
        return (*self._ssh(host), starter)

    def _ssh(self, host: RemoteHost, *more: str) -> tuple[str, ...]:
        return (
            *("ssh", "-T", "-a", "-x", *more),
            *("-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT}"),
            *("-o", f"ServerAliveInterval={_ALIVE}", "-o", "ServerAliveCountMax=3"),
            *self._options,
            *(("-p", str(host.port)) if host.port is not None else ()),
            *(("-l", host.user) if host.user else ()),
            *("--", host.host.strip("[]")),
        )

    def _address(self, host: RemoteHost) -> str:
        asked = subprocess.run(
            self._ssh(host, "-G"),
            capture_output=True,
            text=True,
            check=False,
            timeout=_LOOKUP,
            stdin=subprocess.DEVNULL,
        )
        for line in asked.stdout.splitlines():
            key, _, value = line.partition(" ")
            if key == "hostname":
                return value
        return host.host.strip("[]")


# --- the hosts file ---

# Excludes all that ssh or a shell could read as an option or as several words.
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?|\[[0-9A-Fa-f:.]+\]")
_USER = re.compile(r"[A-Za-z0-9_]([\w.-]*)\$?", flags=re.ASCII)
_PLACE = re.compile(r"((?P<user>[^@]*)@)?(?P<host>\[[^\]]*\]|[^:]*)(:(?P<port>.*))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteHost:
    """One host that ssh reaches."""

    host: str  # a name, an alias of the user's ssh configuration, or an address
    user: str = ""  # empty: as ssh is configured
    port: int | None = None  # None: likewise
    slots: int | None = None  # most ranks on it; None: no limit
    python: str = sys.executable  # a Python with stagewright installed
    address: str = ""  # by which the other hosts reach it; empty: the host's name as ssh resolves it

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.host):
            raise ValueError(
                f"host {self.host!r}: expected a name of letters, digits, '.', '-' or '_', or [IPv6 address]"
            )
        if self.user and not _USER.fullmatch(self.user):
            raise ValueError(f"user {self.user!r}: expected a name of letters, digits, '.', '-' or '_'")
        if self.port is not None and not 0 < self.port < 2**16:
            raise ValueError(f"port {self.port}: expected 1 to 65535")
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"slots={self.slots}: expected at least 1")

    @classmethod
    def parse(cls, line: str) -> RemoteHost:
        """`[user@]host[:port] [slots=N] [python=PATH] [address=ADDRESS]`. Raises ValueError."""
        place, *settings = shlex.split(line)
        match = _PLACE.fullmatch(place)
        if match is None:
            raise ValueError(f"{place!r}: expected [user@]host[:port]")
        values: dict[str, Any] = {"host": match["host"], "user": match["user"] or ""}
        if match["user"] == "":
            raise ValueError(f"{place!r}: expected a user's name before '@'")
        if match["port"] is not None:
            values["port"] = _number("port", match["port"])
        for setting in settings:
            name, equals, value = setting.partition("=")
            if name not in ("slots", "python", "address") or not equals or not value:
                raise ValueError(f"{setting!r}: expected slots=N, python=PATH or address=ADDRESS")
            values[name] = _number(name, value) if name == "slots" else value
        return cls(**values)


def read_hosts(path: Path) -> tuple[RemoteHost, ...]:
    """The hosts of a file, one per line, in their order. Raises ValueError that names the line.

    ada@node1.example.org:2222      slots=4 python=/opt/stagewright/bin/python
    node2                           slots=4 address=10.0.0.2        # address and port for ssh, then options
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"hosts file {str(path)!r} cannot be read: {error}") from None
    hosts = []
    for number, line in enumerate(lines, start=1):
        try:
            if shlex.split(line, comments=True):
                hosts.append(RemoteHost.parse(line.partition("#")[0]))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    if not hosts:
        raise ValueError(f"hosts file {str(path)!r} names no host: expected one a line, such as user@host:22 slots=4")
    return tuple(hosts)


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{name} {text!r}: expected a whole number")
    return int(text)
