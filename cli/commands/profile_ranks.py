"""Measurements by several processes at once: the links between them, or a model's profile while all compute."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar, cast

from ...partition import Profile
from ...schedules.wording import duration

if TYPE_CHECKING:
    import torch

    from ...comm import World
    from ...comm.links import MeasuredLinks

DEFAULT_RANKS = 2
T = TypeVar("T")


def launched(argv: Sequence[str], ranks: int | None) -> int | None:
    """Start `stagewright profile` on each rank of this host, and return the exit status; None in a rank of a job.

    Raises ValueError for another number of ranks than the job has.
    """
    if (world := os.environ.get("WORLD_SIZE")) is None:
        from ..launcher import launch_command

        return launch_command(["profile", *argv], num_ranks=DEFAULT_RANKS if ranks is None else ranks)
    if ranks not in (None, int(world)):
        raise ValueError(f"--ranks {ranks} in one of {world} processes: leave --ranks away under torchrun")
    return None


def measured_links(device: str, timeout: float, *, check: Callable[[], T]) -> tuple[MeasuredLinks, float, T] | None:
    """Links between the ranks of this job, the least memory of a rank [bytes], and the result of `check`; None on all
    ranks but the first. Collective over them. `check` runs on the first rank before any measurement, and may read
    files of its host; its ValueError is raised on all ranks."""
    from ...comm import Collectives, MeshPlace
    from ...comm.links import measure_links
    from ...pipe.auto.layout import least_memory

    found: T | None = None
    wrong = ""
    with _world(device, timeout) as (world, on):
        try:
            found = check() if world.rank == 0 else None
        except ValueError as error:
            wrong = str(error)
        together = Collectives(MeshPlace.line(world), device=on, timeout=timeout)
        wrong = together.gather(wrong, what="reading what the links are measured for")[0]
        if wrong:
            together.close()
            raise ValueError(wrong)
        memory = least_memory(on, together)
        together.close()
        _tell(world, f"measuring the links of {world.size} ranks")
        started = time.perf_counter()
        links = measure_links(world, device=on, timeout=timeout, progress=lambda text: _tell(world, text))
        _tell(world, f"done in {duration(time.perf_counter() - started)}")
    return (links, memory, cast(T, found)) if world.rank == 0 else None


def profile_at_once(measure: Callable[[], Profile], device: str, timeout: float) -> Profile | None:
    """The median profile of all ranks of this job, measured at the same time and so with the contention of training;
    None on all ranks but the first. Collective over them.

    Raises ValueError on all ranks if they are on several hosts.
    """
    from ...comm import Collectives, MeshPlace
    from ...pipe.auto.layout import median_profile

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


@contextmanager
def _world(device: str, timeout: float) -> Iterator[tuple[World, torch.device]]:
    """The processes of this job and this one's device; reports errors inside to the launcher."""
    import torch
    import torch.distributed as dist

    from ...comm import join_world, own_device
    from ..launcher import report_to_launcher

    with report_to_launcher():
        on = own_device(torch.device(device))
        yield join_world(device=on, timeout=timeout), on
    if dist.is_initialized():
        dist.destroy_process_group()


def _tell(world: World, text: str) -> None:
    if world.rank == 0:
        print(text, file=sys.stderr, flush=True)
