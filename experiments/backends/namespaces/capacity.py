"""Rate that this machine carries between two nodes now, measured: a link cannot be shaped to be faster than that."""

from __future__ import annotations

import subprocess
import sys

from ..records import Nodes, Shape
from .network import network

_SECONDS = 0.25
_PORT = 29400
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


def capacity(*, of_wire: bool) -> float:
    """Bytes per second that one connection between two nodes without a limit carries.

    Arguments:
        of_wire: carried by the process that holds packets back; else by the kernel.

    Raises OSError if it cannot be measured.
    """
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
