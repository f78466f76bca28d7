"""Process groups and the mesh: who is in the run, and over which groups links go."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from .errors import PeerLost, PipelineTimeout, short_reason
from .process_group import Lanes, Link

T = TypeVar("T")

GLOO_LANES = 4
RECEIVES_AHEAD = 4  # a link carries several streams (chunks, gradients): enough to keep it busy, at most the lanes
AXES = ("pipe", "data", "tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Where this process stands: `rank` of `size` processes (0 of 1 where all ranks are in-process)."""

    rank: int
    size: int

    @property
    def distributed(self) -> bool:
        """Whether there are other processes."""
        return self.size > 1


def join_world(*, device: torch.device, timeout: float) -> World:
    """Use the process group that is present; else, with WORLD_SIZE above 1, make one; else be alone.

    Raises RuntimeError that names the address when the rendezvous fails within `timeout` [s].
    """
    if dist.is_initialized():
        return World(rank=dist.get_rank(), size=dist.get_world_size())
    size = _environment("WORLD_SIZE", default=1)
    if size <= 1:
        return World(rank=0, size=1)
    rank = _environment("RANK")
    address = (
        f"{os.environ.get('MASTER_ADDR', '(MASTER_ADDR unset)')}:{os.environ.get('MASTER_PORT', '(MASTER_PORT unset)')}"
    )
    try:
        dist.init_process_group(backend_for(device), timeout=timedelta(seconds=timeout))
    except Exception as error:
        raise RuntimeError(
            f"rank {rank} of {size} found no rendezvous at {address} within {timeout:g} s ({short_reason(error)}): "
            f"expected all {size} ranks to be started with the same MASTER_ADDR and MASTER_PORT, each with its own RANK"
        ) from error
    return World(rank=dist.get_rank(), size=dist.get_world_size())


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the axes: `pipe` ranks along the pipeline, `data` replicas of it.

    Ranks in a row are the replicas of a stage: rank = position along the pipeline * data + replica.
    """

    pipe: int
    data: int = 1

    @property
    def num_ranks(self) -> int:
        """R."""
        return self.pipe * self.data


def read_mesh(mesh: Mapping[str, int] | None, world: World, *, wanted: int | None) -> Mesh:
    """The mesh that was given, or one pipeline over the world.

    Arguments:
        mesh: sizes by axis; the axes left out are 1, and pipe is what the processes leave.
        wanted: P of a schedule that was given whole.

    Raises ValueError for an unknown axis, a tensor axis above 1, and sizes that do not match the processes.
    """
    if mesh is not None and not isinstance(mesh, Mapping):
        raise ValueError(f'mesh={mesh!r}: expected sizes by axis, as in mesh={{"pipe": {world.size}}}')
    sizes = dict(mesh or {})
    for axis, size in sizes.items():
        if axis not in AXES:
            raise ValueError(f"mesh axis {axis!r}: expected one of {', '.join(AXES)}")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"mesh axis {axis!r} has size {size!r}: expected a whole number, at least 1")
        if axis == "tensor" and size > 1:
            raise ValueError(
                f"mesh axis {axis!r} has size {size}: tensor parallel groups are not there yet; "
                f'expected 1, as in mesh={{"pipe": {sizes.get("pipe", world.size)}}}'
            )
    data = sizes.get("data", 1)
    if "pipe" not in sizes and wanted is None and world.size % data:
        raise ValueError(
            f'mesh={{"data": {data}}} on {world.size} processes: expected a size that divides {world.size}'
        )
    found = Mesh(pipe=sizes.get("pipe", wanted or world.size // data), data=data)
    if wanted is not None and found.pipe != wanted:
        raise ValueError(
            f'mesh={{"pipe": {found.pipe}}} for a schedule of {wanted} ranks: expected mesh={{"pipe": {wanted}}}'
        )
    if world.distributed and found.num_ranks != world.size:
        also = f', "data": {data}' if data > 1 and world.size % data == 0 else ""
        asks, fix = (
            ("mesh", f'mesh={{"pipe": {world.size // data if also else world.size}{also}}}')
            if wanted is None
            else ("schedule", "a schedule of as many")
        )
        raise ValueError(
            f"the {asks} asks for {found.num_ranks} ranks and the process group has {world.size}: expected {fix}, or "
            f"start {found.num_ranks} processes (torchrun --nproc-per-node {found.num_ranks})"
        )
    return found


def as_one(run: Callable[[], T], *, what: str, world: World, ranks: Sequence[int], timeout: float) -> T:
    """A collective call, or PipelineTimeout or PeerLost that says what it was for and which ranks make it."""
    started = time.monotonic()
    try:
        return run()
    except RuntimeError as error:
        waited = time.monotonic() - started
        story = (
            f"rank {world.rank}: {what}, together with the ranks {', '.join(map(str, ranks))}, failed after "
            f"{waited:.1f} s ({short_reason(error)}): did all of them make this call?"
        )
        kind = PipelineTimeout if waited >= timeout else PeerLost
        raise kind(story, peers=[rank for rank in ranks if rank != world.rank]) from error


def make_group(ranks: Sequence[int], world: World, *, device: torch.device, timeout: float) -> dist.ProcessGroup:
    """A group of these ranks, whose time-out is the run's. Collective over all processes of the world."""
    group: dist.ProcessGroup = as_one(
        lambda: dist.new_group(list(ranks), backend=backend_for(device), timeout=timedelta(seconds=timeout)),
        what="making the links of a PipelineModule",
        world=world,
        ranks=range(world.size),
        timeout=timeout,
    )
    return group


def link_lanes(links: Iterable[Link], world: World, *, device: torch.device, timeout: float) -> dict[Link, Lanes]:
    """The groups of each directed link that this rank is part of. Collective: all ranks give the same links.

    gloo: GLOO_LANES groups for each direction (to a higher rank, to a lower one), shared by all links. With one group,
    a thread that is preempted inside a gloo call holds the pair's lock, and gloo's own thread spins on it for a
    scheduler slice. NCCL: a communicator a directed link, made in the same order everywhere.
    """
    lanes: dict[Link, Lanes] = {}
    if backend_for(device) == "gloo":
        everyone = range(world.size)
        up, down = (
            tuple(make_group(everyone, world, device=device, timeout=timeout) for _ in range(GLOO_LANES))
            for _ in range(2)
        )
        for sender, receiver in links:
            if world.rank in (sender, receiver):
                peer = receiver if world.rank == sender else sender
                lanes[sender, receiver] = Lanes(up if sender < receiver else down, peer)
        return lanes
    for sender, receiver in sorted(links):
        pair = sorted((sender, receiver))
        group = make_group(pair, world, device=device, timeout=timeout)
        if world.rank in pair:
            peer = pair.index(receiver if world.rank == sender else sender)
            lanes[sender, receiver] = Lanes((group,), peer)
    return lanes
