"""Nodes and their links, as one context that leaves nothing after an error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from ....cli.processes import Process, end
from ..records import Nodes, Shape
from . import links
from .host import Host, read_line
from .wire import WireRecord, WireSpec

_PATIENCE = 20.0  # [s] for the wire to start or to end, which takes some 100 ms


class Wire:
    """The process that carries packets between nodes; a context that ends it.

    Raises OSError, with its output, if it does not start.
    """

    def __init__(self, hosts: Sequence[Host], shape: Shape) -> None:
        nodes, (near, far) = range(len(hosts)), links.wire_links(shape)
        spec = WireSpec(
            processes=tuple(host.pid for host in hosts),
            addresses=tuple(links.address(node, shape) for node in nodes),
            sites=tuple(links.site(node, shape) for node in nodes),
            near=near,
            far=far,
            room=links.wire_room(shape, len(hosts)),
        )
        self.record: WireRecord | None = None
        command = [sys.executable, "-P", "-m", f"{__package__}.wire", spec.to_json()]
        self._started = Process.begin(command, None, out=subprocess.PIPE, err=subprocess.PIPE)
        self._process = self._started.process
        assert self._process.stdout is not None
        if read_line(self._process.stdout, _PATIENCE) != b"ready\n":
            self._process.kill()
            self._process.wait()
            why = self.broken()
            self.close()
            raise OSError(why)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def broken(self) -> str:
        """Why it has stopped; empty while it runs."""
        if self._process.poll() is None:
            return ""
        assert self._process.stderr is not None
        said = self._process.stderr.read().decode(errors="replace").strip()
        return f"the wire between the nodes ended (status {self._process.returncode}): {said or 'it said nothing'}"

    def close(self) -> None:
        """End it, and keep its record of packets."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        said = read_line(process.stdout, _PATIENCE)
        if said.endswith(b"}\n"):
            self.record = WireRecord(**json.loads(said))
        end([self._started])


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Connected nodes. `wire`: carries packets between them; None: the kernel does."""

    hosts: tuple[Host, ...]
    addresses: tuple[str, ...]
    wire: Wire | None


@contextmanager
def network(nodes: Nodes, *, has_netem: bool, prefixes: Sequence[Sequence[str]] = ()) -> Iterator[Network]:
    """Start and connect nodes; the context removes them at its end. `has_netem`: the kernel can delay packets;
    `prefixes`: words before every command of a node, by node. Raises OSError with Linux's message."""
    shape = nodes.shape
    addresses = tuple(links.address(node, shape) for node in range(nodes.num_nodes))
    with ExitStack() as stack:
        names = stack.enter_context(_hosts_file(addresses))
        hosts = tuple(
            stack.enter_context(Host(f"node{node}", hosts_file=names, prefix=prefixes[node] if prefixes else ()))
            for node in range(nodes.num_nodes)
        )
        wire = None
        if links.needs_wire(shape, has_netem=has_netem):
            wire = stack.enter_context(Wire(hosts, shape))
        else:
            switch = stack.enter_context(Host("switch"))
            switch.set_up(links.switch_script([host.pid for host in hosts], shape))
        for node, host in enumerate(hosts):
            host.set_up(links.node_script(node, shape, on_wire=wire is not None))
        yield Network(hosts=hosts, addresses=addresses, wire=wire)


@contextmanager
def _hosts_file(addresses: Sequence[str]) -> Iterator[Path]:
    """Content of /etc/hosts on the nodes: the names of all nodes, so that none is resolved outside."""
    with NamedTemporaryFile("w", prefix="stagewright-hosts-") as file:
        names = {"127.0.0.1": "localhost", **{at: f"node{node}" for node, at in enumerate(addresses)}}
        # A socket for both protocols calls an IPv4 address ::ffff:..., and torch's store asks for the name of that.
        lines = ["::1 localhost", *(f"{prefix}{at} {name}" for prefix in ("", "::ffff:") for at, name in names.items())]
        file.write("\n".join(lines) + "\n")
        file.flush()
        yield Path(file.name)
