"""Preflight of all nodes before any work starts: names those that are missing, differ, or cannot be reached.

    node 0 listens at the master's port      node i connects, with retries until the time limit
        |  <------------- name, facts, own problems ----------------------  |
        |  -------------- my time --------------------------------------->  |
        |  <------------- difference of the clocks -----------------------  |
        |  when all have connected, or at the time limit:                   |
        |  -------------- go, or the problems --------------------------->  |

Loads no torch. The port is free again before node 0's agent listens there.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from .facts import NodeFacts, differences

_PAUSE = 0.05  # [s] between two attempts to connect
_TURN = 5.0  # [s] for one node's message
_SLACK = 10.0  # [s] that a node waits for the verdict after the time limit


class PreflightError(Exception):
    """Nodes that cannot work together; the message names them and the reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Place and time limit of a preflight."""

    node_rank: int  # of this node
    names: tuple[str, ...]  # of all nodes, by rank: "node 1 (host b)"
    address: str  # of node 0
    port: int  # of node 0
    limit: float  # for all nodes to connect [s]
    token: str  # known only to nodes of this run

    @property
    def place(self) -> str:
        return f"{self.address}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """One connected node."""

    facts: NodeFacts  # as the node reports them
    problem: str = ""  # as the node reports it; empty: none
    clock_ahead: float = 0.0  # its clock minus node 0's [s]
    round_trip: float = 0.0  # of the exchange that measured `clock_ahead`, whose error is at most half of it [s]


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """Result of a preflight on one node: all nodes by rank, on node 0 only; and this node's address towards node 0 (""
    if unknown)."""

    nodes: tuple[Present, ...] = ()
    local_address: str = ""


def meet(meeting: Meeting, facts: NodeFacts, problem: str = "") -> Met:
    """Wait until all nodes have connected. Raises PreflightError on all nodes if they cannot work together."""
    if meeting.node_rank == 0:
        return _receive(meeting, Present(facts=facts, problem=problem))
    return _come(meeting, Present(facts=facts, problem=problem))


# Node 0


@dataclass(slots=True)
class _Line:
    connection: socket.socket
    _rest: bytes = field(default=b"", init=False)

    def send(self, **values: Any) -> None:
        self.connection.sendall(json.dumps(values).encode() + b"\n")

    def receive(self, limit: float) -> dict[str, Any]:
        """The next object. Raises OSError at the time limit."""
        until = time.monotonic() + limit
        while b"\n" not in self._rest:
            self.connection.settimeout(max(0.001, until - time.monotonic()))
            some = self.connection.recv(65536)
            if not some or len(self._rest) > 2**20:
                raise ConnectionError("the other side has gone")
            self._rest += some
        line, _, self._rest = self._rest.partition(b"\n")
        read = json.loads(line)
        if not isinstance(read, dict):
            raise ConnectionError("the other side does not speak this language")
        return read


def _receive(meeting: Meeting, myself: Present) -> Met:
    until = time.monotonic() + meeting.limit
    here: dict[int, Present] = {0: myself}
    lines: list[_Line] = []
    problems: list[str] = []
    with ExitStack() as stack:
        listening = stack.enter_context(_listen(meeting))
        while len(here) < len(meeting.names) and time.monotonic() < until:
            listening.settimeout(max(0.001, until - time.monotonic()))
            try:
                connection, _ = listening.accept()
            except OSError:
                continue
            line = _Line(stack.enter_context(connection))
            try:
                rank, node = _welcome(meeting, line)
            except (OSError, ValueError, KeyError, TypeError):  # a stranger, or a node that has ended
                connection.close()
                continue
            if rank in here:
                problems.append(
                    f"{meeting.names[rank]}: connected twice, from {here[rank].facts.host} and {node.facts.host}"
                )
            here[rank] = node
            lines.append(line)
        local = lines[0].connection.getsockname()[0] if lines else _resolved(meeting.address)
        problems += _judge(meeting, here)
        verdict = "\n".join(problems)
        for line in lines:
            with suppress(OSError):
                line.send(verdict=verdict)
        for line in lines:  # the side that closes first keeps its port busy for a minute
            with suppress(OSError, ValueError):
                line.receive(1.0)
    if verdict:
        raise PreflightError(verdict)
    return Met(nodes=tuple(here[rank] for rank in range(len(here))), local_address=local)


def _listen(meeting: Meeting) -> socket.socket:
    """A socket at the port of the address if it is one of this host's; otherwise (address translation, a name that this
    host may resolve to its loopback) of all addresses."""
    try:
        try:
            family = socket.AF_INET6 if ipaddress.ip_address(meeting.address).version == 6 else socket.AF_INET
            return socket.create_server((meeting.address, meeting.port), family=family)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno != errno.EADDRNOTAVAIL:
                raise
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", meeting.port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", meeting.port))
    except OSError as error:
        raise PreflightError(
            f"{meeting.names[0]}: cannot listen at port {meeting.port} ({os.strerror(error.errno or 0)}): "
            f"is another run there, or what is left of one? Type another port"
        ) from None


def _resolved(name: str) -> str:
    with suppress(OSError):
        return str(socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)[0][4][0])
    return ""


def _welcome(meeting: Meeting, line: _Line) -> tuple[int, Present]:
    hello = line.receive(_TURN)
    if hello["token"] != meeting.token:
        raise ValueError("not of this run")
    line.send(time=time.time())
    clock = line.receive(_TURN)
    rank = int(hello["node_rank"])
    if not 0 < rank < len(meeting.names):
        raise ValueError("not of this run")
    node = Present(
        facts=NodeFacts.from_json(hello["facts"]),
        problem=str(hello["problem"]),
        clock_ahead=float(clock["ahead"]),
        round_trip=float(clock["round_trip"]),
    )
    return rank, node


def _judge(meeting: Meeting, here: Mapping[int, Present]) -> list[str]:
    names = meeting.names
    missing = [name for rank, name in enumerate(names) if rank not in here]
    wrong = [f"{names[rank]}: {node.problem}" for rank, node in sorted(here.items()) if node.problem]
    for rank, node in sorted(here.items()):
        found = differences(node.facts, here[0].facts)
        if found:
            wrong.append(f"{names[rank]}: {', '.join(found)} as on {names[0]}")
    came = ", ".join(names[rank] for rank in sorted(here))
    return wrong + [
        f"{name}: silent for {meeting.limit:g} s, expected at {meeting.place} (there: {came})" for name in missing
    ]


# The other nodes


def _come(meeting: Meeting, myself: Present) -> Met:
    name, first = meeting.names[meeting.node_rank], meeting.names[0]
    started = time.monotonic()
    connection = _reach(meeting, name)
    with connection:
        line = _Line(connection)
        try:
            asked = time.time()
            clock = time.monotonic()
            line.send(
                token=meeting.token, node_rank=meeting.node_rank, facts=asdict(myself.facts), problem=myself.problem
            )
            theirs = float(line.receive(_TURN)["time"])
            took = time.monotonic() - clock
            line.send(ahead=asked + took / 2 - theirs, round_trip=took)
            verdict = str(line.receive(meeting.limit + _SLACK)["verdict"])
        except (OSError, ValueError, KeyError) as error:
            waited = time.monotonic() - started
            raise PreflightError(
                f"{name}: {first} at {meeting.place} answered, but did not say that all nodes have come "
                f"within {waited:.0f} s ({error})"
            ) from None
        local = connection.getsockname()[0]
    if verdict:
        raise PreflightError(verdict)
    return Met(local_address=local)


def _reach(meeting: Meeting, name: str) -> socket.socket:
    until = time.monotonic() + meeting.limit
    why: OSError | None = None
    while (left := until - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((meeting.address, meeting.port), timeout=min(left, _TURN))
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN:
                raise PreflightError(f"{name}: no host called {meeting.address!r} ({error.strerror})") from None
            why = error
        except OSError as error:
            why = error
        else:
            if connection.getsockname() != connection.getpeername():  # a free loopback port may connect to itself
                return connection
            connection.close()
        time.sleep(_PAUSE)
    raise PreflightError(
        f"{name}: cannot reach {meeting.names[0]} at {meeting.place}, tried for {meeting.limit:g} s "
        f"({(why and why.strerror) or why}): is there a route, and does a firewall let it through?"
    )
