"""Best first: the configuration that may still be fastest is looked at next, until none left can beat the best.

    work alone  ->  cuts, nothing run again  ->  the least that must  ->  memory, what is recomputed  ->  simulated
    (every one)                 (while they may win: bound below the best simulated step)

Branch and bound: an entry of the queue is a configuration with a lower bound of its simulated step [s]. A step with it
never lowers the bound, and the entry with the least bound is next. So when this bound reaches the best simulated step,
that step is optimal among all configurations and the cuts looked at. A search that stops earlier (`max_simulated`,
`seconds`, programs too long to simulate) reports the least bound left (`Searched.least_left`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush, heapreplace, merge
from itertools import count
from operator import itemgetter

from ...schedules.ir import ScheduleError
from ..memory import InFlightCounts
from ..plans.record import Searched
from .any_cuts import least_of_any_cuts, unknowns_of_any_cuts
from .bounds import LeastSeconds
from .climb import TIE, Better, CutClimb, hill_climb, may_order, may_pair, num_choices, with_level_ranks
from .cuts import candidate_ends
from .evaluate import Candidate, DoesNotFitError, Ends, PlanEvaluator
from .layouts import Layout, UnevenLayouts
from .simulated import MAX_ACTIONS, SizesError, TooLongError, num_actions
from .space import ALL_SIZES, Configuration

_REFINED = 3  # configurations whose cuts are moved
_LAYOUTS = 32  # in a row, the least first, that are simulated before moves; four times as many after them
_MISSES = 400  # configurations that are looked at for the nearest miss alone
_NEAREST_PER_FARTHEST = 12  # steps of the entry with the least bound to one of the farthest, where seconds are counted
_MOVES = 40  # from one of them, simulated
_STARTS = 3  # numbers of stages from whose best they are moved
_FITTED_ACTIONS = 300_000  # of all cuts that fit in an order for their costs alone, once anything fits
_PROGRAMS = 270_000  # unknown starts of all programs that bound any cuts
_GOALS = 0.935, 0.953  # of the best plan's seconds: what is to be shown first, of each configuration with any cuts
_STEP = 0.001  # of them: nearer than this to what is known, nothing is tried any more


_Steps = Iterator[float]  # of one entry of the queue; yields its lower bound [s] after each, until it is done
_Entry = tuple[float, int, tuple[object, ...], int, _Steps]  # bound, steps that were taken, key, number
# Least seconds, unknowns (negative: the largest program first, since one that is too large ends it), number.
_Sized = tuple[float, int, int, Configuration]
Progress = Callable[[Searched, float | None], None]
# Configurations with unequal replicas and their cuts, found when they may win.
FindUnequal = Callable[[], Iterable[tuple[Configuration, Ends]]]
Moves = Callable[[Candidate], Iterable[Layout]]


class PlanSearch:
    """One search.

    Arguments:
        wanted: how many simulated configurations to return, at least, where there are as many.
        max_simulated: to stop at.
        seconds: to stop after, once something is simulated; None: never. Then every few steps the farthest
            entry continues, so that something is simulated early.
    """

    def __init__(
        self,
        evaluator: PlanEvaluator,
        *,
        wanted: int,
        max_simulated: int,
        seconds: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.evaluator = evaluator
        self.wanted, self.max_simulated, self.progress = wanted, max_simulated, progress
        self._counts = Counter[str]()
        self._may_order: dict[Configuration, dict[Ends, float]] = {}  # their cuts, with the least seconds [s]
        self.bounds = LeastSeconds(evaluator.topology, norm=evaluator.norm)
        self.miss: tuple[Configuration, DoesNotFitError] | None = None  # what came nearest to fitting
        self._hopeless: list[tuple[float, Configuration]] = []  # bytes a rank that they have too many at least
        self.refused: list[str] = []  # configurations whose schedule can't run
        self.refusal: str | None = None  # of sizes that a schedule does not take, the first
        self.deadline = None if seconds is None else time.monotonic() + seconds
        self._least_seconds = math.inf  # of any configuration, with any cuts
        self._least_left = math.inf  # of those that were not simulated
        self._queue, self._numbers, self._unequal_numbers = list[_Entry](), count(), count(-1, -1)

    def run(
        self, configurations: Iterable[Configuration], unequal: Sequence[tuple[float, FindUnequal]]
    ) -> list[Candidate]:
        """Simulated configurations, the best first; empty where nothing fits.

        Arguments:
            unequal: each with the seconds that none of its configurations falls below [s].
        """
        found, queue, with_any_cuts = list[Candidate](), list[_Entry](), list[_Sized]()
        for c in configurations:
            self._counts["considered"] += 1
            if self._is_hopeless(c):
                self._counts["unfit"] += 1
            else:
                with_any_cuts.append((self._least_seconds_of(c), -unknowns_of_any_cuts(c), len(queue), c))
                queue.append((with_any_cuts[-1][0], 0, c.key, len(queue), self._steps(c, found)))
        self._numbers, self._unequal_numbers = count(len(queue)), count(-1, -1)
        for least, find in unequal:
            queue.append((least, 0, (), next(self._unequal_numbers), self._find_unequal(find, least, found)))
        others = [self._least_seconds, *(least for least, _ in unequal)]
        self._least_seconds = min([*others, *(entry[0] for entry in queue)])
        heapify(queue)
        self._queue = queue
        for step in count():
            if not queue or self._is_done(queue[0][0], found):
                break
            self._take_step(self._next_entry(step))
            if self.progress is not None:
                self.progress(self.searched, _seconds_of_best(found) if found else None)
        # Stopped or not, nothing with unequal replicas that may still win is left out.
        self._queue = own = [entry for entry in queue if entry[3] < 0]
        self._least_left = min([self._least_left, *(entry[0] for entry in queue if entry[3] >= 0)])
        heapify(own)
        while own and own[0][0] < _seconds_of_best(found):
            self._take_step(heappop(own))
        self._least_left = min([self._least_left, *(entry[0] for entry in own)])
        found += self._fitted(found)
        if not found:
            self._find_miss()
        found = self._with_moved_cuts(found)
        self._least_seconds = min([*others, self._least_with_any_cuts(with_any_cuts, _seconds_of_best(found))])
        return found

    def _least_with_any_cuts(self, every: list[_Sized], most: float) -> float:
        """Seconds that none of these configurations falls below, or `most`, if that is less [s]; of many devices by the
        program (`any_cuts`) of the one with the least bound, as long as that may still be more."""
        heapify(every)
        is_large = self.evaluator.topology.num_devices > ALL_SIZES and most < math.inf
        failed, left = dict[int, float](), _PROGRAMS if is_large else 0
        while every and every[0][0] < most:
            least, size, number, c = every[0]
            goal = next((most * each for each in _GOALS if least < most * (each - _STEP)), most)
            goal = goal if number not in failed else (least + failed[number]) / 2
            if goal < least + _STEP * most or -size > left or self.deadline is not None:
                return least
            found = max(least, least_of_any_cuts(self.evaluator, c, goal))
            left += size
            if found < goal * (1 - TIE):
                failed[number] = goal
            heapreplace(every, (found, size, number, c))
        return most

    def improve_with_layouts(
        self,
        found: Sequence[Candidate],
        every: Iterable[tuple[float, Callable[[], Sequence[UnevenLayouts]]]],
        is_new: Callable[[Configuration], bool] = lambda c: True,
    ) -> list[Candidate]:
        """With layouts of unequal replicas as well: the least first, and then the best of each number of stages, of the
        best few, moved for as long as that helps.

        Arguments:
            every: layouts by order of the nodes, each with the seconds that none of them falls below [s].
        """
        found, looked = [*found], {self.evaluator.likeness(each.configuration, each.ends) for each in found}
        known = len(looked)
        orders = [order for least, find in every if least < _seconds_of_best(found) for order in find()]

        def moves(e: Candidate) -> Iterator[Layout]:
            yield from (each for order in orders for each in order.neighbours(e) if is_new(each[1]))
            sliced = e.model.next_slicings(e.configuration) if e.configuration.lengths else ()
            yield from sorted(((self.evaluator.least_seconds(c, e.ends), c, e.ends) for c in sliced), key=itemgetter(0))

        for most, limit in (_LAYOUTS, math.inf), (4 * _LAYOUTS, 0.0):
            left, end = math.inf, len(looked) + most
            layouts = merge(*(order.in_order_of_bound(_seconds_of_best(found)) for order in orders), key=itemgetter(0))
            for least, c, ends in (each for each in layouts if is_new(each[1])):
                if len(looked) == end or least >= _seconds_of_best(found) or self._is_late(found):
                    left = least
                    break
                if (alike := self.evaluator.likeness(c, ends)) not in looked:
                    looked.add(alike)
                    found += self._simulated(c, {ends: least}, limit or _seconds_of_best(found))
            starts = dict[tuple[int, int], Candidate]()
            for each in sorted(found, key=_sort_key):
                starts.setdefault((each.configuration.num_stages, len(each.configuration.lengths)), each)
            climbed = [hill_climb(each, self._better_by_moves(moves, looked)) for each in [*starts.values()][:_STARTS]]
            found += self._with_moved_cuts([each for each in climbed if each not in found], most=1)
        self._least_left = min([self._least_left, left, *(order.least_left for order in orders)])
        self._counts["considered"] += len(looked) - known
        return sorted(found, key=lambda each: float(f"{each.simulated_seconds:.8e}"))

    def with_orders(self, found: Sequence[Candidate]) -> list[Candidate]:
        """With those of several chunks and whole backwards in orders for their costs, the best first."""
        climb = CutClimb(self.evaluator, _seconds_of_best(found), partial(self._is_late, found))
        return sorted([*found, *climb.whole(found)], key=lambda e: float(f"{e.simulated_seconds:.8e}"))

    def _is_late(self, found: Sequence[Candidate]) -> bool:
        return bool(found) and self.deadline is not None and time.monotonic() > self.deadline

    def _better_by_moves(self, moves: Moves, looked: set[object]) -> Better:
        """Better candidates that moves make of one, a few moves in all; those like any that was `looked` at do not."""
        left = iter(range(_MOVES))

        def better(start: Candidate) -> Iterator[Candidate]:
            limit = start.simulated_seconds * (1 - TIE)
            for least, c, ends in () if self._is_late([start]) else moves(start):
                if least >= limit:
                    break
                if (alike := self.evaluator.likeness(c, ends)) not in looked:
                    if next(left, None) is None:
                        break
                    looked.add(alike)
                    yield from self._simulated(c, {ends: least}, limit)

        return better

    def _least_seconds_of(self, c: Configuration) -> float:
        """Seconds of a batch, at least, with any cuts [s]; of unequal groups as in `bounds`, with their members."""
        least, m = self.bounds.of_configuration(c, self.evaluator.least_model(c)), c.batch
        if c.sizes is None:
            return least
        weight = 0.0
        for size in reversed(c.sizes):
            weight += max(0.0, size - weight) / m
        weight = c.num_devices / m if c.family.splits_backward else weight
        return max(least, self.evaluator.work_of_all(c) / weight / self.evaluator.topology.fastest)

    def _take_step(self, entry: _Entry) -> None:
        """Take one step with an entry, which is in the queue again unless it is done."""
        bound, taken, key, number, steps = entry
        least = next(steps, None)
        if least is not None:
            number = number if taken else next(self._numbers)
            heappush(self._queue, (max(bound, least), taken + 1, key, number, steps))

    def _find_unequal(self, find: FindUnequal, bound: float, found: list[Candidate]) -> _Steps:
        """Configurations with unequal replicas and their cuts, each of which joins the queue."""
        for c, ends in find():
            least = max(bound, self.evaluator.least_seconds(c, ends))
            steps = self._steps_of_cuts(c, [ends], found)
            heappush(self._queue, (least, 1, c.key, next(self._unequal_numbers), steps))
            self._counts["considered"] += 1
        yield from ()

    @property
    def searched(self) -> Searched:
        return Searched(
            **{name: self._counts[name] for name in ("considered", "cut", "simulated", "unfit", "too_long")},
            least_left=self._least_left if math.isfinite(self._least_left) else None,
            least=self._least_seconds,
        )

    def _next_entry(self, step: int) -> _Entry:
        """Entry with the least bound; where seconds are counted, now and then the farthest of all."""
        if self.deadline is None or step % _NEAREST_PER_FARTHEST:
            return heappop(self._queue)
        farthest = min(self._queue, key=lambda entry: (-entry[1], entry[0], *entry[2:4]))
        self._queue.remove(farthest)
        heapify(self._queue)
        return farthest

    def _is_done(self, least: float, found: Sequence[Candidate]) -> bool:
        """True where nothing left can win, all of it being at `least` or above, or where enough was simulated."""
        if self._is_late(found):
            return True
        done = bool(found) and least >= _seconds_of_best(found) and len(found) >= self.wanted
        return done or len(found) >= self.max_simulated

    def _steps(self, c: Configuration, found: list[Candidate]) -> _Steps:
        """A configuration is cut, unless it can't be cut so that it fits; then as its cuts."""
        self._counts["cut"] += 1
        every = self._cuts_to_try(c)
        if not every:
            self._counts["unfit"] += 1
            return
        least = with_level_ranks(self.evaluator, c, every)
        if may_order(c):
            self._may_order[c] = least
        yield min(least.values())
        yield from self._steps_of_cuts(c, sorted(least, key=lambda ends: (least[ends], ends)), found)

    def _steps_of_cuts(self, c: Configuration, every: list[Ends], found: list[Candidate]) -> _Steps:
        """Candidates, refined: what runs again is known, then what fits the memory; that is simulated, the best of
        it joins `found`."""
        bound = 0.0
        with suppress(SizesError):  # `_choices_that_fit` says so
            kv_share = self.evaluator.model(c).profile.kv_share
            in_flight = self.evaluator.schedules.in_flight(c, exact=True, kv_share=kv_share)
            least = {ends: self.evaluator.least_seconds(c, ends, in_flight=in_flight) for ends in every}
            every = sorted(every, key=lambda ends: (least[ends], ends))
            bound = least[every[0]]
        yield bound
        fitting = self._choices_that_fit(c, every)
        if not fitting:
            self._counts["unfit"] += 1
            return
        yield fitting[0].bound
        if num_actions(c) > MAX_ACTIONS:
            self._counts["too_long"] += 1
            self._least_left = min(self._least_left, fitting[0].bound)
            return
        bounds = dict[Ends, float]()
        for each in fitting:
            bounds.setdefault(each.ends, each.bound)
        ran = self._simulated(c, bounds)
        found += ran
        self._counts["unfit"] += not ran

    def _cuts_to_try(self, c: Configuration) -> list[Ends]:
        """Cuts to look at; none where the schedule does not take its sizes."""
        try:
            return candidate_ends(self.evaluator, c)
        except SizesError as error:
            self._note_refusal(error, self._least_seconds_of(c))
            return []

    def _fitted(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Configurations with cuts that fit in an order for their costs alone, the best of each, if they may win."""
        if not math.isfinite(min(self.evaluator.topology.memory_bytes)):
            return []
        made, left = dict[Configuration, Candidate](), _FITTED_ACTIONS
        climb = CutClimb(self.evaluator, _seconds_of_best(found), lambda: self._is_late([*found, *made.values()]))

        def is_over(bound: float) -> bool:
            is_left = climb.is_late() or (left < 0 and climb.best_seconds < math.inf)
            if is_left and bound < climb.best_seconds:
                self._least_left = min(self._least_left, bound)
            return is_left or bound >= climb.best_seconds

        for c, least in sorted(self._may_order.items(), key=lambda item: (min(item[1].values()), item[0].key)):
            counted = list[tuple[InFlightCounts, ...]]()
            with suppress(SizesError):  # which a look at its cuts reported
                counted += () if is_over(self._least_seconds_of(c)) else self.evaluator.schedules.least_in_flight(c)
            for in_flight in counted:
                every = candidate_ends(self.evaluator, c, in_flight=in_flight)
                least |= with_level_ranks(self.evaluator, c, [ends for ends in every if ends not in least])
            for bound, ends in sorted((bound, ends) for ends, bound in least.items() if counted):
                left -= num_actions(c)
                if is_over(bound):
                    break
                try:
                    made |= ((c, each) for each in climb.fitted(c, ends))
                except DoesNotFitError as error:
                    self._note_miss(c, error)
        num_new = len({*made} - {each.configuration for each in found})
        self._counts.update(simulated=num_new, unfit=-num_new)
        return [*made.values()]

    def _find_miss(self) -> None:
        """Look at the hopeless ones for what they lack in truth, in order of what they lack on average."""
        for tried, (excess, c) in enumerate(sorted(self._hopeless, key=lambda each: (each[0], each[1].key))):
            if self.miss is not None and (excess >= self.miss[1].too_many or tried >= _MISSES):
                break
            self._choices_that_fit(c, self._cuts_to_try(c))

    def _is_hopeless(self, c: Configuration) -> bool:
        """True where the fullest rank is too small for its weights alone, without a look at the cuts."""
        model = self.evaluator.least_model(c)
        least = self.bounds.weights_of_a_rank(c, model) * model.rules.least_copies(c.data * model.profile.context)
        excess = least - self.evaluator.topology.largest_memory
        if excess <= 0:
            return False
        self._hopeless.append((excess, c))
        return True

    def _choices_that_fit(self, c: Configuration, every: Sequence[Ends]) -> list[Candidate]:
        fitting = []
        for ends in every:
            try:
                fitting += self.evaluator.choices(c, ends)
            except DoesNotFitError as error:
                self._note_miss(c, error)
            except SizesError as error:
                self._note_refusal(error, self.evaluator.least_seconds(c, ends))
                break
        return sorted(fitting, key=lambda each: (each.bound, each.ends))

    def _note_miss(self, c: Configuration, error: DoesNotFitError) -> None:
        if self.miss is None or error.too_many < self.miss[1].too_many:
            self.miss = c, error.with_traceback(None)

    def _note_refusal(self, error: SizesError, least: float) -> None:
        """A schedule that does not take its sizes; or one too long to look at, which would take `least` or more [s]."""
        if isinstance(error, TooLongError):
            self._least_left = min(self._least_left, least)
        self.refusal = str(error) if self.refusal is None else self.refusal

    def _simulated(self, c: Configuration, bounds: Mapping[Ends, float], limit: float = math.inf) -> list[Candidate]:
        """The best of its cuts, those whose bounds can't win left out; none below the limit where all turn out not to
        run [s]."""
        found: list[Candidate] = []
        for ends, bound in bounds.items():
            if bound >= min(limit, _seconds_of_best(found) * (1 - TIE)):
                continue
            try:
                exact = self.evaluator.choices(c, ends, exact=True)
                for choice in exact[: num_choices(c)]:
                    if choice.bound < min(limit, _seconds_of_best(found) * (1 - TIE)):
                        found += self._simulated_if_it_fits(choice)
            except DoesNotFitError as error:
                self._note_miss(c, error)
            except SizesError as error:  # no short batch replaces it, and all of it is too long
                self._note_refusal(error, bound)
                break
            except ScheduleError as error:  # such as an order that deadlocks with these replicas
                self.refused.append(f"{c.label()}: {error}")
                break
        self._counts["simulated"] += bool(found)
        return [best] if found and (best := min(found, key=_sort_key)).simulated_seconds < limit else []

    def _simulated_if_it_fits(self, choice: Candidate) -> list[Candidate]:
        try:
            return [self.evaluator.simulate(choice)]
        except DoesNotFitError as error:
            self._note_miss(choice.configuration, error)
            return []

    def _with_moved_cuts(self, found: list[Candidate], most: int = _REFINED) -> list[Candidate]:
        """The best cuts of each configuration, in orders for their costs; the best few with their cuts moved. As named,
        too, those that may be faster with pairs than in any order."""
        best: dict[Configuration, Candidate] = {}  # cuts of each configuration
        for each in sorted(found, key=_sort_key):
            best.setdefault(each.configuration, each)
        climb = CutClimb(self.evaluator, _seconds_of_best(found), partial(self._is_late, found))
        others = sorted(map(climb.ordered, best.values()), key=_sort_key)
        moved = [climb.climb(each, best.get(replace(each.configuration, own=None), each)) for each in others[:most]]
        every = dict.fromkeys([*moved, *others[most:], *filter(may_pair, [*best.values(), *climb.as_named])])
        return sorted(every, key=_sort_key)


def _seconds_of_best(found: Sequence[Candidate]) -> float:
    return min((each.simulated_seconds for each in found), default=math.inf)


def _sort_key(e: Candidate) -> tuple[object, ...]:
    """Least simulated seconds (to nine digits), then the simplest configuration, the fewest shards, the least memory,
    the first cuts."""
    return (float(f"{e.simulated_seconds:.8e}"), e.configuration.key, e.num_shards, e.memory_bytes, e.ends)
