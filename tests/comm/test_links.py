"""Links: the fit on made-up times, the measured pairs, the whole over gloo, and hosts that do not reach each other.

Clocks of hosts over gloo: processes with clocks of their own, told apart by the names of their machines.
"""

import dataclasses
import json
import math
import os
import socket
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import (
    SIZES,
    SUM_BYTES,
    MeasuredLevel,
    MeasuredLinks,
    Place,
    Topology,
    _as_levels,
    _between,
    _inside,
    _level,
    cluster_of,
    fit_line,
    gloo_address,
    measure_links,
    reach,
    read_place,
    refusals,
    stream_seconds,
)
from support.inside import PingPongPingPong as PingPong
from support.pool import Pool

from stagewright.comm import (
    Collectives,
    HostClocks,
    MeshPlace,
    PeerLost,
    TensorSpec,
    Transport,
    World,
    join_world,
    machine,
)
from stagewright.schedules import Costs, Link, Links, Message, build, simulate

CPU = torch.device("cpu")


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.floats(0, 1e-3), st.floats(1e6, 1e12))
def test_a_line_is_found_again(latency: float, bandwidth: float) -> None:
    fit = fit_line(SIZES, [latency + size / bandwidth for size in SIZES])
    assert fit.bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert fit.latency == pytest.approx(latency, rel=1e-3, abs=2e-3 * SIZES[0] / bandwidth)
    assert fit.residual < 1e-3


def test_a_line_through_small_and_large_messages() -> None:
    """In absolute terms the largest message alone would decide, and the latency would be lost in its error."""
    times = [1e-4 + size / 1e9 for size in SIZES]
    times[-1] *= 1.1
    fit = fit_line(SIZES, times)
    assert fit.latency == pytest.approx(1e-4, rel=0.1)
    assert fit.residual > 0.01
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
        ([[0], [1, 2, 3], [4]], [(1, 2), (1, 3)], [(0, 1), (0, 4)]),
    ],
)
def test_pairs(hosts: list[list[int]], inside: list[tuple[int, int]], between: list[tuple[int, int]]) -> None:
    assert _inside(hosts) == inside
    assert _between(hosts) == between


def level(name: str, size: int, bandwidth: float) -> MeasuredLevel:
    fit = fit_line([1, 2], [1 / bandwidth, 2 / bandwidth])
    return MeasuredLevel(
        name=name,
        size=size,
        bandwidth=bandwidth,
        latency=1e-6,
        residual=0,
        reduce_bandwidth=bandwidth / 2,
        reduce_latency=2e-6,
        pairs=((0, 1),),
        fits=(fit,),
        seconds=(),
    )


def test_unequal_hosts_make_one_level_of_the_slowest_links() -> None:
    levels = (dataclasses.replace(level("host", 2, 1e9), latency=3e-6), level("network", 2, 1e8))
    equal = {"a": [0, 1], "b": [2, 3]}
    assert _as_levels(levels, equal, 4) == MeasuredLinks(levels=levels, hosts=((0, 1), (2, 3)))
    for first, second, wanted in (
        ([0, 1], [2], "expected as many ranks on each host"),
        ([0, 2], [1, 3], "expected ranks of a host next to each other"),
    ):
        found = _as_levels(levels, {"a": first, "b": second}, len(first + second))
        assert [(each.size, each.bandwidth) for each in found.levels] == [(len(first + second), 1e8)]
        assert found.hosts == (tuple(first), tuple(second))
        assert (found.levels[0].latency, found.levels[0].reduce_bandwidth) == (3e-6, 5e7)
        shown = f"a: {', '.join(map(str, first))}; b: {', '.join(map(str, second))}"
        assert f"ranks by host ({shown}) are not equal groups of neighbours" in found.notes[0]
        assert wanted in found.notes[0]


def test_a_message_takes_both_ends_and_the_way() -> None:
    """Seconds of both ends are no latency, nor a ring's; between actions it is what cold caches make of it, and
    a rank that sleeps wakes up."""
    sizes, way, waking, busy = (1000, 2000), 5e-6, 300e-6, 40e-6
    hot = [PingPong(2 * busy + way + size / 1e9, busy + size / 1e12) for size in sizes]
    # pings wake the second rank, pongs find the first one awake
    cold = [PingPong(2 * own + hot[0].latency + waking / 2, own) for own in (3 * busy, 3 * busy + 1000 / 5e9)]
    pairs = [[*hot, *cold]] * 2
    way += waking
    hops, step, part = 2, 2 * way, SUM_BYTES / 1e9
    sums = (hops * step, hops * step + part, part / 4)
    found = _level("host", 2, [(0, 1), (0, 2)], (sizes, sizes), pairs, sums=sums, rings="levels")
    assert found.message_bandwidth == pytest.approx(5e9)
    assert found.bandwidth == pytest.approx(1 / (1 / 1e9 - 2 / 5e9), rel=1e-3)
    assert found.sum_busy == pytest.approx(part / 4 / (hops * step + part))
    assert found.reduce_latency == pytest.approx(step)
    assert found.message_seconds == pytest.approx(3 * busy)
    assert found.latency == pytest.approx(way, rel=1e-3)
    assert found.reduce_bandwidth == pytest.approx(1e9, rel=1e-3)
    assert found.seconds == ((1000, pairs[0][0].seconds), (2000, pairs[0][1].seconds))


def test_sums_over_a_cluster_take_as_long_as_they_were_measured() -> None:
    """Figures of a level, put back into the formula that plans use: over one rank of each host, and over all."""
    sizes, pairs = ((1000, 2000), (1000, 2000)), [[PingPong(1e-4, 1e-5)] * 4]
    small, large = (4 * 4e-3, 2e-5 * 2), (0.1, 4e-3)  # three hosts, two ranks each
    network, host = (
        _level(name, n, [(0, 1)], sizes, pairs, sums=(a, b, 0), rings="flat")
        for name, n, a, b in (("network", 3, small[0], large[0]), ("host", 2, small[1], large[1]))
    )
    found = _as_levels((host, network), {"a": [0, 1], "b": [2, 3], "c": [4, 5]}, 6)
    flat = Topology(cluster_of(dataclasses.replace(found, rings="flat")))
    assert flat.ring((0, 2, 4)).seconds(SUM_BYTES, number=2) == pytest.approx(large[0])
    assert flat.ring((0, 2, 4)).latency == pytest.approx(small[0])
    assert flat.ring((4, 5)).seconds(SUM_BYTES, number=2) == pytest.approx(large[1])
    step = small[0] / 4
    moved = large[0] - 2 * step  # 4/3 of the bytes, behind the waits in front of both halves
    assert flat.ring(range(6)).seconds(SUM_BYTES, number=2) == pytest.approx(2 * step + moved * 10 / 6 / (4 / 3))


class TokenBucket(Transport):
    """The receiving end of a link whose shaper passes a burst at the speed of the wire and the rest at its rate."""

    def __init__(self, *, burst: float, rate: float, wire: float) -> None:
        super().__init__(1)
        self.now, self._tokens, self._burst, self._rate, self._wire = 0.0, burst, burst, rate, wire
        self._posted: dict[Message, int] = {}

    def send(self, message: Message, peer: int, tensors: object, specs: object) -> None:
        raise AssertionError("a receiver sends nothing")

    def abort(self) -> None:
        raise AssertionError("nothing fails")

    def post(self, message: Message, peer: int, specs: Sequence[TensorSpec]) -> None:
        self._posted[message] = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)

    def wait(self, message: Message, timeout: float) -> tuple[torch.Tensor, ...]:
        assert len(self._posted) <= 2  # no memory that grows with what is sent
        size = self._posted.pop(message)
        took = max(size / self._wire, (size - self._tokens) / self._rate)
        self._tokens = min(self._burst, max(0.0, self._tokens + took * self._rate - size))
        self.now += took
        return ()


def test_a_link_is_no_faster_than_past_its_burst() -> None:
    """1 Gbit/s was found as 1.24: what a shaper lets pass at once was there again for each round trip."""
    size, rate, burst = 1 << 22, 1.25e8, 30e6
    bucket = TokenBucket(burst=burst, rate=rate, wire=1.25e9)
    spec = TensorSpec.of(torch.empty(size // 4))
    given = {"device": CPU, "timeout": 1.0, "pair": (0, 1), "number": 16}
    sustained = size / stream_seconds(bucket, spec, clock=lambda: bucket.now, **given)
    assert sustained == pytest.approx(rate)
    trips = [PingPong(1e-4 + max(n / 1.25e9, (n - 5e5) / rate), 1e-5) for n in SIZES]
    times = [[*trips, trips[0], PingPong(1.0, 1.0)]]  # busy for long: the stream says how fast the link is
    sizes, sums = (SIZES, SIZES[:2]), (1.0, 2.0, 0.0)
    found = _level("network", 2, [(0, 1)], sizes, times, sums=sums, rings="flat", sustained=[sustained])
    assert found.fits[0].bandwidth > 1.2 * rate
    assert found.bandwidth == pytest.approx(rate)
    other = TokenBucket(burst=burst, rate=rate, wire=1.25e9)
    other.rank = 2
    assert stream_seconds(other, spec, clock=lambda: other.now, **given) == 0.0 == other.now


class SharedLink(TokenBucket):
    """The receiving end of a link on which both messages in flight travel at half of its rate, and arrive at once."""

    def __init__(self, rate: float) -> None:
        super().__init__(burst=0.0, rate=rate, wire=math.inf)
        self._here: set[Message] = set()

    def wait(self, message: Message, timeout: float) -> tuple[torch.Tensor, ...]:
        if message not in self._here:
            self._here |= self._posted.keys()
            self.now += sum(self._posted.values()) / self._rate
        del self._posted[message]
        return ()


def test_messages_that_share_a_link_do_not_show_it_as_half_as_fast() -> None:
    """On a busy machine 1 Gbit/s was found as 0.52: of two messages in flight one took all the time."""
    link, spec = SharedLink(rate=1.25e8), TensorSpec.of(torch.empty(1 << 20))
    given = {"device": CPU, "timeout": 1.0, "pair": (0, 1), "number": 16}
    assert (1 << 22) / stream_seconds(link, spec, clock=lambda: link.now, **given) == pytest.approx(1.25e8)


def test_a_long_link_is_busy_whatever_its_latency() -> None:
    """GPipe over 56 ms: four receives posted ahead stood still for a latency there and back after every four messages:
    2.05 s. Those of 16 MiB are posted."""
    links = Links(network=Link(latency=0.056, seconds_per_byte=8e-9), activation_bytes=64 * 1024.0)
    schedule = build("gpipe", num_ranks=2, num_microbatches=32)
    assert simulate(schedule, Costs(forward=0.01, backward=0.02), links).makespan == pytest.approx(1.10, abs=0.01)


def test_a_world_of_one_has_no_links() -> None:
    assert measure_links(World(rank=0, size=1), device=CPU, timeout=1.0) == MeasuredLinks(levels=(), hosts=((0,),))


def measured(sizes: tuple[int, ...]) -> dict[str, object]:
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    return dataclasses.asdict(measure_links(world, device=CPU, timeout=120.0, sizes=sizes))


@pytest.mark.thorough(but=["2"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_over_gloo_all_ranks_get_the_same_answer(gloo: Pool, ranks: int) -> None:
    answers = gloo.run(measured, ranks=ranks, args=((1024, 65536, 1 << 20),))
    assert all(answer == answers[0] for answer in answers)
    (host,) = answers[0]["levels"]
    assert (host["name"], host["size"]) == ("host", ranks)
    assert answers[0]["rings"] == "flat"
    assert 0 < host["reduce_latency"] < 1.0
    assert host["pairs"] == (((0, 1),) if ranks == 2 else ((0, 1), (0, 2)))
    assert 1e6 < host["bandwidth"] < 1e12  # a loopback on any machine
    assert 0 <= host["latency"] < 1.0
    assert 0 < host["message_seconds"] < 1.0
    assert 1e6 < (host["message_bandwidth"] or 1e9) < 1e15
    assert [size for size, _ in host["seconds"]] == [1024, 65536, 1 << 20]


def measured_on_two_hosts(names: tuple[str, ...]) -> dict[str, object]:
    with mock.patch("socket.gethostname", return_value=names[dist.get_rank()]):
        return measured((1024, 65536))


def test_hosts_of_unequal_size_whose_first_has_one_rank(gloo: Pool) -> None:
    """Sums within a host were measured on the first, and one rank sums at no speed at all."""
    answers = gloo.run(measured_on_two_hosts, ranks=3, args=(("a", "b", "b"),))
    assert all(answer == answers[0] for answer in answers)
    (flat,) = answers[0]["levels"]
    assert flat["size"] == 3
    assert flat["reduce_bandwidth"] > 0
    assert answers[0]["hosts"] == ((0,), (1, 2))


def test_refusals_are_told_apart_from_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # taken, and nobody listens
        targets = {"open": server.getsockname(), "closed": bound.getsockname()}
        assert refusals(targets, seconds=5.0) == {"closed": "Connection refused"}
        with mock.patch("selectors.DefaultSelector.select", return_value=[]):
            silent = refusals({"a": server.getsockname()}, seconds=0.01)
    assert silent == {"a": "no answer within 0.01 s"}


def test_who_is_not_reached_and_what_to_do() -> None:
    first = {"a": Place(host="a", address="10.0.0.1"), "b": Place(host="b", address="127.0.1.1")}
    assert reach._story(first, {"a": {"b": "Connection refused"}, "b": {}}) == (
        "a does not reach b at 127.0.1.1 (Connection refused): expected the address of a network that all hosts share "
        "(its interface: type GLOO_SOCKET_IFNAME=eth0 before the command), and that nothing, such as "
        "a firewall, blocks it: gloo connects to any free TCP port"
    )
    assert reach._story(first, {"a": {}, "b": {}}) == ""


def test_the_address_is_the_interfaces_or_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert gloo_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME=nothing0: no network interface of .*: expected one of"):
        gloo_address()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (at, 0)) for at in ("192.0.2.1", "127.0.0.5")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert gloo_address() == "127.0.0.5"  # the first is no address of this host
    monkeypatch.setattr(socket, "getaddrinfo", mock.Mock(side_effect=socket.gaierror))
    assert gloo_address() == "127.0.0.1"


def test_a_place_is_told() -> None:
    found = Place(socket.gethostname(), gloo_address())
    assert read_place(json.dumps(found)) == found
    with pytest.raises(ValueError, match="at the rendezvous is no place of a rank"):
        read_place("{}")


def join_as_two_hosts() -> list[str]:
    """Each rank's answers where the second host's address leads elsewhere, and then where it does not."""
    device, rank = torch.device("cpu"), int(os.environ["RANK"])

    def elsewhere(_: str, *, backlog: int) -> socket.socket:
        return socket.create_server(("127.0.0.2", 0))

    named = mock.patch("socket.gethostname", return_value="ab"[rank])
    wrong = mock.patch.object(reach, "_server", side_effect=elsewhere if rank else reach._server)
    with named, wrong, pytest.raises(PeerLost) as error:
        join_world(device=device, timeout=120.0)
    with named:
        world = join_world(device=device, timeout=120.0)
    dist.destroy_process_group()
    return [str(error.value), str(world.size)]


def test_all_ranks_name_the_hosts_that_are_not_reached(gloo: Pool) -> None:
    for rank, (story, size) in enumerate(gloo.run(join_as_two_hosts, ranks=2, group=False)):
        begins = f"rank {rank} of 2 cannot be connected with all others: a does not reach b at 127.0.0.1 (Connection re"
        assert story.startswith(begins)
        assert "b does not reach a" not in story
        assert size == "2"


AHEAD = {"a": 0.0, "b": 5000.0, "c": -0.02}
DRIFT = {"a": 0.0, "b": 0.01, "c": 0.0}  # seconds a second: far more than real clocks, to be seen in a test


def compared(machines: str) -> dict[str, Any]:
    """Two comparisons half a second apart; the truth is known, since all processes are on one machine."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    place, mine = MeshPlace.line(world), machines[world.rank]

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


def test_clocks_of_three_hosts(gloo: Pool) -> None:
    """Process 0 shares its host with 2, and 1 shares with 3; the processes of a host have one reading."""
    found = gloo.run(compared, ranks=5, args=("abacb",))
    assert [each["readings"] for each in found[::2][:2]] == [[], []]
    assert found[1]["readings"] == found[4]["readings"]
    assert len(found[1]["readings"]) == len(found[3]["readings"]) == 2
    assert all(earlier.at < later.at for each in found for earlier, later in pairwise(each["readings"]))
    for each, host in zip(found, "abacb", strict=True):
        assert each["off"] <= each["error"] + 1e-6
        assert (each["error"] > 0) == (host != "a")


def test_one_kernel_is_one_machine() -> None:
    assert machine() == machine()
    assert len(machine()) > 8
