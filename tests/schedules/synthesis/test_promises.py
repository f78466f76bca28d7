"""Seconds are kept, by a clock that counts calls; more time or more room is never worse."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from support.inside import Synthesis, fitting_blocks

from stagewright.schedules import Costs, Layer, Link, Links, build, check, simulate, synthesize, synthesize_jointly


def uneven(num_stages: int) -> Costs:
    random = Random(num_stages)
    seconds = [random.uniform(0.8, 1.2) for _ in range(num_stages)]
    weight = [0.6 * each for each in seconds]
    return Costs(forward=seconds, input_grad=[1.1 * s for s in seconds], weight_grad=weight, latency=0.05)


@contextmanager
def calls_as_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], float]]:
    """A second is a million calls of functions, so that no other process takes from it."""
    made = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal made
        made += event.endswith("call")

    def clock() -> float:
        return made / 1e6

    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", clock)
        patched.setattr(time, "thread_time", clock)
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            yield clock
        finally:
            sys.setprofile(before)


SIZES: dict[str, dict[str, Any]] = {
    "plain": {"num_ranks": 8, "num_microbatches": 48, "costs": uneven(8), "memory_limit": 8},
    "v": {"num_ranks": 8, "num_microbatches": 24, "costs": uneven(16), "memory_limit": 10, "placement": "v"},
    "any": {"num_ranks": 8, "num_microbatches": 24, "costs": uneven(16), "memory_limit": 8, "placement": "any"},
    "links": {"num_ranks": 8, "num_microbatches": 24, "costs": uneven(8), "memory_limit": 9}
    | {"links": Links(network=Link(seconds_per_byte=0.1))},
}


@pytest.mark.thorough(but=["v"])
@pytest.mark.parametrize("kind", [*SIZES, "chains"])
def test_seconds_are_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond them only what an order takes to be written down: its simulation, and what a search was about to end."""
    layers = [Layer(forward=s, input_grad=s, weight_grad=s) for s in uneven(30).forward]  # type: ignore[union-attr]
    seconds = 1.5 if kind == "chains" else 0.6  # an order for the end of a chain takes 0.15
    with calls_as_clock(monkeypatch) as clock:
        if kind in SIZES:
            synthesize(**SIZES[kind], seconds=seconds)
        else:
            synthesize_jointly(layers, num_ranks=4, num_microbatches=8, seconds=seconds)
        assert clock() < 1.15 * seconds


def drawn(number: int) -> tuple[dict[str, Any], int]:
    """A small request, and the least memory of a rank."""
    random = Random(f"more {number}")
    placement = random.choice(["plain", "cyclic", "v"])
    P, V, M = random.randint(2, 4), 1 if placement == "plain" else 2, random.randint(3, 6)

    def seconds() -> list[float]:
        return [float(random.randint(3, 15)) for _ in range(P * V)]

    costs = Costs(forward=seconds(), input_grad=seconds(), weight_grad=seconds(), latency=random.choice([0.0, 1.0]))
    sizes = {"num_ranks": P, "num_microbatches": M, "costs": costs, "placement": placement}
    return sizes | {"objective": random.choice(["makespan", "span"]), "seconds": 600.0}, V


@pytest.mark.thorough(but=["2", "4"])
@pytest.mark.parametrize("number", range(6))
def test_more_evaluations_begin_with_fewer(number: int) -> None:
    sizes, least = drawn(number)
    found = [synthesize(**sizes, memory_limit=least + 1, evaluations=many) for many in (20, 90, 400)]
    for less, more in pairwise(found):
        assert way(more)[: len(less.history)] == way(less)
        assert more.value <= less.value


def way(found: Synthesis) -> list[tuple[float, int]]:
    return [(point.value, point.evaluations) for point in found.history]


@pytest.mark.thorough(but=["2"])
@pytest.mark.parametrize("number", range(6))
def test_more_room_is_no_worse(number: int) -> None:
    """By a higher limit, and by W that keep less."""
    sizes, least = drawn(number)
    rooms = [(least, 1.0), (least + 1, 1.0), (least + 1, 0.9), (least + 2, 0.9), (4 * least, 0.9)]
    values = [synthesize(**sizes, memory_limit=m, kept_share=k, evaluations=1500).value for m, k in rooms]
    assert values == sorted(values, reverse=True)


@pytest.mark.thorough
@pytest.mark.parametrize(("num_ranks", "limit", "part"), [(8, 10, 0.99), (16, 24, 0.97)])
def test_blocks_between_the_named_ones(num_ranks: int, limit: int, part: float) -> None:
    """Under limits between the memory of `v-min`, `v-half` and `zb-v` they leave these behind, at every P."""
    costs, M = Costs(forward=1.0, input_grad=1.0, weight_grad=0.67, latency=0.11), 2 * num_ranks
    blocks = [*fitting_blocks(num_ranks, M, limit)]
    assert all(check(schedule) for schedule in blocks)
    sizes = {"num_ranks": num_ranks, "num_microbatches": M, "costs": costs, "placement": "v", "objective": "span"}
    with_blocks = synthesize(**sizes, memory_limit=limit, seconds=600, evaluations=30)
    named = [simulate(build(name, num_ranks=num_ranks, num_microbatches=M), costs) for name in ("v-min", "v-half")]
    assert with_blocks.value <= part * min(each.span for each in named if max(each.peak_activations) <= limit)
