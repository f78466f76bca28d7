"""Long batches simulated by a short one: where each round takes as long as the one before, more rounds add as much.

    rank 0 | F0 F1 F2 B0 | F3 B1 | F4 B2 | F5 B3 | ... | B. B. B.        one round of 1F1B: a forward and a backward
             warm-up       steady rounds                 drain

A batch of M + q microbatches has the same programs with q more in the steady part. What happens there is a function of
what is still under way, and moves along with it: an action starts when its rank is free and its input is there,
whenever that is. So once all starts of a stretch that holds all that is under way are those of q microbatches before
and the same seconds later, on all ranks, the rest of the batch goes on like that, and the drain is only later. With
latencies q may be any number up to P: as many microbatches as go around between two ranks.

Of messages that meet at one link at the same moment rounding says which goes first, here as in the whole batch: both
may be some hundredths of a percent from what they would be without rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...schedules.ir import Action, Op
from ...schedules.registry import family
from ...schedules.timing.timeline import RankTrace, Span, Timeline
from .space import Configuration

_ROUNDS = (6, 12, 24, 48, 96)  # of P microbatches, in the short batches that are tried
_EQUAL = 1e-12  # relative: rounding


class LongBatch(NamedTuple):
    """Seconds of a whole batch [s], and the short one that has its warm-up and its drain."""

    seconds: float
    short: Timeline


def short_batches(c: Configuration, num_microbatches: int) -> tuple[int, ...]:
    """Sizes of batches of one pipeline that may stand for a batch of so many microbatches, ascending.

    None where the schedule's rounds are not all alike, and none of more than half its size.
    """
    known = family(c.schedule)
    rest = num_microbatches % c.pipeline
    if known.full_after is None or known.rule.is_asynchronous or (known.takes_chunks and rest):
        return ()
    sizes = (rounds * c.pipeline + rest for rounds in _ROUNDS)
    return tuple(size for size in sizes if 2 * size <= num_microbatches)


def long_batch(simulated: Callable[[int], Timeline], c: Configuration, num_microbatches: int) -> LongBatch | None:
    """A batch of so many microbatches; None where no short one gets steady.

    Arguments:
        simulated: the same pipeline with fewer microbatches.
    """
    for size in short_batches(c, num_microbatches):
        short = simulated(size)
        for round_size in range(1, c.pipeline + 1) if c.num_chunks == 1 else (c.pipeline, 2 * c.pipeline):
            seconds = _round_seconds(short.ranks, size=round_size, num_ranks=c.pipeline, num_chunks=c.num_chunks)
            if seconds is not None:
                rounds, rest = divmod(num_microbatches - size, round_size)
                short = simulated(size + rest) if rest else short
                return LongBatch(short.makespan + rounds * seconds, short)
    return None


def _round_seconds(ranks: Sequence[RankTrace], *, size: int, num_ranks: int, num_chunks: int) -> float | None:
    """Seconds of the last steady round, of `size` microbatches, if all under way is that much behind the round before.

    What is under way came within the last P microbatches. What a longer batch does differently begins with the first
    drain of any rank.
    """
    drain = min(_after_last_forward(rank.compute) for rank in ranks)
    back, stretch = 2 * num_chunks * size, 2 * num_chunks * (num_ranks + size)
    least, most = float("inf"), 0.0
    for rank in ranks:
        common = sum(span.start < drain for span in rank.compute)
        if common < back + stretch:
            return None
        for at in range(common - stretch, common):
            now, before = rank.compute[at], rank.compute[at - back]
            if not _is_next(before.what, now.what, size):
                return None
            least, most = min(least, now.start - before.start), max(most, now.start - before.start)
    return (least + most) / 2 if most - least <= _EQUAL * drain else None


def _after_last_forward(program: Sequence[Span[Action]]) -> float:
    last = max(at for at, span in enumerate(program) if span.what.op is Op.F)
    return program[last].end


def _is_next(before: Action, now: Action, size: int) -> bool:
    return (before.stage, before.op, before.index + size) == (now.stage, now.op, now.index)
