"""Nodes and their links, as one context that leaves nothing after an error."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from ....cli.processes import Process, end, let_go
from ..records import Nodes, Shape
from . import links
from .wire import WireRecord, WireSpec

# The shell reads its process id from the launcher's /proc, before it mounts the node's own.
# /sys lists interfaces; segments of shared memory belong to the node, and end with it.
_SET_UP = """
set -e
read -r pid rest < /proc/self/stat
echo "$1" > /proc/sys/kernel/hostname
mount -t proc proc /proc
mount -t sysfs sysfs /sys
if [ -d /dev/shm ]; then mount -t tmpfs tmpfs /dev/shm; fi
if [ -n "$2" ]; then mount --bind "$2" /etc/hosts; fi
ip link set lo up
echo "$pid"
exec cat > /dev/null
"""
_UNSHARE = ("unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child")
_PATIENCE = 20.0  # [s] for a node to come up or to end: both take some 10 ms


class Host:
    """A node that is up; a context that removes it with all its processes.

    Arguments:
        name: its host name.
        hosts_file: content of /etc/hosts there; None: as on this machine.
        prefix: words before every command there, such as those of a share of the processor.

    Raises OSError, with Linux's message, if this process may not make namespaces.
    """

    def __init__(self, name: str, *, hosts_file: Path | None = None, prefix: Sequence[str] = ()) -> None:
        self.name = name
        self._prefix = tuple(prefix)
        command = [*_UNSHARE, "sh", "-c", _SET_UP, "sh", name, str(hosts_file or "")]
        self._started = Process.begin(command, None, out=subprocess.PIPE, err=subprocess.PIPE)
        self._holder = self._started.process
        try:
            self.pid = self._await_pid()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        let_go([self._started], patience=_PATIENCE)  # --kill-child: process 1 ends with the holder, too

    def words(self, command: Sequence[str]) -> tuple[str, ...]:
        """The command line that runs `command` on this node, in this process's working folder."""
        enter = ("nsenter", "--target", str(self.pid), "--net", "--uts", "--ipc", "--mount", "--pid")
        return (*self._prefix, *enter, f"--wdns={Path.cwd()}", *command)

    def start(
        self, command: Sequence[str], *, output: int | IO[bytes] | None, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on this node.

        Arguments:
            command: program and arguments, run without a shell.
            output: for stdout and stderr.
            environment: variables in addition to this process's own.
        """
        return subprocess.Popen(
            self.words(command),
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def set_up(self, script: str) -> None:
        """Run a shell script in this node's network only: it sees this machine's files and processes.

        Raises OSError with its output if it fails.
        """
        enter = ("nsenter", "--target", str(self.pid), "--net", "sh", "-e", "-c", script)
        done = subprocess.run(enter, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{self.name}: {(done.stderr + done.stdout).strip()} (status {done.returncode} of: {script})")

    def crash(self) -> None:
        """End the node like a power failure, without a signal to its processes."""
        os.kill(self.pid, signal.SIGKILL)

    def _await_pid(self) -> int:
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        line = read_line(self._holder.stdout, _PATIENCE)
        if not line.strip().isdigit():
            self._holder.kill()
            said = self._holder.stderr.read().decode(errors="replace").strip()
            raise OSError(f"no namespaces for {self.name}: {said or f'no answer within {_PATIENCE:g} s'}")
        return int(line)


def read_line(stream: IO[bytes], timeout: float) -> bytes:
    """The first line of a process, read without a buffer; the part received if it ends, or after `timeout` [s]."""
    line, until = b"", time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not line.endswith(b"\n") and selector.select(max(0.0, until - time.monotonic())):
            byte = os.read(stream.fileno(), 1)
            if not byte:
                break
            line += byte
    return line


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
