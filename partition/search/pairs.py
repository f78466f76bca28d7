"""Pairs of forwards and backwards (`schedules.overlap`) for what a search has found.

    found, the best first -> those whose stages exchange something -> the same with pairs, simulated -> all by seconds

Bounds are those of actions one after the other, so pairs are tried for what was simulated, and not searched for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from ...schedules.ir import ScheduleError
from ...schedules.wording import duration
from ..memory import RankMemory, context_bytes
from .evaluate import Candidate, PlanEvaluator
from .result import label
from .simulated import SizesError

MAX_ACTIONS = 30_000  # of a batch: all of it is simulated


def with_pairs(evaluator: PlanEvaluator, found: Sequence[Candidate], *, runnable: bool) -> list[Candidate]:
    """These, and those that are faster with pairs, the best first. `runnable`: only where the runtime hides one's
    exchanges behind the other, which is experts' on the CPU."""
    pairs = [pair for each in found for pair in _paired(evaluator, each, runnable=runnable)]
    every = [*found, *pairs]
    return sorted(every, key=lambda each: float(f"{each.simulated_seconds:.8e}")) if pairs else every


def _paired(evaluator: PlanEvaluator, e: Candidate, *, runnable: bool) -> Iterator[Candidate]:
    c, profile = e.configuration, e.model.profile
    exchanges = (e.sums.forward_exchange + e.sums.backward_exchange).any()
    runs = not runnable or (profile.expert > 1 and profile.device.startswith("cpu"))
    is_plain = c.own is None and {name for each in e.memories for name in each.recompute} == {"none"}
    if not (exchanges and runs and is_plain) or 2 * c.num_stages * c.batch > MAX_ACTIONS:
        return
    pair = replace(e, configuration=replace(c, overlaps=True), memories=tuple(map(_with_both, e.memories)))
    beside = context_bytes(profile.device)
    if all(each.total + beside <= each.limit for each in pair.memories):
        with suppress(SizesError, ScheduleError):
            pair = evaluator.simulate(pair)
            if pair.simulated_seconds < e.simulated_seconds:
                yield pair


def _with_both(memory: RankMemory) -> RankMemory:
    """With the workspace of a forward and a backward of two stages at once, counted in the stage that needs most."""
    held = memory.bytes_held.copy()
    workspace = held[-1]
    workspace[workspace.argmax()] = sum(sorted(workspace)[-2:])
    return replace(memory, bytes_held=held)


def gain(found: Sequence[Candidate], best: Candidate) -> list[str]:
    """A note on what the pairs of the best gain, if it has some."""
    alone = min((each for each in found if not each.configuration.overlaps), key=lambda each: each.simulated_seconds)
    if not best.configuration.overlaps:
        return []
    seconds = alone.simulated_seconds
    return [
        f"forwards in pairs with backwards: {1 - best.simulated_seconds / seconds:.2%} less than the best of actions "
        f"one after the other, {label(alone)}, {duration(seconds)} a batch; bounds are of those"
    ]
