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
_WARM_UP = 5
CACHE_BYTES = 4 << 20  # more than a core's own caches hold


class PingPong(NamedTuple):
    """Medians of a message between two ranks, as LogGP has them: seconds = 2 busy + latency + bytes / bandwidth.

    seconds: one way, from its send to the return of the wait for it [s].
    busy: of the processor at either end: to post, to send, to take [s]. It is within `seconds`, but for what threads of
        the transport do beside.
    """

    seconds: float
    busy: float


NOTHING = PingPong(0.0, 0.0)


def ping_pong(
    transport: Transport,
    *,
    rank: int,
    specs: Sequence[TensorSpec],
    device: torch.device,
    timeout: float,
    pair: tuple[int, int] = (0, 1),
    rounds: int = _ROUNDS,
    ranks_of_host: int = 1,
    cold: bool = False,
) -> PingPong:
    """Messages of these tensors between two ranks, to and fro; nothing on the other ranks.

    Both ranks of the pair must call it; their links must exist in both directions.

    Arguments:
        ranks_of_host: on this host. Where each has a core at most, what the transport's own threads compute is taken
            from the ranks, and counts to `busy`.
        cold: whether to push the core's caches out in front of each message, as a stage's compute does: `busy` is then
            that of a message between two actions, while `seconds` has the pushing in it.
    """
    if rank not in pair:
        return NOTHING
    processor = _processor(device, ranks_of_host)
    first, peer = rank == pair[0], pair[1] if rank == pair[0] else pair[0]
    tensors = [torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device).zero_() for spec in specs]
    times, busy, pushed = [], [], torch.zeros(CACHE_BYTES // 4 if cold else 0)
    for turn in range(_WARM_UP + rounds):
        ping = Message(MessageKind.ACT, -1, -2, turn)
        pong = Message(MessageKind.GRAD, -2, -1, turn)
        pushed.add_(1.0)
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


def _processor(device: torch.device, ranks_of_host: int) -> Callable[[], float]:
    """The clock of what a rank is busy with; one that stands still where another device computes and sends."""
    if device.type != "cpu":
        return lambda: 0.0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return time.thread_time if cores > ranks_of_host else time.process_time
