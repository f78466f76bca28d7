"""Sums of gradients over hosts beside what the links, measured in the same processes, let expect of them.

A sum that takes longer than predicted makes a planner replicate too much, one that takes less too little. Each size is
summed alone and in several sums begun together, as gradients are behind a batch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from ..jobs.case import Case, wanted
from ..jobs.figure import Figure, How, repeated

if TYPE_CHECKING:
    from ...comm import Collectives

SUMS = ((1 << 14, 1), (1 << 19, 1), (1 << 22, 1), (1 << 24, 1), (1 << 23, 2), (1 << 23, 8))  # bytes in all, sums
_MEASURED, _PREDICTED, _OFF = "sum", "sum, predicted", "sum, predicted / found"
_WARM_UP = 1
_TIMEOUT = 120.0  # [s]


def measured(case: Case, repetitions: int) -> Iterator[Figure]:
    """Seconds of sums over all ranks, as they are and as predicted; runs on all of them."""
    import torch

    from ...comm import Collectives, MeshPlace, join_world
    from ...comm.links import measure_links
    from ...partition.topology import Topology
    from ...pipe.auto.layout import cluster_of

    device = torch.device("cpu")
    world = join_world(device=device, timeout=_TIMEOUT)
    ring = Topology(cluster_of(measure_links(world, device=device, timeout=_TIMEOUT))).ring(range(world.size))
    together = Collectives(MeshPlace.line(world), device=device, timeout=_TIMEOUT)
    how = How.MEASURED if wanted(case).shape.is_plain else How.EMULATED
    for num_bytes, number in SUMS:
        shown = case.also(bytes=num_bytes, sums=number)
        predicted = ring.seconds(num_bytes, number=number)
        yield Figure(case=shown, name=_PREDICTED, value=predicted, unit="s", how=How.SIMULATED)
        seconds = [_seconds(together, num_bytes, number, world.size) for _ in range(_WARM_UP + repetitions)][_WARM_UP:]
        yield from repeated(seconds, case=shown, name=_MEASURED, unit="s", how=how)
        yield from repeated([predicted / each for each in seconds], case=shown, name=_OFF, unit="ratio", how=how)
    together.close()


def findings(figures: Sequence[Figure]) -> list[str]:
    """How near predictions are, over all sizes and links."""
    by_case: dict[Case, list[float]] = defaultdict(list)
    for figure in figures:
        if figure.name == _OFF:
            by_case[figure.case].append(figure.value)
    off = {case: median(values) - 1 for case, values in by_case.items()}
    if not off:
        return []
    worst = max(sorted(off, key=str), key=lambda case: abs(off[case]))
    return [
        f"Predicted sums are {100 * median(map(abs, off.values())):.0f}% off in the median of {len(off)} cases, "
        f"{100 * off[worst]:+.0f}% at worst ({worst})."
    ]


def _seconds(together: Collectives, num_bytes: int, number: int, num_ranks: int) -> float:
    """Seconds of sums begun together, on the slowest rank; collective over all ranks."""
    import torch

    gradients = [torch.zeros(num_bytes // number // 4) for _ in range(number)]
    ranks, what = range(num_ranks), "summing as gradients are"
    together.gather(None, what=what)  # all begin at once
    began = time.perf_counter()
    for wait in [together.begin_all_reduce(each, what=what, ranks=ranks) for each in gradients]:
        wait()
    return max(together.gather(time.perf_counter() - began, what=what))
