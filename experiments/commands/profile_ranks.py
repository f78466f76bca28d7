"""What several processes measure together: the links between them, or a model's profile while all of them compute."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ...partition import Cluster, Profile
from ...partition.cluster import DeviceKind, Level

if TYPE_CHECKING:
    import torch

    from ...comm import World
    from ...comm.links import MeasuredLinks

DEFAULT_RANKS = 2
_ALIKE = 0.05  # hosts whose speeds differ by less are of one kind


def launched(argv: Sequence[str], ranks: int | None) -> int | None:
    """Start `stagewright profile` once a rank on this host, and return the exit status; None in a rank of a job.

    Raises ValueError for another number of ranks than the job has.
    """
    world = os.environ.get("WORLD_SIZE")
    if world is None:
        from ..launcher import launch_command

        return launch_command(["profile", *argv], num_ranks=DEFAULT_RANKS if ranks is None else ranks)
    if ranks not in (None, int(world)):
        raise ValueError(f"--ranks {ranks} in one of {world} processes: leave --ranks away under torchrun")
    return None


def measured_links(device: str, timeout: float) -> MeasuredLinks | None:
    """Links between the ranks of this job; None on all ranks but the first. Collective over them."""
    from ...comm.links import measure_links

    with _world(device, timeout) as (world, on):
        _tell(world, f"measuring the links of {world.size} ranks")
        started = time.perf_counter()
        found = measure_links(world, device=on, timeout=timeout, progress=lambda text: _tell(world, text))
        _tell(world, f"done in {time.perf_counter() - started:.1f} s")
    return found if world.rank == 0 else None


def profile_at_once(measure: Callable[[], Profile], device: str, timeout: float) -> Profile | None:
    """The median profile of all ranks of this job, which measure at the same time, as they will compute when they
    train, with the seconds that such a run will see; None on all ranks but the first. Collective over them.

    Raises ValueError, on all of them, for ranks on several hosts.
    """
    from ...comm import Collectives, MeshPlace
    from ...pipe.auto import median_profile

    with _world(device, timeout) as (world, on):
        together = Collectives(MeshPlace.line(world), device=on, timeout=timeout)
        hosts = list(dict.fromkeys(together.gather(socket.gethostname(), what="finding the hosts of all ranks")))
        if len(hosts) > 1:
            raise ValueError(
                f"one profile of ranks on {', '.join(hosts)}: expected a profile of each host, `stagewright profile "
                f"--ranks N` there, which `stagewright profile --links --profiles FILE...` then compares"
            )
        _tell(world, f"{world.size} ranks profile at once")
        texts = together.gather(measure().to_json(), what="profiling the model on all ranks")
        together.close()
    return median_profile([Profile.from_json(text) for text in texts]).typical() if world.rank == 0 else None


def with_kinds(cluster: Cluster, profiles: Sequence[Profile], *, names: Sequence[str]) -> Cluster:
    """The same with hosts that are as fast as profiles of one model on each of them say.

    Speeds are relative to the first, whose profile a plan is then made of; hosts within 5% of one are of its kind.

    Arguments:
        profiles: one a host, in the order of ranks.
        names: of the files, for messages.

    Raises ValueError for another number of hosts, and for profiles of models or microbatches that differ.
    """
    levels = cluster.levels
    if levels[0].name == "network":  # a rank a host
        levels = (Level(name="host", size=1, bandwidth=levels[0].bandwidth), *levels)
    hosts = cluster.num_devices // levels[0].size
    if len(profiles) != hosts:
        raise ValueError(f"--profiles {' '.join(names)}: {len(profiles)} for {hosts} hosts: expected one a host")
    first = profiles[0]
    for name, each in zip(names, profiles, strict=True):
        same = [node.name for node in each.nodes] == [node.name for node in first.nodes]
        if not same or (each.microbatch_size, each.tensor) != (first.microbatch_size, first.tensor):
            raise ValueError(f"{name}: another model or microbatch than {names[0]}: expected profiles of one model")
    kinds: list[DeviceKind] = []
    nodes = []
    for each in profiles:
        speed = first.parts_seconds / each.parts_seconds
        kind = next((kind for kind in kinds if abs(speed / kind.speed - 1) < _ALIKE), None)
        if kind is None:
            kind = replace(cluster.kinds[0], name=f"device {len(kinds)}", speed=round(speed, 4))
            kinds.append(kind)
        nodes.append(kind.name)
    return Cluster(levels=levels, kinds=tuple(kinds), nodes=tuple(nodes))


@contextmanager
def _world(device: str, timeout: float) -> Iterator[tuple[World, torch.device]]:
    """The processes of this job, and this one's device; what goes wrong within is told to whoever started it."""
    import torch
    import torch.distributed as dist

    from ...comm import join_world
    from ..launcher import report_to_launcher

    with report_to_launcher():
        on = torch.device(device)
        if on.type == "cuda":
            on = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(on)
        yield join_world(device=on, timeout=timeout), on
    if dist.is_initialized():
        dist.destroy_process_group()


def _tell(world: World, text: str) -> None:
    if world.rank == 0:
        print(text, file=sys.stderr, flush=True)
