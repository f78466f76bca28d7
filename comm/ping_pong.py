"""The latency of a link, measured by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from ..schedules import Message, MessageKind
from .transport import TensorSpec, Transport

_ROUNDS = 30
_WARM_UP = 5


def one_way_seconds(
    transport: Transport, *, rank: int, specs: Sequence[TensorSpec], device: torch.device, timeout: float
) -> float:
    """Median one-way time of a message of these tensors between ranks 0 and 1 [s]; 0 on the other ranks.

    Half a round trip, medians over 30. Both ranks must call it; the links must exist in both directions.
    """
    if rank > 1:
        return 0.0
    peer = 1 - rank
    tensors = [torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device).zero_() for spec in specs]
    times = []
    for turn in range(_ROUNDS + _WARM_UP):
        ping = Message(MessageKind.ACT, -1, -2, turn)
        pong = Message(MessageKind.GRAD, -2, -1, turn)
        start = time.perf_counter()
        if rank == 0:
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
        times.append(time.perf_counter() - start)
    transport.drain(timeout)
    return statistics.median(times[_WARM_UP:]) / 2
