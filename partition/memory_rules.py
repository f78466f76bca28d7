"""What to do about the memory of a rank: what its stages recompute, and whether its optimizer is divided.

`stage_memory` says what a rank holds under any treatment, `recompute_choice` in which order choices are worth trying;
here the one with the least seconds that fits is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul

from .in_flight import InFlight
from .recompute_choice import Choice, Option, cheaper, in_turn
from .stage_cost import StageSums, num_buckets
from .stage_memory import RankBytes, RankMemory, RankPlace, Treatment, Way
from .topology import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRules:
    """Choices that are allowed, and the optimizer.

    Arguments:
        optimizer_ratio: bytes of state a byte of parameters.
        recompute: what is allowed, some of RECOMPUTE.
        sharding: what is allowed, some of "none" and "full".
    """

    optimizer_ratio: float
    recompute: tuple[str, ...] = ("none",)
    sharding: tuple[str, ...] = ("none",)

    def fit(self, sums: StageSums, in_flight: InFlight, place: RankPlace) -> RankMemory:
        """The treatment with the least seconds that fits the device (`recompute_choice`), or with the least excess."""
        rank = _Treatments(sums, in_flight, place, self)
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

    def least_seconds_again(self, sums: StageSums, in_flight: InFlight, place: RankPlace) -> float:
        """Seconds a microbatch that whatever fits must run again, at least [s]; 0 where all may be kept."""
        rank = _Treatments(sums, in_flight, place, self)
        if set(self.recompute) == {"none"} or rank.least_excess(("none",) * rank.num_chunks) == 0:
            return 0.0
        return rank.least_seconds_again(self.recompute)


class _Treatments:
    """Treatments of one rank."""

    def __init__(self, sums: StageSums, in_flight: InFlight, place: RankPlace, rules: MemoryRules) -> None:
        self.bytes = RankBytes(sums, in_flight, place, optimizer_ratio=rules.optimizer_ratio)
        self.num_chunks = self.bytes.num_chunks
        self.shards = self._shards(sums.update[self.bytes.own], rules.sharding)

    def _shards(self, update: Floats, sharding: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Ways to divide the optimizer's state, to try in turn.

        It is divided where that saves time (a share of the step remains, and the updated weights go round behind it,
        where sums of gradients go beside compute), else only where memory is short.
        """
        replicas = self.bytes.place.replicas
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
        exchange, weights = self.bytes.place.exchange, self.bytes.weights
        if exchange is None:
            return [0.0] * len(weights)
        own = list(self.bytes.place.stages)
        numbers = num_buckets(weights, small=self.bytes.sums.small[own], largest=self.bytes.sums.largest[own])
        pairs = zip(weights.tolist(), numbers.tolist(), strict=True)
        return [exchange.seconds(each, number=number) if each else 0.0 for each, number in pairs]

    def options(self, names: Sequence[str]) -> list[list[Option]]:
        """[V] options of each stage."""
        columns = [
            ((self.bytes.most * kept).tolist(), again, self._seconds(name))
            for name, (kept, again) in zip(names, map(self.bytes.row, names), strict=True)
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
        seconds: list[float] = self.bytes.sums.under(name).seconds[self.bytes.own].tolist()
        return seconds

    def treated(self, recompute: Sequence[str]) -> RankMemory:
        """The rank's memory, with the first division of the optimizer's state that fits, or the smallest."""
        best: RankMemory | None = None
        for shards in self.shards:
            memory = self.bytes.memory(Treatment(recompute=tuple(recompute), shards=shards))
            if best is None or memory.too_many < best.too_many:
                best = memory
            if best.too_many == 0:
                break
        assert best is not None
        return best

    def least_excess(self, recompute: Sequence[str]) -> float:
        """`treated(recompute).too_many`, quickly: nothing else of it depends on what is recomputed."""
        rows = list(enumerate(map(self.bytes.row, recompute)))
        kept, again = [kept[v] for v, (kept, _) in rows], [again[v] for v, (_, again) in rows]
        passing, ways = self.bytes.messages + self.bytes.largest_workspace, self._ways
        return self.bytes.excess(min(way.fixed + max(way.peak(kept, again) + passing, way.behind) for way in ways))

    def least_seconds_again(self, names: Sequence[str]) -> float:
        """Seconds that free enough bytes at the moment that would hold most, if stages could be treated in parts.

        What a backward makes again is left out, thus never more than a treatment takes that fits.
        """
        return min(self._least_again(way, names) for way in self._ways)

    def _least_again(self, way: Way, names: Sequence[str]) -> float:
        stash, _ = self.bytes.row("none")
        moments = [*way.forward, *((held, others) for held, others, _ in way.backward)]
        most, held = max((sum(map(mul, held, stash)) + others, held) for held, others in moments)
        excess = self.bytes.excess(way.fixed + most + self.bytes.messages + self.bytes.largest_workspace)
        steps: list[tuple[float, float]] = []  # seconds a byte and bytes, by stage each cheaper than the next
        rows = [(self.bytes.row(name)[0], self._seconds(name)) for name in names]
        for v, number in enumerate(held):
            steps += _descents([(number * (stash[v] - kept[v]), seconds[v]) for kept, seconds in rows])
        seconds = 0.0
        for rate, freed in sorted(steps):
            seconds += rate * min(freed, excess)
            excess -= min(freed, excess)
        return seconds

    @cached_property
    def _ways(self) -> list[Way]:
        """By division of the optimizer's state."""
        return [self.bytes.way(shards) for shards in self.shards]

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
