"""Links of measured plans: seconds of one message over each cut, from the sends of the warm-up. No torch.

Inside of a node all links are alike. The last stage but one sends one forward in its warm-up, to a stage that has done
nothing but wait for it: the bytes over these seconds are the link's bandwidth, and its median over all plans on a
platform is taken for every cut inside of a node.

Between two nodes a message is what makes the warm-up's sends of the stage in front take as long as they did:

    stage s       |F0|send 0|F1|   send 1   |F2|   ...        a send begins when the forward is through and the next
    stage s + 1              |  F0  |send 0|F1 ...             stage receives, which is behind its own send of the one
                                                               before
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, median

from .mist_messages import message_behind
from .mist_plans import MEASURED, MeasuredPlan, Stage, measured

DEVICES_OF_NODE = 8  # of all platforms that were measured
_SWEEPS = 4  # over the cuts between nodes: those of one plan depend on each other a little
_HALVINGS = 40


@cache
def bandwidth(platform: str, path: Path = MEASURED) -> float:
    """One message's bytes a second inside of a node.

    1e12, of which no message is felt, where no plan of the platform says it.
    """
    found = [
        message_behind(plan, len(plan.stages) - 2).sent / seconds
        for plan in measured(path).plans
        if plan.platform == platform and len(plan.stages) > 1 and not between_nodes(plan, len(plan.stages) - 2)
        if (seconds := sent(plan.stages[-2])) > 0
    ]
    return median(found) if found else 1e12


def between_nodes(plan: MeasuredPlan, stage: int) -> bool:
    """Whether the cut behind a stage lies between two nodes."""
    ranks = [rank.number for each in plan.stages[stage : stage + 2] for rank in each.ranks]
    return len({rank // DEVICES_OF_NODE for rank in ranks}) > 1


def sent(stage: Stage) -> float:
    """Seconds that sends of the warm-up took; of several ranks the least: the others' contain waits for them."""
    return min(rank.send for rank in stage.ranks)


def message_seconds(plan: MeasuredPlan, bytes_per_second: float) -> list[float]:
    """[S - 1] of one message over each cut in one direction."""
    cuts = range(len(plan.stages) - 1)
    found = [message_behind(plan, stage).sent / bytes_per_second for stage in cuts]
    forward = [fmean(rank.forward for rank in stage.ranks) / plan.num_microbatches for stage in plan.stages]
    for _ in range(_SWEEPS):
        for stage in reversed(cuts):
            if between_nodes(plan, stage):
                found[stage] = _solved(forward, found, stage, sent(plan.stages[stage]))
    return found


def _solved(forward: Sequence[float], messages: Sequence[float], stage: int, seconds: float) -> float:
    """The message behind a stage with which its sends of the warm-up take so long, or 0 where they wait longer."""
    low, high = 0.0, seconds
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        tried = [*messages[:stage], middle, *messages[stage + 1 :]]
        if warm_up_sends(forward, tried)[stage] < seconds:
            low = middle
        else:
            high = middle
    return low


def warm_up_sends(forward: Sequence[float], messages: Sequence[float]) -> list[float]:
    """[S - 1] seconds from the end of each forward of the warm-up to the end of its send, of each stage together.

    Arguments:
        forward: [S] of one microbatch [s].
        messages: [S - 1] of one over each cut [s].

    >>> warm_up_sends([1.0, 3.0, 1.0], [0.5, 0.25])
    [3.25, 0.25]
    """
    last = len(messages)  # the last stage sends no forward
    ends: dict[tuple[int, int], float] = {}
    total = [0.0] * last
    for microbatch in range(last):
        for stage in range(last - microbatch):
            arrived = ends[stage - 1, microbatch] if stage else ends.get((0, microbatch - 1), 0.0)
            done = arrived + forward[stage]
            receives = ends.get((stage + 1, microbatch - 1), 0.0)
            ends[stage, microbatch] = max(done, receives) + messages[stage]
            total[stage] += ends[stage, microbatch] - done
    return total
