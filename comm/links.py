"""Links between the ranks of a run, measured on a pipeline's transport: seconds = latency + bytes / bandwidth.

Ranks of one host make the inner level, hosts the outer one. Of each level a few pairs are measured, one at a time,
while the other ranks wait:

    host a: 0 1 2 3        inside  0-1, 0-3, 4-5 (the first host's neighbours and ends, the last host's neighbours)
    host b: 4 5 6 7        between 0-4           (the first ranks of the first host and of the next, and of the last)

Between hosts a stream shows the sustained rate of a link, without the burst that a shaper lets pass.
Sums are measured on the host with most ranks, and on the first rank of each host.
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat, zip_longest
from typing import Any, NamedTuple

import torch

from ..schedules import Message, MessageKind
from .collectives import Collectives
from .groups import link_lanes
from .mesh import MeshPlace, World
from .process_group import ProcessGroupTransport
from .staged import staged
from .transport import TensorSpec, Transport

_ROUNDS = 30
_COLD_ROUNDS = 12
_PING_WARM_UP = 5
_PAUSE = 0.01  # about the compute of a stage [s]
_COLD_BYTES = 1 << 20  # of the large message with cold caches, at most
CACHE_BYTES = 4 << 20  # more than a core's own caches hold
SIZES = tuple(4**k * 1024 for k in range(8))  # 1 KiB to 16 MiB
SUM_BYTES = 1 << 23  # of gradients in one measured sum
SMALL_SUM_BYTES = 1 << 14  # of a sum whose steps take as long as empty ones, with elements for every rank
_SUMMED = 2  # gradients, as many as gloo sums at once
WARM_UP = 3
_SUMS = 9
_PAIRS = 3  # measured of a level, at most
_MOST_ROUNDS, _LEAST_ROUNDS = 40, 6
_BYTES_A_SIZE = 1 << 26  # larger messages travel less often
_STREAM, _MOST_STREAMED = 0.5, 64  # [s] of messages back to back, about, and their largest number


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFit:
    """seconds = latency + bytes / bandwidth, fitted to measured times: latency at least 0 [s], bandwidth [bytes/s]."""

    latency: float
    bandwidth: float
    residual: float  # root mean square of the line's error, relative to the measured times


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLevel:
    """One level of links, as `Level` of a Cluster describes it. `bandwidth`, `residual`: medians over the pairs
    [bytes/s], relative; at most the sustained rate of a stream."""

    name: str  # "host" or "network"
    size: int  # number of ranks, or of groups of the level below, that it joins
    bandwidth: float
    latency: float  # median to a rank that sleeps while it waits, without the time for which both ends are busy [s]
    residual: float
    # Of each member's link in a ring that sums gradients, scaled and all in flight at once as after a batch [bytes/s].
    reduce_bandwidth: float
    reduce_latency: float  # of each of the 2 (size - 1) steps of such a ring, measured with a small sum [s]
    pairs: tuple[tuple[int, int], ...]  # measured pairs of ranks
    fits: tuple[LineFit, ...]  # of each pair
    seconds: tuple[tuple[int, float], ...]  # by message size [bytes], of the first pair, one way [s]
    # For which the rank at either end of a message is busy with it, not part of the others [s]; and the rate at which
    # it is busy with bytes, in addition [bytes/s]; None: they take none of its time.
    message_seconds: float = 0.0
    message_bandwidth: float | None = None
    sum_busy: float = 0.0  # share of a sum's seconds for which the processors of its members are busy with it (0 to 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks:
    """Links of a run."""

    levels: tuple[MeasuredLevel, ...]  # innermost first
    hosts: tuple[tuple[int, ...], ...] = ()  # ranks of each host, in the order of their first ranks
    notes: tuple[str, ...] = ()  # what levels can't describe
    # How the backend sums over several levels, as `Cluster.rings` names it: NCCL by "levels", gloo "flat".
    rings: str = "levels"


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> LineFit:
    """The line with the least squares of relative errors, latency at least 0. `sizes`: [n] of messages [bytes], at
    least two different ones. `seconds`: [n] one way, above 0 [s]. Raises ValueError for fewer sizes, or times that are
    not above 0.

    >>> fit = fit_line([1e3, 1e6], [2e-6, 1.001e-3])
    >>> round(fit.latency * 1e6, 6), round(fit.bandwidth / 1e6)
    (1.0, 1000)
    """
    if len(set(sizes)) < 2 or len(sizes) != len(seconds) or min(seconds) <= 0:
        raise ValueError(
            f"sizes={list(sizes)}, seconds={list(seconds)}: expected a time above 0 for each of two or more sizes"
        )
    weights = [1 / t**2 for t in seconds]
    total = sum(weights)
    size = sum(w * n for w, n in zip(weights, sizes, strict=True)) / total
    mean = sum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    points = list(zip(weights, sizes, seconds, strict=True))
    slope = sum(w * (n - size) * (t - mean) for w, n, t in points) / sum(w * (n - size) ** 2 for w, n, t in points)
    latency = mean - slope * size
    if slope <= 0 or latency < 0:  # the nearest line that a link can have passes through the origin
        latency = 0.0
        slope = sum(w * n * t for w, n, t in points) / sum(w * n * n for w, n, t in points)
    off = [(latency + slope * n) / t - 1 for _, n, t in points]
    return LineFit(latency=latency, bandwidth=1 / slope, residual=statistics.fmean(each**2 for each in off) ** 0.5)


def measure_links(
    world: World,
    *,
    device: torch.device,
    timeout: float,
    sizes: Sequence[int] = SIZES,
    progress: Callable[[str], object] | None = None,
) -> MeasuredLinks:
    """Fit the links between the ranks of `world`. Collective over all of them; the result is the same on all.

    Arguments:
        device: of the tensors that are sent.
        timeout: for which a rank waits for another [s]; the measurement must not take longer than that.
        sizes: of messages [bytes].
        progress: called with what is measured next, on each rank.

    Hosts with unequal numbers of ranks, or whose ranks are not next to each other, make one level with the slowest of
    its links, and a note. A world of one rank has no links. Raises PipelineTimeout or PeerLost where a rank is gone.
    """
    if not world.distributed:
        return MeasuredLinks(levels=(), hosts=((world.rank,),))
    report = progress or (lambda text: None)
    together = Collectives(MeshPlace.line(world), device=device, timeout=timeout)
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(together.gather(socket.gethostname(), what="finding the hosts of all ranks")):
        by_host.setdefault(host, []).append(rank)
    hosts = list(by_host.values())
    wanted = [("host", _inside(hosts)[:_PAIRS]), ("network", _between(hosts)[:_PAIRS])]
    both = sorted({link for _, pairs in wanted for a, b in pairs for link in ((a, b), (b, a))})
    groups = together.groups
    lanes = link_lanes(both, groups)
    transport = staged(ProcessGroupTransport(world.rank, lanes, device=groups.wire, timeout=timeout), groups)
    rings = "flat" if groups.backend == "gloo" else "levels"
    levels, cold = [], (min(sizes), min(max(sizes), _COLD_BYTES))
    for name, pairs in wanted:
        times: list[list[PingPong]] = []  # by pair: of each size, then of a small and a large one with cold caches
        sustained: list[float] = []
        for pair in pairs:
            report(f"{name}: messages between ranks {pair[0]} and {pair[1]}")
            exchange: dict[str, Any] = {"device": device, "timeout": timeout, "pair": pair}
            measure = partial(ping_pong, transport, ranks_of_host=max(map(len, hosts)), **exchange)
            rounds = [min(_MOST_ROUNDS, max(_LEAST_ROUNDS, _BYTES_A_SIZE // size)) for size in sizes]
            mine = [measure(specs=[_spec(s, device)], rounds=r) for s, r in zip(sizes, rounds, strict=True)]
            mine += [measure(specs=[_spec(size, device)], cold=True) for size in cold]
            what = f"measuring the link between ranks {pair[0]} and {pair[1]}"
            times.append(together.gather(mine, what=what)[pair[0]])
            if name == "network":  # within a host there is no shaper
                number = round(_STREAM / max(one.seconds for one in times[-1][: len(sizes)]))
                number = min(_MOST_STREAMED, max(_LEAST_ROUNDS, number))
                each = stream_seconds(transport, _spec(max(sizes), device), number=number, **exchange)
                sustained.append(max(sizes) / together.gather(each, what=what)[pair[1]])
        if pairs:
            report(f"{name}: sums over ranks")
            members = max(hosts, key=len) if name == "host" else [ranks[0] for ranks in hosts]
            sums = _sums(together, members, ranks_of_host=max(map(len, hosts)))
            own = {"sums": sums, "rings": rings, "sustained": sustained}
            levels.append(_level(name, len(members), pairs, (sizes, cold), times, **own))  # type: ignore[arg-type]
    together.gather(None, what="measuring the links")
    transport.close()
    together.close()
    return replace(_as_levels(levels, by_host, world.size), rings=rings)


def _inside(hosts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    several = [ranks for ranks in hosts if len(ranks) > 1]
    pairs = [(ranks[0], other) for ranks in (*several[:1], *several[-1:]) for other in (ranks[1], ranks[-1])]
    return list(dict.fromkeys(pairs))


def _between(hosts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    others = [ranks[0] for ranks in (*hosts[1:2], *hosts[-1:]) if ranks is not hosts[0]]
    return list(dict.fromkeys((hosts[0][0], other) for other in others))


def _spec(size: int, device: torch.device) -> TensorSpec:
    return TensorSpec.of(torch.empty(max(1, size // 4), device=device))


def _sums(together: Collectives, members: Sequence[int], *, ranks_of_host: int) -> tuple[float, float, float]:
    """Medians of sums of gradients over a level's members: of a small one, of a large one, and for how long the large
    one occupies the busiest member's processor [s]."""
    together.subgroup(members)
    small, _ = _sum_seconds(together, members, SMALL_SUM_BYTES, number=1, ranks_of_host=ranks_of_host)
    large, busy = _sum_seconds(together, members, SUM_BYTES, number=_SUMMED, ranks_of_host=ranks_of_host)
    return small, large, busy


def _sum_seconds(
    together: Collectives, members: Sequence[int], num_bytes: int, *, number: int, ranks_of_host: int
) -> tuple[float, float]:
    """Medians of summing `num_bytes` over `members` as gradients are: scaled, then in flight at once, in `number` sums;
    of the slowest member, and of the busiest member's processor [s]."""
    device, what = together.device, "measuring sums over ranks"
    processor = processor_clock(device, ranks_of_host)
    times, busy = [], []
    if together.rank in members:
        gradients = [torch.zeros(num_bytes // number // 4, device=device) for _ in range(number)]
        for _ in range(WARM_UP + _SUMS):
            start, worked = time.perf_counter(), processor()
            torch._foreach_mul_(gradients, 1.0)
            for wait in [together.begin_all_reduce(each, what=what, ranks=members) for each in gradients]:
                wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
            busy.append(processor() - worked)
    mine = [statistics.median(each[WARM_UP:]) if each else 0.0 for each in (times, busy)]
    slowest, busiest = (max(each) for each in zip(*together.gather(mine, what=what), strict=True))
    return slowest, busiest


def _level(
    name: str,
    size: int,
    pairs: Sequence[tuple[int, int]],
    sizes: tuple[Sequence[int], tuple[int, int]],
    times: Sequence[Sequence[PingPong]],
    *,
    sums: tuple[float, float, float],
    rings: str,
    sustained: Sequence[float] = (),
) -> MeasuredLevel:
    """`sizes`: of messages, and of two with cold caches; `times`: by pair, of all of them; `sums`: of `_sums`;
    `sustained`: rates of streams by pair, between hosts [bytes/s].

    The time that both ends are busy with bytes is not the link's. So its bandwidth is above that of the messages, by up
    to ten times, but at most that of a stream.

    The small sum counts as if it were empty: 2 (size - 1) steps. The large one is put into the formula of rings
    (`partition/topology.py`): by "levels" each step has the same latency,

        seconds = 2 (size - 1) (reduce_latency + bytes / size / reduce_bandwidth)

    and in a "flat" ring the larger of its steps and its bytes decides:

        seconds = max(2 (size - 1) reduce_latency + bytes / reduce_bandwidth,
                      2 reduce_latency + 2 (size - 1) / size bytes / reduce_bandwidth)
    """
    hot, (least, most) = sizes
    fits = tuple(fit_line(hot, [one.seconds for one in each[: len(hot)]]) for each in times)
    small, large = (statistics.median(each[at].busy for each in times) for at in (-2, -1))
    busy_a_byte = max(0.0, large - small) / max(1, most - least)
    alone = [1 / max(1 / fit.bandwidth - 2 * busy_a_byte, 0.1 / fit.bandwidth) for fit in fits]
    latency = statistics.median(
        max(0.0, fit.latency - 2 * each[0].busy) + waking_seconds(each[0], each[-2])
        for fit, each in zip(fits, times, strict=True)
    )
    (one, whole, busy), hops = sums, 2 * (size - 1)
    step = min(one, whole) / hops
    kinds = [(hops, 1.0), (2, hops / size)] if rings == "flat" else [(hops, hops / size)]
    return MeasuredLevel(
        name=name,
        size=size,
        bandwidth=statistics.median(map(min, alone, sustained or repeat(math.inf))),
        latency=latency,
        message_seconds=small,
        message_bandwidth=1 / busy_a_byte if busy_a_byte else None,
        sum_busy=min(1.0, busy / whole),
        reduce_bandwidth=max(part * SUM_BYTES / max(whole - waits * step, whole / 10) for waits, part in kinds),
        reduce_latency=step,
        residual=statistics.median(fit.residual for fit in fits),
        pairs=tuple(pairs),
        fits=fits,
        seconds=tuple((size, one.seconds) for size, one in zip(hot, times[0], strict=False)),
    )


def _as_levels(levels: Sequence[MeasuredLevel], by_host: Mapping[str, Sequence[int]], num_ranks: int) -> MeasuredLinks:
    """Levels of groups of equal size whose ranks are next to each other, or one level of all ranks."""
    hosts = tuple(tuple(ranks) for ranks in by_host.values())
    size = len(hosts[0])
    if hosts == tuple(tuple(range(i, i + size)) for i in range(0, num_ranks, size)):
        return MeasuredLinks(levels=tuple(levels), hosts=hosts)
    slowest = min(levels, key=lambda level: level.bandwidth)
    worst = {
        name: max(getattr(level, name) for level in levels)
        for name in ("latency", "reduce_latency", "message_seconds", "sum_busy")
    }
    worst["reduce_bandwidth"] = min(level.reduce_bandwidth for level in levels)
    rates = [level.message_bandwidth for level in levels if level.message_bandwidth]
    flat = replace(slowest, size=num_ranks, message_bandwidth=min(rates, default=None), **worst)
    shown = "; ".join(f"{host}: {', '.join(map(str, ranks))}" for host, ranks in by_host.items())
    want = "as many ranks on each host" if len({*map(len, hosts)}) > 1 else "ranks of a host next to each other"
    note = (
        f"ranks by host ({shown}) are not equal groups of neighbours, so all links count as slow as the slowest: "
        f"expected {want}, as torchrun starts them with one --nproc-per-node everywhere, Slurm with "
        f"--distribution=block"
    )
    return MeasuredLinks(levels=(flat,), hosts=hosts, notes=(note,))


class PingPong(NamedTuple):
    """Medians of a message between two ranks, as in LogGP: seconds = 2 busy + latency + bytes / bandwidth."""

    seconds: float  # one way, from its send to the return of the wait for it [s]
    # Of the processor at either end, to post, send or receive it [s]: part of `seconds`, but for what threads of the
    # transport do alongside.
    busy: float

    @property
    def latency(self) -> float:
        return max(0.0, self.seconds - 2 * self.busy)


def ping_pong(
    transport: Transport,
    specs: Sequence[TensorSpec],
    *,
    device: torch.device,
    timeout: float,
    pair: tuple[int, int] = (0, 1),
    rounds: int | None = None,
    ranks_of_host: int = 1,  # number of ranks on this host, for `processor_clock`
    # Whether to imitate ranks between two actions: both evict their core's caches, as a stage's compute does, and the
    # second sleeps in its wait before the message arrives. Then half of the messages wake a rank: see `waking_seconds`.
    cold: bool = False,
) -> PingPong:
    """Messages of these tensors between two ranks, back and forth; nothing on the other ranks.

    Both ranks of the pair must call it; their links must exist in both directions."""
    rank = transport.rank
    if rank not in pair:
        return PingPong(0.0, 0.0)
    processor = processor_clock(device, ranks_of_host)
    first, peer = rank == pair[0], pair[1] if rank == pair[0] else pair[0]
    tensors = [torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device).zero_() for spec in specs]
    times, busy, pushed = [], [], torch.zeros(CACHE_BYTES // 4 if cold else 0)
    for number in range(_PING_WARM_UP + (rounds or (_COLD_ROUNDS if cold else _ROUNDS))):
        ping = Message(MessageKind.ACT, -1, -2, number)
        pong = Message(MessageKind.GRAD, -2, -1, number)
        pushed.add_(1.0)
        if cold and first:
            time.sleep(_PAUSE)
        start, worked = time.perf_counter(), processor()
        if first:
            transport.post(pong, peer, specs)
            transport.send(ping, peer, tensors, specs)
            transport.wait(pong, timeout)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            transport.acknowledged([ping])
        else:
            transport.post(ping, peer, specs)
            transport.wait(ping, timeout)
            transport.send(pong, peer, tensors, specs)
            transport.end_of_program()
        times.append(time.perf_counter() - start)
        busy.append(processor() - worked)
    transport.drain(timeout)
    return PingPong(*(statistics.median(each[_PING_WARM_UP:]) / 2 for each in (times, busy)))


def stream_seconds(
    transport: Transport,
    spec: TensorSpec,
    *,
    device: torch.device,
    timeout: float,
    pair: tuple[int, int],
    number: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds between arrivals of messages that are sent back to back: the median of the slowest half.

    A shaper lets a burst pass at once, and another one after each pause, such as while a pong returns: so round trips
    show a link as faster than it is. The slowest half comes after the burst, if that is less than half of all. Two
    messages are in flight at a time, and where they share the link both arrive at once: each counts half of the time
    from the arrival before them to the later of them.
    Both ranks of the pair must call it; the second one has the result, the others 0.
    """
    rank, (first, second) = transport.rank, pair
    messages = [Message(MessageKind.ACT, -3, -4, i) for i in range(number + 1)]
    arrivals: list[float] = []
    if rank == first:
        tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device).zero_()
        for message in messages:
            transport.send(message, second, [tensor], [spec])
    elif rank == second:
        transport.post(messages[0], first, [spec])
        for message, then in zip_longest(messages, messages[1:]):
            if then is not None:
                transport.post(then, first, [spec])
            transport.wait(message, timeout)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            arrivals.append(clock())
    transport.drain(timeout)
    between = sorted((later - earlier) / 2 for earlier, later in zip(arrivals, arrivals[2:], strict=False))
    return statistics.median(between[len(between) // 2 :]) if between else 0.0


def waking_seconds(hot: PingPong, cold: PingPong) -> float:
    """Additional seconds of a message to a rank that sleeps while it waits for it, by two `ping_pong`s [s]."""
    return max(0.0, 2 * (cold.latency - hot.latency))


def processor_clock(device: torch.device, ranks_of_host: int) -> Callable[[], float]:
    """The clock of a rank's processor time; constant where another device computes and sends. Where each rank of a host
    has a core at most, the transport's threads count, too: they take time from the ranks."""
    if device.type != "cpu":
        return lambda: 0.0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return time.thread_time if cores > ranks_of_host else time.process_time
