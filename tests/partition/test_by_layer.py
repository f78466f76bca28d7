"""Each node over a tensor group divided, whole or by samples: against all assignments, and what a plan makes of it."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
from support.inside import by_layer

from stagewright.partition import Cluster, Node, Plan, PlanStage, Profile, plan

LATENCY, PER_BYTE = 0.3, 0.1


def priced(node: Node) -> Node:
    forward, backward = (
        number * LATENCY + num_bytes * PER_BYTE
        for number, num_bytes in (
            (node.forward_sums, node.forward_sum_bytes),
            (node.backward_sums, node.backward_sum_bytes),
        )
    )
    return replace(
        node, forward_seconds=node.forward_seconds + forward, backward_seconds=node.backward_seconds + backward
    )


def random_profiles(seed: int) -> tuple[Profile, Profile, Profile]:
    """A chain, sometimes with a branch: a microbatch on one rank and over two, and half of it on one; figures differ
    freely, and some nodes hand halves of their features on."""
    rng = random.Random(seed)
    n = rng.randint(2, 5)
    names = [f"n{i}" for i in range(n)]
    edges = list(pairwise(names))
    if n > 3 and rng.random() < 0.4:
        edges.append((names[0], names[rng.randrange(2, n)]))
    whole, cut, half = [], [], []
    for i, name in enumerate(names):
        weights, way = rng.choice((0.0, 4.0, 12.0, 60.0)), rng.choice(("any",) * 5 + ("divided",))
        one = Node(
            name=name,
            forward_seconds=rng.randint(2, 20) / 4,
            backward_seconds=rng.randint(2, 40) / 4,
            activation_bytes=rng.choice((2.0, 8.0, 30.0)),
            parameter_bytes=weights,
            largest_parameter_bytes=weights and weights / rng.choice((1, 2)),
            way=way,
        )
        parts = bool(cut) and cut[-1].activation_bytes < whole[-1].activation_bytes  # of features come in
        is_cut = weights > 0 and way == "any" and rng.random() < 0.7
        on = is_cut and i < n - 1 and not parts and rng.random() < 0.5
        faster = 0.55 if is_cut or parts else 1.0
        sums = {"forward_sums": 1.0, "forward_sum_bytes": one.activation_bytes} if is_cut and not on else {}
        whole.append(one)
        cut.append(
            replace(
                one,
                way="divided",
                forward_seconds=one.forward_seconds * faster,
                backward_seconds=one.backward_seconds * faster,
                parameter_bytes=weights / 2 if is_cut else weights,
                largest_parameter_bytes=0.0,
                activation_bytes=one.activation_bytes / (2 if on else 1),
                **sums,
            )
        )
        share = rng.choice((0.5, 0.6, 1.0))
        half.append(
            replace(
                one, forward_seconds=one.forward_seconds * share, backward_seconds=one.backward_seconds * share,
                activation_bytes=one.activation_bytes / 2,
            )
        )  # fmt: skip
    shared: dict[str, Any] = {"edges": tuple(edges)}
    return (
        Profile(nodes=whole, microbatch_size=2, **shared),
        Profile(nodes=cut, microbatch_size=2, tensor=2, **shared),
        Profile(nodes=half, microbatch_size=1, **shared),
    )


@cache
def seconds(node: Node) -> float:
    return priced(node).seconds


def seconds_of(ways: tuple[str, ...], whole: Profile, cut: Profile, half: Profile) -> float | None:
    """F + B of all nodes, with the seconds of what travels as the runtime does it; None for ways that do not run."""
    place = {node.name: i for i, node in enumerate(whole.nodes)}
    edges = [(place[a], place[b]) for a, b in whole.edges or ()]
    takers = [[b for a, b in edges if a == i] for i in range(len(ways))]
    makers = [[a for a, b in edges if b == i] for i in range(len(ways))]
    has_part = [c.activation_bytes < w.activation_bytes for c, w in zip(cut.nodes, whole.nodes, strict=True)]
    for a, b in edges:
        if has_part[a] and (ways[a] == "divided") != (ways[b] == "divided"):
            return None
    total = 0.0
    for i, way in enumerate(ways):
        one = whole.nodes[i]
        if one.way == "divided" and way != "divided":
            return None
        if way != "samples":
            total += seconds(cut.nodes[i] if way == "divided" else one)
            continue
        part = half.nodes[i]
        total += part.seconds
        goes_on = takers[i] == [i + 1] and makers[i + 1] == [i] and ways[i + 1] == "samples"
        comes_in = len(makers[i]) == 1 and takers[i - 1] == [i] and makers[i] == [i - 1] and ways[i - 1] == "samples"
        if not goes_on:
            total += LATENCY / 2 + PER_BYTE * one.activation_bytes / 2
        if makers[i] and not comes_in:
            total += LATENCY / 2 + PER_BYTE * sum(whole.nodes[m].activation_bytes for m in makers[i]) / 2
        if part.parameter_bytes:
            total += LATENCY * part.parameter_bytes / part.largest_parameter_bytes + PER_BYTE * part.parameter_bytes
    return total


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first", range(0, 400, 100))
def test_no_assignment_takes_less(first: int) -> None:
    seen: set[str] = set()
    for seed in range(first, first + 100):
        profiles = random_profiles(seed)
        found = by_layer(*profiles, priced)
        every = product(("divided", "whole", "samples"), repeat=len(found))
        least = min(took for ways in every if (took := seconds_of(ways, *profiles)) is not None)
        assert sum(node.seconds for node in found) == pytest.approx(least, rel=1e-12), seed
        words = tuple(node.way.split()[0] for node in found)
        assert seconds_of(words, *profiles) == pytest.approx(least, rel=1e-12), seed
        seen.update(node.way for node in found)
    assert seen == {"divided", "whole", "samples", "samples on"}
