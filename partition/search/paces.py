"""Paces of the ranks and stages of a configuration with its cuts, and the least step that follows from them.

A rank has the two lanes of a stage (`stage_cost`), its work and its links, each the sum over its stages at the share of
its busiest replica. `bounds` says what is known before a configuration is cut.
"""

from __future__ import annotations

import numpy as np

from ...schedules.families.registry import family
from ...schedules.timing.costs import Ties
from ..stage_cost import StageSeconds, busiest_share, pace
from ..topology import Floats
from .space import Configuration


def _by_rank(c: Configuration, figures: Floats) -> Floats:
    """[P] sums over the chunks."""
    return np.asarray(np.bincount(c.positions, weights=figures, minlength=c.pipeline), dtype=np.float64)


def _share(c: Configuration) -> Floats:
    """[P] of the busiest replica."""
    return busiest_share(c.num_microbatches, np.array(c.counts))


def _updates(c: Configuration) -> Floats:
    """[P] sums of gradients a microbatch: once a batch, or once each replica of every stage has had a microbatch."""
    if c.num_microbatches is None:
        return np.asarray(1 / np.array(c.counts))
    once = family(c.schedule).rule.updates_per_batch(c.batch, c.counts)
    return np.full(c.pipeline, once / c.batch)


def _work(c: Configuration, s: StageSeconds) -> Floats:
    """[P] seconds a microbatch of a rank's compute lane."""
    return _by_rank(c, s.work) * _share(c) + _held(c, s)


def _held(c: Configuration, s: StageSeconds) -> Floats:
    """[P] of those, for which it does not compute but is busy with its sums."""
    return _by_rank(c, s.held) * _updates(c)


def _links(c: Configuration, s: StageSeconds) -> Floats:
    """[P] seconds a microbatch of its links: all that its busiest replica sends, and its all-reduces of gradients."""
    return _by_rank(c, s.sending) * _share(c) + _by_rank(c, s.around) * _updates(c)


def _updates_behind(c: Configuration, s: StageSeconds, *, around: Floats) -> Floats:
    """[P] seconds from a rank's last backward to the end of its updates, at least.

    All its steps, and the sums of the one stage whose backward was last: those of others may have gone on beside it.

    Arguments:
        around: [S] what goes round for an update, or the part of it that is not counted to the rank's work.
    """
    least = np.full(c.pipeline, np.inf)
    np.minimum.at(least, list(c.positions), around + s.step)
    return np.asarray(np.maximum(_by_rank(c, s.step), least), dtype=np.float64)


def rank_paces(c: Configuration, s: StageSeconds) -> Floats:
    """[P] seconds a microbatch of the slower lane of each rank."""
    return pace(work=_work(c, s), links=_links(c, s))


def stage_paces(c: Configuration, s: StageSeconds) -> Floats:
    """[S] seconds a microbatch of the slower lane of each stage alone."""
    share, updates = (each[list(c.positions)] for each in (_share(c), _updates(c)))
    return pace(work=s.work * share + s.held * updates, links=s.sending * share + s.around * updates)


def least_step(c: Configuration, s: StageSeconds, tied: Ties, again: Floats | float = 0.0) -> float:
    """A lower bound of the step [s]; `again`: [P] further seconds of F and B a microbatch, whichever stage's they are.

    Of a flushed batch: the first microbatch must reach a rank, the rank does its work, and the last gradient must get
    back to the first rank, which updates behind it, and behind sums of weights that its first stage shares. What keeps
    a rank busy with sums is a part of its own work, whenever it comes, and no part of that way back. Where the backward
    is split, what comes behind may be weight gradients, and the way back takes no time that is known.
    """
    work, held = (_work(c, s) + again * _share(c)) * c.batch, _held(c, s) * c.batch
    links = float(_links(c, s).max()) * c.batch
    if family(c.schedule).rule.is_asynchronous:
        return max(float((work + _by_rank(c, s.step) * _updates(c) * c.batch).max()), links)
    update = _updates_behind(c, s, around=s.around - s.held)
    front, around = c.pipeline - 1, s.overhead + s.message_overhead
    part = c.least_slice  # of what must be through on the way to a rank, and back
    head, tail = (
        np.concatenate([[0.0], np.cumsum(part * (own + s.message[:front]) + around[:front])])
        for own in (s.forward[:front], s.backward[:front])
    )
    if family(c.schedule).splits_backward:
        return max(float((head + work + update).max()), links)
    shared = max((seconds + float(s.step[0]) for (first, *_), seconds in tied if first == 0), default=0.0)
    back = work - held + tail + max(_updates_behind(c, s, around=s.around)[0], shared)
    return max(float((head + np.maximum(work + update, back)).max()), links)
