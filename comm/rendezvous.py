"""The rendezvous of processes at the store of MASTER_ADDR, and whether gloo will be able to connect them.

gloo connects each rank with all others at the address to which its host's name resolves there, or that of
GLOO_SOCKET_IFNAME. If that is a loopback address, or a firewall blocks it, it tries five times, each as long as the
time-out, and names neither rank nor reason. Here the first rank of each host listens at that address and connects to
those of the other hosts; all ranks learn what failed, and raise the same error.
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
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

from .failures import PeerLost, short_reason
from .forked import kept_from_children
from .groups import DeviceOf, backend_for, no_more_files
from .mesh import World

_LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_PATIENCE = 5.0  # [s] for connecting: TCP retries after 1 s and 3 s


@kept_from_children()
def join_world(*, device: torch.device, timeout: float) -> World:
    """Use the process group that exists; else, with WORLD_SIZE above 1, make one; else run in one process.

    Raises RuntimeError that names the address, and the ranks that are missing, when the rendezvous fails within
    `timeout` [s]; PeerLost that names hosts which gloo cannot connect, and what to type; ValueError for a
    GLOO_SOCKET_IFNAME that is no interface.
    """
    if dist.is_initialized():
        return World(rank=dist.get_rank(), size=dist.get_world_size())
    size = _environment("WORLD_SIZE", default=1)
    if size <= 1:
        return World(rank=0, size=1)
    world = World(rank=_environment("RANK"), size=size)
    limit = timedelta(seconds=timeout)
    address = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    place = json.dumps(Place(socket.gethostname(), gloo_address(), *DeviceOf.here(device)))
    try:
        store, said = _meet(world, limit, place)
    except Exception as error:
        raise RuntimeError(
            f"rank {world.rank} of {size} found no rendezvous at {address} within {timeout:g} s "
            f"({short_reason(error)}): expected all {size} ranks to be started with the same MASTER_ADDR and "
            f"MASTER_PORT, each with its own RANK"
        ) from error
    places = [read_place(each) for each in said]
    kind = backend_for([DeviceOf(*each[2:]) for each in places], lambda ranks: f"ranks {', '.join(map(str, ranks))}")
    story = unreached(store, places, world.rank, limit=timeout) if kind == "gloo" else ""
    if story:
        raise PeerLost(f"rank {world.rank} of {size} cannot be connected with all others: {story}")
    try:
        dist.init_process_group(kind, store=store, rank=world.rank, world_size=world.size, timeout=limit)
        connected = [f"connected/{rank}" for rank in range(size)]
        store.set(connected[world.rank], "")
        store.wait(connected, limit)  # a process whose caller fails at once must not end while others still connect
    except Exception as error:
        raise RuntimeError(
            f"rank {world.rank} of {size} found all others at {address}, but could not be connected with them within "
            f"{timeout:g} s ({no_more_files(size) or short_reason(error)})"
        ) from error
    return world


def _meet(world: World, limit: timedelta, mine: str) -> tuple[Store, list[str]]:
    """The store at MASTER_ADDR, once all ranks have reached it, and the text of each: torch's env:// rendezvous, with
    an error that names missing ranks. The agent that started the ranks hosts it, else rank 0: on loopback alone, unless
    the job spans hosts."""
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ValueError(f"{name} is not set")
    host, port, listens = os.environ["MASTER_ADDR"], _environment("MASTER_PORT"), None
    is_master = world.rank == 0 and not has_agent
    is_one_host = host in ("localhost", "::1", _LOOPBACK) or os.environ.get("LOCAL_WORLD_SIZE") == str(world.size)
    if is_one_host and not has_agent:
        host = _LOOPBACK
        with suppress(OSError):  # this process listens there already, or the store reports who does
            listens = socket.create_server((host, port), backlog=128 + world.size).detach() if is_master else None
    store = TCPStore(
        host,
        port,
        world.size,
        is_master=is_master,
        master_listen_fd=listens,
        timeout=limit,
        wait_for_workers=False,
        multi_tenant=not has_agent,
    )
    visit = store.add(f"stagewright/visits of {world.rank}", 1)  # a process group may be made again
    places = [f"stagewright/visit {visit}/{rank}" for rank in range(world.size)]
    store.set(places[world.rank], mine)
    try:
        store.wait(places, limit)
    except RuntimeError:
        missing = [str(rank) for rank, place in enumerate(places) if not store.check([place])]
        raise RuntimeError(f"missing: rank {', '.join(missing)}") from None
    said = [each.decode() for each in store.multi_get(places)]
    return PrefixStore(f"default_pg/{visit}", store), said


def _environment(name: str, *, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ValueError(f"{name}={text!r} in the environment: expected a whole number; start with torchrun") from None


class Place(NamedTuple):
    """Where a rank is: its host, the address at which gloo will listen there, its device (see `DeviceOf`)."""

    host: str
    address: str
    device: str = ""
    backend: str = "gloo"


def read_place(text: str) -> Place:
    try:
        return Place(*json.loads(text))
    except (TypeError, ValueError):
        raise ValueError(f"{text!r:.80} at the rendezvous is no place of a rank") from None


def gloo_address() -> str:
    """The address at which gloo listens on this host: of the first interface of GLOO_SOCKET_IFNAME; else the first one
    of the host's name that can be bound here; else the loopback address. Raises ValueError for an unknown interface."""
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
    return _LOOPBACK


def interfaces() -> dict[str, str]:
    """IPv4 addresses by network interface of this host; interfaces without one are left out."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def unreached(store: Store, places: Sequence[Place], rank: int, *, limit: float) -> str:
    """Why hosts do not reach each other, the same on all ranks; empty where they do. Collective over the ranks.

    Arguments:
        store: of this rendezvous alone.
        places: of all ranks.
        limit: of the waits of ranks for each other [s].
    """
    leaders: dict[str, int] = {}
    for number, each in enumerate(places):
        leaders.setdefault(each.host, number)
    if len(leaders) == 1 or not all(each.address for each in places):
        return ""  # an interface without an IPv4 address is left to gloo
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
    return socket.create_server((address, 0), family=_family(address), backlog=max(backlog, 128))


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def refusals(targets: Mapping[str, tuple[str, int]], *, seconds: float) -> dict[str, str]:
    """Hosts to which no connection could be made, and why. `targets`: address and port by host. `seconds`: limit for
    all of them together."""
    found: dict[str, str] = {}
    until = time.monotonic() + seconds
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for host, at in targets.items():
            tried = stack.enter_context(socket.socket(_family(at[0])))
            tried.setblocking(False)
            error = tried.connect_ex(at)
            if error in (0, errno.EINPROGRESS):
                selector.register(tried, selectors.EVENT_WRITE, host)
            else:  # no route to the host, for example
                found[host] = os.strerror(error)
        is_over = False
        while selector.get_map() and not is_over:
            left = until - time.monotonic()
            is_over = left <= 0  # one more poll, for what arrived while this process did not run
            for key, _ in selector.select(max(0.0, left)):
                assert isinstance(key.fileobj, socket.socket)
                if error := key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    found[key.data] = os.strerror(error)
                selector.unregister(key.fileobj)
        found |= {key.data: f"no answer within {seconds:g} s" for key in selector.get_map().values()}
    return found


def _story(first: Mapping[str, Place], failed: Mapping[str, Mapping[str, str]]) -> str:
    refused = [(host, other, why) for host, others in failed.items() for other, why in others.items()]
    lines = [f"{host} does not reach {other} at {first[other].address} ({why})" for host, other, why in refused]
    if not lines:
        return ""
    return (
        f"{'; '.join(lines)}: expected the address of a network that all hosts share (its interface: type "
        f"GLOO_SOCKET_IFNAME=eth0 before the command), and that nothing, such as a firewall, blocks it: gloo "
        f"connects to any free TCP port"
    )
