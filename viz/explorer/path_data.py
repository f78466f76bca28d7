"""The critical path as columns, and what it consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...schedules import Action, Timeline
from ...schedules.timing.critical_path import PathKind, critical_path

_KINDS = list(PathKind)
_NONE = -1


def path_columns(
    timeline: Timeline, number_of: Mapping[tuple[int, Action], int], ticks: Callable[[float], int]
) -> dict[str, Any]:
    """Steps in the order of time, and shares of the makespan by kind, link, sum and rank, the largest first."""
    path = critical_path(timeline)
    whole = path.seconds or 1.0
    steps = [
        (
            _KINDS.index(step.kind),
            number_of.get((step.rank, step.what), _NONE) if isinstance(step.what, Action) else _NONE,
            step.rank,
            _NONE if step.sender is None else step.sender,
            ticks(step.start),
            ticks(step.end),
        )
        for step in path.steps
    ]
    names = ("kind", "action", "rank", "sender", "start", "end")
    columns: dict[str, Any] = dict(zip(names, map(list, zip(*steps, strict=True)) if steps else [[]] * 6, strict=True))
    links = {f"rank {src} to rank {dst}": seconds for (src, dst), seconds in path.by_link.items()}
    sums = {f"gradients of stage{'s' * (len(s) > 1)} {', '.join(map(str, s))}": x for s, x in path.by_sum.items()}
    groups = {
        "kinds": {str(kind): seconds for kind, seconds in path.by_kind.items()},
        "links": dict(sorted((links | sums).items(), key=lambda pair: -pair[1])),
        "ranks": {f"rank {rank}": seconds for rank, seconds in path.by_rank.items()},
    }
    shares = {
        name: [[text, round(seconds / whole, 6)] for text, seconds in group.items()] for name, group in groups.items()
    }
    return {**columns, "shares": shares}
