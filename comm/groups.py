"""Process groups and the mesh: who is in the run, and over which groups links go."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .errors import short_reason
from .process_group import Link

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


def pipe_size(mesh: Mapping[str, int] | None, world: World, *, wanted: int | None) -> int:
    """P from the mesh, or from the world.

    Arguments:
        mesh: sizes by axis; the axes left out are 1.
        wanted: P of a schedule that was given whole.

    Raises ValueError for an unknown axis, a data or tensor axis above 1, and a size that does not match the processes.
    """
    sizes = dict(mesh or {})
    for axis, size in sizes.items():
        if axis not in AXES:
            raise ValueError(f"mesh axis {axis!r}: expected one of {', '.join(AXES)}")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"mesh axis {axis!r} has size {size!r}: expected a whole number, at least 1")
        if axis != "pipe" and size > 1:
            raise ValueError(
                f"mesh axis {axis!r} has size {size}: data and tensor parallel groups are not there yet; "
                f'expected 1, as in mesh={{"pipe": {sizes.get("pipe", world.size)}}}'
            )
    size = sizes.get("pipe", wanted or world.size)
    if wanted is not None and size != wanted:
        raise ValueError(
            f'mesh={{"pipe": {size}}} for a schedule of {wanted} ranks: expected mesh={{"pipe": {wanted}}}'
        )
    if world.distributed and size != world.size:
        raise ValueError(
            f'the mesh asks for {size} ranks and the process group has {world.size}: expected mesh={{"pipe": '
            f"{world.size}}}, or start {size} processes (torchrun --nproc-per-node {size})"
        )
    return size


def link_groups(
    links: Iterable[Link], world: World, *, device: torch.device, timeout: float
) -> dict[Link, tuple[dist.ProcessGroup, int]]:
    """A process group for each directed link that this rank is part of. Collective: all ranks give the same links.

    gloo: one group for all. NCCL: a communicator a directed link, made in the same order everywhere.
    """
    backend, limit = backend_for(device), timedelta(seconds=timeout)
    groups: dict[Link, tuple[dist.ProcessGroup, int]] = {}
    if backend == "gloo":
        everyone = dist.new_group(backend="gloo", timeout=limit)
        for sender, receiver in links:
            if world.rank in (sender, receiver):
                groups[sender, receiver] = (everyone, receiver if world.rank == sender else sender)
        return groups
    for sender, receiver in sorted(links):
        pair = sorted((sender, receiver))
        group = dist.new_group(pair, backend=backend, timeout=limit)
        if world.rank in pair:
            groups[sender, receiver] = (group, pair.index(receiver if world.rank == sender else sender))
    return groups
