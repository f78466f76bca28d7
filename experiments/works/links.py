"""Links between nodes as ranks measure them over gloo: one-way time of a message, and bytes per second.

Experiments on shaped links also record these figures, which show the real links:

    yield from between_nodes(case)      on all ranks, before anything else is sent
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..jobs.case import Case, nodes_of
from ..jobs.figure import Figure, How

if TYPE_CHECKING:
    import torch

LATENCY, BANDWIDTH = "latency of a link", "bandwidth of a link"
_TRIPS = 15
_LONG, _LONGEST = 0.25, 2.0  # [s] of a message: shortest for a rate, and sufficient
_STEADY = 0.05  # largest relative difference of two rates in a row
_FIRST, _MOST = 1 << 18, 1 << 27  # [bytes] of messages


def measured(case: Case, repetitions: int) -> Iterator[Figure]:
    """Both figures of every link, and their ratios to the requested ones; runs on all ranks."""
    for repetition in range(repetitions):
        for figure in between_nodes(case, repetition=repetition):
            yield figure
            if (asked := _asked(figure)) is not None:
                name = f"{figure.name}, found / asked for"
                yield replace(figure, name=name, value=figure.value / asked, unit="ratio")


def between_nodes(case: Case, *, repetition: int = 0) -> Iterator[Figure]:
    """Latency and bandwidth from every node to every other one, one link after the other; runs on all ranks.

    The case of a figure is the given one with the nodes of the link: `sender`, `receiver`. Latency is half a round trip
    of one byte. Bandwidth is the difference in bytes over the difference in time of a message and one of half its size,
    which excludes TCP's slow start. Messages grow until it is constant.
    """
    import torch.distributed as dist

    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_nodes = dist.get_world_size() // ranks_per_node
    how = How.MEASURED if nodes_of(case).shape.is_plain else How.EMULATED
    for sender in range(num_nodes):
        for receiver in range(num_nodes):
            if sender == receiver:
                continue
            latency, bandwidth = _link(sender * ranks_per_node, receiver * ranks_per_node)
            link = case.also(sender=sender, receiver=receiver)
            yield Figure(case=link, name=LATENCY, value=latency, unit="s", how=how, repetition=repetition)
            yield Figure(
                case=link, name=BANDWIDTH, value=8e-9 * bandwidth, unit="Gbit/s", how=how, repetition=repetition
            )


def _asked(figure: Figure) -> float | None:
    shape = nodes_of(figure.case).shape
    crosses = False
    if shape.sites:
        crosses = shape.sites[int(figure.case.number("sender"))] != shape.sites[int(figure.case.number("receiver"))]
    if figure.name == LATENCY:
        return (shape.site_latency if crosses else shape.latency) or None
    rates = [rate for rate in (shape.bandwidth, shape.site_bandwidth if crosses else None) if rate is not None]
    return 8e-9 * min(rates) if rates else None


def _link(sender: int, receiver: int) -> tuple[float, float]:
    import torch
    import torch.distributed as dist

    found = torch.zeros(2, dtype=torch.float64)
    dist.barrier()
    rank = dist.get_rank()
    if rank in (sender, receiver):
        byte = torch.zeros(1, dtype=torch.uint8)
        found[0] = min(exchange(byte, sender, receiver) for _ in range(_TRIPS)) / 2
        found[1] = _rate(sender, receiver)
    dist.broadcast(found, src=sender)
    return found[0].item(), found[1].item()


def _rate(sender: int, receiver: int) -> float:
    """Bytes per second; the sender's clock decides for both ranks.

    If no two differences agree, as on a busy machine, the lower of the last two counts, or the rate of the whole
    longest message, which is never faster than its link.
    """
    import torch

    size, before, rates = _FIRST, 0.0, [0.0, 0.0]
    while True:
        took = torch.zeros(1, dtype=torch.float64)
        took[0] = exchange(torch.zeros(size, dtype=torch.uint8), sender, receiver)
        _pass(took, sender, receiver)
        longer, before = took.item() - before, took.item()
        rates = [rates[-1], size / 2 / longer if longer > 0 else 0.0]
        is_steady = rates[1] > 0 and abs(rates[1] - rates[0]) <= _STEADY * rates[1]
        if before >= _LONG and is_steady:
            return rates[1]
        if before >= _LONGEST or size >= _MOST:
            return max(min(rates), size / before)
        size *= 2


def exchange(message: torch.Tensor, sender: int, receiver: int) -> float:
    """Seconds from sending a message to the arrival of a one-byte answer."""
    import torch

    began = time.perf_counter()
    _pass(message, sender, receiver)
    _pass(torch.zeros(1, dtype=torch.uint8), receiver, sender)
    return time.perf_counter() - began


def _pass(message: torch.Tensor, sender: int, receiver: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == sender:
        dist.send(message, receiver)
    else:
        dist.recv(message, sender)
