"""The latency of a link, and what a message takes of the ranks at its ends, measured by itself."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..schedules import Message, MessageKind
from .transport import TensorSpec, Transport

_ROUNDS = 30
_COLD_ROUNDS = 12
_WARM_UP = 5
_PAUSE = 0.01  # about the compute of a stage [s]
CACHE_BYTES = 4 << 20  # more than a core's own caches hold


class PingPong(NamedTuple):
    """Medians of a message between two ranks, as LogGP has them: seconds = 2 busy + latency + bytes / bandwidth.

    seconds: one way, from its send to the return of the wait for it [s].
    busy: of the processor at either end: to post, to send, to take [s]. It is within `seconds`, but for what threads of
        the transport do beside.
    """

    seconds: float
    busy: float

    @property
    def latency(self) -> float:
        """Seconds of the way beside both ends [s]."""
        return max(0.0, self.seconds - 2 * self.busy)


NOTHING = PingPong(0.0, 0.0)


def ping_pong(
    transport: Transport,
    *,
    rank: int,
    specs: Sequence[TensorSpec],
    device: torch.device,
    timeout: float,
    pair: tuple[int, int] = (0, 1),
    rounds: int | None = None,
    ranks_of_host: int = 1,
    cold: bool = False,
) -> PingPong:
    """Messages of these tensors between two ranks, to and fro; nothing on the other ranks.

    Both ranks of the pair must call it; their links must exist in both directions.

    Arguments:
        ranks_of_host: on this host; see `processor_clock` for what counts to `busy`.
        cold: whether to be as ranks are between two actions: both push their core's caches out, as a stage's compute
            does, and the second sleeps in its wait for some time before the message comes. Then half of the messages
            wake a rank: see `waking_seconds`.
    """
    if rank not in pair:
        return NOTHING
    processor = processor_clock(device, ranks_of_host)
    first, peer = rank == pair[0], pair[1] if rank == pair[0] else pair[0]
    tensors = [torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device).zero_() for spec in specs]
    times, busy, pushed = [], [], torch.zeros(CACHE_BYTES // 4 if cold else 0)
    for turn in range(_WARM_UP + (rounds or (_COLD_ROUNDS if cold else _ROUNDS))):
        ping = Message(MessageKind.ACT, -1, -2, turn)
        pong = Message(MessageKind.GRAD, -2, -1, turn)
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
    return PingPong(*(statistics.median(each[_WARM_UP:]) / 2 for each in (times, busy)))


def waking_seconds(hot: PingPong, cold: PingPong) -> float:
    """How much longer a message takes to a rank that sleeps in its wait for it than to one that was just awake [s].

    Arguments:
        hot, cold: medians of `ping_pong` with the same tensors, as the first rank of the pair has them.
    """
    return max(0.0, 2 * (cold.latency - hot.latency))


def processor_clock(device: torch.device, ranks_of_host: int) -> Callable[[], float]:
    """The clock of what a rank is busy with; one that stands still where another device computes and sends.

    Where each rank of a host has a core at most, what the transport's own threads compute is taken from the ranks.
    """
    if device.type != "cpu":
        return lambda: 0.0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return time.thread_time if cores > ranks_of_host else time.process_time
