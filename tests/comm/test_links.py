"""Links: the fit on made-up times, the pairs that are measured, and the whole over gloo."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pool import Pool

from stagewright.comm import World
from stagewright.comm.links import (
    SIZES,
    SUM_BYTES,
    LinkLevel,
    MeasuredLinks,
    _as_levels,
    _between,
    _inside,
    _level,
    fit_line,
    measure_links,
)
from stagewright.comm.ping_pong import PingPong

CPU = torch.device("cpu")


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.floats(0, 1e-3), st.floats(1e6, 1e12))
def test_a_line_is_found_again(latency: float, bandwidth: float) -> None:
    fit = fit_line(SIZES, [latency + size / bandwidth for size in SIZES])
    assert fit.bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert fit.latency == pytest.approx(latency, rel=1e-3, abs=2e-3 * SIZES[0] / bandwidth)
    assert fit.residual < 1e-3


def test_small_messages_count_as_much_as_large_ones() -> None:
    """In absolute terms the largest message alone would decide, and the latency would be lost in its error."""
    times = [1e-4 + size / 1e9 for size in SIZES]
    times[-1] *= 1.1
    fit = fit_line(SIZES, times)
    assert fit.latency == pytest.approx(1e-4, rel=0.1)
    assert fit.residual > 0.01


def test_latency_is_never_below_zero() -> None:
    fit = fit_line([1, 2, 3], [1e-6, 3e-6, 5e-6])
    assert fit.latency == 0
    assert fit.bandwidth > 0
    assert fit_line([1, 2], [2e-6, 1e-6]).bandwidth > 0  # the larger one was faster


@pytest.mark.parametrize(
    ("sizes", "seconds"), [([1], [1.0]), ([1, 1], [1.0, 1.0]), ([1, 2], [1.0, 0.0]), ([1, 2], [1.0])]
)
def test_no_line(sizes: list[float], seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="expected a time above 0 for each of two or more sizes"):
        fit_line(sizes, seconds)


@pytest.mark.parametrize(
    ("hosts", "inside", "between"),
    [
        ([[0, 1]], [(0, 1)], []),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [(0, 1), (0, 3), (4, 5), (4, 7)], [(0, 4)]),
        ([[0], [1], [2]], [], [(0, 1), (0, 2)]),
        ([[0, 1], [2]], [(0, 1)], [(0, 2)]),
    ],
)
def test_pairs(hosts: list[list[int]], inside: list[tuple[int, int]], between: list[tuple[int, int]]) -> None:
    assert _inside(hosts) == inside
    assert _between(hosts) == between


def level(name: str, size: int, bandwidth: float) -> LinkLevel:
    fit = fit_line([1, 2], [1 / bandwidth, 2 / bandwidth])
    return LinkLevel(
        name=name,
        size=size,
        bandwidth=bandwidth,
        latency=1e-6,
        residual=0,
        reduce_bandwidth=bandwidth / 2,
        pairs=((0, 1),),
        fits=(fit,),
        seconds=(),
    )


def test_unequal_hosts_make_one_level_of_the_slowest_links() -> None:
    levels = (level("host", 2, 1e9), level("network", 2, 1e8))
    assert _as_levels(levels, [[0, 1], [2, 3]], 4) == MeasuredLinks(levels=levels)
    for hosts in ([[0, 1], [2]], [[0, 2], [1, 3]]):
        found = _as_levels(levels, hosts, sum(map(len, hosts)))
        assert [(each.size, each.bandwidth) for each in found.levels] == [(sum(map(len, hosts)), 1e8)]
        assert "not equal groups of neighbours" in found.notes[0]


def test_a_message_takes_both_ends_and_the_way() -> None:
    """What both ends are busy is no latency, nor a ring's; between actions it is what cold caches make of it, and
    a rank that sleeps wakes up."""
    sizes, way, waking, busy = (1000, 2000), 5e-6, 300e-6, 40e-6
    hot = [PingPong(2 * busy + way + size / 1e9, busy + size / 1e12) for size in sizes]
    # pings wake the second rank, pongs find the first one awake
    cold = PingPong(2 * 3 * busy + hot[0].latency + waking / 2, 3 * busy)
    pairs = [[*hot, cold]] * 2
    way += waking
    hops, part = 2, SUM_BYTES / 1e9
    found = _level("host", 2, [(0, 1), (0, 2)], sizes, pairs, sum_seconds=hops * way + part)
    assert found.message_seconds == pytest.approx(3 * busy)
    assert found.latency == pytest.approx(way, rel=1e-3)
    assert found.reduce_bandwidth == pytest.approx(1e9, rel=1e-3)
    assert found.seconds == ((1000, pairs[0][0].seconds), (2000, pairs[0][1].seconds))


def test_a_world_of_one_has_no_links() -> None:
    assert measure_links(World(rank=0, size=1), device=CPU, timeout=1.0) == MeasuredLinks(levels=())


def measured(sizes: tuple[int, ...]) -> dict[str, object]:
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    return dataclasses.asdict(measure_links(world, device=CPU, timeout=30.0, sizes=sizes))


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, 3])
def test_over_gloo_all_ranks_get_the_same_answer(gloo: Pool, ranks: int) -> None:
    answers = gloo.run(measured, ranks=ranks, args=((1024, 65536, 1 << 20),))
    assert all(answer == answers[0] for answer in answers)
    (host,) = answers[0]["levels"]
    assert (host["name"], host["size"]) == ("host", ranks)
    assert host["pairs"] == (((0, 1),) if ranks == 2 else ((0, 1), (0, 2)))
    assert 1e6 < host["bandwidth"] < 1e12  # a loopback on any machine
    assert 0 <= host["latency"] < 1.0
    assert 0 < host["message_seconds"] < 1.0
    assert [size for size, _ in host["seconds"]] == [1024, 65536, 1 << 20]
