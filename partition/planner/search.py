"""Best first: the configuration that may still be fastest is looked at next, until none left can beat the best.

    work alone  ->  cuts, costs and memory  ->  ranks levelled  ->  simulated
    (every one)           (while they may win: bound below the best simulated step)

Each step makes the bound of a configuration larger or leaves it; the next one to look at is the one with the least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count, pairwise
from operator import itemgetter
from typing import overload

from ...schedules.ir import ScheduleError
from ...schedules.registry import family
from ..solver.chunks import level_ranks, neighbours
from ..stage_memory import MemoryRules
from .cuts import candidate_ends, few_ways
from .evaluate import MAX_ACTIONS, Ends, Evaluated, Evaluator, MisfitError, RefusedError, by_rank
from .model import Model
from .result import Found
from .space import Configuration

_REFINED_ACTIONS = 300_000  # of all simulations that move cuts
_REFINED = 3  # configurations whose cuts are moved
_LEAST_FILL = 0.5
_STREAM_BATCHES = 8  # about as many as the program of a stream spans
_MISSES = 400  # configurations that are looked at for the nearest miss alone
_TIE = 1e-9  # relative: nearer than this, the simpler one wins


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """The configuration that came nearest to fitting."""

    configuration: Configuration
    ends: Ends
    stage_group: int
    too_many: float
    limit: float


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of configurations that came so far."""

    considered: int = 0
    cut: int = 0
    unfit: int = 0
    too_long: int = 0
    simulated: int = 0
    left: int = 0


Progress = Callable[[Tally, float | None], None]


class Search:
    """One search.

    Arguments:
        fixed: cuts of configurations that bring their own (unequal replicas).
        wanted: how many simulated configurations to return, at least, where there are as many.
        max_simulated: to stop at.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        rules_of: Callable[[Model], MemoryRules],
        *,
        wanted: int,
        max_simulated: int,
        progress: Progress | None = None,
    ) -> None:
        self.evaluator, self.rules_of = evaluator, rules_of
        self.wanted, self.max_simulated, self.progress = wanted, max_simulated, progress
        self.tally = Tally()
        self._rings: dict[tuple[int, int], float] = {}  # seconds a byte
        self.miss: Miss | None = None
        self._hopeless: list[tuple[float, Configuration]] = []  # bytes a rank that they have too many at least
        self.refused: list[str] = []  # configurations whose schedule can't run
        self.refusal: str | None = None  # of sizes that a schedule does not take, the first
        self.least_left: float | None = None

    def run(self, configurations: Iterable[Configuration], fixed: Sequence[tuple[Configuration, Ends]]) -> list[Found]:
        """Simulated configurations, the best first; empty where nothing fits."""
        queue: list[tuple[float, int, tuple[object, ...], int, object]] = []
        for c in configurations:
            queue.append((self._least(c), 0, c.key, len(queue), c))
        self.tally.considered += len(queue) + len(fixed)
        numbers = count(len(queue))
        heapify(queue)
        for number, (c, ends) in enumerate(fixed):
            fitting = self._fitting(c, [ends])
            self.tally.unfit += not fitting
            if fitting:
                heappush(queue, (fitting[0].bound, 2, c.key, -1 - number, fitting))
        found: list[Found] = []
        while queue and not self._is_done(queue[0][0], found):
            bound, level, key, number, item = heappop(queue)
            if level == 2:
                assert isinstance(item, list)
                self._run(item, found)
            else:
                fitting, bound = self._cut(item, bound)
                if fitting:
                    heappush(queue, (bound, level + 1, key, next(numbers), fitting))
            if self.progress is not None:
                self.progress(self.tally, _least_seconds(found))
        self.least_left = queue[0][0] if queue else None
        # Stopped or not, nothing that was brought along and may still win is left out.
        for bound, *_, item in sorted((entry for entry in queue if entry[3] < 0), key=itemgetter(0, 3)):
            if bound < _least_seconds(found, otherwise=math.inf):
                assert isinstance(item, list)
                self._run(item, found)
        self.tally.left = len(queue)
        if not found:
            self._find_miss()
        found.sort(key=_rank)
        best: dict[Configuration, Found] = {}  # of one configuration, with its own cuts and those that were brought
        for each in found:
            best.setdefault(each.evaluated.configuration, each)
        return self._refined(list(best.values()))

    def _is_done(self, least: float, found: Sequence[Found]) -> bool:
        """True where nothing left can win, all of it being at `least` or above, or where enough was simulated."""
        done = bool(found) and least >= _least_seconds(found, otherwise=math.inf) and len(found) >= self.wanted
        return done or len(found) >= self.max_simulated

    def _cut(self, item: object, bound: float) -> tuple[list[Evaluated], float]:
        """A configuration's candidates that fit, or those with their ranks made level, and their least bound."""
        if isinstance(item, Configuration):
            self.tally.cut += 1
            fitting = self._candidates(item)
            return fitting, max(bound, _if_level(fitting[0])) if fitting else bound
        assert isinstance(item, list)
        fitting = self._levelled(item)
        return fitting, max(bound, fitting[0].bound)

    def _run(self, item: list[Evaluated], found: list[Found]) -> None:
        """Simulate the candidates of one configuration; the best of them joins `found`."""
        if self.evaluator.num_actions(item[0].configuration) > MAX_ACTIONS:
            self.tally.too_long += 1
            return
        ran = self._simulated(item)
        found += ran
        self.tally.simulated += bool(ran)
        self.tally.unfit += not ran

    def _least(self, c: Configuration) -> float:
        """No cut of this configuration is faster, on devices that are all as fast as the fastest [s].

        Each rank has its work and its updates. Under a flush with one stage a rank, rank r may have 1 - 1/m of the work
        of the rank in front, since it waits that much longer: T = W / (1 - (1 - 1/m)^P) for W a microbatch, m
        microbatches a replica. With chunks the cuts that are tried (even ones) fill the pipeline in about (P - 1)/V
        times W/P; half of that is counted, and nothing where every cut is tried. Neither holds where the backward is
        split: weight gradients are work for those who wait.
        """
        model = self.evaluator.model(c)
        m = c.batch // c.data
        work = model.seconds / self.evaluator.topology.fastest + self._around(c, model)
        if family(c.schedule).rule.is_asynchronous:
            return work * m / c.pipeline
        is_split = family(c.schedule).splits_backward
        fill = 0.0
        if c.num_chunks > 1 and not is_split and not few_ways(model, c.num_stages):
            fill = _LEAST_FILL * (c.pipeline - 1) / c.num_chunks
        each = (work * (m + fill) + self._updates(c, model)) / c.pipeline
        return each if c.num_chunks > 1 or is_split else max(each, work / (1 - (1 - 1 / m) ** c.pipeline))

    def _around(self, c: Configuration, model: Model) -> float:
        """Seconds a microbatch that the runtime takes of all ranks together, beside F and B of all stages."""
        hops = sum(a != b for a, b in pairwise(c.positions))  # a message at two ends, in both directions
        least = min(link.busy for link in self.evaluator.topology.links)
        return 2 * c.num_stages * model.profile.action_seconds + 4 * hops * least

    def _updates(self, c: Configuration, model: Model) -> float:
        """Seconds of all ranks of a replica together: gradients summed over the best placed D ranks, and the steps.

        Where ranks have several stages the sums of one may go on beside the backwards of another.
        """
        steps = float(model.cuts.update[-1]) / self.evaluator.topology.fastest / c.data
        if c.num_chunks > 1:
            return steps
        key = (c.data, c.tensor)
        if key not in self._rings:
            self._rings[key] = self._least_ring(c.data, c.tensor)
        ring = float(model.cuts.parameters[-1]) * self._rings[key]
        return ring + steps

    def _least_ring(self, data: int, tensor: int) -> float:
        """Seconds a byte of sums over D ranks in the best of the places that stages of D T ranks may have."""
        fast = self.evaluator.topology.with_fast_cards()
        return min(ring.seconds_a_byte for ring in fast.rings_of_groups(data, stride=tensor))

    def _candidates(self, c: Configuration) -> list[Evaluated]:
        if self._is_hopeless(c):
            self.tally.unfit += 1
            return []
        fitting = self._with_cuts(c)
        self.tally.unfit += not fitting
        return fitting

    def _with_cuts(self, c: Configuration) -> list[Evaluated]:
        """Its candidates that fit; none where the schedule does not take its sizes."""
        try:
            ends = candidate_ends(self.evaluator, self.rules_of(self.evaluator.model(c)), c)
        except RefusedError as error:
            self._note_refusal(error)
            return []
        return self._fitting(c, ends)

    def _find_miss(self) -> None:
        """Look at the hopeless ones for what they lack in truth, in order of what they lack on average."""
        for tried, (excess, c) in enumerate(sorted(self._hopeless, key=lambda each: (each[0], each[1].key))):
            if self.miss is not None and (excess >= self.miss.too_many or tried >= _MISSES):
                break
            self._with_cuts(c)

    def _is_hopeless(self, c: Configuration) -> bool:
        """True where all devices together are too small for the weights alone, without another look at the cuts."""
        model = self.evaluator.model(c)
        rules = self.rules_of(model)
        shards = c.data if "full" in rules.sharding else 1
        held = float(model.cuts.parameters[-1]) * (2 + rules.optimizer_ratio / shards) + float(model.cuts.buffers[-1])
        excess = held / c.pipeline - self.evaluator.topology.largest_memory
        if excess <= 0:
            return False
        self._hopeless.append((excess, c))
        return True

    def _fitting(self, c: Configuration, every: Sequence[Ends]) -> list[Evaluated]:
        """Candidates that fit the memory, the one with the least bound first."""
        fitting = []
        for ends in every:
            try:
                fitting.append(self.evaluator.evaluate(c, ends))
            except MisfitError as error:
                self._note_miss(c, ends, error)
            except RefusedError as error:
                self._note_refusal(error)
                break
        return sorted(fitting, key=lambda each: (each.bound, each.ends))

    def _levelled(self, fitting: list[Evaluated]) -> list[Evaluated]:
        """The same, and with chunks the same with the work of the ranks made level."""
        c = fitting[0].configuration
        if c.num_chunks == 1:
            return fitting
        cuts = self.evaluator.model(c).cuts
        known = [each.ends for each in fitting]
        more = [level_ranks(cuts, ends, c.positions) for ends in known[:2]]
        return sorted(
            fitting + self._fitting(c, [ends for ends in dict.fromkeys(more) if ends not in known]),
            key=lambda each: (each.bound, each.ends),
        )

    def _note_miss(self, c: Configuration, ends: Ends, error: MisfitError) -> None:
        if self.miss is None or error.too_many < self.miss.too_many:
            self.miss = Miss(
                configuration=c, ends=ends, stage_group=error.stage_group, too_many=error.too_many, limit=error.limit
            )

    def _note_refusal(self, error: RefusedError) -> None:
        self.refusal = str(error) if self.refusal is None else self.refusal

    def _simulated(self, candidates: list[Evaluated]) -> list[Found]:
        """The best of its candidates, those that can't win left out; none where all turn out not to run."""
        found: list[Found] = []
        for evaluated in candidates:
            least = min((each.seconds for each in found), default=None)
            if least is not None and evaluated.bound >= least * (1 - _TIE):
                continue
            try:
                exact = self.evaluator.evaluate(evaluated.configuration, evaluated.ends, exact=True)
            except MisfitError as error:
                self._note_miss(evaluated.configuration, evaluated.ends, error)
                continue
            except RefusedError as error:
                self._note_refusal(error)
                break
            try:
                simulated = self.evaluator.simulate(exact)
            except RefusedError as error:  # no short batch stands for it, and all of it is too long
                self._note_refusal(error)
                break
            except ScheduleError as error:  # such as an order that deadlocks with these replicas
                self.refused.append(f"{exact.configuration.label}: {error}")
                break
            found.append(Found(evaluated=exact, simulated=simulated))
        return [min(found, key=_rank)] if found else []

    def _refined(self, found: list[Found]) -> list[Found]:
        """The best few with their cuts moved for as long as that helps."""
        left = float(_REFINED_ACTIONS)
        better = []
        for each in found[:_REFINED]:
            refined, left = self._move_cuts(each, left)
            better.append(refined)
        return sorted(better + found[_REFINED:], key=_rank)

    def _move_cuts(self, start: Found, budget: float) -> tuple[Found, float]:
        best, c = start, start.evaluated.configuration
        cost = self.evaluator.num_actions(c) * (_STREAM_BATCHES if family(c.schedule).rule.is_asynchronous else 1)
        moved = True
        while moved:
            moved = False
            for ends in neighbours(self.evaluator.model(c).cuts, best.evaluated.ends):
                try:
                    evaluated = self.evaluator.evaluate(c, ends, exact=True)
                except MisfitError:
                    continue
                if evaluated.bound >= best.seconds * (1 - _TIE):
                    continue
                if budget < cost:
                    return best, budget
                budget -= cost
                try:
                    simulated = self.evaluator.simulate(evaluated)
                except RefusedError:  # too long, as no short batch stands for these cuts
                    continue
                if simulated.seconds < best.seconds * (1 - _TIE):
                    best, moved = replace(best, evaluated=evaluated, simulated=simulated), True
                    break
        return best, budget


@overload
def _least_seconds(found: Sequence[Found]) -> float | None: ...


@overload
def _least_seconds(found: Sequence[Found], *, otherwise: float) -> float: ...


def _least_seconds(found: Sequence[Found], *, otherwise: float | None = None) -> float | None:
    return min((each.seconds for each in found), default=otherwise)


def _if_level(e: Evaluated) -> float:
    """The bound if its ranks had equal work, where they have several stages: what levelling them may reach [s]."""
    c = e.configuration
    if c.num_chunks == 1:
        return e.bound
    work = by_rank(c, e.seconds.work)
    return e.bound - float(work.max() - work.mean()) * c.batch / c.data


def _rank(found: Found) -> tuple[object, ...]:
    """Least simulated seconds (to nine digits), then the simplest configuration, the least memory, the first cuts."""
    e = found.evaluated
    return (float(f"{found.seconds:.9e}"), e.configuration.key, e.memory_bytes, e.ends)
