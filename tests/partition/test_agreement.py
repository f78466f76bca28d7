"""`partition()` and `plan()` say the same of the same stage: seconds, and bytes by data structure."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.inside import (
    SCHEDULES,
    Evaluated,
    MemoryRules,
    Model,
    PlanEvaluator,
    RangeCosts,
    SizesError,
    Topology,
    steady_in_flight,
)

from .small import CLUSTERS, configuration, profiles

PROFILES = profiles(chain=True, max_nodes=6)


class Case:
    """Stages with replicas on the first devices that leave none idle behind them, priced by both."""

    def __init__(self, data: st.DataObject, *, has_batch: bool) -> None:
        self.profile = profile = data.draw(PROFILES)
        cluster = data.draw(CLUSTERS)
        self.schedule = data.draw(st.sampled_from(SCHEDULES))
        self.model = Model(profile, MemoryRules(optimizer_ratio=2.0))
        last = len(self.model.cuts) - 1
        most = min(cluster.num_devices, last)
        num_stages = data.draw(st.integers(1, most))
        inner = data.draw(st.permutations(range(1, last)))[: num_stages - 1]
        self.ends = (0, *sorted(inner), last)
        spare = cluster.num_devices - num_stages
        counts = []
        for _ in range(num_stages):
            more = data.draw(st.integers(0, spare))
            counts.append(1 + more)
            spare -= more
        self.counts, self.spare = tuple(counts), spare
        starts = list(accumulate(counts, initial=spare))  # the pipeline ends at the last device
        self.num_microbatches = data.draw(st.integers(max(counts), 12)) if has_batch else None
        self.costs = RangeCosts(
            self.model.cuts, cluster, schedule=self.schedule, num_microbatches=self.num_microbatches
        )
        self.configuration = configuration(
            pipeline=num_stages,
            data=counts[0],
            schedule=self.schedule,
            num_microbatches=self.num_microbatches,
            ranks=tuple(tuple(range(a, a + n)) for a, n in zip(starts[:-1], counts, strict=True)),
        )
        self.evaluator = PlanEvaluator(Topology(cluster), lambda _size, _tensor: self.model)

    def exact(self) -> Evaluated:
        if self.num_microbatches is not None:
            return self.evaluator.evaluate(self.configuration, self.ends, exact=True)
        flights = steady_in_flight(self.schedule, self.counts, None)
        return self.evaluator.evaluate(self.configuration, self.ends, flights=flights)

    def by_range(self) -> tuple[list[float], list[float]]:
        """Seconds and bytes of each stage as the dynamic program sees them."""
        seconds, held = [], []
        for s, count in enumerate(self.counts):
            at = self.costs.ranges(count, sum(self.counts[s:]))
            first, last = self.ends[s], self.ends[s + 1]
            seconds.append(float(self.costs.seconds(first, last, at)))
            held.append(float(self.costs.bytes(self.model.cuts.stages(first, last), at)))
        return seconds, held


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_dynamic_program_is_never_slower_and_never_smaller(data: st.DataObject) -> None:
    case = Case(data, has_batch=True)
    try:
        exact = case.exact()
    except SizesError:
        assume(False)
    seconds, held = case.by_range()
    assert max(seconds) <= exact.bottleneck * (1 + 1e-9) + 1e-12
    for bytes_by_range, memory in zip(held, exact.memories, strict=True):
        assert bytes_by_range >= memory.total * (1 - 1e-9)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_dynamic_program_says_the_same_in_the_steady_state(data: st.DataObject) -> None:
    """Without a batch on links of one kind nothing is left open but who the neighbours are."""
    case = Case(data, has_batch=False)
    exact, (seconds, held) = case.exact(), case.by_range()
    assert held == pytest.approx([memory.total for memory in exact.memories], rel=1e-9)
    if len(set(case.costs.seconds_a_byte)) == 1:
        assert max(seconds) == pytest.approx(exact.bottleneck, rel=1e-9, abs=1e-12)
    assert np.isfinite(seconds).all()
