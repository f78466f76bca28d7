"""One configuration with its cuts: what each stage costs, what each rank holds, and the least seconds of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from ...schedules.registry import family
from ..allocator import certain
from ..memory import Moments, RankMemory, RankPlace
from ..recompute import MemoryRules
from ..stage_cost import StageSeconds, StageSums, round_seconds, stage_seconds
from ..topology import Topology
from .built import BuiltSchedules
from .evaluated import Ends, Evaluated
from .model import Model
from .paces import least_step, rank_paces
from .placement import Placement, Placements
from .simulated import Simulated, simulated
from .space import Configuration

Figure = TypeVar("Figure")


class MisfitError(Exception):
    """No treatment makes it fit: on `stage_group` it takes `too_many` bytes more than there are."""

    def __init__(self, *, stage_group: int, too_many: float, limit: float) -> None:
        super().__init__(f"{too_many:,.0f} bytes too many")
        self.stage_group, self.too_many, self.limit = stage_group, too_many, limit


class Evaluator:
    """Costs, memory and simulation of configurations.

    Arguments:
        model_of: of a microbatch and a tensor size.
        norm: of the global norm under a flush, see `Costs` [s]; None: there is none.
    """

    def __init__(
        self,
        topology: Topology,
        rules_of: Callable[[Model], MemoryRules],
        model_of: Callable[[int, int], Model],
        *,
        norm: float | None = None,
    ) -> None:
        self.norm = norm
        self.topology, self.model_of, self._rules_of = topology, model_of, rules_of
        self.placements = Placements(topology)
        self.schedules = BuiltSchedules()
        # Of the configuration at hand: cuts move, and most ranks keep theirs.
        self._memories_of: tuple[Configuration, Sequence[Moments]] | None = None
        self._memories: dict[object, RankMemory] = {}
        self._again: dict[object, float] = {}  # seconds that run again, at least

    def model(self, c: Configuration) -> Model:
        """The model at its microbatch and tensor size."""
        return self.model_of(c.microbatch_size, c.tensor)

    def norm_seconds(self, schedule: str | None) -> float | None:
        """Seconds of the global norm, for which ranks wait under a flush alone [s]."""
        return None if schedule is None or family(schedule).rule.is_asynchronous else self.norm

    def _beside(self, c: Configuration, model: Model) -> float:
        """Seconds of a step that no schedule hides [s]."""
        return model.profile.around_seconds + (self.norm_seconds(c.schedule) or 0.0)

    def evaluate(
        self, c: Configuration, ends: Ends, *, exact: bool = False, flights: Sequence[Moments] | None = None
    ) -> Evaluated:
        """Costs and memory; MisfitError where it does not fit, for the rank that has most too much, and RefusedError.

        Arguments:
            exact: count what is in flight in the whole schedule, or one that holds exactly as much.
            flights: by stage of the first chunk, in place of what the schedule says.
        """
        model, place, positions = self.model(c), self.placements.of(c), c.positions
        sums, rules = model.stages(ends, positions), self._rules_of(model)
        if flights is None:
            flights = self.schedules.in_flight(c, exact=exact)
        memories = self._by_rank(c, ends, flights, self._memories, lambda p, rank: rules.fit(sums, flights[p], rank))
        worst = max(range(c.pipeline), key=lambda p: memories[p].too_many)
        if memories[worst].too_many:
            raise MisfitError(stage_group=worst, too_many=memories[worst].too_many, limit=place.limits[worst])
        treatments = [(memories[p].treatment, s // c.pipeline) for s, p in enumerate(positions)]
        seconds = _seconds(
            c,
            sums,
            place,
            recompute=[each.recompute[v] for each, v in treatments],
            shards=[each.shards[v] for each, v in treatments],
            action=model.profile.action_seconds,
        )
        tied = self.placements.ties(c, model.tied_stages(ends))
        return Evaluated(
            configuration=c,
            ends=ends,
            model=model,
            placement=place,
            sums=sums,
            seconds=seconds,
            tied=tied,
            memories=tuple(memories),
            bottleneck=float(rank_paces(c, seconds).max()),
            bound=0.0 if c.num_microbatches is None else least_step(c, seconds, tied) + self._beside(c, model),
        )

    def least_seconds(self, c: Configuration, ends: Ends, *, flights: Sequence[Moments] | None = None) -> float:
        """No order of this work is faster, whatever is done about memory [s]; 0 where M is open.

        Arguments:
            flights: where given, what each rank must run again for its memory counts, too (and for much more time).
        """
        if c.num_microbatches is None:
            return 0.0
        model, counts, place, rules = self.model(c), c.counts, self.placements.of(c), self._rules_of(self.model(c))
        sums, may_shard = model.stages(ends, c.positions), "full" in rules.sharding
        seconds = _seconds(
            c,
            sums,
            place,
            recompute=["none"] * c.num_stages,
            shards=[counts[p] if may_shard else 1 for p in c.positions],
            action=model.profile.action_seconds,
        )
        if may_shard:  # or not divided, where that is faster
            whole = round_seconds(sums, [place.rings[p] for p in c.positions])
            seconds = replace(seconds, ring=np.minimum(seconds.around, whole), gather=np.zeros_like(whole))
        again = np.zeros(c.pipeline)
        if flights is not None:
            least = self._by_rank(
                c, ends, flights, self._again, lambda p, rank: rules.least_seconds_again(sums, flights[p], rank)
            )
            again = np.array(least) / np.array(place.speeds)
        tied = self.placements.ties(c, model.tied_stages(ends))
        return least_step(c, seconds, tied, again) + self._beside(c, model)

    def _by_rank(
        self,
        c: Configuration,
        ends: Ends,
        flights: Sequence[Moments],
        known: dict[object, Figure],
        find: Callable[[int, RankPlace], Figure],
    ) -> list[Figure]:
        """[P] what is found of each rank with its stages; for the configuration at hand it is kept in `known`."""
        if self._memories_of != (c, flights):
            self._memories_of = c, flights
            self._memories.clear()
            self._again.clear()
        place, counts, found = self.placements.of(c), c.counts, []
        for p, stages in enumerate(_stages_of(c.positions, c.pipeline)):
            own = (p, *((ends[s], ends[s + 1]) for s in stages))
            if own not in known:
                rank = RankPlace(
                    stages=stages,
                    replicas=counts[p],
                    tensor=c.tensor,
                    limit=place.limits[p],
                    exchange=place.exchanges[p],
                    streams=family(c.schedule).rule.is_asynchronous,
                    beside=certain(self.model(c).profile.device),
                )
                known[own] = find(p, rank)
            found.append(known[own])
        return found

    def simulate(self, evaluated: Evaluated) -> Simulated:
        """Seconds and bubble of its step; RefusedError where the schedule does not take its sizes."""
        return simulated(evaluated, self.schedules, norm=self.norm_seconds(evaluated.configuration.schedule))


def _seconds(
    c: Configuration,
    sums: StageSums,
    place: Placement,
    *,
    recompute: Sequence[str],
    shards: Sequence[int],
    action: float,
) -> StageSeconds:
    group = np.array(c.positions)
    return stage_seconds(
        sums,
        speeds=np.asarray(place.speeds)[group],
        inward=place.inward,
        outward=place.outward,
        rings=[place.rings[p] for p in group],
        exchanges=[place.exchanges[p] for p in group],
        tensor=c.tensor,
        recompute=recompute,
        shards=np.array(shards, dtype=np.float64),
        action=action,
    )


def _stages_of(positions: Sequence[int], num_ranks: int) -> list[tuple[int, ...]]:
    """[P] stages of each rank."""
    stages: list[list[int]] = [[] for _ in range(num_ranks)]
    for stage, at in enumerate(positions):
        stages[at].append(stage)
    return [tuple(each) for each in stages]
