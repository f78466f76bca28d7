"""A lower bound of a step with any cuts of one configuration: its schedule as a linear program.

Unknown are the nodes, or parts of nodes, of each kind k in stage s under each treatment t of their memory, x[s, k, t];
the seconds F and B of each stage; the start of each action; and the step T, which is to be the least:

    F[s], B[s] = sums of x[s, ., .] times the seconds of a node, and of what runs again
    start(a) + seconds(a) <= start(b)              b is next on the rank of a
    start(a) + seconds(a) + message <= start(b)    b takes the message of a
    start(a) + seconds(a) + sum + message <= start(b)    b takes the first message after the sum of gradients that a
                                                         completes, which is on the links of the same rank
    end of the last B of s + its sums and update <= T
    bytes of each rank, at each moment at which it may hold most, <= its memory
    x adds up to the nodes of each kind, and to a node or more in each stage

All of it is linear, since the order of the actions is given. What is not (which nodes follow each other, messages that
queue otherwise) is left out or has its least value, so that all cuts with all treatments that fit are among the
solutions.
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

_MOST_UNKNOWNS = 9_000  # of a program of the whole schedule
_MOST_ACTIONS = 60_000  # of schedules that are looked at
_INFEASIBLE = 2  # of scipy
_WHOLE = 1e-4  # of a node: as far as a solver's answer may be off
_ROUNDED = 1e-6  # relative: likewise, of seconds


def unknowns_of_any_cuts(c: Configuration) -> int:
    """Actions of its program: a measure of its size."""
    return 2 * c.num_stages * microbatches_of(c)


def least_of_any_cuts(evaluator: PlanEvaluator, c: Configuration, most: float = math.inf) -> float:
    """Seconds that no cuts of it fall below, or `most` where that is less [s]; infinite where none fit. 0 where
    nothing is known: streams, halves of backwards, slices, unequal stages, what waits on the host, long schedules."""
    model, num_actions = evaluator.model(c), unknowns_of_any_cuts(c)
    is_plain = c.is_equal and c.own is None and c.sizes is None and not c.lengths and not model.rules.offloads
    if not is_plain or c.family.rule.is_asynchronous or c.family.splits_backward or num_actions > _MOST_ACTIONS:
        return 0.0
    outside = model.profile.around_seconds + (evaluator.norm or 0.0)
    try:
        program = _Program(evaluator, c, model)
        if program.schedule.overlapped:
            return 0.0
        found = program.least((most - outside) * (1 + _ROUNDED))
    except SizesError:
        return 0.0
    return min(most, found * (1 - _ROUNDED) + outside)


class _Program:
    """The linear program of one configuration. Its unknowns in order: T, F, B, x, starts of F and of B."""

    def __init__(self, evaluator: PlanEvaluator, c: Configuration, model: Model) -> None:
        self.c, self.model, self.place, self.num_stages = c, model, evaluator.placement(c), c.num_stages
        self.schedule = evaluator.schedules.schedule(c, microbatches_of(c))
        self.in_flight = evaluator.schedules.in_flight(c, exact=True)
        self.is_flat = evaluator.topology.is_flat
        crossing = model.cuts.crossing[1:-1].min(initial=math.inf) if c.num_stages > 1 else 0.0
        self.messages, self.nodes = self.place.hop_seconds(crossing, crossing), least_of_nodes(model)
        self.around = model.profile.action_seconds + np.broadcast_to(self.place.on.message_overhead, c.num_stages)
        # Bytes of a rank besides: workspace of one of its nodes, of which it has V or more.
        self.beside = sorted(node.workspace_bytes for node in model.profile.nodes)[c.num_chunks - 1] + crossing
        every = [*_figures_of_nodes(model)]
        kinds = Counter(every)
        figures, self.kind_of_node = np.array(list(kinds)), np.array([[*kinds].index(each) for each in every])
        self.counts = list(kinds.values())
        # [K, 1] each; and [K, treatments] with the optimizer's state divided or not
        self.forward, self.backward, self.update, self.large, self.weights, self.buffers = figures.T[:6, :, None]
        most = c.data * model.profile.context if c.data > 1 else 1
        numbers = sorted({1 if name == "none" else most for name in model.rules.sharding})
        treated = np.repeat(figures[:, 6:].reshape(len(kinds), -1, 2), len(numbers), axis=1)
        self.kept, self.again = treated[..., 0], treated[..., 1]
        self.shards = np.resize(numbers, self.kept.shape)
        self._forward, self._x = 1, 1 + 2 * self.num_stages
        self._starts: int = self._x + self.kept.size * self.num_stages
        self.num_unknowns = self._starts + 2 * self.num_stages * self.schedule.num_microbatches
        self._stages = [[s for s, position in enumerate(c.positions) if position == p] for p in range(c.pipeline)]
        self.every = np.arange(self._x, self._starts).reshape(self.num_stages, *self.kept.shape)
        self._rows: list[tuple[Indices, Floats, float]] = []  # unknowns, their coefficients, and what these are at most

    def least(self, most: float) -> float:
        """The least T; infinite where nothing fits in `most` or less [s]."""
        for make in self._seconds_of_stages, self._memory, self._updates, self._actions_of_ranks:
            make()
        if most < math.inf and not self._is_whole(most):
            return math.inf
        if self.num_unknowns > _MOST_UNKNOWNS:
            return 0.0
        self._order()
        x = self._solution(np.zeros(1, np.intp), is_all=True)
        return math.inf if x is None else float(x[0])

    def _is_whole(self, most: float) -> bool:
        """Rows for the nodes of the most frequent kind that each rank has time for; False where these are too few."""
        k = int(np.argmax(self.counts))
        number, limit, first = float(self.counts[k]), len(self._rows), self.c.positions[0]
        ranks = [self.every[own, k] for own in self._stages]
        fullest = np.full(len(ranks), number)
        self._add((0, 1.0), most=most)
        for own in ranks:
            self._add((own, 1.0), most=number)
        others = [p for p in range(len(ranks)) if p != first]
        for group in filter(None, (others, [first], others)):  # those after the first wait for its updates, too
            x = self._solution(*(ranks[p] for p in group), aim=-1.0)
            if x is None:
                return False
            for p in group:
                fullest[p] = math.floor(float(x[ranks[p]].sum()) + _WHOLE)
                self._add((ranks[p], 1.0), most=fullest[p])
            self._add((ranks[first], -1.0), most=fullest.sum() - fullest[first] - number)
        del self._rows[limit]  # solvers are slow to see that nothing fits
        return bool(fullest.sum() >= number)

    def _actions_of_ranks(self) -> None:
        """Rows of each rank alone: its actions follow each other, once a microbatch is there, which must go back."""
        M, S = self.schedule.num_microbatches, self.num_stages
        for own, program in zip(self._stages, self.schedule.programs, strict=True):
            first, *_, last = (action for action in program if action.op in (Op.F, Op.B))
            seconds = [(self._forward + s + each, float(M)) for s in own for each in (0, S)]
            inside = 2 * M * float(sum(self.around[s] for s in own))
            there, back = self._ahead(first.stage)[0], self._ahead(min(first.stage, last.stage))[1]
            for end, ahead in (last, there), (Op.B(0, last.index), back):
                own_end = (self._forward + S + end.stage, -1.0), (self._start(*end), -1.0)
                self._add(*seconds, *own_end, most=float(self.around[end.stage]) - ahead - inside)

    def _ahead(self, stage: int) -> tuple[float, float]:
        """Seconds of F, and of F and B, of a microbatch in the stages before one, at least [s]."""
        least, fixed = self.nodes, float((self.around[:stage] + self.messages[:stage]).sum())
        at, speed = np.searchsorted(least.sizes, stage), max(self.place.on.speed)
        return float(least.forward[at]) / speed + fixed, float(least.both[at]) / speed + 2 * fixed

    def _solution(self, *aims: Indices, aim: float = 1.0, is_all: bool = False) -> Floats | None:
        """[unknowns] with the least sum of `aim` times these; None where nothing fits; SizesError if the solver
        fails. `is_all`: whether stages have all nodes together."""
        from scipy.optimize import linprog  # type: ignore[import-untyped]
        from scipy.sparse import csr_array  # type: ignore[import-untyped]

        each = [(self.every[:, k].ravel(), np.ones(self.every[:, k].size), n) for k, n in enumerate(self.counts)]
        columns, values, limits = zip(*self._rows, *each * is_all, strict=True)
        ends, shape = np.cumsum([0, *map(len, columns)]), (len(limits), self.num_unknowns)
        # In seconds of a microbatch: with large numbers HiGHS says of programs that fit that nothing does.
        scale = np.full(self.num_unknowns, self.model.seconds or 1.0)
        scale[self._x : self._starts] = 1.0
        rows = csr_array((np.concatenate(values), np.concatenate(columns), ends), shape=shape) * scale
        sizes = abs(rows).max(axis=1).toarray().ravel()
        rows, limits = rows / sizes[:, None], limits / sizes
        (upper, most), (same, numbers) = (
            (rows[part], limits[part]) for part in (np.s_[: len(self._rows)], np.s_[len(self._rows) :])
        )
        goal = np.zeros(self.num_unknowns)
        goal[np.concatenate(aims, axis=None)] = aim
        method = "highs-ipm" if is_all else "highs-ds"  # the faster one
        found = linprog(goal, A_ub=upper, b_ub=most, A_eq=same, b_eq=numbers, method=method)
        if found.status not in (0, _INFEASIBLE):
            raise SizesError(found.message)
        return np.asarray(found.x) * scale if found.status == 0 else None

    def _add(self, *terms: tuple[int | Indices, float | Floats], most: float) -> None:
        pairs = [np.broadcast_arrays(np.ravel(unknowns), np.ravel(times)) for unknowns, times in terms]
        columns, values = (np.concatenate(each) for each in zip(*pairs, strict=True))
        self._rows.append((columns, values.astype(np.float64), most))

    def _start(self, stage: int, op: Op, index: int) -> int:
        number = int(op is Op.B) * self.num_stages + stage
        return self._starts + number * self.schedule.num_microbatches + index

    def _seconds_of_stages(self) -> None:
        for s, speed in enumerate(self.place.on.speed):
            forward, backward = self.forward + 0 * self.again, self.backward + self.again
            self._add((self.every[s], forward / speed), (self._forward + s, -1.0), most=0.0)
            self._add((self.every[s], backward / speed), (self._forward + self.num_stages + s, -1.0), most=0.0)
            self._add((self.every[s], -1.0), most=-1.0)  # a node or more
        members = self.model.cuts.members
        for s, ends in (0, members[1:].all(axis=0)), (-1, ~members[:-1].any(axis=0)):
            for k, number in Counter(self.kind_of_node[ends].tolist()).items():
                self._add((self.every[s, k], -1.0), most=-float(number))

    def _order(self) -> None:
        """Rows for actions that follow others on their rank, or take their message."""
        S, M, messages, positions = self.num_stages, self.schedule.num_microbatches, self.messages, self.c.positions

        def follows(a: Action, start: int, message: float = 0.0, *sums: tuple[Indices, Floats]) -> None:
            s, op, index = a
            seconds = self._forward + (op is Op.B) * S + s
            own = self._start(s, op, index)
            self._add((seconds, 1.0), (own, 1.0), (start, -1.0), *sums, most=-float(self.around[s] + message))

        # Several tied sums may be in orders of their own, in which others begin later.
        queues = not (self.is_flat or self.place.cards) and len(self.model.cuts.tied) < 2
        for program in self.schedule.programs:
            steps = [action for action in program if action.op in (Op.F, Op.B)]
            last = {a.stage: a for a in steps if a.op is Op.B}
            for a, b in pairwise(steps):
                follows(a, self._start(*b))
                to = b.stage + (1 if b.op is Op.F else -1)
                leaves = queues and 0 <= to < S and positions[b.stage] != positions[to]
                if leaves and a == last[a.stage]:  # the next message of the rank waits for the sum of a
                    message = messages[min(b.stage, to)]
                    follows(a, self._start(to, b.op, b.index), message, (self.every[a.stage], self._sums[a.stage]))
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
        self._sums = rings
        for program in self.schedule.programs:
            last = {a.stage: a for a in program if a.op is Op.B}
            ends = sorted(last.values(), key=program.index)
            for at, a in enumerate(ends):
                s, own = a.stage, ((self._start(*a), 1.0), (self._forward + S + a.stage, 1.0), (0, -1.0))
                self._add(*own, (self.every[s], rings[s] + steps[s] + gathers[s]), most=-self.around[s])
                if not self.is_flat:
                    lane = [
                        (self.every[b.stage], rings[b.stage] * (k >= at) + gathers[b.stage]) for k, b in enumerate(ends)
                    ]
                    self._add(*own, *lane, most=-self.around[s])
            self._add(*own, *((self.every[b.stage], steps[b.stage]) for b in ends), most=-self.around[s])

    def _memory(self) -> None:
        beside, rules = self.beside + context_bytes(self.model.profile.device), self.model.rules
        for counted, limit, stages in zip(self.in_flight, self.place.limits, self._stages, strict=True):
            held = counted.versions + rules.optimizer_ratio / self.shards
            for moment in counted.counts if limit < math.inf else ():
                microbatches, graded = moment[: 2 * len(stages)].reshape(2, -1)
                terms = [
                    (self.every[s], (number * self.kept + (held + has_any) * self.weights + self.buffers) / limit)
                    for s, number, has_any in zip(stages, microbatches, graded, strict=True)
                ]
                self._add(*terms, most=1 - beside / limit)


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
