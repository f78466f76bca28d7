"""An order for each batch of a plan's work: laws of cost by size, and the memory of the plan and of its devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.inside import Replanner, Size, fitted, peak_held, planned_for, stage_laws

from stagewright.partition import Cluster, Node, Plan, Profile, plan
from stagewright.schedules import MemoryLimitError, Schedule

MEASURED = [Size(1, 100), Size(1, 200), Size(1, 400)]
M = 6


def profile(size: Size) -> Profile:
    """F of 1 ms a token and attention; the last node has no attention, and half the W."""
    seconds = [1e-3 * size.tokens + attention * size.tokens * size.length for attention in (2e-6, 2e-6, 2e-6, 0.0)]
    nodes = [
        Node(
            name=f"n{number}",
            forward_seconds=f,
            backward_seconds=2 * f,
            input_grad_seconds=1.5 * f if number == 3 else f,
            weight_grad_seconds=0.5 * f if number == 3 else f,
            stash_bytes=100.0 * size.tokens,
            activation_bytes=8.0 * size.tokens,
            parameter_bytes=50.0,
        )
        for number, f in enumerate(seconds)
    ]
    return Profile(nodes=nodes, microbatch_size=size.samples)


PROFILES = {size: profile(size) for size in MEASURED}


def planned(memory_limit: float | None = None) -> Plan:
    return plan(
        planned_for(PROFILES),
        Cluster.from_levels([(2, 1e12)]),
        global_batch=M,
        schedules=("1f1b",),
        pipeline_sizes=(2,),
        data_sizes=(1,),
        recompute=("none",),
        memory_limit=memory_limit,
    )


def test_laws_are_what_was_measured_and_go_on_beyond() -> None:
    laws = stage_laws(planned(), PROFILES)
    whole = [s.nodes for s in planned().stages]
    for law, names in zip(laws, whole, strict=True):
        for size in (*MEASURED, Size(1, 1000), Size(2, 150)):
            nodes = [node for node in profile(size).nodes if node.name in names]
            assert law["forward"](size) == pytest.approx(sum(n.forward_seconds for n in nodes), rel=1e-6)
            assert law["weight_grad"](size) == pytest.approx(sum(n.weight_grad_seconds for n in nodes), rel=1e-6)
            assert law["input_grad"](size) == pytest.approx(sum(n.input_grad_seconds for n in nodes), rel=1e-6)
            assert law["held"](size) == pytest.approx(sum(n.stash_bytes for n in nodes), rel=1e-6)
    one, two = fitted({Size(2, 10): 3.0}), fitted({Size(1, 10): 3.0, Size(1, 20): 4.0})
    assert one(Size(1, 10)) == pytest.approx(1.5)
    assert two(Size(1, 40)) == pytest.approx(6.0)
    assert fitted({Size(1, 10): 0.0})(Size(1, 10)) > 0  # every action takes some time


def peaks(schedule: Schedule, held: list[list[float]]) -> list[float]:
    return [peak_held(program, held) for program in schedule.programs]


def test_the_step_of_a_batch_ends_with_the_norm_and_sums_of_tied_weights_as_that_of_the_plan() -> None:
    sums: dict[str, Any] = {"norm": 0.25, "tied": (((0, 1), 0.5),), "update": (0.0, 1.0)}
    plans = [replace(found, costs=replace(found.costs, **more)) for found in [planned()] for more in ({}, sums)]
    alone, whole = (Replanner(each, PROFILES, cold=1).find([Size(1, 400)] * M) for each in plans)
    assert whole.fixed_value == pytest.approx((alone.fixed_value or 0.0) + 0.25 + 0.5 + 1.0)


@pytest.mark.thorough
def test_no_more_memory_than_the_plan_or_its_own_order_and_never_more_than_the_device_has() -> None:
    short, long = Size(1, 100), Size(1, 400)
    replanner = Replanner(planned(), PROFILES)
    sizes = [long, short, short, long, short, short]
    largest = peaks(replanner._own, replanner.held([long] * M))
    assert replanner.limits(sizes) == replanner.limits([short] * M) == largest
    found = replanner.find(sizes)
    assert found.value < 0.95 * found.fixed_value
    assert all(
        here <= most * (1 + 1e-9)
        for here, most in zip(peaks(found.schedule, replanner.held(sizes)), largest, strict=True)
    )
    beyond = [Size(1, 600)] * M  # longer than any that was measured: the plan's own order holds more
    assert replanner.limits(beyond) == pytest.approx([1.5 * each for each in largest])

    tight = planned(memory_limit=1.1 * max(planned().memory_bytes.values()))
    replanner = Replanner(tight, PROFILES)
    assert max(replanner.limits(beyond)) < 1.2 * max(largest)
    some = [Size(1, 600), *[short] * (M - 1)]
    found = replanner.find(some)
    held = peaks(found.schedule, replanner.held(some))
    assert all(here <= most * (1 + 1e-9) for here, most in zip(held, replanner.limits(some), strict=True))
    with pytest.raises(MemoryLimitError, match="one microbatch alone takes"):
        replanner.find([Size(1, 2000), *[short] * (M - 1)])
