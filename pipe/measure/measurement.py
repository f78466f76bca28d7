"""Measured costs of the last steps, for the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...comm import Collectives, Guard, HostClocks
from ...schedules import Costs, Schedule, Spread, Timeline
from ...schedules.timing.records import RankRecord
from .gather import gather_costs, gather_spread
from .recorder import Recorder


class Measurement:
    """Durations of the ranks of this process.

    Arguments:
        drain: makes the links quiet.
        one_way_seconds: measures the latency of a link; collective over the processes.
        assemble: records of one step, or of a few of a stream, of all ranks put together.
    """

    def __init__(
        self,
        recorders: Sequence[Recorder],
        *,
        schedule: Schedule,
        drain: Callable[[], None],
        one_way_seconds: Callable[[], float],
        assemble: Callable[[Sequence[RankRecord]], Timeline],
        collectives: Collectives,
        guard: Guard,
        clocks: HostClocks,
    ) -> None:
        self._recorders = recorders
        self._schedule = schedule
        self._drain = drain
        self._one_way_seconds = one_way_seconds
        self._assemble = assemble
        self._collectives = collectives
        self._guard = guard
        self._clocks = clocks
        self._latency: float | None = None  # measured once [s]

    def costs(self) -> Costs:
        """See PipelineModule.measured_costs."""
        costs = self._costs()
        if costs is None:
            raise ValueError("nothing was measured yet: expected at least one train_step before measured_costs()")
        return costs

    def _costs(self) -> Costs | None:
        if self._latency is None:
            self._drain()
        with self._guard.together():
            if self._latency is None:
                self._latency = self._one_way_seconds()
            return gather_costs(self._recorders, self._collectives, schedule=self._schedule, latency=self._latency)

    def spread(self) -> Spread | None:
        """See PipelineModule.measured_spread."""
        costs = self._costs()
        if costs is None:
            return None
        with self._guard.together():
            table = costs.table_for(self._schedule)
            return gather_spread(
                self._recorders,
                self._collectives,
                table,
                schedule=self._schedule,
                assemble=self._assemble,
                clocks=self._clocks,
            )

    def forget(self) -> None:
        """See PipelineModule.forget_measurements."""
        for recorder in self._recorders:
            recorder.forget()
