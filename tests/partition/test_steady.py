"""Long batches that a short one stands for: the same seconds as all of the batch simulated."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import (
    Configuration,
    MemoryRules,
    Model,
    PlanEvaluator,
    Topology,
    count_in_flight,
    long_batch,
    short_batches,
    simulated_batch,
)
from support.sizes import fitting

from stagewright.partition import Cluster, Node, Profile, partition, plan
from stagewright.schedules import FAMILIES, Costs, Timeline, build, simulate

# Sums of these are exact: ties between messages on a link stay ties.
EIGHTHS = st.integers(0, 24).map(lambda n: n / 8)
NEAR = st.sampled_from([1.0, 1 + 2.0**-10, 1 - 2.0**-12, 1 + 2.0**-20, 3.0])  # steady after many rounds only


def configuration(schedule: str, P: int, V: int, M: int) -> Configuration:
    return Configuration(
        pipeline=P, data=1, tensor=1, schedule=schedule, num_chunks=V, microbatch_size=1, num_microbatches=M
    )


FLUSH = [each for each in FAMILIES.values() if each.full_after is not None and not each.rule.is_asynchronous]


@pytest.mark.thorough(but=["1f1b"])
@pytest.mark.parametrize("each", FLUSH, ids=lambda each: each.name)
def test_more_microbatches_are_more_rounds_in_the_middle(each: Any) -> None:
    """Programs of a short batch are those of a long one without its middle; so the drains are alike."""
    for P, V in product((1, 2, 3, 4), (2, 3) if each.takes_chunks else (1,)):
        for M in range(12 * P, 14 * P):
            if fitting(each.name, P, M) != (P, M):
                continue  # an odd P, where it must be even
            c = configuration(each.name, P, V, M)
            for size in short_batches(c, M):
                options = {"num_ranks": P, "num_chunks": V if V > 1 else None}
                whole, short = (build(each.name, num_microbatches=m, **options) for m in (M, size))
                for all_of_it, part in zip(whole.programs, short.programs, strict=True):
                    half = len(part) // 2
                    moved = [(a.stage, a.op, a.index + M - size) for a in part[-half:]]
                    assert all_of_it[:half] == part[:half]
                    assert [(a.stage, a.op, a.index) for a in all_of_it[-half:]] == moved


def evaluator_of(profile: Profile, bandwidth: float, num_ranks: int) -> PlanEvaluator:
    model = Model(profile, MemoryRules(optimizer_ratio=2.0))
    cluster = Cluster.parse(f"{num_ranks}:net={bandwidth}B/s@0.25s")
    return PlanEvaluator(Topology(cluster), lambda _size, _tensor: model)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data())
def test_the_same_as_all_of_the_batch(data: st.DataObject) -> None:
    P, V = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 1, 2]))
    figure = data.draw(st.sampled_from([EIGHTHS, NEAR]))
    nodes = tuple(
        Node(
            name=f"n{i}",
            forward_seconds=data.draw(figure) + 0.125,
            backward_seconds=data.draw(figure),
            activation_bytes=data.draw(EIGHTHS),
            parameter_bytes=data.draw(EIGHTHS),
            update_seconds=data.draw(EIGHTHS),
        )
        for i in range(P * V)
    )
    M = data.draw(st.integers(20, 60)) * P + (data.draw(st.integers(0, P - 1)) if V == 1 else 0)
    c = configuration("1f1b" if V == 1 else "interleaved", P, V, M)
    evaluator = evaluator_of(Profile(nodes=nodes), data.draw(st.sampled_from([0.5, 2.0, 2.0**30])), P)
    found = evaluator.choices(c, tuple(range(P * V + 1)), exact=True)[0]
    whole, folded = simulated_batch(c, found.costs, found.links, evaluator.schedules, M), evaluator.simulate(found)
    assert folded.simulated_seconds == whole.makespan
    assert folded.bubble == pytest.approx(whole.bubble, abs=1e-9)


def folded(c: Configuration, M: int, costs: Costs) -> tuple[float | None, list[int]]:
    """Seconds, and the sizes of the batches that were simulated for them."""
    sizes = []

    def simulated(m: int) -> Timeline:
        sizes.append(m)
        chunks = c.num_chunks if c.num_chunks > 1 else None
        return simulate(build(c.schedule, num_ranks=c.pipeline, num_microbatches=m, num_chunks=chunks), costs)

    found = long_batch(simulated, c, M)
    return None if found is None else found[0], sizes


@pytest.mark.thorough(but=["0.0-1-1-100000"])
@pytest.mark.parametrize(("P", "V", "M"), [(1, 1, 10**5), (4, 1, 10**5 + 3), (4, 3, 10**5), (16, 1, 1000)])
@pytest.mark.parametrize("latency", [0.0, 0.5, 3.0])
def test_it_is_found_and_short(P: int, V: int, M: int, latency: float) -> None:
    """Equal stages are steady at once, though not each microbatch where messages take time; unequal ones after some."""
    c = configuration("1f1b" if V == 1 else "interleaved", P, V, M)
    for costs in (
        Costs(forward=1, backward=2, latency=latency),
        Costs(forward=1, backward=[2] * (P * V - 1) + [3], latency=latency),
    ):
        seconds, sizes = folded(c, M, costs)
        assert seconds is not None
        assert max(sizes) < 14 * P


def test_what_slowly_gets_out_of_step_is_not_steady() -> None:
    """The first rank is a thousandth slower than the last, which runs at its own pace while there is work in stock."""
    costs = Costs(forward=[1 + 2.0**-10, 0.5, 0.5, 1], backward=[2, 1, 1, 2])
    assert folded(configuration("1f1b", 4, 1, 300), 300, costs)[0] is None


@pytest.mark.parametrize(("schedule", "P", "V"), [("1f1b", 3, 1), ("2bw", 3, 1), ("interleaved", 4, 3)])
def test_what_is_in_flight_is_that_of_the_whole_batch(schedule: str, P: int, V: int) -> None:
    """Memory of a short batch where it holds exactly as much; interleaved groups of other sizes hold more."""
    nodes = tuple(Node(name=f"n{i}", forward_seconds=1, backward_seconds=2) for i in range(P * V))
    evaluator = evaluator_of(Profile(nodes=nodes), 1e9, P)
    for M in range(5 * P, 7 * P):
        counted = evaluator.schedules.in_flight(configuration(schedule, P, V, M), exact=True)
        chunks = V if V > 1 else None
        whole = count_in_flight(build(schedule, num_ranks=P, num_microbatches=M, num_chunks=chunks))
        for a, b in zip(counted, whole, strict=True):
            for is_backward in (False, True):
                ours, theirs = (
                    np.unique(
                        each.counts[each.num_forwards :] if is_backward else each.counts[: each.num_forwards], axis=0
                    )
                    for each in (a, b)
                )
                assert np.array_equal(ours, theirs), (M, is_backward)


def test_what_no_short_batch_stands_for() -> None:
    assert short_batches(configuration("gpipe", 4, 1, 10**6), 10**6) == ()
    assert short_batches(configuration("2bw", 4, 1, 10**6), 10**6) == ()
    assert short_batches(configuration("interleaved", 4, 2, 10**6 + 1), 10**6 + 1) == ()
    assert short_batches(configuration("1f1b", 4, 1, 40), 40) == ()


def test_very_long_batches_are_planned() -> None:
    """A million microbatches: every layout is simulated, and the plan's seconds are its work and its fill."""
    nodes = tuple(Node(name=f"n{i}", forward_seconds=1, backward_seconds=2, parameter_bytes=1e9) for i in range(4))
    found = plan(
        Profile(nodes=nodes), Cluster.from_levels([(4, 1e3)]), global_batch=10**6, schedules="1f1b", data_sizes=(1,)
    )
    assert len(found.stages) == 4
    assert found.simulated_step_time == pytest.approx((10**6 + 3) * 3, rel=1e-9)
    assert found.searched.too_long == 0
    many = partition(Profile(nodes=nodes), Cluster.from_levels([(4, 1e3)]), num_microbatches=10**12, straight=True)
    assert many.simulated_step_time == pytest.approx((10**12 + 3) * 3, rel=1e-9)
