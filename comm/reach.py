"""Whether hosts reach each other where gloo will connect their ranks; asked before gloo tries.

gloo connects each rank with all others at the address that the name of its host has there, or that of
GLOO_SOCKET_IFNAME. If that is a loopback address, or a firewall stands between, it tries five times, each as long as
the time-out, and says neither who nor what. Here the first rank of each host listens at that address and connects to
those of the other hosts; all ranks learn what failed, and say the same.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_PATIENCE = 5.0  # [s] for connecting: TCP asks again after 1 s and 3 s


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank is.

    Arguments:
        host: its name.
        address: at which gloo will listen there.
    """

    host: str
    address: str

    @classmethod
    def here(cls) -> Place:
        """The place of this process. Raises ValueError for a GLOO_SOCKET_IFNAME that names no interface."""
        return cls(host=socket.gethostname(), address=gloo_address())

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Place:
        """Back from `to_json`. Raises ValueError for another text."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError):
            raise ValueError(f"{text!r:.80} at the rendezvous is no place of a rank") from None


def gloo_address() -> str:
    """The address at which gloo listens on this host: of the first interface of GLOO_SOCKET_IFNAME; else the first of
    the host's name that is its own; else the loopback one.

    Raises ValueError for a name of no interface.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if name:
        there = interfaces()
        if name not in {each for _, each in socket.if_nameindex()}:
            raise ValueError(
                f"GLOO_SOCKET_IFNAME={name}: no network interface of {socket.gethostname()}: expected one of "
                f"{', '.join(sorted(there))}"
            )
        return there.get(name, "")
    with suppress(OSError):
        for family, kind, _, _, at in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind((at[0], 0))
                return str(at[0])
    return "127.0.0.1"


def interfaces() -> dict[str, str]:
    """IPv4 addresses by network interface of this host; those without one are left out."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def unreached(store: Store, places: Sequence[Place], rank: int, *, limit: float) -> str:
    """Why hosts do not reach each other, the same on all ranks; empty where they do. Collective over them.

    Arguments:
        store: of this meeting alone.
        places: of all ranks.
        limit: seconds that ranks wait for each other.
    """
    leaders: dict[str, int] = {}
    for number, each in enumerate(places):
        leaders.setdefault(each.host, number)
    if len(leaders) == 1 or not all(each.address for each in places):
        return ""  # an interface without an IPv4 address is gloo's own business
    first = {host: places[leader] for host, leader in leaders.items()}
    wait = timedelta(seconds=limit)
    listens, answers = ([f"reach/{what}/{host}" for host in leaders] for what in ("listens", "answers"))
    with ExitStack() as stack:
        if rank in leaders.values():
            me = list(leaders.values()).index(rank)
            server = stack.enter_context(_server(places[rank].address, backlog=len(leaders)))
            store.set(listens[me], str(server.getsockname()[1]))
            store.wait(listens, wait)
            ports = map(int, store.multi_get(listens))
            targets = {host: (first[host].address, port) for host, port in zip(leaders, ports, strict=True)}
            del targets[places[rank].host]
            store.set(answers[me], json.dumps(refusals(targets, seconds=min(_PATIENCE, limit / 2))))
        store.wait(answers, wait)  # until then all of them listen
    failures = [json.loads(answer) for answer in store.multi_get(answers)]
    return _story(first, dict(zip(leaders, failures, strict=True)))


def _server(address: str, *, backlog: int) -> socket.socket:
    """A socket to which so many others may connect, though nobody takes them in."""
    return socket.create_server((address, 0), family=_family(address), backlog=max(backlog, 128))


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def refusals(targets: Mapping[str, tuple[str, int]], *, seconds: float) -> dict[str, str]:
    """Hosts to which no connection could be made, and why.

    Arguments:
        targets: address and port by host.
        seconds: that all together may take.
    """
    found: dict[str, str] = {}
    until = time.monotonic() + seconds
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for host, at in targets.items():
            tried = stack.enter_context(socket.socket(_family(at[0])))
            tried.setblocking(False)
            error = tried.connect_ex(at)
            if error in (0, errno.EINPROGRESS):
                selector.register(tried, selectors.EVENT_WRITE, host)
            else:  # no way there, say
                found[host] = os.strerror(error)
        is_over = False
        while selector.get_map() and not is_over:
            left = until - time.monotonic()
            is_over = left <= 0  # one more look, at what came while this process did not run
            for key, _ in selector.select(max(0.0, left)):
                assert isinstance(key.fileobj, socket.socket)
                if error := key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    found[key.data] = os.strerror(error)
                selector.unregister(key.fileobj)
        found |= {key.data: f"no answer within {seconds:g} s" for key in selector.get_map().values()}
    return found


def _story(first: Mapping[str, Place], failed: Mapping[str, Mapping[str, str]]) -> str:
    lines = [
        f"{host} does not reach {other} at {first[other].address} ({why})"
        for host, others in failed.items()
        for other, why in others.items()
    ]
    if not lines:
        return ""
    return (
        f"{'; '.join(lines)}: expected the address of a network that all hosts share (its interface: type "
        f"GLOO_SOCKET_IFNAME=eth0 in front of the command), and that nothing, such as a firewall, stands between: gloo "
        f"connects to any free TCP port"
    )
