"""The critical path over a timeline: dark frames round its actions, lines along its messages and waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..schedules import Action, CriticalPath, Timeline
from .scale import TOP, Scale, corners

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PATH_INK = "#000000"
_LINE = 1.6
_ABOVE = 1.8  # the boxes, and below the numbers


def draw_path(axes: Axes, timeline: Timeline, path: CriticalPath, scale: Scale) -> None:
    """Draw it over the boxes; O(steps)."""
    from matplotlib.collections import LineCollection, PolyCollection

    frames, lines = [], []
    for step in path.steps:
        start, end = ((at - timeline.start) / scale.unit for at in (step.start, step.end))
        if isinstance(step.what, Action):
            frames.append(corners(start, end - start, step.rank + TOP, scale.box_height))
        else:
            sender = step.rank if step.sender is None else step.sender
            lines.append([(start, sender + scale.middle), (end, step.rank + scale.middle)])
    if frames:
        drawn = PolyCollection(frames, facecolors="none", edgecolors=PATH_INK, linewidths=_LINE, zorder=_ABOVE)
        axes.add_collection(drawn, autolim=False)
    if lines:
        between = LineCollection(lines, colors=PATH_INK, linewidths=_LINE, zorder=_ABOVE)
        axes.add_collection(between, autolim=False)


def path_words(path: CriticalPath) -> str:
    """Shares of the path by kind, the largest first: `backward 61%, forward 32%, message 7%`."""
    if path.seconds <= 0:
        return "nothing"
    shares = [(kind.value, seconds / path.seconds) for kind, seconds in path.by_kind.items()]
    return ", ".join(f"{kind} {share:.0%}" for kind, share in shares if share >= 0.005)
