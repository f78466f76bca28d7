"""Treatments of a rank's memory: what its stages recompute, and whether its optimizer's state is divided.

`memory` counts a rank's bytes; here they are compared under each treatment, and those that fit and are not beaten are
kept. Stages are added one after the other, under each treatment of its own front:

    stage front   treatments of a stage, none beaten in seconds, bytes kept and bytes made again at once
    partial_v     = partial_v-1 x front of stage v, with bytes at each moment t at which the rank may be fullest:
                  bytes_v[t] = bytes_v-1[t] + in_flight[t, v] kept + remade[t, v] made again
    rank front    of all that fit at every t, those that no other beats in the seconds of each stage, the least seconds
                  first, for each division of the optimizer's state; at most MOST_TREATMENTS

Exact up to _MOST_PARTIAL treatments of the stages so far. Of more, only those continue that are on the front of seconds
and bytes at the fullest moment, if the later stages keep all that they can, or if they keep as little as they can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from ..schedules.messages import BUCKET_BYTES, receives_ahead
from .memory import GRADIENTS_SENT, InFlightCounts, RankMemory, RankPlace, stream_copies, total_bytes, weight_copies
from .stage_cost import COUNTED, OFFLOAD, Recomputed, StageSeconds, StageSums
from .topology import Floats, Indices

MOST_TREATMENTS = 16  # treatments of a rank that are kept
_MOST_PARTIAL = 512  # of the stages so far, up to which all go on


# [O] names of ways to treat one stage, the least seconds first: `stage_cost`'s table without what is beaten.
StageFront = tuple[tuple[str, ...], Recomputed]


def stage_front(sums: StageSums, stage: int, names: Sequence[str]) -> StageFront:
    """Rows of the table for one stage; where "none" is allowed, counts between it and others as well."""
    labels, rows = list(names), np.array([[column[stage] for column in sums.under(name)] for name in names])
    for kind in (each for each in COUNTED if each in names and "none" in names):
        counts = np.column_stack(sums.counts(stage, kind))[1:-1]
        labels += [f"{kind}:{number + 1}" for number in range(len(counts))]
        rows = np.append(rows, counts, 0)
    order = np.lexsort((rows[:, 0] + rows[:, 1], rows[:, 2]))
    kept, again, seconds = rows[order].T
    beaten = (kept[:, None] >= kept) & (again[:, None] >= again) & np.tri(len(rows), k=-1, dtype=bool)
    left = np.flatnonzero(~beaten.any(axis=1))
    return tuple(labels[order[at]] for at in left), Recomputed(kept[left], again[left], seconds[left])


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRules:
    """Choices that are allowed, of RECOMPUTE, of dividing the optimizer's state and whether activations may wait on the
    host, and its bytes a byte of parameters."""

    optimizer_ratio: float
    recompute: tuple[str, ...] = ("none",)
    sharding: tuple[str, ...] = ("none",)
    offloads: bool = False

    def least_copies(self, replicas: float) -> float:
        """Times that the fullest of so many replicas holds a stage's weights, at least; where the optimizer's state is
        divided, each has the parts of others for a moment, of gradients and of weights."""
        ratio = self.optimizer_ratio
        states = {"none": ratio, "full": 1 + (ratio - 1) / replicas}
        return float(weight_copies(1, min(states[name] for name in self.sharding)))

    def front(self, sums: StageSums, in_flight: InFlightCounts, place: RankPlace) -> tuple[RankMemory, ...]:
        """Treatments that fit the device, the least seconds first; or the one with the least excess."""
        rank, plain = _TreatedRank(sums, in_flight, place, self), list[RankMemory]()
        if "none" in self.recompute:  # most ranks need no more
            plain = [rank.memory(("none",) * rank.num_chunks, shards) for shards in (rank.shards[0], rank.shards[-1])]
            plain = [memory for memory in plain[: len(rank.shards)] if not memory.too_many]
        if len(plain) == min(len(rank.shards), 2):
            return tuple(plain)
        options = rank.options(self.recompute)
        every = [treated for shards in rank.shards for treated in rank.treatments(options, shards)]
        least = min(every)[0]
        front = sorted((each for each in every if each[0] == least), key=lambda each: (each[1], sum(each[3]), each[2]))
        most = MOST_TREATMENTS if least == 0 else 1
        return tuple(rank.memory(recompute, shards) for *_, shards, recompute in front[:most])

    def offloaded(self, sums: StageSums, in_flight: InFlightCounts, place: RankPlace, number: int) -> list[RankMemory]:
        """Treatments where activations of its first stages wait on the host, and all else is kept. `in_flight`: with
        those moves. `number`: of these stages."""
        rank = _TreatedRank(sums, in_flight, place, self)
        names = (OFFLOAD,) * number + ("none",) * (rank.num_chunks - number)
        return [rank.memory(names, shards) for shards in rank.shards]

    def given(
        self,
        sums: StageSums,
        in_flight: InFlightCounts,
        place: RankPlace,
        recompute: Sequence[str],
        shards: Sequence[int],
    ) -> RankMemory:
        """One treatment, whether it fits or not."""
        return _TreatedRank(sums, in_flight, place, self).memory(recompute, tuple(shards))

    def least_seconds_again(self, sums: StageSums, in_flight: InFlightCounts, place: RankPlace) -> float:
        """Seconds per microbatch that all that fits must run again, at least [s]; 0 where all may be kept."""
        if set(self.recompute) == {"none"}:
            return 0.0
        rank = _TreatedRank(sums, in_flight, place, self)
        return min(rank.least_seconds_again(shards, self.recompute) for shards in rank.shards)


# Bytes too many, seconds that run again, bytes at the fullest; how the optimizer is divided, what is recomputed.
_Chosen = tuple[float, float, float, tuple[int, ...], tuple[str, ...]]


class StateDivision(NamedTuple):
    """Bytes under one division of the optimizer's state, before it is known what is recomputed."""

    optimizer: Floats  # [V] of its state
    summing: Floats  # [V] besides the gradients while they are summed
    moments: Floats  # gradients, sums and messages at each moment
    fixed: float  # always there, gradients apart
    after_batch: float  # gradients and their sums after the batch


class _TreatedRank:
    """Bytes that one rank holds, by what is recomputed and how the optimizer's state is divided."""

    def __init__(self, sums: StageSums, in_flight: InFlightCounts, place: RankPlace, rules: MemoryRules) -> None:
        self.sums, self.counted, self.place, self.optimizer_ratio = sums, in_flight, place, rules.optimizer_ratio
        self.own = list(place.stages)
        self.before, self.after, self.weights = sums.before[self.own], sums.after[self.own], sums.weights[self.own]
        self.buffers, self.workspace = sums.buffers[self.own], sums.workspace[self.own] + self.before + self.after
        self.num_chunks = V = len(self.weights)
        self.in_flight, self.states, self.remade = np.split(in_flight.counts, [V, 3 * V], axis=1)
        self.most = in_flight.microbatches.max(axis=0)
        self._rows: dict[str, tuple[Floats, Floats]] = {}
        self._divisions: dict[tuple[int, ...], StateDivision] = {}
        self.shards = self._shards(rules.sharding)

    def row(self, name: str) -> tuple[Floats, Floats]:
        """[V] bytes kept of a microbatch, [V] made again."""
        if name not in self._rows:
            row = self.sums.under(name)
            self._rows[name] = row.kept[self.own], row.again[self.own]
        return self._rows[name]

    def division(self, shards: tuple[int, ...]) -> StateDivision:
        if shards not in self._divisions:
            holders = self.sums.holders(shards, self.own)
            optimizer, summing = self.weights * self.optimizer_ratio / holders, self._summing(holders)
            kept = self.weights * self.counted.versions + optimizer + self.buffers
            self._divisions[shards] = StateDivision(
                optimizer=optimizer,
                summing=summing,
                moments=self.states @ np.concatenate([self.weights, summing]) + self.messages,
                fixed=float(kept.sum()),
                after_batch=float(self.weights.sum()) + float(summing.sum()),
            )
        return self._divisions[shards]

    def at_moments(self, recompute: Sequence[str], shards: tuple[int, ...]) -> tuple[Floats, Floats, Floats]:
        """[moments] bytes that come and go, without workspace; [V] bytes kept of a microbatch, and made again."""
        rows = [self.row(name) for name in recompute]
        kept, again = (np.array([row[what][v] for v, row in enumerate(rows)]) for what in (0, 1))
        return self.in_flight @ kept + self.remade @ again + self.division(shards).moments, kept, again

    def memory(self, recompute: Sequence[str], shards: tuple[int, ...]) -> RankMemory:
        division, (moments, kept, again) = self.division(shards), self.at_moments(recompute, shards)
        fullest = int(moments.argmax())
        microbatches, graded, summed, remade = self.counted.counts[fullest].reshape(4, self.num_chunks)
        gradients, activations = graded * self.weights, microbatches * kept + remade * again
        workspace, sent = self.workspace, float(self.messages[fullest] + (summed * division.summing).sum())
        after_batch = float((self.weights + division.summing).sum())
        if float((gradients + activations).sum() + workspace.max()) + sent <= after_batch:
            # After the batch all gradients are there, with their sums, and nothing else that comes and goes.
            gradients, activations, workspace = self.weights, np.zeros_like(kept), np.zeros_like(kept)
            sent = float(division.summing.sum())
        versions = self.weights * self.counted.versions
        held = np.array([versions, gradients, division.optimizer, self.buffers, activations, workspace])
        return RankMemory(
            recompute=tuple(recompute),
            shards=shards,
            bytes_held=held,
            messages=sent,
            in_flight=tuple(np.ceil(self.most - 1e-6).astype(int).tolist()),
            limit=self.place.limit,
            too_many=self.excess(total_bytes(held) + sent),
        )

    def excess(self, total: float) -> float:
        """Bytes beyond the device's; rounding is none."""
        excess = total + self.place.context_bytes - self.place.limit
        return 0.0 if excess <= self.place.limit * 1e-12 else excess

    @cached_property
    def messages(self) -> Floats:
        """[moments] bytes received ahead and sent; stages on the same rank send each other nothing."""
        comes, goes = ([stage + step not in self.own for stage in self.own] for step in (-1, 1))
        before, after = np.where(comes, self.before, 0.0), np.where(goes, self.after, 0.0)
        into, out, most = float(before.max()), float(after.max()), float(self.most.sum())
        n, largest = float(self.place.num_messages), max(self.sums.before.max(), self.sums.after.max())
        ahead = receives_ahead(largest if n < math.inf else math.inf)
        # Under a flush a microbatch is posted, or sent on, or its gradient returned. A stream posts for the next batch.
        total = math.inf if self.place.streams else n
        posted = min(ahead, n) if into >= out else max(0.0, min(ahead, n, total - most))
        sent = float((after * self.most).sum()) if total - posted >= most else out * (total - posted)
        sent += out * min(ahead, n + self.place.streams)
        found = np.full(len(self.in_flight), into * min(posted + GRADIENTS_SENT, total) + sent)
        if self.num_chunks > 1 and ahead >= n == total and self.place.is_whole:
            # All are posted. A microbatch is to come, waits with its output, or has its gradient on its way. One in
            # flight subtracts at most what it keeps, a gradient of weights at most itself: more are never fewer bytes.
            came = self.in_flight @ np.minimum(before, self.row("none")[0])
            returned = self.states[:, : self.num_chunks] @ np.minimum(after, self.weights)
            found = n / self.num_chunks * (before + after).sum() + self.in_flight @ after - came - returned
        return found / self.place.tensor

    @cached_property
    def largest_workspace(self) -> float:
        return float(self.workspace.max())

    def _summing(self, divided: Floats) -> Floats:
        """[V] bytes besides the gradients while they are summed: parts of other ranks, and one bucket in all."""
        if self.place.replicas * self.sums.rounds.context == 1:
            return np.zeros_like(self.weights)
        if self.place.streams:
            return stream_copies(self.weights, divided)
        largest = float(np.where(divided > 1, self.sums.largest[self.own], 0.0).max())
        bucket = max(largest, min(float(self.sums.small[self.own].sum()), BUCKET_BYTES))
        return np.asarray(self.weights * (1 - 1 / divided + bucket / (float(self.weights.sum()) or 1.0)))

    def _shards(self, sharding: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Ways to divide the optimizer's state, the whole one first: of each stage, or of many stages alike."""
        numbers = dict.fromkeys(1 if name == "none" else self.place.replicas for name in sharding)
        if self.num_chunks <= 2:
            return tuple(product(numbers, repeat=self.num_chunks))
        return tuple((number,) * self.num_chunks for number in numbers)

    def options(self, names: Sequence[str]) -> list[StageFront]:
        return [stage_front(self.sums, stage, names) for stage in self.own]

    def treatments(self, options: Sequence[StageFront], shards: tuple[int, ...]) -> list[_Chosen]:
        """Treatments that fit with the optimizer divided into these shards; if none does, that of the least excess."""
        division = self.division(shards)
        loads = [
            np.outer(each.kept, self.in_flight[:, v]) + np.outer(each.again, self.remade[:, v])
            for v, (_, each) in enumerate(options)
        ]
        beside = division.fixed + self.largest_workspace + self.place.context_bytes
        room = self.place.limit * (1 + 1e-12) - beside - division.moments
        bytes_of, seconds, picks = division.moments * 0.0, np.zeros((1, 0)), np.zeros((1, 0), dtype=np.intp)
        for v, ((names, each), load) in enumerate(zip(options, loads, strict=True)):
            bytes_of = (bytes_of[..., None, :] + load).reshape(-1, len(room))
            before, own = np.divmod(np.arange(len(bytes_of)), len(names))
            seconds = np.column_stack([seconds[before], each.seconds[own]])
            picks = np.column_stack([picks[before], own])
            if len(picks) > _MOST_PARTIAL:
                rest = [sum(each.min(axis=0) for each in loads[v + 1 :]), sum(each[0] for each in loads[v + 1 :])]
                fullest, total = [(bytes_of + each - room).max(axis=1) for each in rest], seconds.sum(axis=1)
                fullest[0] = np.maximum(fullest[0], 0.0)  # may fit, and then the earliest run again
                left = np.unique(np.concatenate([_on_front(total, each) for each in fullest]))
                bytes_of, seconds, picks = bytes_of[left], seconds[left], picks[left]
        totals = np.maximum(bytes_of + division.moments + self.largest_workspace, division.after_batch)
        fullest = division.fixed + totals.max(axis=1)
        excess = np.array([self.excess(total) for total in fullest.tolist()])
        total = np.array([float(f"{each:.12e}") for each in seconds.sum(axis=1).tolist()])
        earliest = [-seconds[:, v] for v in reversed(range(len(options)))]
        left, found = np.lexsort((*earliest, total, excess)), list[_Chosen]()
        while len(left) and len(found) < MOST_TREATMENTS and (not found or excess[left[0]] == 0):
            at = left[0]
            names = tuple(options[v][0][pick] for v, pick in enumerate(picks[at].tolist()))
            found.append((float(excess[at]), float(total[at]), float(fullest[at]), shards, names))
            left = left[(seconds[left] < seconds[at]).any(axis=1)]
        return found

    def least_seconds_again(self, shards: tuple[int, ...], names: Sequence[str]) -> float:
        """Seconds that free enough bytes at the moment that would hold most, if stages could be treated in parts. What
        a backward makes again is left out, thus never more than a treatment takes that fits."""
        division, (stash, _) = self.division(shards), self.row("none")
        bytes_at = self.in_flight @ stash + division.moments
        most, in_flight = max(zip(bytes_at.tolist(), self.in_flight.tolist(), strict=True))
        excess = self.excess(division.fixed + most + self.largest_workspace)
        steps: list[tuple[float, float]] = []  # seconds a byte and bytes, by stage each cheaper than the next
        if not excess:
            return 0.0
        for v, (number, (_, front)) in enumerate(zip(in_flight, self.options(names), strict=True)):
            freed = number * (float(stash[v]) - front.kept)
            steps += _descents(list(zip(freed.tolist(), front.seconds.tolist(), strict=True)))
        seconds = 0.0
        for rate, freed in sorted(steps):
            seconds += rate * min(freed, excess)
            excess -= min(freed, excess)
        return seconds


def _descents(options: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Rates [s/byte] and bytes of the steps from nothing freed to most, on the lower hull of (bytes freed, seconds).

    >>> _descents([(4.0, 1.0), (6.0, 3.0), (5.0, 3.0)])
    [(0.25, 4.0), (1.0, 2.0)]
    """
    steps: list[tuple[float, float]] = []
    at, spent = 0.0, 0.0
    while True:
        left = [((seconds - spent) / (freed - at), freed, seconds) for freed, seconds in options if freed > at]
        if not left:
            return steps
        rate, freed, seconds = min(left, key=lambda each: (each[0], -each[1]))
        steps.append((max(rate, 0.0), freed - at))
        at, spent = freed, seconds


def _on_front(seconds: Floats, excess: Floats) -> Indices:
    """Where no other has as few seconds and as little excess."""
    order = len(seconds) - 1 - np.lexsort((excess[::-1], np.round(seconds[::-1], 12)))
    least = np.minimum.accumulate(excess[order])
    return np.asarray(order[np.concatenate([[True], excess[order][1:] < least[:-1]])])


def with_offloads(
    fronts: Sequence[Sequence[RankMemory]], offloaded: Sequence[Sequence[RankMemory]]
) -> list[tuple[Sequence[RankMemory], ...]]:
    """[choices][P] of each rank its front, or one treatment under which activations wait on the host: all choices, or,
    of more than MOST_TREATMENTS, those in which the first ranks, which hold most, do so alike."""
    options = [
        [*[own] * (not own[0].too_many), *([each] for each in others)]
        for own, others in zip(fronts, offloaded, strict=True)
    ]
    if math.prod(map(len, options)) <= MOST_TREATMENTS:
        return list(product(*options))
    found = dict[tuple[int, ...], tuple[Sequence[RankMemory], ...]]()
    for last, first_ranks in product(range(1, max(map(len, options))), range(len(options) + 1)):
        picks = [min(last, len(own) - 1) * (p < first_ranks) for p, own in enumerate(options)]
        found[tuple(picks)] = tuple(own[pick] for own, pick in zip(options, picks, strict=True))
    return list(found.values())


def one_of_each_rank(
    positions: Sequence[int],
    fronts: Sequence[Sequence[RankMemory]],
    seconds_of: Callable[[Sequence[RankMemory]], StageSeconds],
) -> list[tuple[RankMemory, ...]]:
    """[choices][P] treatments of the ranks, whose stages have these places: all, or, of more than MOST_TREATMENTS, the
    least seconds of each rank under each limit of the seconds of an update."""
    longest, places = max(map(len, fronts)), np.array(positions)
    if longest == 1:
        return [tuple(front[0] for front in fronts)]
    alike = [seconds_of([front[min(at, len(front) - 1)] for front in fronts]) for at in range(longest)]
    left: list[list[tuple[float, RankMemory]]] = []  # of each rank, its update and the treatment
    for p, front in enumerate(fronts):
        figures = [np.array([s.backward, s.collectives + s.step, s.gather + s.step])[:, places == p] for s in alike]
        mine: list[int] = []
        for at in sorted(range(len(front)), key=lambda at: float(figures[at].sum())):
            if not any((figures[other] <= figures[at]).all() for other in mine):
                mine.append(at)
        left.append([(float(figures[at][1].sum()), front[at]) for at in sorted(mine)])
    if math.prod(map(len, left)) <= MOST_TREATMENTS:
        return [tuple(memory for _, memory in chosen) for chosen in product(*left)]
    least = max(min(update for update, _ in mine) for mine in left)
    found: dict[tuple[int, ...], tuple[RankMemory, ...]] = {}
    for limit in sorted({update for mine in left for update, _ in mine if update >= least}):
        picks = [next(at for at, (update, _) in enumerate(mine) if update <= limit) for mine in left]
        found[tuple(picks)] = tuple(mine[at][1] for mine, at in zip(left, picks, strict=True))
    return list(found.values())
