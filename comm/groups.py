"""Process groups: how processes meet, and over which groups links go."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from .errors import PeerLost, PipelineTimeout, short_reason
from .mesh import MeshPlace, World
from .process_group import Lanes, Link

T = TypeVar("T")

GLOO_LANES = 4


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


def link_lanes(links: Iterable[Link], place: MeshPlace, *, device: torch.device, timeout: float) -> dict[Link, Lanes]:
    """The groups of each directed link that this process is part of. Collective: all processes give the same links.

    gloo: GLOO_LANES groups for each direction (to a higher rank, to a lower one), shared by all links. With one group,
    a thread that is preempted inside a gloo call holds the pair's lock, and gloo's own thread spins on it for a
    scheduler slice. NCCL: a communicator a directed link, made in the same order everywhere.
    """
    lanes: dict[Link, Lanes] = {}
    world, me = place.world, place.world.rank
    if backend_for(device) == "gloo":
        everyone = range(world.size)
        up, down = (
            tuple(make_group(everyone, world, device=device, timeout=timeout) for _ in range(GLOO_LANES))
            for _ in range(2)
        )
        for sender, receiver in links:
            ends = place.process_of(sender), place.process_of(receiver)
            if me in ends:
                peer = ends[1] if me == ends[0] else ends[0]
                lanes[sender, receiver] = Lanes(up if sender < receiver else down, peer, peer)
        return lanes
    for sender, receiver in sorted(links):
        ends = place.process_of(sender), place.process_of(receiver)
        pair = sorted(ends)
        group = make_group(pair, world, device=device, timeout=timeout)
        if me in pair:
            peer = ends[1] if me == ends[0] else ends[0]
            lanes[sender, receiver] = Lanes((group,), pair.index(peer), peer)
    return lanes
