"""Memory of a rank under all that may be done about it: what its stages recompute, whether its optimizer is divided.

`memory` counts what a rank holds; here it is weighed under treatments, and of those that fit the one with the least
seconds is taken. Choices of V stages are tried in turn. Where there are few, all: those with the least seconds first.
Else

    greedy     each stage its option of least seconds; then always the change that frees most bytes for a second
    alike      all stages the same option, the one with the least seconds first

and, of the first choice that fits, `cheaper` names changes back. Bytes are what the stages keep at the rank's fullest,
and the most that one of them makes again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from ..schedules.messages import BUCKET_BYTES, RECEIVES_AHEAD
from .memory import GRADIENTS_SENT, Moments, RankMemory, RankPlace, streaming, total_of
from .stage_cost import StageSums, num_buckets
from .topology import Floats

EVERY = 16  # choices up to which all are tried


class Option(NamedTuple):
    """One row of the table of recomputation (`stage_cost`) for one stage: bytes at the rank's fullest, seconds."""

    name: str
    seconds: float
    kept: float
    again: float


Choice = tuple[Option, ...]  # [V]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRules:
    """Choices that are allowed, of RECOMPUTE and of dividing the optimizer's state, and its bytes a byte of
    parameters."""

    optimizer_ratio: float
    recompute: tuple[str, ...] = ("none",)
    sharding: tuple[str, ...] = ("none",)

    def fit(self, sums: StageSums, moments: Moments, place: RankPlace) -> RankMemory:
        """The treatment with the least seconds that fits the device, or with the least excess."""
        rank = _TreatedRank(sums, moments, place, self)
        if "none" in self.recompute:  # most ranks need no more
            plain = ("none",) * rank.num_chunks
            if len(self.recompute) == 1 or rank.least_excess(plain) == 0:
                return rank.treated(plain)
        options = rank.options(self.recompute)
        best, least = tuple(each[0] for each in options), math.inf
        for choice in in_turn(options):
            excess = rank.least_excess([option.name for option in choice])
            if excess < least:
                best, least = choice, excess
            if excess == 0:
                best = rank.relaxed(choice, options)
                break
        return rank.treated([option.name for option in best])

    def least_seconds_again(self, sums: StageSums, moments: Moments, place: RankPlace) -> float:
        """Seconds a microbatch that whatever fits must run again, at least [s]; 0 where all may be kept."""
        rank = _TreatedRank(sums, moments, place, self)
        if set(self.recompute) == {"none"} or rank.least_excess(("none",) * rank.num_chunks) == 0:
            return 0.0
        return rank.least_seconds_again(self.recompute)


class StateDivision(NamedTuple):
    """Bytes under one division of the optimizer's state, before it is known what is recomputed.

    optimizer, summing: [V] its state; bytes beside the gradients while they are summed. moments: gradients and sums at
    each moment. fixed: there whatever runs, gradients apart. behind: gradients and their sums behind the batch.
    """

    optimizer: Floats
    summing: Floats
    moments: Floats
    fixed: float
    behind: float


class _TreatedRank:
    """Bytes that one rank holds, by what is recomputed and how the optimizer's state is divided."""

    def __init__(self, sums: StageSums, moments: Moments, place: RankPlace, rules: MemoryRules) -> None:
        self.sums, self.moments, self.place, self.optimizer_ratio = sums, moments, place, rules.optimizer_ratio
        self.own = list(place.stages)
        self.before, self.behind, self.weights = sums.before[self.own], sums.behind[self.own], sums.weights[self.own]
        self.buffers, self.workspace = sums.buffers[self.own], sums.workspace[self.own] + self.before + self.behind
        self.num_chunks = V = len(self.weights)
        self.held, self.states, self.anew = np.split(moments.counts, [V, 3 * V], axis=1)
        self.most = moments.held.max(axis=0)
        self._rows: dict[str, tuple[Floats, Floats]] = {}
        self._divisions: dict[tuple[int, ...], StateDivision] = {}
        self.shards = self._shards(sums.update[self.own], rules.sharding)

    def row(self, name: str) -> tuple[Floats, Floats]:
        """[V] bytes kept of a microbatch, [V] made again."""
        if name not in self._rows:
            row = self.sums.under(name)
            self._rows[name] = row.kept[self.own], row.again[self.own]
        return self._rows[name]

    def division(self, shards: tuple[int, ...]) -> StateDivision:
        if shards not in self._divisions:
            optimizer, summing = self.weights * self.optimizer_ratio / np.array(shards), self._summing(shards)
            kept = self.weights * self.moments.versions + optimizer + self.buffers
            self._divisions[shards] = StateDivision(
                optimizer=optimizer,
                summing=summing,
                moments=self.states @ np.concatenate([self.weights, summing]),
                fixed=float(kept.sum()),
                behind=float(self.weights.sum()) + float(summing.sum()),
            )
        return self._divisions[shards]

    def at_moments(self, recompute: Sequence[str], shards: tuple[int, ...]) -> tuple[Floats, Floats, Floats]:
        """[moments] bytes of activations, gradients and sums; [V] bytes kept of a microbatch, and made again."""
        rows = [self.row(name) for name in recompute]
        kept, again = (np.array([row[what][v] for v, row in enumerate(rows)]) for what in (0, 1))
        return self.held @ kept + self.anew @ again + self.division(shards).moments, kept, again

    def too_many(self, recompute: Sequence[str], shards: tuple[int, ...]) -> float:
        """`memory(recompute, shards).too_many`, quickly."""
        division, (moments, _, _) = self.division(shards), self.at_moments(recompute, shards)
        passing = float(moments.max()) + self.messages + self.largest_workspace
        return self.excess(division.fixed + max(passing, division.behind))

    def memory(self, recompute: Sequence[str], shards: tuple[int, ...]) -> RankMemory:
        division, (moments, kept, again) = self.division(shards), self.at_moments(recompute, shards)
        microbatches, graded, summed, anew = self.moments.counts[int(moments.argmax())].reshape(4, self.num_chunks)
        gradients, activations = graded * self.weights, microbatches * kept + anew * again
        workspace, sent = self.workspace, self.messages + float((summed * division.summing).sum())
        all_behind = float((self.weights + division.summing).sum())
        if float((gradients + activations).sum() + workspace.max()) + sent <= all_behind:
            # Behind the batch all gradients are there, with their sums, and nothing else that comes and goes.
            gradients, activations, workspace = self.weights, np.zeros_like(kept), np.zeros_like(kept)
            sent = float(division.summing.sum())
        versions = self.weights * self.moments.versions
        held = np.array([versions, gradients, division.optimizer, self.buffers, activations, workspace])
        return RankMemory(
            recompute=tuple(recompute),
            shards=shards,
            held=held,
            messages=sent,
            in_flight=tuple(self.most.astype(int).tolist()),
            limit=self.place.limit,
            too_many=self.excess(total_of(held) + sent),
        )

    def excess(self, total: float) -> float:
        """Bytes beyond the device's; rounding is none."""
        excess = total + self.place.beside - self.place.limit
        return 0.0 if excess <= self.place.limit * 1e-12 else excess

    @cached_property
    def messages(self) -> float:
        """Bytes received ahead and sent; stages on the same rank send each other nothing."""
        num_messages = self.moments.num_microbatches * self.num_chunks
        received, returned = min(RECEIVES_AHEAD, num_messages), min(GRADIENTS_SENT, num_messages)
        comes, goes = ([stage + step not in self.own for stage in self.own] for step in (-1, 1))
        before, behind = np.where(comes, self.before, 0.0), np.where(goes, self.behind, 0.0)
        sent = float(behind.max()) * received + float((behind * self.most).sum())
        return (float(before.max()) * (received + returned) + sent) / self.place.tensor

    @cached_property
    def largest_workspace(self) -> float:
        return float(self.workspace.max())

    def _summing(self, shards: Sequence[int]) -> Floats:
        """[V] bytes beside the gradients while they are summed: parts of other ranks, and one bucket in all."""
        if self.place.replicas == 1:
            return np.zeros_like(self.weights)
        if self.place.streams:
            return streaming(self.weights, shards)
        divided = np.array(shards, dtype=np.float64)
        largest = float(np.where(divided > 1, self.sums.largest[self.own], 0.0).max())
        bucket = max(largest, min(float(self.sums.small[self.own].sum()), BUCKET_BYTES))
        return np.asarray(self.weights * (1 - 1 / divided + bucket / (float(self.weights.sum()) or 1.0)))

    def _shards(self, update: Floats, sharding: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Ways to divide the optimizer's state, to try in turn.

        It is divided where that saves time (a share of the step remains, and the updated weights go round behind it,
        where all-reduces of gradients go beside compute), else only where memory is short.
        """
        replicas = self.place.replicas
        may_shard = "full" in sharding and replicas > 1
        must = "none" not in sharding and replicas > 1
        rounds = self._gather_seconds() if may_shard and not must else [0.0] * len(update)
        saved = [seconds * (1 - 1 / replicas) for seconds in update.tolist()]
        pairs = zip(saved, rounds, strict=True)
        wanted = tuple(replicas if must or (may_shard and saves > costs) else 1 for saves, costs in pairs)
        sharded = (replicas if may_shard else 1,) * len(wanted)
        return (wanted,) if wanted == sharded else (wanted, sharded)

    def _gather_seconds(self) -> list[float]:
        """[V] seconds of gathering each stage's updated weights."""
        exchange, weights = self.place.exchange, self.weights
        if exchange is None:
            return [0.0] * len(weights)
        own = list(self.place.stages)
        numbers = num_buckets(weights, small=self.sums.small[own], largest=self.sums.largest[own])
        pairs = zip(weights.tolist(), numbers.tolist(), strict=True)
        return [exchange.seconds(each, number=number) if each else 0.0 for each, number in pairs]

    def options(self, names: Sequence[str]) -> list[list[Option]]:
        columns = [
            ((self.most * kept).tolist(), again, self._seconds(name))
            for name, (kept, again) in zip(names, map(self.row, names), strict=True)
        ]
        return [
            [
                Option(name=name, seconds=seconds[v], kept=kept[v], again=again[v])
                for name, (kept, again, seconds) in zip(names, columns, strict=True)
            ]
            for v in range(self.num_chunks)
        ]

    def _seconds(self, name: str) -> list[float]:
        """[V] seconds a microbatch that run again."""
        seconds: list[float] = self.sums.under(name).seconds[self.own].tolist()
        return seconds

    def treated(self, recompute: Sequence[str]) -> RankMemory:
        """The rank's memory, with the first division of the optimizer's state that fits, or the smallest."""
        found = self.memory(recompute, self.shards[0])
        for shards in self.shards[1:] if found.too_many else ():
            found = min(found, self.memory(recompute, shards), key=lambda each: each.too_many)
        return found

    def least_excess(self, recompute: Sequence[str]) -> float:
        """`treated(recompute).too_many`, quickly: nothing else of it depends on what is recomputed."""
        return min(self.too_many(recompute, shards) for shards in self.shards)

    def least_seconds_again(self, names: Sequence[str]) -> float:
        """Seconds that free enough bytes at the moment that would hold most, if stages could be treated in parts.

        What a backward makes again is left out, thus never more than a treatment takes that fits.
        """
        return min(self._least_again(shards, names) for shards in self.shards)

    def _least_again(self, shards: tuple[int, ...], names: Sequence[str]) -> float:
        division, (stash, _) = self.division(shards), self.row("none")
        most, held = max(zip((self.held @ stash + division.moments).tolist(), self.held.tolist(), strict=True))
        excess = self.excess(division.fixed + most + self.messages + self.largest_workspace)
        steps: list[tuple[float, float]] = []  # seconds a byte and bytes, by stage each cheaper than the next
        rows = [(self.row(name)[0].tolist(), self._seconds(name)) for name in names]
        for v, number in enumerate(held):
            steps += _descents([(number * (float(stash[v]) - kept[v]), seconds[v]) for kept, seconds in rows])
        seconds = 0.0
        for rate, freed in sorted(steps):
            seconds += rate * min(freed, excess)
            excess -= min(freed, excess)
        return seconds

    def relaxed(self, choice: Choice, options: Sequence[Sequence[Option]]) -> Choice:
        """The same with fewer seconds in single stages, where that still fits."""
        chosen, done = list(choice), set[int]()
        for stage, option in cheaper(options, choice):
            if stage in done:
                continue
            before, chosen[stage] = chosen[stage], option
            if self.least_excess([each.name for each in chosen]) == 0:
                done.add(stage)
            else:
                chosen[stage] = before
        return tuple(chosen)


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


def in_turn(options: Sequence[Sequence[Option]]) -> Iterator[Choice]:
    """Choices, each at most once; V lists of the same names in the same order.

    >>> stage = [Option("none", 0, 9, 0), Option("full", 2, 1, 3), Option("selective", 1, 6, 1)]
    >>> [[option.name for option in choice] for choice in in_turn([stage])]
    [['none'], ['selective'], ['full']]
    """
    if len(options[0]) ** len(options) <= EVERY:
        yield from sorted(product(*options), key=lambda choice: (sum(each.seconds for each in choice), _bytes(choice)))
        return
    seen: set[Choice] = set()
    alike = sorted(range(len(options[0])), key=lambda i: sum(each[i].seconds for each in options))
    for choice in (*_greedy(options), *(tuple(each[i] for each in options) for i in alike)):
        if choice not in seen:
            seen.add(choice)
            yield choice


def cheaper(options: Sequence[Sequence[Option]], choice: Choice) -> Iterator[tuple[int, Option]]:
    """Changes of one stage to fewer seconds: the stages with most seconds first, of each the least seconds first."""
    if len(options[0]) ** len(options) <= EVERY:
        return  # all with fewer seconds were tried
    for stage in sorted(range(len(choice)), key=lambda v: -choice[v].seconds):
        for option in sorted(options[stage], key=_order):
            if option.seconds < choice[stage].seconds:
                yield stage, option


def _order(option: Option) -> tuple[float, float]:
    return option.seconds, option.kept + option.again


def _bytes(choice: Sequence[Option]) -> float:
    return sum(option.kept for option in choice) + max(option.again for option in choice)


def _greedy(options: Sequence[Sequence[Option]]) -> Iterator[Choice]:
    now = [min(each, key=_order) for each in options]
    while True:
        yield tuple(now)
        best: tuple[float, int, Option] | None = None
        first, second = (*sorted((each.again for each in now), reverse=True), 0.0)[:2]
        for stage, each in enumerate(options):
            old = now[stage]
            others = second if old.again == first else first  # the most that another stage makes again
            for option in each:
                more = option.seconds - old.seconds
                freed = old.kept - option.kept + first - max(others, option.again)
                if more >= 0 and freed > 0 and (best is None or freed / max(more, 1e-12) > best[0]):
                    best = freed / max(more, 1e-12), stage, option
        if best is None:
            return
        now[best[1]] = best[2]
