"""Clocks of hosts over gloo: processes with clocks of their own, told apart by the names of their machines."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.pool import Pool

from stagewright.comm import Collectives, HostClocks, MeshPlace, World, machine

AHEAD = {"a": 0.0, "b": 5000.0, "c": -0.02}
DRIFT = {"a": 0.0, "b": 0.01, "c": 0.0}  # seconds a second: far more than real clocks, to be seen in a test


def compared(rank: int, size: int, machines: str) -> dict[str, Any]:
    """Two comparisons half a second apart; the truth is known, since all processes are on one machine."""
    place = MeshPlace.line(World(rank=rank, size=size))
    mine = machines[rank]

    def now() -> float:
        t = time.perf_counter()
        return AHEAD[mine] + (1 + DRIFT[mine]) * t

    collectives = Collectives(place, device=torch.device("cpu"), timeout=120.0)
    clocks = HostClocks(collectives, now=now, machine=mine)
    clocks.compare()
    time.sleep(0.3)
    between = time.perf_counter()
    at = AHEAD[mine] + (1 + DRIFT[mine]) * between
    time.sleep(0.2)
    clocks.compare()
    offset, error = clocks.offset_at(at)
    base = AHEAD["a"] + (1 + DRIFT["a"]) * between
    found = {"off": abs(at + offset - base), "error": error, "readings": list(clocks.readings)}
    collectives.close()
    return found


def compared_here(machines: str) -> dict[str, Any]:
    import torch.distributed as dist

    return compared(dist.get_rank(), dist.get_world_size(), machines)


@pytest.mark.gloo
def test_clocks_of_three_hosts(gloo: Pool) -> None:
    """Process 0 shares its host with 2, and 1 shares with 3; the processes of a host have one reading."""
    found = gloo.run(compared_here, ranks=5, args=("abacb",))
    assert [each["readings"] for each in found[::2][:2]] == [[], []]
    assert found[1]["readings"] == found[4]["readings"]
    assert len(found[1]["readings"]) == len(found[3]["readings"]) == 2
    assert all(earlier.at < later.at for each in found for earlier, later in pairwise(each["readings"]))
    for each, host in zip(found, "abacb", strict=True):
        assert each["off"] <= each["error"] + 1e-6
        assert (each["error"] > 0) == (host != "a")


@pytest.mark.thorough
@pytest.mark.gloo
def test_processes_of_one_host_ping_nobody(gloo: Pool) -> None:
    found = gloo.run(compared_here, ranks=2, args=("aa",))
    assert [(each["error"], each["readings"]) for each in found] == [(0.0, []), (0.0, [])]


def test_one_kernel_is_one_machine() -> None:
    assert machine() == machine()
    assert len(machine()) > 8
