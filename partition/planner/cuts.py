"""Cuts worth a simulation for one configuration: the dynamic program's, those made by hand, and their neighbours."""

from __future__ import annotations

import math

import numpy as np

from ...schedules.messages import RECEIVES_AHEAD
from ..solver.antichains import Floats
from ..solver.chunks import all_stages, equal_stages, even_stages
from .evaluate import Ends, Evaluator
from .in_flight import InFlight
from .memory import MemoryRules
from .model import Model
from .place import Place
from .space import Configuration

ALL_CUTS = 64  # ways to cut up to which each is looked at


def candidate_ends(evaluator: Evaluator, rules: MemoryRules, c: Configuration) -> list[Ends]:
    """The likely best ones first; none where the graph has no chain of so many stages.

    Every way where these are at most ALL_CUTS; else the least slowest stage within the memory, the least slowest stage
    whatever it holds (where the first finds none), and equal numbers of nodes.
    """
    model = evaluator.model(c)
    found: list[Ends] = []
    if few_ways(model, c.num_stages):
        every = all_stages(model.cuts.inside, c.num_stages, limit=ALL_CUTS)
        if every is not None:
            return every
    costs = _StageCosts(model, evaluator.places.of(c), evaluator.in_flight(c, exact=False), rules, c)
    for fits in (True, False):
        ends = even_stages(costs.within if fits else costs.whatever, c.num_stages, len(model.coarse))
        if ends is not None:
            found.append(tuple(model.coarse[at] for at in ends))
            break
    by_hand = equal_stages(model.cuts, c.num_stages)
    if by_hand is not None:
        found.append(by_hand)
    return list(dict.fromkeys(found))


def few_ways(model: Model, num_stages: int) -> bool:
    """Whether each way to cut so many stages is looked at (or found to be too many quickly)."""
    nodes = len(model.cuts) - 1
    return nodes <= 24 and math.comb(max(nodes - 1, 0), num_stages - 1) <= 50 * ALL_CUTS


class _StageCosts:
    """[n, n] seconds of stage s between two of the coarse cuts, by what it computes and sends.

    Each of a rank's V stages is given a V-th of its memory, with what it holds at the rank's peak.
    """

    def __init__(
        self, model: Model, place: Place, flights: tuple[InFlight, ...], rules: MemoryRules, c: Configuration
    ) -> None:
        self.model, self.place, self.flights, self.rules, self.c = model, place, flights, rules, c
        at = np.asarray(model.coarse)
        cuts = model.cuts
        self.inside = cuts.inside[np.ix_(at, at)]

        def between(column: Floats) -> Floats:
            own = column[at]
            return np.asarray(np.maximum(own - own[:, None], 0.0), dtype=np.float64)

        self.work, self.forward = between(cuts.seconds), between(cuts.forward)
        self.weights, self.stash = between(cuts.parameters), between(cuts.stash)
        self.buffers = between(cuts.buffers)
        self.crossing = cuts.crossing[at]
        self._plain: dict[object, Floats] = {}
        self._made: dict[object, Floats] = {}

    def whatever(self, stage: int) -> Floats:
        """Without a memory limit, nothing recomputed."""
        p = stage % self.c.pipeline
        inward, outward = self.place.inward[stage], self.place.outward[stage]
        key = (inward, outward, self.place.speeds[p])
        if key not in self._plain:
            sent = self.crossing[:, None] * inward.seconds_a_byte + self.crossing * outward.seconds_a_byte
            worst = np.maximum(self.work / self.place.speeds[p], sent / self.c.tensor)
            self._plain[key] = np.where(self.inside, worst, np.inf)
        return self._plain[key]

    def within(self, stage: int) -> Floats:
        """Recomputed where it must be, infinite where it does not fit."""
        p, chunk = stage % self.c.pipeline, stage // self.c.pipeline
        flight, limit = self.flights[p], self.place.limits[p] / self.c.num_chunks
        plain = self.whatever(stage)
        must = "none" not in self.rules.recompute
        if not math.isfinite(limit) and not must:
            return plain
        held = flight.held[int(flight.held.sum(axis=1).argmax())][chunk]
        key = (id(plain), float(held), flight.versions, limit, self.place.speeds[p])
        if key in self._made:
            return self._made[key]
        shards = self.c.counts[p] if "full" in self.rules.sharding else 1
        fixed = self.weights * (flight.versions + 1 + self.rules.optimizer_ratio / shards) + self.buffers
        fixed = fixed + self.model.largest_workspace / self.c.num_chunks
        ends = self.crossing[:, None] + self.crossing
        fixed = fixed + ends * (1 + RECEIVES_AHEAD / self.c.tensor / self.c.num_chunks)
        seconds = plain
        small = fixed + held * self.stash
        if "full" in self.rules.recompute:
            again = np.full(plain.shape, fill_value=True) if must else small > limit
            seconds = np.where(again, np.maximum(plain, (self.work + self.forward) / self.place.speeds[p]), plain)
            small = np.where(again, fixed + held * self.crossing[:, None] + self.stash, small)
        made = np.where(small <= limit, seconds, np.inf)
        self._made[key] = made
        return made
