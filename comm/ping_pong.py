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
    transport: Transport,
    *,
    rank: int,
    specs: Sequence[TensorSpec],
    device: torch.device,
    timeout: float,
    pair: tuple[int, int] = (0, 1),
    rounds: int = _ROUNDS,
) -> float:
    """Median one-way time of a message of these tensors between two ranks [s]; 0 on the other ranks.

    Half a round trip. Both ranks of the pair must call it; their links must exist in both directions.
    """
    if rank not in pair:
        return 0.0
    first, peer = rank == pair[0], pair[1] if rank == pair[0] else pair[0]
    tensors = [torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device).zero_() for spec in specs]
    times = []
    for turn in range(_WARM_UP + rounds):
        ping = Message(MessageKind.ACT, -1, -2, turn)
        pong = Message(MessageKind.GRAD, -2, -1, turn)
        start = time.perf_counter()
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
    transport.drain(timeout)
    return statistics.median(times[_WARM_UP:]) / 2
