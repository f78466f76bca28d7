"""One treatment from each rank's front: against every treatment of every stage in every cut, by the same simulation."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.grids import nightly
from support.inside import (
    COUNTED,
    NOT_SEARCHED,
    RECOMPUTE,
    Configuration,
    DoesNotFitError,
    InFlightCounts,
    MemoryRules,
    Model,
    PlaceNetwork,
    PlanEvaluator,
    PlanSearch,
    RankPlace,
    Recomputed,
    SearchSpace,
    StageSums,
    Topology,
    _TreatedRank,
    stage_seconds,
)
from support.inside import simulated_simulated as simulated

from stagewright.partition import Cluster, DeviceKind, Node, Plan, Profile, plan
from stagewright.schedules import Costs, Link, Links, MemoryPart, build, memory_curves, simulate

from .small import OverTensors, configuration


def drawn(seed: int) -> tuple[Profile, Configuration, Cluster, float]:
    """A chain of four or five nodes on two or three ranks, or on two of two chunks or replicas; little memory."""
    rng = random.Random(seed)

    def figure(most: int) -> float:
        return rng.randint(0, most) / 4

    nodes = []
    for i in range(rng.choice((4, 4, 5))):
        stash = figure(16)
        nodes.append(
            Node(
                name=f"n{i}",
                forward_seconds=figure(8) + 0.25,
                backward_seconds=figure(16) + 0.25,
                activation_bytes=figure(4),
                parameter_bytes=figure(6),
                stash_bytes=stash,
                update_seconds=figure(4),
                runs_again=rng.random() < 0.8,
                selective_bytes=stash / 2,
                selective_seconds=figure(4),
                keep_less_bytes=stash * 0.75,
                keep_less_seconds=figure(2),
            )
        )
    pipeline, data, chunks = rng.choice(((2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2)))
    c = configuration(
        pipeline=pipeline,
        data=data,
        schedule="1f1b" if chunks == 1 else "interleaved",
        num_chunks=chunks,
        num_microbatches=rng.choice((2, 4, 6)) * data,
    )
    whole = sum(4 * node.parameter_bytes + 2 * node.stash_bytes + 6 * node.activation_bytes for node in nodes)
    bandwidth = rng.choice((2.0, 20.0))
    limit = whole * rng.uniform(0.2, 0.8) + 1
    return Profile(nodes=tuple(nodes), microbatch_size=1), c, Cluster.from_levels([(pipeline * data, bandwidth)]), limit


def every_step(
    profile: Profile,
    c: Configuration,
    cluster: Cluster,
    limit: float,
    sharding: tuple[str, ...],
    *,
    words: tuple[str, ...] = RECOMPUTE,
) -> Iterator[float]:
    """Seconds of all treatments and cuts; where `words` have "offload", of the first chunks of a rank beside "none"."""
    own_words = [word for word in words if word != "offload"]
    rules = MemoryRules(optimizer_ratio=2.0, recompute=tuple(own_words), sharding=sharding, offloads="offload" in words)
    model = Model(profile, rules)
    free, tight = (PlanEvaluator(Topology(cluster, memory_limit=each), lambda *_: model) for each in (None, limit))
    ways = (1, c.data) if sharding == ("none", "full") else (1,)
    for inner in combinations(range(1, len(profile.nodes)), c.num_stages - 1):
        ends = (0, *inner, len(profile.nodes))
        base, flights = free.choices(c, ends, exact=True)[0], tight.schedules.in_flight(c, exact=True)
        places, fitting = tight._of_each_rank(c, ends, flights, {}, lambda _, place: place), []
        for p, place in enumerate(places):
            rank = _TreatedRank(base.sums, flights[p], place, rules)
            counted = [word for word in own_words if word in COUNTED]
            numbers = [[*product(counted, range(1, ends[s + 1] - ends[s]))] for s in place.stages]
            options = [[*own_words, *(f"{kind}:{k}" for kind, k in own)] for own in numbers]
            choices = product(product(*options), product({*ways}, repeat=len(options)))
            fits = [(names, shards) for names, shards in choices if not rank.memory(names, shards).too_many]
            fitting.append(fits + leaving(fits, rank, ways) if "offload" in words else fits)
        steps: dict[object, float] = {}
        for chosen in product(*fitting):
            treatments = [(chosen[p], s // c.pipeline) for s, p in enumerate(c.positions)]
            seconds = stage_seconds(
                base.sums,
                base.placement.on,
                again=base.sums.seconds_again([names[v] for (names, _), v in treatments]),
                shards=[shards[v] for (_, shards), v in treatments],
            )
            key = (
                np.concatenate([seconds.backward, seconds.ring, seconds.step, seconds.gather]).tobytes(),
                tuple(names for names, _ in chosen if "offload" in names),
            )
            if key[1]:
                key += (chosen,)  # type: ignore[assignment]
            if key not in steps:
                memories = tuple(
                    _TreatedRank(base.sums, flights[p], place, rules).memory(*chosen[p])
                    for p, place in enumerate(places)
                )
                try:
                    found = tight.simulate(replace(base, seconds=seconds, memories=memories))
                except DoesNotFitError:
                    steps[key] = math.inf
                else:
                    steps[key] = found.simulated_seconds
        yield from steps.values()


def leaving(fits: list[Any], rank: _TreatedRank, ways: tuple[int, ...]) -> list[Any]:
    """Treatments of a rank that cannot keep all; whether they fit, their simulation says. Of `fits` those go that run
    again what they need not: that can be faster, since it gives the link to the host time."""
    V, names = rank.num_chunks, ("none",) * rank.num_chunks
    if all((names, (way,) * V) in fits for way in ways):
        fits[:] = [each for each in fits if each[0] == names]
        return []
    seconds = {
        id(each): np.array([rank.sums.under(n).seconds[s] for n, s in zip(each[0], rank.own, strict=True)])
        for each in fits
    }

    def beaten(each: Any) -> bool:
        mine = seconds[id(each)]
        return any(
            other[1] == each[1] and (seconds[id(other)] <= mine).all() and (seconds[id(other)] < mine).any()
            for other in fits
        )

    fits[:] = [each for each in fits if not beaten(each)]
    return [*product([("offload",) * k + names[k:] for k in range(1, V + 1)], product(ways, repeat=V))]


def compared(seed: int, words: tuple[str, ...] = RECOMPUTE, host: float | None = None) -> tuple[float, set[str]] | None:
    """By how much the plan as named is slower than the best there is, relative, and what its stages do; None where
    nothing fits."""
    sharding = ("none", "full")
    profile, c, cluster, limit = drawn(seed)
    if host is not None:
        cluster, limit = replace(cluster, kinds=(DeviceKind(host_bandwidth=host),)), limit * 2
        nodes = (replace(node, stash_bytes=4 * node.stash_bytes + 1) for node in profile.nodes)
        schedule = "gpipe" if c.num_chunks == 1 and seed % 3 else c.schedule
        profile = replace(profile, nodes=tuple(nodes))
        c = replace(c, num_microbatches=6 * c.data, schedule=schedule)
    least = min(every_step(profile, c, cluster, limit, sharding, words=words), default=math.inf)
    options = {"global_batch": c.num_microbatches, "memory_limit": limit, "optimizer_sharding": sharding}
    options |= {"pipeline_sizes": (c.pipeline,), "data_sizes": (c.data,), "schedules": (c.schedule,)}
    try:
        found = plan(profile, cluster, chunk_sizes=(2,), recompute=words, **options)  # type: ignore[arg-type]
        with mock.patch.object(PlanSearch, "with_orders", lambda _, found: found):
            named = plan(profile, cluster, chunk_sizes=(2,), recompute=words, **options)  # type: ignore[arg-type]
    except ValueError as error:
        assert "nothing fits the memory" in str(error)  # noqa: PT017
        assert least == math.inf
        return None
    timeline = simulated(found).timeline
    assert timeline.batch_seconds == pytest.approx(found.simulated_step_time, rel=1e-9)
    for rank, curve in enumerate(memory_curves(timeline, found.stage_bytes)):
        sent = curve.parts.get(
            MemoryPart.MESSAGES, (0.0,) * len(curve.times)
        )  # slow links may hold up more than a plan counts
        most = max(held - own for held, own in zip(curve.total, sent, strict=True))
        said = found.memory[rank]  # without a workspace it is fullest behind the batch, and what it sends then are sums
        one = c.num_chunks == 1  # of several chunks messages count at the fullest moment, and are more at others
        assert most + (said.communication if said.workspace and one else 0.0) <= limit * (1 + 1e-9)
    assert found.simulated_step_time <= named.simulated_step_time
    return named.simulated_step_time / least - 1, {stage.recompute for stage in named.stages}


# Two hundred of them by day, and so below.
@pytest.mark.thorough
@pytest.mark.parametrize("first", [first if first < 200 else nightly(first) for first in range(0, 500, 50)])
def test_as_fast_as_the_best_of_all_treatments_and_cuts(first: int) -> None:
    """500 cases: recomputation of each stage, by counts too, and whether its optimizer is divided over two replicas."""
    found = {seed: compared(seed) for seed in range(first, first + 50)}
    known = {seed: each[0] for seed, each in found.items() if each is not None}
    assert len(known) > 25
    assert known == pytest.approx(dict.fromkeys(known, 0.0), abs=1e-8)


@pytest.mark.thorough
@pytest.mark.parametrize("first", [first if first < 200 else nightly(first) for first in range(0, 500, 25)])
def test_as_fast_as_the_best_where_activations_may_wait_on_the_host(first: int) -> None:
    """500 cases more, over fast links and slow ones: of each rank the first chunks' leave, or layers run again."""
    hosts = (4.0, 16.0, 64.0, 256.0)
    found = {seed: compared(seed, ("none", "layer", "offload"), hosts[seed % 4]) for seed in range(first, first + 25)}
    known = {seed: each[0] for seed, each in found.items() if each is not None}
    assert len(known) > 8
    assert any("offload" in each[1] for each in found.values() if each is not None)
    assert known == pytest.approx(dict.fromkeys(known, 0.0), abs=1e-8)


def test_the_first_stage_recomputes_and_the_last_does_not() -> None:
    """1F1B on three ranks: three, two and one microbatch of four layers that keep 100 bytes each or 10."""
    layer = {"forward_seconds": 1.0, "backward_seconds": 2.0, "activation_bytes": 10.0, "stash_bytes": 100.0}
    profile = Profile(nodes=tuple(Node(name=f"l{i}", **layer) for i in range(12)), microbatch_size=1)  # type: ignore[arg-type]
    options = {"global_batch": 8, "schedules": "1f1b", "pipeline_sizes": (3,), "recompute": ("none", "layer")}
    found = plan(profile, Cluster.from_levels([(3, 1e9)]), memory_limit=900.0, **options)  # type: ignore[arg-type]
    assert [stage.recompute for stage in found.stages] == ["layer:2", "layer:1", "none"]
    assert [len(stage.nodes) for stage in found.stages] == [4, 4, 4]
    assert found.memory[0].activations == 3 * (2 * 100 + 10) + 100  # the first one takes the batch
    assert "recompute layer:2" in found.explain()
    assert "recompute layer in 2 of 3 stages" in found.explain().replace("\n  ", " ")


@pytest.mark.parametrize("seed", range(8))
def test_of_very_many_ways_the_pruned_ones_are_nearly_the_best(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of four stages with up to six ways each: 1% more seconds at most where few go on, and never a misfit."""
    rng = np.random.default_rng(seed)
    V, moments = 4, 6
    stash, forward = rng.uniform(50, 100, V), rng.uniform(1, 2, V)
    tables = [np.linspace(0, 1, 6) for _ in range(V)]
    nothing = np.zeros(V)
    others = ("backward", "update", "weights", "buffers", "before", "after", "workspace", "largest", "small")
    sums = StageSums(
        forward=forward,
        stash=stash,
        **dict.fromkeys(others, nothing),
        by_node=lambda _: Recomputed(kept=stash * 0.1, again=stash / 6, seconds=forward),
        by_count=lambda v, _: Recomputed(
            stash[v] * (1 - 0.9 * tables[v]), stash[v] / 6 * (tables[v] > 0), forward[v] * tables[v]
        ),
    )
    held, running = rng.integers(1, 7, (moments, V)), np.eye(V)[rng.integers(0, V, moments)]
    counts = np.concatenate([held, np.zeros((moments, 2 * V)), running], axis=1).astype(float)
    flight = InFlightCounts(counts=counts, num_forwards=moments, versions=1)
    most = float((held @ stash).max())
    for share in (0.9, 0.6, 0.35):
        place = RankPlace(stages=tuple(range(V)), replicas=1, tensor=1, limit=share * most)
        took = []
        for ways in (10_000, 40):
            monkeypatch.setattr("stagewright.partition.recompute._MOST_PARTIAL", ways)
            best = MemoryRules(optimizer_ratio=2.0, recompute=("none", "layer")).front(sums, flight, place)[0]
            assert best.too_many == 0
            took.append(float(sums.seconds_again(best.recompute).sum()))
        assert took[0] <= took[1] <= 1.05 * took[0]


def test_a_heavy_stage_has_two_ranks() -> None:
    """Two of four devices have the heavy unit, and each of the others one: with two for both, two are slower."""
    named = (("heavy", 4.0), ("b", 3.0), ("c", 3.0))
    nodes = tuple(
        Node(name=n, forward_seconds=f, backward_seconds=f, activation_bytes=8.0, parameter_bytes=64.0)
        for n, f in named
    )
    source = OverTensors(Profile(nodes=nodes, microbatch_size=1), 1.3)
    options = {"global_batch": 32, "data_sizes": (1,), "schedules": "1f1b", "tensor_sizes": (1, 2)}
    found = plan(source, Cluster.from_levels([(4, 100.0)]), microbatch_sizes=(1,), **options)  # type: ignore[arg-type]
    assert [(stage.nodes, stage.tensor, stage.ranks) for stage in found.stages] == [
        (("heavy",), 2, (0, 1)), (("b",), 1, (2,)), (("c",), 1, (3,))
    ]  # fmt: skip
    assert [stage.parameter_bytes for stage in found.stages] == [32.0, 64.0, 64.0]
    assert [way.seconds_per_byte for way in found.links.network.routes.values()] == [0.01, 0.01]  # by one member
    assert found.searched is not None
    assert "tensor 2-1-1" in found.explain().splitlines()[0]
    assert "heavy, tensor 2" in found.explain()
    assert Plan.from_json(found.to_json()) == found


@pytest.mark.thorough
@pytest.mark.parametrize("first", [0, nightly(50)])
def test_as_fast_as_the_best_of_all_tensor_sizes(first: int) -> None:
    """Stages in a row on four devices: every size of each, every cut, simulated from the profiles alone."""
    mixed = 0
    for seed in range(first, first + 50):
        rng = random.Random(seed)
        nodes = [
            Node(
                name=f"n{i}",
                forward_seconds=rng.randint(1, 12) / 4,
                backward_seconds=rng.randint(1, 24) / 4,
                activation_bytes=rng.randint(0, 12) / 4,
            )
            for i in range(rng.choice((3, 4)))
        ]
        m, more, bandwidth = rng.choice((2, 8, 32)), rng.choice((1.0, 1.4, 1.8)), rng.choice((2.0, 50.0))
        source = OverTensors(Profile(nodes=tuple(nodes), microbatch_size=1), more)
        cluster = Cluster.from_levels([(4, bandwidth)])
        steps = {}
        for P in range(1, len(nodes) + 1):
            for sizes, inner in product(product((1, 2, 4), repeat=P), combinations(range(1, len(nodes)), P - 1)):
                if sum(sizes) <= 4:
                    steps[sizes, inner] = step_of(source, sizes, (0, *inner, len(nodes)), bandwidth, m)
        options = {"global_batch": m, "data_sizes": (1,), "schedules": "1f1b", "microbatch_sizes": (1,)}
        found = plan(source, cluster, **options)  # type: ignore[arg-type]
        assert found.simulated_step_time == pytest.approx(min(steps.values()), rel=1e-8), seed
        assert found.searched.least <= min(steps.values()) * (1 + 1e-9)
        assert found.searched.faster_left(found.simulated_step_time or 0) == 0
        mixed += len({stage.tensor for stage in found.stages}) > 1
    assert mixed > 1


@pytest.mark.parametrize("num_devices", [4, 12])
def test_tensor_sizes_of_stages_are_those_that_are_not_told_to_be_left_out(num_devices: int) -> None:
    schedules = [("1f1b", (1,)), ("2bw", (1,)), ("interleaved", (2,))]
    sizes: dict[str, Any] = {"microbatch_sizes": [1], "tensor_sizes": [1, 2, 4], "max_stages": num_devices}
    space = SearchSpace(num_devices=num_devices, global_batch=4, schedules=schedules, **sizes)
    mixed = [each for each in space.configurations() if each.sizes is not None]
    assert {each.schedule for each in mixed} == {"1f1b"}
    assert {(each.data, each.num_chunks, each.num_devices) for each in mixed} == {(1, 1, num_devices)}
    turns = [sum(one != other for one, other in pairwise(each.sizes or ())) for each in mixed]
    assert max(turns) == (2 if num_devices == 4 else 1)
    said = next(each for each in NOT_SEARCHED if "tensor ranks that do" in each)
    for what in ("replicas", "chunks", "streams", "idle devices", "on more than 8 devices", "take turns"):
        assert what in said


def step_of(source: OverTensors, sizes: tuple[int, ...], ends: tuple[int, ...], bandwidth: float, m: int) -> float:
    own = [
        source.profile(microbatch_size=1, tensor=size).nodes[a:b]
        for size, (a, b) in zip(sizes, pairwise(ends), strict=True)
    ]
    routes = {(p, p + 1): Link(seconds_per_byte=1 / bandwidth / min(pair)) for p, pair in enumerate(pairwise(sizes))}
    crossing = [stage[-1].activation_bytes for stage in own[:-1]]
    links = Links(
        network=PlaceNetwork(places=tuple((p,) for p in range(len(sizes))), routes=routes), activation_bytes=crossing
    )
    costs = Costs(
        forward=[sum(node.forward_seconds for node in stage) for stage in own],
        backward=[sum(node.backward_seconds for node in stage) for stage in own],
    )
    return simulate(build("1f1b", num_ranks=len(sizes), num_microbatches=m), costs, links).makespan
