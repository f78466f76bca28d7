"""Process groups, and which of them each link uses."""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from .failures import Guard, PeerLost, PipelineError, PipelineTimeout, short_reason
from .forked import kept_from_children
from .mesh import MeshPlace
from .process_group import Lanes, Link

T = TypeVar("T")

GLOO_LANES = 4
_POLL, _MOST_POLL = 0.001, 0.05  # [s] between polls of whether all have arrived: increasing
_LOOKS = 8  # such polls to one of whether a process has failed
_LEAST = 0.1  # [s] for what still has to be tried when the time is up


BACKEND = "STAGEWRIGHT_BACKEND"  # in the environment: gloo, for CUDA devices that NCCL can't connect; or nccl
_CPU = torch.device("cpu")


def own_device(device: torch.device) -> torch.device:
    """This process's device, for a CUDA device without a number: the current one, if it was set, else that of
    LOCAL_RANK, modulo the number of devices. A CPU loses its number, as in accelerate's "cpu:0": real tensors have none
    there, and fake ones would be on another device than those of "cpu"."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda" or device.index is not None:
        return device
    index, local = torch.cuda.current_device(), os.environ.get("LOCAL_RANK", "")
    if index == 0 and local.isdecimal():
        index = int(local) % torch.cuda.device_count()
    return torch.device("cuda", index)


class DeviceOf(NamedTuple):
    """A process's device, for the others. uuid: empty on a CPU, which many may share; backend: of its environment."""

    uuid: str
    backend: str

    @classmethod
    def here(cls, device: torch.device) -> DeviceOf:
        if device.type != "cuda":
            return cls("", "gloo")
        wanted = os.environ.get(BACKEND, "")
        if wanted not in ("", "gloo", "nccl"):
            raise ValueError(f"{BACKEND}={wanted}: expected gloo or nccl, or leave it out")
        return cls(str(torch.cuda.get_device_properties(device).uuid), wanted)


def backend_for(devices: Sequence[DeviceOf], names: Callable[[Sequence[int]], str]) -> str:
    """gloo where the environment says so, or two processes share a device, which NCCL does not support; else NCCL.
    Raises ValueError, the same on all, for processes with different settings, and for NCCL on a shared device."""
    kinds, wanted = ["CUDA" if each.uuid else "the CPU" for each in devices], {each.backend for each in devices}
    if len({*kinds}) > 1:
        said = ", ".join(f"process {one} on {kind}" for one, kind in enumerate(kinds))
        raise ValueError(f'{said}: expected the same kind of device in every process, as with device="cuda"')
    if len(wanted) > 1:
        said = ", ".join(f"{each.backend or 'nothing'} in process {one}" for one, each in enumerate(devices))
        raise ValueError(f"{BACKEND} is {said}: expected the same in every process")
    if wanted == {"gloo"}:
        return "gloo"
    sharing = shared_device(devices)
    if sharing and wanted == {"nccl"}:
        raise ValueError(
            f"{BACKEND}=nccl, and {names(sharing)} use one device: expected one device per process, as "
            f'with device="cuda" and the model on the CPU, or {BACKEND}=gloo'
        )
    return "gloo" if sharing else "nccl"


def shared_device(devices: Sequence[DeviceOf]) -> list[int]:
    """Processes that share the first device which several of them use; none where each has its own."""
    users: dict[str, list[int]] = {}
    for process, each in enumerate(devices):
        users.setdefault(each.uuid or str(process), []).append(process)
    return next((each for each in users.values() if len(each) > 1), [])


class Groups:
    """Process groups of one pipeline, made in the same order by all processes, and destroyed together.

    Before each one, and after the last, all processes wait for each other at a barrier in the rendezvous store: so they
    connect at the same time, and a missing one is known by name. A group holds threads and descriptors until `close`.

    Attributes:
        backend: gloo or nccl.
        sharing: processes that share a CUDA device, if any do.
    """

    @kept_from_children()
    def __init__(self, place: MeshPlace, *, device: torch.device, timeout: float, guard: Guard | None = None) -> None:
        self.world = world = place.world
        self._guard = guard or Guard(None)  # it knows who has failed
        self.place = place
        self.device = device
        self._timeout = timeout
        self._made: list[dist.ProcessGroup] = []
        self._barriers = 0
        if world.distributed:
            # A separate connection: one that another thread waits at, as in connecting, is blocked.
            self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            self._name = f"groups/{self._store.add(f'groups/of process {world.rank}', 1)}"
        self.backend, self.sharing = self._backend()
        self.wire = _CPU if self.backend == "gloo" else device  # device of the tensors that it carries

    @property
    def is_staged(self) -> bool:
        return self.wire.type != self.device.type

    def make(self, *wanted: Sequence[int], backend: str | None = None) -> list[dist.ProcessGroup]:
        """Groups of these processes, all within one time-out. Collective over all processes of the world. `backend`:
        None: that of the device. Raises PipelineTimeout or PeerLost, which name the missing processes."""
        if not self.world.distributed:
            return []
        started = time.monotonic()
        kind = self.backend if backend is None else backend
        until = started + self._timeout
        made = [self._make(members, backend=kind, until=until) for members in wanted]
        self._barrier(until)  # a process whose caller fails at once must not end while others still connect
        return made

    def as_one(self, run: Callable[[], T], *, what: str, processes: Sequence[int]) -> T:
        """Result of a collective call. Raises PipelineTimeout or PeerLost that names its purpose and processes."""
        started = time.monotonic()
        try:
            return run()
        except RuntimeError as error:
            waited, me = time.monotonic() - started, self.world.rank
            story = (
                f"{self.place.name_of(me)}: {what}, together with {self.place.names_of(processes)}, failed after "
                f"{waited:.1f} s ({short_reason(error)}): did all of them make this call?"
            )
            kind = PipelineTimeout if waited >= self._timeout else PeerLost
            raise kind(story, peers=[one for one in processes if one != me]) from error

    def close(self) -> None:
        for group in self._made:
            with suppress(ValueError):  # the user has destroyed all groups of the process already
                dist.destroy_process_group(group)
        self._made.clear()
        vars(self).pop("_store", None)  # and its connection

    def _backend(self) -> tuple[str, list[int]]:
        """The backend, and processes that share a device. Collective over the processes of a run on CUDA."""
        if self.device.type != "cuda" or not self.world.distributed:
            return ("nccl" if self.device.type == "cuda" else "gloo"), []
        torch.cuda.set_device(self.device)  # NCCL puts objects on the current one
        keys = [f"{self._name}/device of {one}" for one in range(self.world.size)]
        self._store.set(keys[self.world.rank], json.dumps(DeviceOf.here(self.device)))
        self._barrier(time.monotonic() + self._timeout)
        devices = [DeviceOf(*json.loads(each)) for each in self._store.multi_get(keys)]
        return backend_for(devices, self.place.names_of), shared_device(devices)

    def _make(self, members: Sequence[int], *, backend: str, until: float) -> dist.ProcessGroup:
        self._barrier(until)
        left = max(until - time.monotonic(), _LEAST)
        try:
            group = self._within(left, list(members), backend)
        except RuntimeError as error:
            if files := no_more_files(self.world.size):
                raise PipelineError(f"{self.place.name_of(self.world.rank)}: making the links: {files}") from error
            missing = [one for one in self._others if not self._store.check([self._key(one, self._barriers + 1)])]
            raise self._lost(missing, "have not connected", until=until, why=f" ({short_reason(error)})") from error
        if self.world.rank in members:
            self._made.append(group)
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self._timeout), group)  # of what is done in it
        return group

    def _within(self, seconds: float, members: list[int], backend: str) -> dist.ProcessGroup:
        """A new group within `seconds`. gloo tries five times to connect, and takes as long each time."""
        make = partial(dist.new_group, members, backend=backend, timeout=timedelta(seconds=seconds))
        if backend == "nccl":  # it connects later, and a thread has a device of its own
            return cast(dist.ProcessGroup, make())
        died = self._guard.someone_died  # other errors are reported when the time is up
        return cast(dist.ProcessGroup, connected(make, seconds + _LEAST, someone_died=died))

    def _barrier(self, until: float) -> None:
        self._barriers += 1
        keys = {one: self._key(one, self._barriers) for one in range(self.world.size)}
        arrived = f"{self._name}/{self._barriers}"
        self._store.add(arrived, 1)  # first: a process that stops between the two counts as arrived
        self._store.set(keys[self.world.rank], "")
        for looks in count(1):
            if self._store.add(arrived, 0) == self.world.size:
                return
            if time.monotonic() > until or (looks % _LOOKS == 0 and self._guard.others_failed()):
                missing = [one for one in self._others if not self._store.check([keys[one]])]
                raise self._lost(missing, "have not come", until=until)
            time.sleep(min(looks * _POLL, _MOST_POLL))

    @property
    def _others(self) -> list[int]:
        return [one for one in range(self.world.size) if one != self.world.rank]

    def _key(self, process: int, barrier: int) -> str:
        return f"{self._name}/{barrier}/{process}"

    def _lost(self, missing: Sequence[int], fate: str, *, until: float, why: str = "") -> PipelineError:
        late = time.monotonic() > until - 0.1 * self._timeout
        me, others = self.place.name_of(self.world.rank), self.place.names_of(missing)
        limit = f" within {self._timeout:g} s" if late else ""
        story = (
            f"{me}: making the links of a PipelineModule: {others} {fate}{limit}{why}: did all of them make this call?"
        )
        return (PipelineTimeout if late else PeerLost)(story, peers=missing)


def no_more_files(size: int) -> str:
    """Message where a process may not open the files that a group of `size` needs, which gloo does not name; or ""."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        taken = len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:  # not on Linux
        return ""
    except OSError:
        taken = limit
    is_over = 0 < limit < taken + 2 * size + 16
    return f"{taken} of {limit} files are open: expected ulimit -n {4 * limit}" if is_over else ""


@kept_from_children()
def connected(make: Callable[[], T], seconds: float, *, someone_died: Callable[[], bool]) -> T:
    """Result of `make`, on another thread. Raises RuntimeError after `seconds`, or soon after another process died."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(make())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="stagewright-groups").start()
    until = time.monotonic() + seconds
    while True:
        try:
            return answer.result(min(_LOOKS * _MOST_POLL, max(until - time.monotonic(), 0.0)))
        except TimeoutError:  # of this poll
            if answer.done() or time.monotonic() >= until or someone_died():
                raise RuntimeError("connecting takes too long, or another process has died") from None


def link_lanes(links: Iterable[Link], groups: Groups) -> dict[Link, tuple[Lanes, ...]]:
    """The lanes of each directed link of this process: one to each process that receives from it, or the one from the
    process that it receives from. Collective: all processes give the same links.

    Each member of a receiving tensor group receives from one member of the sending group (see `mesh`).

    gloo: GLOO_LANES groups for each direction (to a higher rank, to a lower one), shared by all links. With one group,
    a thread that is preempted inside a gloo call holds the pair's lock, and gloo's own thread spins on it for a
    scheduler slice. NCCL: a communicator per directed pair of processes, made in the same order everywhere.
    """
    place, me = groups.place, groups.world.rank
    members = place.mesh.members
    pairs = [
        (link, (place.process_of(link[0], tensor=t), process))
        for link in sorted(links)
        for t, process in enumerate(members(link[1]))
    ]
    used: list[tuple[tuple[dist.ProcessGroup, ...], Sequence[int]]]  # by pair: groups, and the processes in them
    if groups.backend == "gloo":
        everyone = range(groups.world.size)
        both = groups.make(*[everyone] * (2 * GLOO_LANES))
        up, down = tuple(both[:GLOO_LANES]), tuple(both[GLOO_LANES:])
        used = [(up if sender < receiver else down, everyone) for (sender, receiver), _ in pairs]
    else:
        ends = [sorted(pair) for _, pair in pairs]
        used = [((group,), pair) for group, pair in zip(groups.make(*ends), ends, strict=True)]
    lanes: dict[Link, tuple[Lanes, ...]] = {link: () for link in links if me in (*members(link[0]), *members(link[1]))}
    for (link, pair), (over, processes) in zip(pairs, used, strict=True):
        if me in pair:
            peer = pair[1] if me == pair[0] else pair[0]
            lanes[link] += (Lanes(over, processes.index(peer), peer),)
    return lanes
