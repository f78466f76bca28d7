"""Problems with more room than there is, whose orders moves then make fit the memory.

A stage whose activations wait on the host takes next to nothing, so the search is asked for the order of a problem in
which the first stages of the chain take none: their activations live longest. Or it is given some times the memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from .problem import Problem

_PARTS = (0.5, 0.25, 0.75, 1.0)  # of the stages, those that leave
_TIMES = (2.0, 1.4, math.inf)  # as much memory
_MOVING = 2.0  # activations of a stage that are under way, out and back


def relaxed(problem: Problem) -> Iterator[Problem]:
    """Such problems, those that most often lead to something first."""
    assert problem.memory_limit is not None
    S, M = problem.num_stages, problem.num_microbatches
    largest = [max(row) for row in problem.held]
    for away in dict.fromkeys(round(part * S) for part in _PARTS):
        if away == 0:
            continue
        limits = []
        for limit, own in zip(problem.memory_limit, problem.placement, strict=True):
            least = max(math.fsum(problem.held[s][k] for s in own if s >= away) for k in range(M))
            moving = _MOVING * max((largest[s] for s in own if s < away), default=0.0)
            limits.append(max(limit - moving, least))
        gone = ((0.0,) * M,) * away
        yield replace(
            problem,
            held=(*gone, *problem.held[away:]),
            kept=(*gone, *problem.kept[away:]),
            memory_limit=tuple(limits),
        )
    for times in _TIMES:
        pairs = zip(problem.memory_limit, problem.smallest_memory, strict=True)
        limits = [max(times * limit, least) for limit, least in pairs]
        yield replace(problem, memory_limit=None if times == math.inf else tuple(limits))
