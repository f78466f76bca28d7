"""Back end `netns`: every node is a set of Linux namespaces on this host, with its own address and shaped links."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

from ...cli.launcher import sigterm_as_interrupt
from .namespaces import links
from .namespaces.cpu_share import remove_leftovers, shares, why_no_share
from .namespaces.network import Host, Network, network
from .namespaces.wire import WireRecord
from .node import STARTER
from .records import Nodes, Outcome, Shape, Work
from .supervise import NodeStart, Say, run_nodes, to_stderr

_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "mount"}
_TUN = Path("/dev/net/tun")
_CARRIED_ANYWHERE = 50e6  # [bytes/s] slower links need no measurement
_MOST_NODES = 250  # addresses of a site
_LATE = 0.01  # share of late packets above which the report warns
_SECONDS = 0.25
_PORT = 29400  # free on every node: nothing else runs there
_TAKE = f"""
import socket
with socket.create_server(("", {_PORT})) as server:
    print("ready", flush=True)
    peer, _ = server.accept()
    buffer = bytearray(1 << 20)
    while peer.recv_into(buffer):
        pass
    peer.close()
"""
_GIVE = f"""
import socket, sys, time
with socket.create_connection((sys.argv[1], {_PORT}), timeout=20) as peer:
    block, sent, start = bytes(1 << 18), 0, time.perf_counter()
    while time.perf_counter() - start < {_SECONDS}:
        sent += peer.send(block)
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)
    print(sent / (time.perf_counter() - start))
"""


def what_is_missing() -> str:
    """Why nodes cannot be made here, and the remedy; empty if they can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, and this is {sys.platform}"
    programs = [name for name in _PACKAGES if shutil.which(name) is None]
    if programs:
        packages = " ".join(sorted({_PACKAGES[name] for name in programs}))
        return f"not found: {', '.join(programs)} (Debian: apt install {packages})"
    if os.geteuid() != 0:
        return f"network namespaces need root, and this is user {os.geteuid()}"
    try:
        with Host("probe"):
            return ""
    except OSError as error:
        return f"root may not make namespaces here ({error}); a container needs --privileged, or CAP_SYS_ADMIN"


def has_netem() -> bool:
    """Whether this kernel can delay packets. Raises OSError if namespaces cannot be made."""
    with Host("probe") as host:
        try:
            host.set_up("tc qdisc add dev lo root netem delay 1ms")
        except OSError:
            return False
        return True


def why_no_wire() -> str:
    """Why a process cannot carry packets here; empty if it can."""
    if _TUN.exists():
        return ""
    return f"{_TUN} is missing: modprobe tun; a container needs --device {_TUN} too"


class NetnsBackend:
    """Nodes in namespaces of this host. Needs root; first removes the remains of an interrupted run. `say` prints
    lines; `measured_capacity`: of the wire, or of the kernel [bytes/s]."""

    name = "netns"

    def __init__(
        self, *, say: Say = to_stderr, measured_capacity: Callable[[bool], float] = lambda wire: capacity(of_wire=wire)
    ) -> None:
        self._say = say
        self._measure = measured_capacity
        self._capacities: dict[bool, float] = {}

    def check(self, nodes: Nodes) -> None:
        _check_numbers(nodes)
        if missing := what_is_missing():
            raise ValueError(
                f"--backend netns: {missing}; type `sudo -E env PATH=$PATH stagewright ...`, "
                f"or --backend local, whose links are not shaped"
            )
        shape = nodes.shape
        on_wire = links.needs_wire(shape, has_netem=self._has_netem)
        if on_wire and (missing := why_no_wire()):
            raise ValueError(f"--backend netns with a latency: {missing}; or leave out --latency")
        if shape.cpu_share is not None and (why := why_no_share(shape.cpu_share, nodes.num_nodes)):
            raise ValueError(f"--backend netns: {why}")
        self._check_rate(shape, on_wire)

    def run(self, work: Work, nodes: Nodes) -> Outcome:
        """Run the work on all nodes, and remove them and their links after any ending.

        Writes wire.json to the work's folder if a process carried the packets: their number and delays.
        """
        self.check(nodes)
        for name in remove_leftovers():
            self._say(f"removed what an interrupted run left: control group {name}")
        with ExitStack() as stack:
            stack.enter_context(sigterm_as_interrupt())
            net = self._network(stack, nodes)
            broken = stack.enter_context(_crashed_with_the_wire(net))
            starts = [
                NodeStart(name=f"node {rank} ({address})", command=host.words(STARTER), interface=links.INTERFACE)
                for rank, (host, address) in enumerate(zip(net.hosts, net.addresses, strict=True))
            ]
            outcome = run_nodes(starts, work, nodes, address=net.addresses[0], port=_PORT, say=self._say)
        if broken:
            return replace(outcome, status=outcome.status or 1, report="\n".join([*broken, outcome.report]).strip())
        if net.wire is None or net.wire.record is None:
            return outcome
        return self._with_wire(outcome, net.wire.record, work.folder)

    def _network(self, stack: ExitStack, nodes: Nodes) -> Network:
        prefixes = stack.enter_context(shares(nodes.shape.cpu_share, nodes.num_nodes))
        try:
            return stack.enter_context(network(nodes, has_netem=self._has_netem, prefixes=prefixes))
        except OSError as error:
            raise ValueError(f"--backend netns: Linux did not make the nodes: {error}") from None

    @cached_property
    def _has_netem(self) -> bool:
        return has_netem()

    def _check_rate(self, shape: Shape, on_wire: bool) -> None:
        rate = max(shape.bandwidth or 0.0, shape.site_bandwidth or 0.0)
        if rate <= _CARRIED_ANYWHERE:
            return
        if on_wire not in self._capacities:
            self._capacities[on_wire] = self._measure(on_wire)
        carried = self._capacities[on_wire]
        if rate > carried:
            who = "the process that holds packets back carries" if on_wire else "Linux carries"
            without = ", or leave out --latency: Linux itself carries more" if on_wire else ""
            raise ValueError(
                f"links of {8e-9 * rate:.3g} Gbit/s: {who} {8e-9 * carried:.2g} Gbit/s between two nodes here, "
                f"measured just now; type a lower --bandwidth{without}"
            )

    def _with_wire(self, outcome: Outcome, record: WireRecord, folder: Path) -> Outcome:
        (folder / "wire.json").write_text(json.dumps(asdict(record)) + "\n")
        self._say(record.describe())
        if outcome.status == 0 and (record.dropped or record.late > _LATE * record.packets):
            warning = f"links were not as asked for, this machine was too busy; {record.describe()}"
            return replace(outcome, report="\n".join([outcome.report, warning]).strip())
        return outcome


def _check_numbers(nodes: Nodes) -> None:
    shape = nodes.shape
    if not 1 <= nodes.num_nodes <= _MOST_NODES or nodes.ranks_per_node < 1:
        raise ValueError(
            f"{nodes.num_nodes} nodes of {nodes.ranks_per_node} ranks: expected 1 to {_MOST_NODES} nodes, "
            f"and at least 1 rank on each"
        )
    if shape.sites and (
        len(shape.sites) != nodes.num_nodes or not all(0 <= site < _MOST_NODES for site in shape.sites)
    ):
        raise ValueError(
            f"sites {shape.sites}: expected a number from 0 to {_MOST_NODES - 1} for each of {nodes.num_nodes} nodes"
        )
    for name in ("bandwidth", "site_bandwidth"):
        rate = getattr(shape, name)
        if rate is not None and rate < 1000:
            raise ValueError(f"{name}={rate:g}: expected at least 1000 bytes/s")
    for name in ("latency", "site_latency"):
        if not 0 <= getattr(shape, name) <= 10:
            raise ValueError(f"{name}={getattr(shape, name):g}: expected 0 to 10 s")


@contextmanager
def _crashed_with_the_wire(net: Network) -> Iterator[list[str]]:
    """End the nodes when the process that carries their packets ends: they would wait for ever. Yields the reason."""
    broken: list[str] = []
    done = threading.Event()

    def watch(wire_broken: Callable[[], str]) -> None:
        while not done.wait(0.2):
            if why := wire_broken():
                broken.append(why)
                for host in net.hosts:
                    host.crash()
                return

    watcher = threading.Thread(target=watch, args=(net.wire.broken,), daemon=True) if net.wire else None
    if watcher:
        watcher.start()
    try:
        yield broken
    finally:
        done.set()
        if watcher:
            watcher.join()


def capacity(*, of_wire: bool) -> float:
    """Bytes per second of one connection between two nodes without a limit; `of_wire`: through the process that delays
    packets, else through the kernel. Raises OSError if it cannot be measured."""
    shape = Shape(latency=1e-5 if of_wire else 0.0)
    with network(Nodes(num_nodes=2, shape=shape), has_netem=False) as net:
        taker = net.hosts[1].start(_python(_TAKE), output=subprocess.PIPE)
        try:
            assert taker.stdout is not None
            if taker.stdout.readline() != b"ready\n":
                raise OSError("what two nodes carry could not be measured: the receiver did not start")
            giver = net.hosts[0].start(_python(_GIVE, net.addresses[1]), output=subprocess.PIPE)
            said, _ = giver.communicate()
        finally:
            net.hosts[1].crash()
            taker.communicate()
    try:
        return float(said)
    except ValueError:
        raise OSError(f"what two nodes carry could not be measured: {said.decode(errors='replace')}") from None


def _python(script: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", script, *words)
