"""Process groups: how processes meet, and over which groups links go."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

from .errors import PeerLost, PipelineError, PipelineTimeout, short_reason
from .mesh import MeshPlace, World
from .process_group import Lanes, Link
from .reach import Place, unreached

T = TypeVar("T")

GLOO_LANES = 4
_LOOPBACK = "127.0.0.1"
_POLL, _MOST_POLL = 0.001, 0.05  # [s] from look to look at whether all have come: ever longer
_LOOKS = 8  # of them to a look at whether one has failed
_LEAST = 0.1  # [s] for what still has to be tried when the time is up


def join_world(*, device: torch.device, timeout: float) -> World:
    """Use the process group that is present; else, with WORLD_SIZE above 1, make one; else be alone.

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
    limit, gloo = timedelta(seconds=timeout), backend_for(device) == "gloo"
    address = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    place = Place.here() if gloo else None
    try:
        store, places = _meet(world, limit, "" if place is None else place.to_json())
    except Exception as error:
        raise RuntimeError(
            f"rank {world.rank} of {size} found no rendezvous at {address} within {timeout:g} s "
            f"({short_reason(error)}): expected all {size} ranks to be started with the same MASTER_ADDR and "
            f"MASTER_PORT, each with its own RANK"
        ) from error
    story = unreached(store, [Place.from_json(each) for each in places], world.rank, limit=timeout) if gloo else ""
    if story:
        raise PeerLost(f"rank {world.rank} of {size} cannot be connected with all others: {story}")
    try:
        dist.init_process_group(backend_for(device), store=store, rank=world.rank, world_size=world.size, timeout=limit)
        connected = [f"connected/{rank}" for rank in range(size)]
        store.set(connected[world.rank], "")
        store.wait(connected, limit)  # whose caller fails at once must not leave while others still connect
    except Exception as error:
        raise RuntimeError(
            f"rank {world.rank} of {size} met all others at {address}, but could not be connected with them within "
            f"{timeout:g} s ({short_reason(error)})"
        ) from error
    return world


def _meet(world: World, limit: timedelta, mine: str) -> tuple[Store, list[str]]:
    """The store at MASTER_ADDR, which all ranks have reached, and what each has said of itself: torch's env://
    rendezvous, which names who is missing.

    An agent that started the ranks hosts it, else rank 0: on loopback alone, unless the job spans hosts.
    """
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ValueError(f"{name} is not set")
    host, port, listens = os.environ["MASTER_ADDR"], _environment("MASTER_PORT"), None
    is_master = world.rank == 0 and not has_agent
    if not has_agent and _is_one_host(host, world):
        host = _LOOPBACK
        with suppress(OSError):  # this process listens there already, or the store tells who does
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


def _is_one_host(host: str, world: World) -> bool:
    """Whether all ranks are on this one: no other means it by that address, or whoever started them has said so."""
    return host in ("localhost", "::1", _LOOPBACK) or os.environ.get("LOCAL_WORLD_SIZE") == str(world.size)


def _environment(name: str, *, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ValueError(f"{name}={text!r} in the environment: expected a whole number; start with torchrun") from None


def backend_for(device: torch.device) -> str:
    """gloo for the CPU, nccl for CUDA."""
    return "nccl" if device.type == "cuda" else "gloo"


def as_one(run: Callable[[], T], *, what: str, place: MeshPlace, processes: Sequence[int], timeout: float) -> T:
    """A collective call, or PipelineTimeout or PeerLost that says what it was for and which processes make it."""
    started = time.monotonic()
    try:
        return run()
    except RuntimeError as error:
        waited = time.monotonic() - started
        story = (
            f"{place.name_of(place.world.rank)}: {what}, together with {place.names_of(processes)}, failed after "
            f"{waited:.1f} s ({short_reason(error)}): did all of them make this call?"
        )
        kind = PipelineTimeout if waited >= timeout else PeerLost
        raise kind(story, peers=[one for one in processes if one != place.world.rank]) from error


class Groups:
    """Process groups of one pipeline, made in the same order by all processes, and destroyed together.

    Before each one, and behind the last, all processes meet at the rendezvous store: they connect at the same time, and
    one that does not come is known by name. A group holds threads and descriptors until `close`.
    """

    def __init__(
        self,
        place: MeshPlace,
        *,
        device: torch.device,
        timeout: float,
        others_failed: Callable[[], bool] = lambda: False,
    ) -> None:
        self.world = world = place.world
        self._others_failed = others_failed
        self._mesh = place
        self.device = device
        self._timeout = timeout
        self._made: list[dist.ProcessGroup] = []
        self._meetings = 0
        if world.distributed:
            self._store = dist.distributed_c10d._get_default_store()
            self._name = f"groups/{self._store.add(f'groups/of process {world.rank}', 1)}"

    def make(self, *wanted: Sequence[int], backend: str | None = None) -> list[dist.ProcessGroup]:
        """Groups of these processes, all within one time-out. Collective over all processes of the world.

        Arguments:
            backend: None: that of the device.

        Raises PipelineTimeout or PeerLost, which name the processes that are behind.
        """
        if not self.world.distributed:
            return []
        started = time.monotonic()
        kind = backend_for(self.device) if backend is None else backend
        until = started + self._timeout
        made = [self._make(members, backend=kind, until=until) for members in wanted]
        self._meet(until)  # nobody leaves, as one whose caller fails at once does, while others still connect
        return made

    def close(self) -> None:
        """Destroy all groups. Nobody may use them any more, here or elsewhere."""
        for group in self._made:
            with suppress(ValueError):  # the user has destroyed all groups of the process already
                dist.destroy_process_group(group)
        self._made.clear()

    def _make(self, members: Sequence[int], *, backend: str, until: float) -> dist.ProcessGroup:
        self._meet(until)
        left = max(until - time.monotonic(), _LEAST)
        try:
            group = self._within(left, list(members), backend)
        except RuntimeError as error:
            behind = [one for one in self._others if not self._store.check([self._place(one, self._meetings + 1)])]
            raise self._lost(behind, "have not connected", until=until, why=f" ({short_reason(error)})") from error
        if self.world.rank in members:
            self._made.append(group)
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self._timeout), group)  # of what is done in it
        return group

    def _within(self, seconds: float, members: list[int], backend: str) -> dist.ProcessGroup:
        """A new group in so many seconds. gloo tries five times to connect, and takes as long each time."""
        make = partial(dist.new_group, members, backend=backend, timeout=timedelta(seconds=seconds))
        if backend == "nccl":  # it connects later, and a thread has a device of its own
            return cast(dist.ProcessGroup, make())
        answer: Future[dist.ProcessGroup] = Future()

        def run() -> None:
            try:
                answer.set_result(make())
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=run, daemon=True, name="stagewright-groups").start()
        try:
            return answer.result(seconds + _LEAST)
        except TimeoutError:
            raise RuntimeError("connecting takes too long") from None

    def _meet(self, until: float) -> None:
        self._meetings += 1
        places = {one: self._place(one, self._meetings) for one in range(self.world.size)}
        met = f"{self._name}/{self._meetings}"
        self._store.set(places[self.world.rank], "")
        self._store.add(met, 1)
        for looks in count(1):
            if self._store.add(met, 0) == self.world.size:
                return
            if time.monotonic() > until or (looks % _LOOKS == 0 and self._others_failed()):
                behind = [one for one in self._others if not self._store.check([places[one]])]
                raise self._lost(behind, "have not come", until=until)
            time.sleep(min(looks * _POLL, _MOST_POLL))

    @property
    def _others(self) -> list[int]:
        return [one for one in range(self.world.size) if one != self.world.rank]

    def _place(self, process: int, meeting: int) -> str:
        return f"{self._name}/{meeting}/{process}"

    def _lost(self, behind: Sequence[int], fate: str, *, until: float, why: str = "") -> PipelineError:
        late = time.monotonic() > until - 0.1 * self._timeout
        me, others = self._mesh.name_of(self.world.rank), self._mesh.names_of(behind)
        limit = f" within {self._timeout:g} s" if late else ""
        story = (
            f"{me}: making the links of a PipelineModule: {others} {fate}{limit}{why}: did all of them make this call?"
        )
        return (PipelineTimeout if late else PeerLost)(story, peers=behind)


def link_lanes(links: Iterable[Link], place: MeshPlace, groups: Groups) -> dict[Link, Lanes]:
    """The groups of each directed link that this process is part of. Collective: all processes give the same links.

    Each plane of the mesh has links of its own between its processes.

    gloo: GLOO_LANES groups for each direction (to a higher rank, to a lower one), shared by all links. With one group,
    a thread that is preempted inside a gloo call holds the pair's lock, and gloo's own thread spins on it for a
    scheduler slice. NCCL: a communicator a directed link, made in the same order everywhere.
    """
    lanes: dict[Link, Lanes] = {}
    me = place.world.rank
    if backend_for(groups.device) == "gloo":
        both = groups.make(*[range(place.world.size)] * (2 * GLOO_LANES))
        up, down = tuple(both[:GLOO_LANES]), tuple(both[GLOO_LANES:])
        for sender, receiver in links:
            ends = place.process_of(sender), place.process_of(receiver)
            if me in ends:
                peer = ends[1] if me == ends[0] else ends[0]
                lanes[sender, receiver] = Lanes(up if sender < receiver else down, peer, peer)
        return lanes
    ordered = [(link, sorted(pair)) for link in sorted(links) for pair in place.planes(link)]
    for (link, pair), group in zip(ordered, groups.make(*(pair for _, pair in ordered)), strict=True):
        if me in pair:
            peer = pair[1] if me == pair[0] else pair[0]
            lanes[link] = Lanes((group,), pair.index(peer), peer)
    return lanes
