"""Measurements of all ranks, combined: timelines, and costs for the simulator. Collective over the processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from ...comm import Collectives, HostClocks
from ...schedules import Costs, Op, Schedule, Spread, Timeline, estimate_spread
from ...schedules.timing.inputs import Cause, Input, action_input, calibrate
from ...schedules.timing.records import RankRecord
from ...schedules.timing.spread import LEAST_STEPS
from ..context import Run
from .recorder import RankRecorder, Timed

_MOST_ACTIONS = 100_000  # of the steps whose times are all used


class Measurement:
    """Durations of the ranks of this process."""

    def __init__(
        self,
        run: Run,
        recorders: Sequence[RankRecorder],
        *,
        schedule: Schedule,
        drain: Callable[[], None],  # ends all traffic on the links
        one_way_seconds: Callable[[], float],  # measures the latency of a link; collective over the processes
        # Combines all ranks' records of one step, or of a few of a stream.
        assemble: Callable[[Sequence[RankRecord]], Timeline],
        clocks: HostClocks,
    ) -> None:
        self._recorders = recorders
        self._schedule = schedule
        self._drain = drain
        self._one_way_seconds = one_way_seconds
        self._assemble = assemble
        self._collectives = run.collectives
        self._guard = run.guard
        self.clocks = clocks
        self._latency: float | None = None  # measured once [s]

    def costs(self) -> Costs:
        costs = self._costs()
        if costs is None:
            raise ValueError("nothing was measured yet: expected at least one train_step before measured_costs()")
        return costs

    def _costs(self) -> Costs | None:
        """Median costs by stage and op, separately for replicas, on every rank; None if nothing was measured."""
        if self._latency is None:
            self._drain()
        with self._guard.together():
            if self._latency is None:
                self._latency = self._one_way_seconds()
            return self._gather_costs(self._latency)

    def _gather_costs(self, latency: float) -> Costs | None:
        recorders, what = self._recorders, "gathering the measured costs"
        by_rank = [recorder.medians() for recorder in recorders]
        overheads: dict[int, list[float]] = defaultdict(list)
        norms: list[float | None] = []
        outside: list[tuple[float, float, float]] = []
        mine = (
            [recorder.median_overheads() for recorder in recorders],
            latency,
            [recorder.median_norm() for recorder in recorders],
            [around for recorder in recorders if (around := recorder.median_around()) is not None],
        )
        for seen_overheads, seen_latency, seen_norms, seen_around in self._collectives.gather(mine, what=what):
            for stage, seconds in (each for own in seen_overheads for each in own.items()):
                overheads[stage].append(seconds)
            latency = max(latency, seen_latency)
            norms += seen_norms
            outside += seen_around
        if len(by_rank) == 1:
            by_rank = self._collectives.gather_ranks(by_rank[0], what=what)
        # The rank that is last at the norm does not wait: its time is that of the norm.
        norm = min((seconds for seconds in norms if seconds is not None), default=None)
        if not any(by_rank):
            return None
        # Likewise the rank that begins first, and the one that ends last: their times around a step have no waits.
        around = sum(min(each) for each in zip(*outside, strict=True))
        between = {stage: fmean(seconds) for stage, seconds in overheads.items()}
        return costs_from_medians(by_rank, between, schedule=self._schedule, latency=latency, norm=norm, around=around)

    def spread(self) -> Spread | None:
        costs = self._costs()
        if costs is None:
            return None
        with self._guard.together():
            table = costs.table_for(self._schedule)
            steps = [recorder.steps() for recorder in self._recorders]
            most = max(LEAST_STEPS, _MOST_ACTIONS // max(1, sum(map(len, self._schedule.programs))))
            records = [recorder.records()[-most:] for recorder in self._recorders]
            if len(self._recorders) == 1:
                self.clocks.compare()
                mine = [_placed(record, self.clocks) for record in records[0]]
                seen = self._collectives.gather_ranks((steps[0], mine), what="gathering the measured durations")
                steps, records = [each for each, _ in seen], [each for _, each in seen]
            number = min(map(len, records))
            together = zip(*(own[len(own) - number :] for own in records), strict=True)
            return estimate_spread(steps, table, [self._assemble(step) for step in together])

    def forget(self) -> None:
        for recorder in self._recorders:
            recorder.forget()


def gather_records(
    records: Sequence[RankRecord],
    collectives: Collectives,
    assemble: Callable[[Sequence[RankRecord]], Timeline],
    clocks: HostClocks,
) -> Timeline:
    if len(records) > 1:  # all ranks are here
        return assemble(records)
    clocks.compare()
    (record,) = records
    return assemble(collectives.gather_ranks(_placed(record, clocks), what="gathering the timeline"))


def _placed(record: RankRecord, clocks: HostClocks) -> RankRecord:
    offset, error = clocks.offset_at(record.compute[0].start) if record.compute else (0.0, 0.0)
    return replace(record, offset=offset, error=error)


def costs_from_medians(
    by_rank: Sequence[Mapping[Timed, float]],  # [P] seconds by stages and op
    overheads: Mapping[int, float],  # seconds around an action, by stage
    *,
    schedule: Schedule,
    latency: float,
    norm: float | None,
    around: float,
) -> Costs:
    """The costs of a schedule whose ranks measured these medians; an op that no rank measured costs 0.

    F, B, I and W of a stage's replicas are each rank's own. Updates and moves are means over replicas, sums the least:
    the rank that is last at a sum does not wait."""
    together: dict[Timed, list[float]] = {}
    for own in by_rank:
        for key, seconds in own.items():
            together.setdefault(key, []).append(seconds)
    stages = range(schedule.num_stages)

    def mean(op: Op, stage: int) -> float:
        return fmean(together.get(((stage,), op), (0.0,)))

    seen: dict[Input, float] = {}
    is_split = any(op in (Op.I, Op.W) for _, op in together)
    for stage, ranks in enumerate(schedule.owners):
        for op in (Op.F, Op.B, Op.I, Op.W) if is_split else (Op.F, Op.B):
            # Where I and W ran as one, or B did, half of that.
            halved = op in (Op.I, Op.W) and ((stage,), op) not in together
            timed, part = (Op.B, 0.5) if halved else (op, 1.0)
            for rank in ranks if ((stage,), timed) in together else ():
                seconds = by_rank[rank].get(((stage,), timed), mean(timed, stage))
                seen[action_input(schedule, op, stage, rank)] = part * seconds
    for (each, op), summed in together.items():
        if op is Op.REDUCE_GRAD:
            seen[Input(Cause.SUMS, "sum", each)] = min(summed)
    seen |= {Input(Cause.OVERHEAD, "overhead", (stage,)): overheads.get(stage, 0.0) for stage in stages}
    seen |= {Input(Cause.UPDATE, "update", (stage,)): mean(Op.U, stage) for stage in stages}
    unseen = Costs(
        forward=0.0,
        latency=latency,
        norm=norm,
        around=around,
        offload=[mean(Op.OFFLOAD, stage) for stage in stages],
        reload=[mean(Op.RELOAD, stage) for stage in stages],
    )
    return calibrate(schedule, unseen, None, seen, queueing=True)[0]
