"""The best candidates with their cuts moved for as long as that helps, and in orders made for the costs of these cuts.

    best of each configuration -> ordered for its costs -> the best few, one cut moved at a time
                                                           if memory was in the way: again as if there was no limit;
                                                           the best on that way that fits is moved in turn

A schedule by name knows neither that chunks are unequal nor what their cuts leave to it: where it splits the backward,
the same F and I with W and idle time used anew take some percent less (`PlanEvaluator.ordered`). Whole backwards on
several chunks are ordered last of all, so that which cuts are tried is as if there were no such orders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations

from ..plans.record import OWN
from ..solve.chunks import level_ranks, neighbours
from .cuts import candidate_ends
from .evaluate import Candidate, DoesNotFitError, Ends, PlanEvaluator
from .simulated import SizesError, microbatches_of, num_actions
from .space import Configuration

TIE = 1e-9  # relative: nearer than this, the simpler one wins
_REFINED_ACTIONS = 300_000  # of all simulations that move cuts
_RUNNER_UP_ACTIONS = 30_000  # of those, for cuts that cannot become the best
_STREAM_BATCHES = 8  # about as many as the program of a stream spans
_CHOSEN_ACTIONS = 6_000  # of all simulations of one way to cut, with other treatments of its ranks
_ORDERED_ACTIONS = 10_000  # of a batch, up to which orders are made for its costs
_TIGHTENED = 4  # times that an order is made for less memory, as long as workspace makes it exceed the limit
_FITTED = 6  # ways to treat the ranks, each in an order that fits, of one way to cut
_GAINED = 1.15  # of the best, from where an order with whole backwards may become it
_NEAR = 1.05  # of the best, beyond which nothing is tried past the limit, nor for long batches

Better = Callable[[Candidate], Iterable[Candidate]]  # those of its neighbours that take less


class CutClimb:
    """Moves of cuts, within a number of simulated actions. `best_seconds`: of any candidate so far [s];
    `as_named`: those with moved cuts before they are ordered."""

    def __init__(self, evaluator: PlanEvaluator, best_seconds: float, is_late: Callable[[], bool]) -> None:
        self.evaluator, self.best_seconds, self.is_late = evaluator, best_seconds, is_late
        self.as_named = list[Candidate]()
        self._is_blocked, self._at, self._orders = False, -1, False
        # With actions as named and memory as it is, and otherwise.
        self._actions_left = {True: _REFINED_ACTIONS, False: _REFINED_ACTIONS}

    def ordered(self, e: Candidate, *, is_free: bool = False) -> Candidate:
        """The same in an order made for its costs, if that is faster and may be the best."""
        if e.bound >= self.best_seconds or self.is_late() or not may_order(e.configuration):
            return e
        return min([e, *self._ordered(e, e.simulated_seconds * (1 - TIE), is_free=is_free)], key=_seconds)

    def whole(self, found: Iterable[Candidate]) -> Iterator[Candidate]:
        """Those of several chunks with whole backwards in orders for their costs, each if it is the best so far."""
        for e in found:
            c, limit = e.configuration, self.best_seconds * (1 - TIE)
            is_whole = may_order(c, is_split=False) and c.num_chunks > 1 and not c.family.rule.is_asynchronous
            is_near = e.bound < limit and e.simulated_seconds < _GAINED * self.best_seconds
            if is_whole and is_near and not self.is_late():
                for own in self._ordered(e, limit, is_free=False):
                    if own.simulated_seconds < limit:
                        self.best_seconds = own.simulated_seconds
                        yield own

    def fitted(self, c: Configuration, ends: Ends) -> list[Candidate]:
        """The best in an order that holds less than its schedule does, where that is needed, if it may be the best."""
        every, best = self._with_less(c, ends), list[Candidate]()
        with suppress(DoesNotFitError):
            if _keeps_all(self.evaluator.choices(c, ends, exact=True)[0]):
                return []
        for e in sorted(every, key=lambda e: e.bound)[:_FITTED]:
            limit = self.best_seconds * (1 - TIE)
            best = [*(self._ordered(e, limit, is_free=False) if e.bound < limit else ())] or best
            self.best_seconds = min([self.best_seconds, *map(_seconds, best)])
        return best

    def climb(self, start: Candidate, named: Candidate) -> Candidate:
        """The best that comes of moving its cuts, or those of the same without an order for its costs: no one moved to
        a place nearby makes it faster, unless the actions or the time are over before."""
        self._is_blocked = False
        best = self._climbed(start, named, self._better, is_free=False)
        self.best_seconds = min(self.best_seconds, best.simulated_seconds)
        is_near = best.simulated_seconds < _NEAR * self.best_seconds and num_choices(best.configuration) > 1
        if self._is_blocked and is_near and "none" in best.model.rules.recompute:
            over = self._past_the_limit(best)
            best = best if over is best else hill_climb(over, self._better)
        return hill_climb(best, self._exchanged)

    def _climbed(self, start: Candidate, named: Candidate, better: Better, *, is_free: bool) -> Candidate:
        self._at, self._orders = -1, False
        best = hill_climb(named, better)
        if may_order(named.configuration):
            self._orders = True
            self.as_named += [best] * (not is_free)
            best = hill_climb(min([start, self.ordered(best, is_free=is_free)], key=_seconds), better)
        return best

    def _better(self, start: Candidate) -> Iterator[Candidate]:
        return (each for each in self._near(start, is_free=False) if _is_less(each, start))

    def _exchanged(self, start: Candidate) -> Iterator[Candidate]:
        """Faster ones with the treatments of two chunks exchanged on all ranks: others wait for sums of gradients."""
        c, own = start.configuration, start.memories
        for pair in combinations(range(c.num_chunks), 2):
            at = [sum(pair) - v if v in pair else v for v in range(c.num_chunks)]
            memories = tuple(replace(each, recompute=tuple(each.recompute[v] for v in at)) for each in own)
            if any(a.recompute != b.recompute for a, b in zip(memories, own, strict=True)) and not self.is_late():
                found = self._treated(c, replace(start, memories=memories))
                if _fits(found) and found.bound < start.simulated_seconds:
                    with suppress(SizesError, DoesNotFitError):
                        found = self.evaluator.simulate(found)
                        yield from [found] * _is_less(found, start)

    def _past_the_limit(self, best: Candidate) -> Candidate:
        """The best that fits of what is met as the cuts are moved as if memory had no limit."""
        c, met, starts = replace(best.configuration, own=None), [best], list[Candidate]()
        for ends in with_level_ranks(self.evaluator, c, candidate_ends(self.evaluator, c, has_limit=False)):
            with suppress(SizesError):
                starts += map(self.evaluator.simulate, self._choices(c, ends, is_free=True))

        def better(start: Candidate) -> Iterator[Candidate]:
            for each in self._near(start, is_free=True):
                met.append(each)
                if _is_less(each, start):
                    yield each

        if starts:
            named = min(starts, key=_seconds)
            starts.append(self.ordered(named, is_free=True))
            self._climbed(starts[-1], named, better, is_free=True)
        return min(filter(_fits, met + starts), key=lambda each: float(f"{each.simulated_seconds:.8e}"))

    def _near(self, start: Candidate, *, is_free: bool) -> Iterator[Candidate]:
        """Candidates that may be faster than one, with one of its cuts moved; where orders are made for each, from the
        cut on that was moved last."""
        c, limit = start.configuration, start.simulated_seconds * (1 - TIE)
        every = [*neighbours(self.evaluator.model(c).cuts, start.ends)]
        first = self._at + 1 if self._orders else 0
        for at in range(first, first + len(every)):
            if self.is_late():
                return
            self._at = at % len(every)
            yield from self._tried(c, every[self._at], limit, is_free=is_free)

    def _tried(self, c: Configuration, ends: Ends, limit: float, *, is_free: bool) -> Iterator[Candidate]:
        """These cuts simulated, where they may take less than the limit [s], in an order for their costs if that is to
        be had."""
        cost = num_actions(c) * (_STREAM_BATCHES if c.family.rule.is_asynchronous else 1)
        for evaluated in self._choices(c, ends, is_free=is_free):
            as_named = not (is_free or self._orders)
            can_win, left = evaluated.bound < self.best_seconds, self._actions_left[as_named] - cost
            if evaluated.bound >= limit or left < (0 if can_win else _REFINED_ACTIONS - _RUNNER_UP_ACTIONS):
                continue
            self._actions_left[as_named] = left
            if self._orders:
                yield from self._ordered(evaluated, limit, is_free=is_free)
            elif is_free or _fits(evaluated):
                with suppress(SizesError, DoesNotFitError):  # too long, as no short batch replaces these cuts
                    yield self.evaluator.simulate(evaluated)

    def _choices(self, c: Configuration, ends: Ends, *, is_free: bool) -> Sequence[Candidate]:
        """Ways to treat its ranks, where orders are made also with less in flight; all kept, if `is_free`."""
        with suppress(DoesNotFitError):
            if not is_free:
                found = self.evaluator.choices(c, ends, exact=True)[: num_choices(c)]
                self._is_blocked |= any(name != "none" for each in found[0].memories for name in each.recompute)
                return found
        if is_free and "none" in self.evaluator.model(c).rules.recompute:
            return [self.evaluator.given(c, ends, recompute=["none"] * c.num_stages, shards=[1] * c.num_stages)]
        self._is_blocked |= not is_free
        with suppress(DoesNotFitError):
            return self._with_less(c, ends) if self._orders and not is_free else []
        return []

    def _with_less(self, c: Configuration, ends: Ends) -> list[Candidate]:
        """Ways to treat its ranks that fit under some order; DoesNotFitError where one microbatch does not."""
        at_once, in_turn = self.evaluator.schedules.least_in_flight(c)
        every = self.evaluator.choices(c, ends, in_flight=in_turn)[: num_choices(c)]
        with suppress(DoesNotFitError):
            every += self.evaluator.choices(c, ends, in_flight=at_once)[: num_choices(c)]
        found = {tuple((own.recompute, own.shards) for own in each.memories): each for each in every}
        return [self._treated(c, each) for each in found.values()]

    def _treated(self, c: Configuration, e: Candidate) -> Candidate:
        """The configuration with the cuts of another and its ranks treated alike, whether that fits or not."""
        rows = [(e.memories[p], v) for p, v in zip(c.positions, c.chunks, strict=True)]
        recompute, shards = [each.recompute[v] for each, v in rows], [each.shards[v] for each, v in rows]
        return self.evaluator.given(c, e.ends, recompute=recompute, shards=shards)

    def _ordered(self, e: Candidate, limit: float, *, is_free: bool) -> Iterator[Candidate]:
        """The same with its ranks treated alike, in an order made for its costs, where that may be below the limit."""
        too_many = [0.0 if is_free else memory.too_many for memory in e.memories]
        if not e.configuration.family.splits_backward:  # it may use what is left, without a limit what the fullest has
            too_many = [own.total - (own.limit if own.limit < math.inf else e.memory_bytes) for own in e.memories]
        for _ in range(_TIGHTENED):
            if (own := self.evaluator.ordered(e, limit, too_many)) is None:
                return
            found = self._treated(own, e)
            if is_free or _fits(found):
                yield self.evaluator.simulate(found)
                return
            too_many = [more + memory.too_many for more, memory in zip(too_many, found.memories, strict=True)]


def may_pair(e: Candidate) -> bool:
    """Whether pairs of its actions may take less: it is as its schedule has it, keeps all, and exchanges something."""
    exchanges = (e.sums.forward_exchange + e.sums.backward_exchange).any()
    return bool(e.configuration.own is None and _keeps_all(e) and exchanges)


def hill_climb(best: Candidate, better: Better) -> Candidate:
    """The best that comes of one: the first that is better is taken, for as long as there is one."""
    while (found := next(iter(better(best)), None)) is not None:
        best = found
    return best


def may_order(c: Configuration, *, is_split: bool = True) -> bool:
    """Whether its schedule is one of the named ones with W to move, or without, of a batch that is not too long."""
    is_plain = c.is_equal and not c.batch % c.counts[0] and not (c.lengths or c.overlaps or c.schedule == OWN)
    is_short = is_plain and 2 * c.num_stages * microbatches_of(c) <= _ORDERED_ACTIONS
    return is_short and c.family.splits_backward == is_split


def _is_less(one: Candidate, other: Candidate) -> bool:
    return one.simulated_seconds < other.simulated_seconds * (1 - TIE)


def with_level_ranks(evaluator: PlanEvaluator, c: Configuration, every: Sequence[Ends]) -> dict[Ends, float]:
    """Cuts, each with its least seconds [s], and the two best of them with the work of ranks levelled."""
    least = {ends: evaluator.least_seconds(c, ends) for ends in every}
    for ends in sorted(every, key=lambda ends: (least[ends], ends))[: 2 * (c.num_chunks > 1)]:
        level = level_ranks(evaluator.model(c).cuts, ends, c.positions)
        least.setdefault(level, evaluator.least_seconds(c, level))
    return least


def num_choices(c: Configuration) -> int:
    return max(1, _CHOSEN_ACTIONS // num_actions(c))


def _keeps_all(e: Candidate) -> bool:
    return {name for memory in e.memories for name in memory.recompute} == {"none"}


def _fits(e: Candidate) -> bool:
    return not any(memory.too_many for memory in e.memories)


def _seconds(e: Candidate) -> float:
    return e.simulated_seconds
