"""Best first: the configuration that may still be fastest is looked at next, until none left can beat the best.

    work alone  ->  cuts, nothing run again  ->  the least that must  ->  memory, what is recomputed  ->  simulated
    (every one)                 (while they may win: bound below the best simulated step)

Each step makes the bound of a configuration larger or leaves it; the next one to look at is the one with the least.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush, merge
from itertools import count
from operator import itemgetter
from typing import NamedTuple, cast

from ...schedules.families.registry import family
from ...schedules.ir import ScheduleError
from ..plans.record import Searched
from ..solve.chunks import level_ranks, neighbours
from .bounds import LeastSeconds
from .cuts import candidate_ends
from .evaluate import Ends, Evaluated, MisfitError, PlanEvaluator
from .layouts import Layout, Rows
from .simulated import MAX_ACTIONS, SizesError, TooLongError, num_actions
from .space import Configuration

_REFINED_ACTIONS = 300_000  # of all simulations that move cuts
_REFINED = 3  # configurations whose cuts are moved
_LAYOUTS = 32  # in a row, the least first, that are simulated in front of moves; four times as many behind them
_STREAM_BATCHES = 8  # about as many as the program of a stream spans
_MISSES = 400  # configurations that are looked at for the nearest miss alone
_STEPS = 12  # of best first to one of farthest first, where seconds are counted
_CHOSEN_ACTIONS = 6_000  # of all simulations of one way to cut, with other treatments of its ranks
_MOVES = 40  # from one of them, simulated
_STARTS = 3  # numbers of stages from whose best they are moved
_TIE = 1e-9  # relative: nearer than this, the simpler one wins


_Entry = tuple[float, int, tuple[object, ...], int, object]  # bound, level, key, number, what is looked at
Progress = Callable[[Searched, float | None], None]
# Configurations that bring their own cuts (unequal replicas), found when they may win.
Brought = Callable[[], Iterable[tuple[Configuration, Ends]]]
Moves = Callable[[Evaluated], Iterable[Layout]]


class _WithCuts(NamedTuple):
    """A configuration with its cuts to look at, the one with the least bound first."""

    configuration: Configuration
    every: list[Ends]
    is_weighed: bool = False  # the bound knows what must run again


class PlanSearch:
    """One search.

    Arguments:
        wanted: how many simulated configurations to return, at least, where there are as many.
        max_simulated: to stop at.
        seconds: to stop after, once something is simulated; None: never. Then every few steps whatever has come
            farthest goes on, so that something is simulated early.
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
        self.least = LeastSeconds(evaluator.topology, norm=evaluator.norm)
        self.miss: tuple[Configuration, MisfitError] | None = None  # what came nearest to fitting
        self._hopeless: list[tuple[float, Configuration]] = []  # bytes a rank that they have too many at least
        self.refused: list[str] = []  # configurations whose schedule can't run
        self.refusal: str | None = None  # of sizes that a schedule does not take, the first
        self.deadline = None if seconds is None else time.monotonic() + seconds
        self._least_seconds = math.inf  # of any configuration, whatever its cuts
        self._least_left = math.inf  # of those that were not simulated
        self._numbers, self._brought_numbers = count(), count(-1, -1)

    def run(self, configurations: Iterable[Configuration], brought: Sequence[tuple[float, Brought]]) -> list[Evaluated]:
        """Simulated configurations, the best first; empty where nothing fits.

        Arguments:
            brought: each with the seconds that none of its configurations falls below [s].
        """
        queue: list[_Entry] = []
        for c in configurations:
            self._counts["considered"] += 1
            if self._is_hopeless(c):
                self._counts["unfit"] += 1
            else:
                queue.append((self._least(c), 0, c.key, len(queue), c))
        self._numbers, self._brought_numbers = count(len(queue)), count(-1, -1)
        queue += [(least, 0, (), next(self._brought_numbers), find) for least, find in brought]
        self._least_seconds = min([self._least_seconds, *(entry[0] for entry in queue)])
        heapify(queue)
        found: list[Evaluated] = []
        for step in count():
            if not queue or self._is_done(queue[0][0], found):
                break
            self._look(self._next(queue, step), queue, found)
            if self.progress is not None:
                self.progress(self.searched, _least_seconds(found) if found else None)
        # Stopped or not, nothing that was brought along and may still win is left out.
        own = [entry for entry in queue if entry[3] < 0]
        queue = [entry for entry in queue if entry[3] >= 0]
        self._least_left = min([self._least_left, *(entry[0] for entry in queue)])
        heapify(own)
        while own and own[0][0] < _least_seconds(found):
            self._look(heappop(own), own, found)
        self._least_left = min([self._least_left, *(entry[0] for entry in own)])
        if not found:
            self._find_miss()
        return self._refined(found)

    def improved(
        self,
        found: Sequence[Evaluated],
        every: Iterable[tuple[float, Callable[[], Sequence[Rows]]]],
        is_new: Callable[[Configuration], bool] = lambda c: True,
    ) -> list[Evaluated]:
        """With layouts in rows as well: the least first, and then the best of each number of stages, of the best few,
        moved for as long as that helps.

        Arguments:
            every: rows, each with the seconds that none of their layouts falls below [s].
        """
        found, looked = [*found], set[tuple[Configuration, Ends]]()
        rows = [row for least, find in every if least < _least_seconds(found) for row in find()]

        def moves(e: Evaluated) -> Iterator[Layout]:
            yield from (each for row in rows for each in row.next_to(e) if is_new(each[1]))
            sliced = e.model.next_slicings(e.configuration) if e.configuration.lengths else ()
            yield from sorted(((self.evaluator.least_seconds(c, e.ends), c, e.ends) for c in sliced), key=itemgetter(0))

        for most, limit in (_LAYOUTS, math.inf), (4 * _LAYOUTS, 0.0):
            left, layouts = math.inf, merge(*(row.best_first(_least_seconds(found)) for row in rows), key=itemgetter(0))
            for number, (least, c, ends) in enumerate(each for each in layouts if is_new(each[1])):
                if number == most or least >= _least_seconds(found) or self._is_late(found):
                    left = least
                    break
                if (c, ends) not in looked:
                    looked.add((c, ends))
                    found += self._simulated(c, {ends: least}, limit or _least_seconds(found))
            starts = dict[tuple[int, int], Evaluated]()
            for each in sorted(found, key=_rank):
                starts.setdefault((each.configuration.num_stages, len(each.configuration.lengths)), each)
            climbed = [self._climbed(each, moves, looked) for each in [*starts.values()][:_STARTS]]
            found += self._refined([each for each in climbed if each not in found], most=1)
        self._least_left = min(self._least_left, left)
        self._counts["considered"] += len(looked)
        return sorted(found, key=lambda each: float(f"{each.simulated_seconds:.8e}"))

    def _is_late(self, found: Sequence[Evaluated]) -> bool:
        return bool(found) and self.deadline is not None and time.monotonic() > self.deadline

    def _climbed(self, best: Evaluated, moves: Moves, looked: set[tuple[Configuration, Ends]]) -> Evaluated:
        """The best that comes of one by moves that help; those that were `looked` at do not."""
        left, start = _MOVES, None
        while best is not start and not self._is_late([best]):
            start = best
            for least, c, ends in moves(best):
                limit = best.simulated_seconds * (1 - _TIE)
                if least >= limit or not left:
                    break
                if (c, ends) in looked:
                    continue
                looked.add((c, ends))
                left -= 1
                if better := self._simulated(c, {ends: least}, limit):
                    best = better[0]
                    break
        return best

    def _least(self, c: Configuration) -> float:
        """Seconds of a batch, at least, whatever the cuts [s]; of unequal groups as in `bounds`, with their members."""
        least, m = self.least.of(c, self.evaluator.least_model(c)), c.batch
        if c.sizes is None:
            return least
        weight = 0.0
        for size in reversed(c.sizes):
            weight += max(0.0, size - weight) / m
        weight = c.num_devices / m if family(c.schedule).splits_backward else weight
        return max(least, self.evaluator.work_of_all(c) / weight / self.evaluator.topology.fastest)

    def _look(self, entry: _Entry, queue: list[_Entry], found: list[Evaluated]) -> None:
        """Take one step with what is looked at: it joins `found`, or the queue again, or is out."""
        bound, _, key, number, item = entry
        if isinstance(item, list):
            self._run(item, found)
            return
        if callable(item):
            for c, ends in cast(Brought, item)():
                least = max(bound, self.evaluator.least_seconds(c, ends))
                heappush(queue, (least, 1, c.key, next(self._brought_numbers), _WithCuts(c, [ends])))
                self._counts["considered"] += 1
            return
        further, least = self._further(item)
        if further is not None:
            level = 1 + further.is_weighed if isinstance(further, _WithCuts) else 3
            heappush(queue, (max(bound, least), level, key, next(self._numbers) if level == 1 else number, further))

    @property
    def searched(self) -> Searched:
        return Searched(
            **{name: self._counts[name] for name in ("considered", "cut", "simulated", "unfit", "too_long")},
            least_left=self._least_left if math.isfinite(self._least_left) else None,
            least=self._least_seconds,
        )

    def _next(self, queue: list[_Entry], step: int) -> _Entry:
        """Entry with the least bound; where seconds are counted, now and then the farthest of all."""
        if self.deadline is None or step % _STEPS:
            return heappop(queue)
        farthest = min(queue, key=lambda entry: (-entry[1], entry[0], *entry[2:4]))
        queue.remove(farthest)
        heapify(queue)
        return farthest

    def _is_done(self, least: float, found: Sequence[Evaluated]) -> bool:
        """True where nothing left can win, all of it being at `least` or above, or where enough was simulated."""
        if self._is_late(found):
            return True
        done = bool(found) and least >= _least_seconds(found) and len(found) >= self.wanted
        return done or len(found) >= self.max_simulated

    def _further(self, item: object) -> tuple[_WithCuts | list[Evaluated] | None, float]:
        """A configuration as its cuts, cuts as those that fit, with the least seconds; None where nothing is left."""
        if isinstance(item, Configuration):
            return self._cut(item)
        assert isinstance(item, _WithCuts)
        if not item.is_weighed:
            return self._weighed(item)
        fitting = self._fitting(item.configuration, item.every)
        self._counts["unfit"] += not fitting
        return fitting or None, fitting[0].bound if fitting else math.inf

    def _cut(self, c: Configuration) -> tuple[_WithCuts | None, float]:
        """A configuration's cuts, and the least seconds of any of them; None where it can't be cut so that it fits."""
        self._counts["cut"] += 1
        every = self._ends(c)
        if not every:
            self._counts["unfit"] += 1
            return None, math.inf
        least = {ends: self.evaluator.least_seconds(c, ends) for ends in every}
        every.sort(key=lambda ends: (least[ends], ends))
        if c.num_chunks > 1:
            cuts = self.evaluator.model(c).cuts
            for ends in [level_ranks(cuts, ends, c.positions) for ends in every[:2]]:
                if ends not in least:
                    least[ends] = self.evaluator.least_seconds(c, ends)
        return _WithCuts(c, sorted(least, key=lambda ends: (least[ends], ends))), min(least.values())

    def _weighed(self, cut: _WithCuts) -> tuple[_WithCuts, float]:
        """The same, with the least seconds of any of them now that their memory is known."""
        c, find = cut.configuration, self.evaluator.least_seconds
        try:
            kv_share = self.evaluator.model(c).profile.kv_share
            flights = self.evaluator.schedules.in_flight(c, exact=False, kv_share=kv_share)
        except SizesError:  # `_fitting` says so
            return cut._replace(is_weighed=True), 0.0
        least = {ends: find(c, ends, flights=flights) for ends in cut.every}
        every = sorted(cut.every, key=lambda ends: (least[ends], ends))
        return _WithCuts(c, every, is_weighed=True), least[every[0]]

    def _run(self, item: list[Evaluated], found: list[Evaluated]) -> None:
        """Simulate the candidates of one configuration; the best of them joins `found`."""
        if num_actions(item[0].configuration) > MAX_ACTIONS:
            self._counts["too_long"] += 1
            self._least_left = min(self._least_left, item[0].bound)
            return
        bounds = dict[Ends, float]()
        for each in item:
            bounds.setdefault(each.ends, each.bound)
        ran = self._simulated(item[0].configuration, bounds)
        found += ran
        self._counts["unfit"] += not ran

    def _ends(self, c: Configuration) -> list[Ends]:
        """Cuts to look at; none where the schedule does not take its sizes."""
        try:
            return candidate_ends(self.evaluator, c)
        except SizesError as error:
            self._note_refusal(error, self._least(c))
            return []

    def _find_miss(self) -> None:
        """Look at the hopeless ones for what they lack in truth, in order of what they lack on average."""
        for tried, (excess, c) in enumerate(sorted(self._hopeless, key=lambda each: (each[0], each[1].key))):
            if self.miss is not None and (excess >= self.miss[1].too_many or tried >= _MISSES):
                break
            self._fitting(c, self._ends(c))

    def _is_hopeless(self, c: Configuration) -> bool:
        """True where the fullest rank is too small for its weights alone, without a look at the cuts.

        Where the optimizer is divided, a rank has the parts of others for a moment, of gradients and of weights.
        """
        model = self.evaluator.least_model(c)
        rules = model.rules
        ways = {"none": rules.optimizer_ratio, "full": (rules.optimizer_ratio - 1) / c.data + 1}
        optimizer = min(ways[name] for name in rules.sharding) if c.data > 1 else rules.optimizer_ratio
        excess = self.least.weights_of_a_rank(c, model) * (2 + optimizer) - self.evaluator.topology.largest_memory
        if excess <= 0:
            return False
        self._hopeless.append((excess, c))
        return True

    def _fitting(self, c: Configuration, every: Sequence[Ends]) -> list[Evaluated]:
        fitting = []
        for ends in every:
            try:
                fitting += self.evaluator.choices(c, ends)
            except MisfitError as error:
                self._note_miss(c, error)
            except SizesError as error:
                self._note_refusal(error, self.evaluator.least_seconds(c, ends))
                break
        return sorted(fitting, key=lambda each: (each.bound, each.ends))

    def _note_miss(self, c: Configuration, error: MisfitError) -> None:
        if self.miss is None or error.too_many < self.miss[1].too_many:
            self.miss = c, error.with_traceback(None)

    def _note_refusal(self, error: SizesError, least: float) -> None:
        """A schedule that does not take its sizes; or one too long to look at, which would take `least` or more [s]."""
        if isinstance(error, TooLongError):
            self._least_left = min(self._least_left, least)
        self.refusal = str(error) if self.refusal is None else self.refusal

    def _simulated(self, c: Configuration, bounds: Mapping[Ends, float], limit: float = math.inf) -> list[Evaluated]:
        """The best of its cuts, those whose bounds can't win left out; none below the limit where all turn out not to
        run [s]."""
        found: list[Evaluated] = []
        for ends, bound in bounds.items():
            if bound >= min(limit, _least_seconds(found) * (1 - _TIE)):
                continue
            try:
                exact = self.evaluator.choices(c, ends, exact=True)
                for choice in exact[: _num_choices(c)]:
                    if choice.bound < min(limit, _least_seconds(found) * (1 - _TIE)):
                        found += self._ran(choice)
            except MisfitError as error:
                self._note_miss(c, error)
            except SizesError as error:  # no short batch stands for it, and all of it is too long
                self._note_refusal(error, bound)
                break
            except ScheduleError as error:  # such as an order that deadlocks with these replicas
                self.refused.append(f"{c.label}: {error}")
                break
        self._counts["simulated"] += bool(found)
        return [best] if found and (best := min(found, key=_rank)).simulated_seconds < limit else []

    def _ran(self, choice: Evaluated) -> list[Evaluated]:
        try:
            return [self.evaluator.simulate(choice)]
        except MisfitError as error:
            self._note_miss(choice.configuration, error)
            return []

    def _refined(self, found: list[Evaluated], most: int = _REFINED) -> list[Evaluated]:
        """The best cuts of each configuration; the best few with their cuts moved for as long as that helps."""
        best: dict[Configuration, Evaluated] = {}  # of one configuration, with its own cuts and those that were brought
        for each in sorted(found, key=_rank):
            best.setdefault(each.configuration, each)
        left = float(_REFINED_ACTIONS)
        better, others = [], [*best.values()]
        for each in others[:most]:
            refined, left = self._move_cuts(each, left)
            better.append(refined)
        return sorted(better + others[most:], key=_rank)

    def _move_cuts(self, start: Evaluated, budget: float) -> tuple[Evaluated, float]:
        best, c = start, start.configuration
        cost = num_actions(c) * (_STREAM_BATCHES if family(c.schedule).rule.is_asynchronous else 1)
        moved = True
        while moved:
            moved = False
            for ends in neighbours(self.evaluator.model(c).cuts, best.ends):
                try:
                    choices = self.evaluator.choices(c, ends, exact=True)[: _num_choices(c)]
                except MisfitError:
                    continue
                before = best
                for evaluated in choices:
                    if evaluated.bound >= best.simulated_seconds * (1 - _TIE):
                        continue
                    if budget < cost:
                        return best, budget
                    budget -= cost
                    try:
                        simulated = self.evaluator.simulate(evaluated)
                    except (SizesError, MisfitError):  # too long, as no short batch stands for these cuts
                        continue
                    if simulated.simulated_seconds < best.simulated_seconds * (1 - _TIE):
                        best, moved = simulated, True
                if best is not before:
                    break
        return best, budget


def _num_choices(c: Configuration) -> int:
    return max(1, _CHOSEN_ACTIONS // num_actions(c))


def _least_seconds(found: Sequence[Evaluated]) -> float:
    return min((each.simulated_seconds for each in found), default=math.inf)


def _rank(e: Evaluated) -> tuple[object, ...]:
    """Least simulated seconds (to nine digits), then the simplest configuration, the fewest shards, the least memory,
    the first cuts."""
    return (float(f"{e.simulated_seconds:.8e}"), e.configuration.key, e.num_shards, e.memory_bytes, e.ends)
