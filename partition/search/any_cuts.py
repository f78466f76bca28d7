"""A lower bound of a step with any cuts of one configuration: its schedule as a linear program.

Unknown are the nodes, or parts of nodes, of each kind k in stage s under each treatment t of their memory, x[s, k, t];
the seconds F and B of each stage; the start of each action; and the step T, which is to be the least:

    F[s], B[s] = sums of x[s, ., .] times the seconds of a node, and of what runs again
    start(a) + seconds(a) <= start(b)              b is next on the rank of a
    start(a) + seconds(a) + message <= start(b)    b takes the message of a
    end of the last B of s + its sums and update <= T
    bytes of each rank, at each moment at which it may hold most, <= its memory
    x adds up to the nodes of each kind, and to a node or more in each stage

All of it is linear, since the order of the actions is given. What is not (which nodes follow each other, messages that
queue) is left out or has its least value, so that all cuts with all treatments that fit are among the solutions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import chain, pairwise, product

import numpy as np

from ...schedules.ir import Action, Op
from ..memory import context_bytes
from ..topology import Floats, Indices, TransferTime
from .bounds import least_of_nodes
from .evaluate import PlanEvaluator
from .model import Model
from .simulated import SizesError, microbatches_of
from .space import Configuration

_MOST_UNKNOWNS = 9_000
_INFEASIBLE = 2  # of scipy
_ROUNDED = 1e-6  # relative: as far as a solver's answer may be off


def unknowns_of_any_cuts(c: Configuration) -> int:
    """Actions of its program: a measure of its size."""
    return 2 * c.num_stages * microbatches_of(c)


def least_of_any_cuts(evaluator: PlanEvaluator, c: Configuration) -> float:
    """Seconds of a batch that no cuts of it fall below [s]: infinite where none fit; 0 where nothing is known, as of
    streams, halves of backwards, slices, unequal stages, what waits on the host, and of programs that are too large."""
    model, num_actions = evaluator.model(c), unknowns_of_any_cuts(c)
    is_plain = c.is_equal and c.own is None and c.sizes is None and not c.lengths and not model.rules.offloads
    if not is_plain or c.family.rule.is_asynchronous or c.family.splits_backward or num_actions > _MOST_UNKNOWNS:
        return 0.0
    try:
        program = _Program(evaluator, c, model)
    except SizesError:
        return 0.0
    if program.num_unknowns > _MOST_UNKNOWNS or program.schedule.overlapped:
        return 0.0
    return program.least() * (1 - _ROUNDED) + model.profile.around_seconds + (evaluator.norm or 0.0)


class _Program:
    """The linear program of one configuration. Its unknowns in order: T, F, B, x, starts of F and of B."""

    def __init__(self, evaluator: PlanEvaluator, c: Configuration, model: Model) -> None:
        self.c, self.model, self.place, self.num_stages = c, model, evaluator.placement(c), c.num_stages
        self.schedule = evaluator.schedules.schedule(c, microbatches_of(c))
        self.in_flight = evaluator.schedules.in_flight(c, exact=True)
        self.is_flat = evaluator.topology.is_flat
        self.around = model.profile.action_seconds + np.broadcast_to(self.place.on.message_overhead, c.num_stages)
        kinds = Counter(_figures_of_nodes(model))
        figures = np.array(list(kinds))
        self.counts = list(kinds.values())
        # [K, 1] each; and [K, treatments] with the optimizer's state divided or not
        self.forward, self.backward, self.update, self.large, self.weights, self.buffers = figures.T[:6, :, None]
        most = c.data * model.profile.context if c.data > 1 else 1
        numbers = sorted({1 if name == "none" else most for name in model.rules.sharding})
        treated = np.repeat(figures[:, 6:].reshape(len(kinds), -1, 2), len(numbers), axis=1)
        self.kept, self.again = treated[..., 0], treated[..., 1]
        self.shards = np.resize(numbers, self.kept.shape)
        self._x, self._starts = 1 + 2 * self.num_stages, 1 + (2 + self.kept.size) * self.num_stages
        self.num_unknowns = self._starts + 2 * self.num_stages * self.schedule.num_microbatches
        self._rows: list[tuple[Indices, Floats, float]] = []  # unknowns, their coefficients, and what these are at most

    def least(self) -> float:
        """The least T [s]; infinite where nothing fits, 0 where the solver finds none."""
        from scipy.optimize import linprog  # type: ignore[import-untyped]
        from scipy.sparse import csr_array  # type: ignore[import-untyped]

        for make in self._seconds_of_stages, self._order, self._updates, self._memory:
            make()
        every = np.arange(self._x, self._starts).reshape(self.num_stages, *self.kept.shape)
        for own in every:  # a node or more
            self._add((own, -1.0), most=-1.0)
        unequal = len(self._rows)
        for k, number in enumerate(self.counts):
            self._add((every[:, k], 1.0), most=float(number))
        columns, values, limits = zip(*self._rows, strict=True)
        ends = np.cumsum([0, *map(len, columns)])
        rows = csr_array(
            (np.concatenate(values), np.concatenate(columns), ends), shape=(len(limits), self.num_unknowns)
        )
        (upper, most), (equal, numbers) = ((rows[part], limits[part]) for part in (np.s_[:unequal], np.s_[unequal:]))
        step = np.eye(1, self.num_unknowns)[0]
        found = linprog(step, A_ub=upper, b_ub=most, A_eq=equal, b_eq=numbers, method="highs-ipm")
        return float(found.fun) if found.status == 0 else math.inf if found.status == _INFEASIBLE else 0.0

    def _add(self, *terms: tuple[int | Indices, float | Floats], most: float) -> None:
        pairs = [np.broadcast_arrays(np.ravel(unknowns), np.ravel(times)) for unknowns, times in terms]
        columns, values = (np.concatenate(each) for each in zip(*pairs, strict=True))
        self._rows.append((columns, values.astype(np.float64), most))

    def _own(self, stage: int) -> Indices:
        """[K * treatments] its x."""
        begin = self._x + stage * self.kept.size
        return np.arange(begin, begin + self.kept.size)

    def _start(self, stage: int, op: Op, index: int) -> int:
        number = int(op is Op.B) * self.num_stages + stage
        return self._starts + number * self.schedule.num_microbatches + index

    def _seconds_of_stages(self) -> None:
        for s, speed in enumerate(self.place.on.speed):
            forward, backward = self.forward + 0 * self.again, self.backward + self.again
            self._add((self._own(s), forward / speed), (1 + s, -1.0), most=0.0)
            self._add((self._own(s), backward / speed), (1 + self.num_stages + s, -1.0), most=0.0)

    def _order(self) -> None:
        """Rows for actions that follow others on their rank, or take their message."""
        S, M = self.num_stages, self.schedule.num_microbatches
        crossing = self.model.cuts.crossing[1:-1].min(initial=math.inf) if S > 1 else 0.0
        messages = self.place.hop_seconds(crossing, crossing)

        def follows(a: Action, start: int, message: float = 0.0) -> None:
            s, op, index = a
            seconds = 1 + (op is Op.B) * S + s
            own = self._start(s, op, index)
            self._add((seconds, 1.0), (own, 1.0), (start, -1.0), most=-float(self.around[s] + message))

        for program in self.schedule.programs:
            steps = [action for action in program if action.op in (Op.F, Op.B)]
            for a, b in pairwise(steps):
                follows(a, self._start(*b))
        for s, index in product(range(S), range(M)):
            if s + 1 < S:
                follows(Op.F(s, index), self._start(s + 1, Op.F, index), messages[s])
                follows(Op.B(s + 1, index), self._start(s, Op.B, index), messages[s])
            else:
                follows(Op.F(s, index), self._start(s, Op.B, index))

    def _updates(self) -> None:
        """Rows for what follows the last backward of each stage: its sums, those of stages that end later, and all
        gathers of its rank, one after the other, but in flat rings, where several go on at once."""
        profile, on, S = self.model.profile, self.place.on, self.num_stages
        gradients, gathered = profile.gradient_ratio, 0.0 if profile.gathers_ahead else profile.gather_ratio
        is_known, divided = profile.expert == 1, self.shards > 1
        rings, gathers, steps = [], [], []

        def seconds(link: TransferTime, ratio: float, *, as_one: bool = False) -> Floats:
            fixed = 0.0 if as_one or self.is_flat else self.large * link.latency
            return np.asarray(is_known * (fixed + self.weights * link.seconds_a_byte * ratio))

        for ring, exchange, speed in zip(on.rings, on.exchanges, on.speed, strict=True):
            parts = seconds(ring if profile.sums_whole else exchange, gradients, as_one=profile.sums_whole)
            sums = np.where(divided, parts, seconds(ring, gradients))
            rings.append(0 * sums if profile.sums_early else sums)
            gathers.append(divided * seconds(exchange, gathered, as_one=profile.sums_whole or gathered == 0))
            steps.append(self.update / speed / self.shards)
        for program in self.schedule.programs:
            last = {a.stage: a for a in program if a.op is Op.B}
            ends = sorted(last.values(), key=program.index)
            for at, a in enumerate(ends):
                s, own = a.stage, ((self._start(*a), 1.0), (1 + S + a.stage, 1.0), (0, -1.0))
                self._add(*own, (self._own(s), rings[s] + steps[s] + gathers[s]), most=-self.around[s])
                if not self.is_flat:
                    lane = [
                        (self._own(b.stage), rings[b.stage] * (k >= at) + gathers[b.stage]) for k, b in enumerate(ends)
                    ]
                    self._add(*own, *lane, most=-self.around[s])
            self._add(*own, *((self._own(b.stage), steps[b.stage]) for b in ends), most=-self.around[s])

    def _memory(self) -> None:
        context, rules = context_bytes(self.model.profile.device), self.model.rules
        for p, (counted, limit) in enumerate(zip(self.in_flight, self.place.limits, strict=True)):
            stages = [s for s, position in enumerate(self.c.positions) if position == p]
            for moment in counted.counts if limit < math.inf else ():
                microbatches, graded = moment[: 2 * len(stages)].reshape(2, -1)
                held = counted.versions + rules.optimizer_ratio / self.shards
                terms = [
                    (self._own(s), (number * self.kept + (held + has_any) * self.weights + self.buffers) / limit)
                    for s, number, has_any in zip(stages, microbatches, graded, strict=True)
                ]
                self._add(*terms, most=1 - context / limit)


def _figures_of_nodes(model: Model) -> Iterator[tuple[float, ...]]:
    """Figures by node: F, B, update, parameters that travel alone, bytes of weights and of buffers; and bytes kept and
    seconds that run again, under each treatment. What several nodes share is left out."""
    least, shared = least_of_nodes(model), {at for nodes, _ in model.cuts.tied for at in nodes}
    for at, node in enumerate(model.profile.nodes):
        treated = [(node.stash_bytes, 0.0)]
        for name in (each for each in model.rules.recompute if each != "none"):
            treated.append((0.0, node.forward_seconds) if name == "full" else node.treated(name)[:2])
        alone = 0.0 if at in shared else float(model.cuts.large[at])
        sizes = alone, float(least.parameters[at]), node.buffer_bytes
        yield (
            node.forward_seconds,
            node.backward_seconds,
            float(least.update[at]),
            *sizes,
            *chain.from_iterable(treated),
        )
