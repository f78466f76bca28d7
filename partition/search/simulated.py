"""Schedules of configurations, built once each: what is in flight in them, and their simulated batches.

Every rank has one network card, on which its messages and its sums of gradients queue; all messages between two stages
take the slowest way between ranks of theirs that share a microbatch. Where devices share cards all replicas are
simulated, else one of equal ones.

Long batches are simulated by a short one: where each round takes as long as the one before, more rounds add as much.

    rank 0 | F0 F1 F2 B0 | F3 B1 | F4 B2 | F5 B3 | ... | B. B. B.        one round of 1F1B: a forward and a backward
             warm-up       steady rounds                 drain

A batch of M + q microbatches has the same programs with q more in the steady part. What happens there is a function of
what is still under way, and moves along with it: an action starts when its rank is free and its input is there,
whenever that is. So once all starts of a stretch that holds all that is under way are those of q microbatches before
and the same seconds later, on all ranks, the rest of the batch continues like that, and the drain is only later. With
latencies q may be any number up to P: as many microbatches as go around between two ranks.

Of messages that meet at one link at the same moment rounding says which goes first, here as in the whole batch: both
may be some hundredths of a percent from what they would be without rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from random import Random

import numpy as np

from ...schedules.families.automatic import lists, reordered
from ...schedules.families.registry import build
from ...schedules.ir import Action, Op, Schedule
from ...schedules.orders.evaluate import OrderEvaluator, Orders, SlideSearch
from ...schedules.orders.listing import Lister, Policy
from ...schedules.orders.problem import fits, with_rounding
from ...schedules.program import run_as_one
from ...schedules.search.request import Request
from ...schedules.search.search import fuse
from ...schedules.timing.costs import Costs
from ...schedules.timing.links import Links, PlaceNetwork
from ...schedules.timing.simulate import simulate
from ...schedules.timing.timeline import RankTrace, Timeline
from ...schedules.transform import replicate, with_late_updates, with_offload, with_overlap
from ..memory import InFlightCounts, count_in_flight, in_flight_of_chunk_order, most_of_replicas, steady_in_flight
from ..topology import Floats
from .space import Configuration

MAX_ACTIONS = 1_000_000  # of one simulation
_KEPT_SCHEDULES = 8
_ROUNDS = (6, 12, 24, 48, 96)  # of P microbatches, in the short batches that are tried
_EQUAL = 1e-12  # relative: rounding
_SLIDES, _HOT = 400, 0.1  # of whole backwards: how many, and the first heat


class SizesError(ValueError):
    """The schedule does not take these sizes."""


class TooLongError(SizesError):
    """More actions than are simulated or counted."""


class BuiltSchedules:
    """The last few schedules, and all counts of what is in flight."""

    def __init__(self) -> None:
        self._known_in_flight: dict[object, tuple[InFlightCounts, ...]] = {}
        self._known_least: dict[object, list[tuple[InFlightCounts, ...]]] = {}
        self._schedules: dict[object, Schedule] = {}

    def in_flight(self, c: Configuration, *, exact: bool, kv_share: float = 0.0) -> tuple[InFlightCounts, ...]:
        """[P] counts of the first chunk's stages; of unequal replicas where not `exact`, the steady state's: no less.
        Slices count by tokens, and what is kept besides them for whole sequences (`KVCache`) with the first.

        SizesError where the schedule does not take these sizes.
        """
        if c.own is not None:
            if c.own not in self._known_in_flight:
                self._known_in_flight[c.own] = count_in_flight(c.own)
            return self._known_in_flight[c.own]
        if not (exact or c.is_equal):
            return steady_in_flight(c.schedule, c.counts, c.num_microbatches)
        m = microbatches_of(c)
        known, rest = c.family, m % c.pipeline
        full, is_alike = known.full_after, not (known.takes_chunks and rest)  # a shorter batch holds exactly as much
        if c.is_equal and full is not None and is_alike and m > (full + 2) * c.pipeline:
            m = (full + 1) * c.pipeline + rest
        _check_length(c, m)
        key = (c.schedule, c.num_chunks, c.pipeline if c.is_equal else c.counts, m, c.lengths, kv_share)
        if key not in self._known_in_flight:
            if c.lengths:
                first, *others = c.parts
                ranks = count_in_flight(self.schedule(c, m), (first + kv_share, *others))
            elif c.is_equal and known.chunk_order is not None:
                ranks = in_flight_of_chunk_order(
                    known.chunk_order(c.pipeline, m, c.num_chunks), num_chunks=c.num_chunks
                )
            else:
                ranks = count_in_flight(self.schedule(c, m))
            self._known_in_flight[key] = by_place(c, ranks)
        return self._known_in_flight[key]

    def least_in_flight(self, c: Configuration) -> list[tuple[InFlightCounts, ...]]:
        """[P] counts of orders that hold less: its F and I with each W at once, and one microbatch at a time (two of
        them: the second finds gradients)."""
        key = (c.schedule, c.num_chunks, c.pipeline, m := microbatches_of(c))
        if key not in self._known_least:
            named = self.schedule(replace(c, own=None), m)
            orders = map(_forwards_and_input_grads, named.programs)
            at_once = [[each for a in own for each in (a, a._replace(op=Op.W))[: 1 + (a.op is Op.I)]] for own in orders]
            in_turn = [[each for k in (0, 1) for each in program if each.index == k] for program in at_once]
            made = (replace(named, programs=tuple(map(tuple, each))) for each in (at_once, in_turn))
            self._known_least[key] = [*map(count_in_flight, made)]
        return self._known_least[key]

    def schedule(self, c: Configuration, num_microbatches: int, *, is_of_all: bool = False) -> Schedule:
        """Schedule of one of equal replicas, or `is_of_all`; else of all; its own where it has one. SizesError where it
        lacks these sizes."""
        _check_length(c, num_microbatches)
        if c.own is not None:
            return c.own
        counts = None if c.is_equal and not is_of_all else c.counts
        key = (c.schedule, c.pipeline, c.num_chunks, counts, num_microbatches, len(c.lengths), c.overlaps)
        if key not in self._schedules:
            if len(self._schedules) >= _KEPT_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
            options: dict[str, object] = {} if counts is None else {"replicas": counts}
            options |= {"num_slices": len(c.lengths)} if c.lengths else {}
            try:
                made = build(
                    c.schedule,
                    num_ranks=c.pipeline if counts is None else sum(counts),
                    num_microbatches=num_microbatches,
                    num_chunks=c.num_chunks,
                    **options,
                )
                self._schedules[key] = with_overlap(made) if c.overlaps else made
            except ValueError as error:
                raise SizesError(str(error)) from None
        return self._schedules[key]


def by_place(c: Configuration, ranks: tuple[InFlightCounts, ...]) -> tuple[InFlightCounts, ...]:
    """[P] the most of any replica, of the ranks of one replica where all are equal, else of all."""
    starts = np.cumsum([0, *c.counts])
    return ranks if c.is_equal else tuple(most_of_replicas(ranks[a:b]) for a, b in pairwise(starts))


def _check_length(c: Configuration, num_microbatches: int) -> None:
    if 2 * c.num_stages * num_microbatches * (len(c.lengths) or 1) > MAX_ACTIONS:
        raise TooLongError(
            f"{num_microbatches:,} microbatches of {c.num_stages} stages: more than {MAX_ACTIONS:,} actions"
        )


def microbatches_of(c: Configuration) -> int:
    """Microbatches of the schedule that is built: of the busiest replica where all are equal, else of all."""
    return -(-c.batch // c.counts[0]) if c.is_equal else c.batch


def num_actions(c: Configuration) -> int:
    """Actions in the simulation of a batch, or of the shortest that may replace it."""
    m = microbatches_of(c)
    return 2 * c.num_stages * (len(c.lengths) or 1) * min(short_batches(c, m) if c.is_equal else (), default=m)


def simulated_batch(
    c: Configuration,
    costs: Costs,
    links: Links,
    schedules: BuiltSchedules,
    num_microbatches: int,
    *,
    leaving: Collection[int] = (),
) -> Timeline:
    """Every action of a batch of so many microbatches, whose activations of these stages leave for the host;
    SizesError where its schedule can't be built."""
    shares = c.is_equal and isinstance(links.network, PlaceNetwork) and bool(links.network.cards)
    if shares and c.batch % c.counts[0]:
        schedule = schedules.schedule(c, c.batch, is_of_all=True)
    else:
        schedule = schedules.schedule(c, num_microbatches)
        schedule = replicate(schedule, c.counts[0]) if shares else schedule
    if shares or not c.is_equal:
        starts = (0, *accumulate(c.counts))
        links = links.on([range(a, b) for a, b in pairwise(starts)])
    if costs.index_factors is not None:  # of the slices that one replica runs
        costs = replace(costs, index_factors=costs.index_factors[: schedule.num_microbatches * (len(c.lengths) or 1)])
    schedule = with_late_updates(schedule, links)
    if leaving:
        schedule = with_offload(schedule, stages=leaving, costs=costs)
    return simulate(schedule, costs, links)


def order_for(
    starts: Sequence[Schedule], costs: Costs, links: Links, held: Sequence[float], too_many: Sequence[float]
) -> tuple[float, Schedule] | None:
    """The order that takes least for costs, and its seconds, queueing apart [s]: of the starts, and of their F and I
    with W anew and forwards in idle time (`reordered`), also with B in place of I and W; list schedules where all of
    these hold too much. Of a start with whole backwards: see `_of_whole_backwards`. No rank holds more than under the
    first start, less what was too many; None if one microbatch does, or no W takes time.

    Arguments:
        held: [S] bytes of a microbatch from F to W.
        too_many: [P] bytes; below 0, those that are left.
    """
    first = starts[0]
    request = Request(
        num_microbatches=first.num_microbatches,
        placement=first.placement,
        costs=replace(costs, tied=(), index_factors=None),
        activations=held,
        links=links if first.num_stages > 1 else None,
    )
    try:
        evaluator = OrderEvaluator(request.problem())
    except ValueError:
        return None
    given = [*map(evaluator.orders, starts)]
    limits = [peak - more for peak, more in zip(evaluator.peaks(given[0]), too_many, strict=True)]
    evaluator.limits = tuple(map(with_rounding, limits))
    has_room = all(map(fits, evaluator.problem.smallest_memory, limits))
    if not first.split_stages:
        return _of_whole_backwards(evaluator, given[0], first.name) if has_room else None
    made = (reordered(evaluator, map(_forwards_and_input_grads, each.programs)) for each in starts)
    split = [*filter(evaluator.fits, given), *chain.from_iterable(made)]
    if has_room and not split:
        lister = OrderEvaluator(replace(evaluator.problem, memory_limit=tuple(limits)))
        S, M = first.num_stages, first.num_microbatches
        split = [each for ahead in ([M] * S, range(S, 0, -1)) for each in lists(lister, ahead)]
    every = [*split, *(fuse(evaluator, orders) for orders in split)]
    values = (evaluator.value(fuse(evaluator, orders, only_local=True)) for orders in every)
    value, at = min(((value, at) for at, value in enumerate(values)), default=(0.0, -1))
    if at < 0:
        return None
    same = next((each for each, own in zip(starts, given, strict=True) if own is every[at]), None)
    return value, same or evaluator.schedule(every[at], name=first.name)


def _of_whole_backwards(evaluator: OrderEvaluator, start: Orders, name: str) -> tuple[float, Schedule]:
    """The best order of F and B that is found within the limits, and its seconds [s]: actions of the start, or of a
    list schedule with forwards first, slide."""
    problem, whole = evaluator.problem, evaluator.problem.seconds[Op.B]
    S, M, P = problem.num_stages, problem.num_microbatches, problem.num_ranks
    short = tuple(tuple(_EQUAL * seconds for seconds in row) for row in whole)  # a B is an I, and next to nothing
    seconds, kept = {**problem.seconds, Op.I: whole, Op.W: short}, ((0.0,) * M,) * S
    lister = Lister(OrderEvaluator(replace(problem, seconds=seconds, kept=kept, memory_limit=evaluator.limits)))
    every = [start]
    for ahead in (M,) * S, tuple(range(S, 0, -1)):
        listed = lister.build(Policy(ahead=ahead, backlog=(0,) * P, fill=(0.0,) * P, forward_first=True))
        every.append([[c + 2 * S * M * (c >= S * M) for c in order if c < 2 * S * M] for order in listed])
    value, best = min(((evaluator.value(each), each) for each in every if evaluator.fits(each)), key=itemgetter(0))
    for found in SlideSearch(evaluator).anneal(best, Random(0), steps=_SLIDES, hot=_HOT, cold=_HOT / 30):
        value, best = found or (value, best)
    return value, evaluator.schedule(best, name=name)


def _forwards_and_input_grads(program: Sequence[Action]) -> list[Action]:
    return [Action(stage, Op.F if op is Op.F else Op.I, k) for stage, op, k in program if op is not Op.W]


def num_weight_grads(schedule: Schedule) -> Floats:
    """[S] part of the microbatches whose W runs apart from I."""
    if not schedule.split_stages:
        return np.zeros(schedule.num_stages)
    joined, m = run_as_one(schedule), schedule.num_microbatches
    return np.array([(s in schedule.split_stages) - len(joined.get(s, ())) / m for s in range(schedule.num_stages)])


def short_batches(c: Configuration, num_microbatches: int) -> tuple[int, ...]:
    """Sizes of batches of one pipeline that may replace a batch of so many microbatches, ascending.

    None where the schedule's rounds are not all alike, and none of more than half its size.
    """
    known = c.family
    rest = num_microbatches % c.pipeline
    if c.overlaps or c.own is not None:  # actions are shorter in pairs than alone; an order is of one batch
        return ()
    if known.full_after is None or known.rule.is_asynchronous or (known.takes_chunks and rest):
        return ()
    sizes = (rounds * c.pipeline + rest for rounds in _ROUNDS)
    return tuple(size for size in sizes if 2 * size <= num_microbatches)


def long_batch(
    simulated: Callable[[int], Timeline], c: Configuration, num_microbatches: int
) -> tuple[float, Timeline] | None:
    """Seconds of a batch of so many microbatches [s], and the short one that has its warm-up and its drain, or None."""
    for size in short_batches(c, num_microbatches):
        short = simulated(size)
        for round_size in range(1, c.pipeline + 1) if c.num_chunks == 1 else (c.pipeline, 2 * c.pipeline):
            seconds = _round_seconds(short.ranks, size=round_size, num_ranks=c.pipeline, num_chunks=c.num_chunks)
            if seconds is not None:
                rounds, rest = divmod(num_microbatches - size, round_size)
                short = simulated(size + rest) if rest else short
                return short.makespan + rounds * seconds, short
    return None


def _round_seconds(ranks: Sequence[RankTrace], *, size: int, num_ranks: int, num_chunks: int) -> float | None:
    """Seconds of the last steady round of `size` microbatches; None if the starts in it are not all equally later than
    in the round before.

    Compared are the starts of the last P + size microbatches on each rank, which hold all that is under way, before the
    first drain of any rank: there a longer batch begins to differ.
    """
    drain = min([span for span in rank.compute if span.what.op is Op.F][-1].end for rank in ranks)
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


def _is_next(before: Action, now: Action, size: int) -> bool:
    return (before.stage, before.op, before.index + size) == (now.stage, now.op, now.index)
