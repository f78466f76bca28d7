"""Lower bounds of layouts and of schedules: none is above what a simulation takes, and none refuses what fits."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from support.inside import (
    Configuration,
    DoesNotFitError,
    LeastSeconds,
    MemoryRules,
    Model,
    PlanEvaluator,
    SizesError,
    Topology,
    UnevenLayouts,
    least_of_any_cuts,
    range_costs,
    uneven_layouts,
)

from stagewright.partition import Cluster, Level, Node, Profile, plan

from .small import chain, configuration

RACKS = [Level(name=name, size=size, bandwidth=rate) for name, size, rate in (("a", 1, 9), ("b", 2, 1), ("c", 2, 0.2))]
HOSTS = [Level(name="a", size=2, bandwidth=1.0), Level(name="b", size=2, bandwidth=1.0, devices_per_card=2)]
FLAT, SHARED = Cluster(levels=tuple(RACKS), rings="flat"), Cluster(levels=tuple(HOSTS))
ONE_WAY = replace(Cluster.from_levels([(2, 9.0), (2, 1.0)]), node_links=((0, 1, 0.1, 0.0),))


def evaluator_of(
    profile: Profile, cluster: Cluster, *sharding: str, limit: float | None = None
) -> tuple[PlanEvaluator, Model]:
    model = Model(profile, MemoryRules(optimizer_ratio=2.0, sharding=("none", *sharding)))
    return PlanEvaluator(Topology(cluster, memory_limit=limit), lambda _size, _tensor: model), model


def bounds_and_seconds(profile: Profile, cluster: Cluster, M: int) -> Iterator[tuple[float, float, object]]:
    """Of every layout in a row of the first order of the devices."""
    evaluator, model = evaluator_of(profile, cluster, "full")
    sizes = {"schedule": "1f1b", "microbatch_size": 1, "num_microbatches": M}
    for least, c, ends in uneven_layouts(evaluator.topology, model, 0.0, **sizes)[0].in_order_of_bound(math.inf):
        choices = evaluator.choices(c, ends, exact=True)
        yield least, min(evaluator.simulate(each).simulated_seconds for each in choices), (c.ranks, ends)


@pytest.mark.parametrize(
    ("cluster", "figures", "M"),
    [
        (FLAT, {"parameter_bytes": 9.0}, 4),
        (ONE_WAY, {"activation_bytes": 1.0}, 2),
        (SHARED, {"activation_bytes": 9.0}, 8),
    ],
    ids=["exchanges-between-racks", "one-way", "shared-cards"],
)
def test_no_layout_takes_less_than_its_bound(cluster: Cluster, figures: dict[str, float], M: int) -> None:
    """Parts of sums go over the link that joins two racks, and a flat ring over the slowest one; a message back is not
    as slow as one there; messages on a host and between hosts leave over different cards."""
    found = list(bounds_and_seconds(chain(3, **figures), cluster, M))
    assert len(found) > 2
    for least, seconds, what in found:
        assert least <= seconds * (1 + 1e-9), what


@pytest.mark.thorough
def test_sums_that_begin_in_the_last_backward_are_bounded_as_such() -> None:
    nodes = [
        Node(
            name=name,
            forward_seconds=1.0,
            backward_seconds=2.0,
            parameter_bytes=9e6,
            largest_parameter_bytes=3e6,
            small_parameter_bytes=0.0,
        )
        for name in "abc"
    ]
    slower = Cluster.from_levels([(4, 2e6)])
    for profile in (
        Profile(nodes=nodes, microbatch_size=1, sums_early=True, sums_whole=each) for each in (True, False)
    ):
        for least, seconds, what in bounds_and_seconds(profile, slower, 4):
            assert least <= seconds * (1 + 1e-9), what
        best = plan(profile, slower, global_batch=4, optimizer_sharding=("none", "full"))
        assert best.searched.least <= (best.simulated_step_time or 0.0) * (1 + 1e-9)


def test_weights_without_a_sum_are_gathered_all_the_same() -> None:
    """The host takes its time for them where formulas give them no bytes to sum: in the bound and in the simulation."""
    kinds = {"forward_seconds": 1.0, "backward_seconds": 2.0, "update_seconds": 1.0}
    nodes = [Node(name="a", part_seconds=0.1, **kinds), Node(name="b", parameter_bytes=9.0, **kinds)]
    evaluator, _ = evaluator_of(Profile(nodes=nodes, microbatch_size=1), Cluster.from_levels([(4, 90.0)]), "full")
    for choice in evaluator.choices(configuration(pipeline=2, data=2), (0, 1, 2), exact=True):
        assert choice.bound <= evaluator.simulate(choice).simulated_seconds * (1 + 1e-9)


def test_messages_of_a_rank_over_its_own_links_and_over_a_shared_card_overlap() -> None:
    profile = chain(3, activation_bytes=9.0)
    evaluator, _ = evaluator_of(profile, SHARED)
    c = configuration(pipeline=3, schedule="zb-h1", num_microbatches=8)
    (choice,) = evaluator.choices(c, (0, 1, 2, 3), exact=True)
    links = 8 * (choice.seconds.sending + choice.seconds.sending_shared)
    assert max(choice.bound, evaluator.least_seconds(c, choice.ends)) <= evaluator.simulate(choice).simulated_seconds
    assert evaluator.simulate(choice).simulated_seconds < links.max()


@pytest.mark.thorough(but=["2-4"])
@pytest.mark.parametrize(("size", "M"), [(2, 4), pytest.param(3, 3, marks=pytest.mark.thorough)])
def test_layouts_with_idle_devices_are_not_refused_where_they_fit(size: int, M: int) -> None:
    """All layouts on two nodes that a search without a limit has, each under the limit that it needs itself; its bound
    is not above what it takes. Devices between stages, or after the last one, may be idle, and hold no microbatches."""
    profile = chain(3, backward_seconds=0.1, parameter_bytes=1.0, stash_bytes=9.0)
    cluster = Cluster.from_levels([(size, 9.0), (2, 1.0)])

    def layouts(limit: float | None = None) -> list[tuple[float, Configuration, tuple[int, ...]]]:
        _, model = evaluator_of(profile, cluster, limit=limit)
        costs = range_costs(model, cluster, "1f1b", M, limit)
        sample = Configuration(
            pipeline=1, data=1, tensor=1, num_chunks=1, schedule="1f1b", microbatch_size=1, num_microbatches=M
        )
        found = UnevenLayouts(model, costs, range(2 * size), sample, 0.0).in_order_of_bound(math.inf)
        return [(least, c, ends) for least, c, ends in found]

    evaluator, _ = evaluator_of(profile, cluster)
    have_idle = 0
    for least, c, ends in layouts():
        choices = evaluator.choices(c, ends, exact=True)
        assert least <= min(evaluator.simulate(each).simulated_seconds for each in choices) * (1 + 1e-9), (c, ends)
        have_idle += any(a[-1] + 1 < b[0] for a, b in pairwise((*c.stage_ranks, (2 * size,))))
        limit = min(each.memory_bytes for each in choices)
        assert (c.ranks, ends) in [(other.ranks, found) for _, other, found in layouts(limit)], (c.ranks, ends, limit)
    assert have_idle > 5


def test_a_rank_that_gathers_weights_ahead_does_so_before_its_first_microbatch_is_there() -> None:
    """Sums keep ranks from computing; the gather of the second stage is through before the first one's forward is."""
    small, large = chain(2, forward_seconds=9.0, parameter_bytes=1.0, update_seconds=9.0).nodes
    profile = Profile(nodes=[small, replace(large, parameter_bytes=8.0)], microbatch_size=1, gathers_ahead=True)
    cluster = Cluster(levels=(Level(name="a", size=4, bandwidth=1.0, sum_busy=1.0),))
    evaluator, _ = evaluator_of(profile, cluster, "full")
    c = configuration(data=2)
    for choice in evaluator.choices(c, (0, 1, 2), exact=True):
        seconds = evaluator.simulate(choice).simulated_seconds
        assert choice.seconds.gather[1] > 0
        assert max(choice.bound, evaluator.least_seconds(c, choice.ends)) <= seconds * (1 + 1e-9)


RECOMPUTE = [("none",), ("full",), ("none", "full"), ("none", "full", "layer", "selective")]
SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("eager-1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
OTHERS = [("2bw", 1), ("zb-h1", 1), ("looped-bfs", 2), ("zb-v", 2), ("hanayo", 2)]  # without a program of bounds


def node(rng: random.Random, kind: dict[str, float], name: str) -> Node:
    more: dict[str, float] = {}
    if rng.random() < 0.3:
        more = {"selective_bytes": kind["stash_bytes"] * rng.random(), "selective_seconds": 0.2 * rng.random()}
    if rng.random() < 0.3:
        more |= {"largest_parameter_bytes": kind["parameter_bytes"] * rng.uniform(0.2, 1), "small_parameter_bytes": 0.0}
    return Node(name=name, **kind, **more)


def problem(seed: int) -> tuple[random.Random, PlanEvaluator, Model]:
    """Nodes of few kinds, on links that keep ranks busy or are flat rings, with memory for a part of them."""
    rng = random.Random(seed)
    kinds = [
        {
            "forward_seconds": rng.uniform(0.1, 2),
            "backward_seconds": rng.uniform(0.1, 4),
            "activation_bytes": rng.choice([0, 0.1, 1, 5]) * rng.random(),
            "parameter_bytes": rng.choice([0.1, 1, 10]) * rng.random(),
            "buffer_bytes": rng.choice([0, 1]) * rng.random(),
            "stash_bytes": rng.choice([0.1, 1, 5]) * rng.random(),
            "update_seconds": rng.choice([0, 0.3, 2]) * rng.random(),
        }
        for _ in range(rng.randint(1, 3))
    ]
    nodes = [node(rng, rng.choice(kinds), f"n{i}") for i in range(rng.randint(3, 6))]
    shared = min(nodes[0].parameter_bytes, nodes[-1].parameter_bytes) * rng.random()
    profile = Profile(
        nodes=tuple(nodes),
        microbatch_size=1,
        tied=((("n0", nodes[-1].name), shared),) if rng.random() < 0.3 else (),
        action_seconds=rng.choice([0, 0.05]),
        around_seconds=rng.choice([0, 0.1]),
        sums_early=rng.random() < 0.2,
        sums_whole=rng.random() < 0.3,
        gathers_ahead=rng.random() < 0.2,
    )
    bandwidth, slower = rng.choice([0.5, 3, 10, 100]), rng.choice([1, 4])
    levels = [
        Level(
            name=f"level{at}",
            size=size,
            bandwidth=bandwidth / slower**at,
            latency=rng.choice([0, 0.05]),
            message_seconds=rng.choice([0, 0, 0.02]),
            message_bandwidth=None if seed % 3 else 1e3,
            sum_busy=rng.choice([0, 0, 0.3]),
        )
        for at, size in enumerate(rng.choice([(4,), (6,), (2, 2), (4, 2), (3, 2)]))
    ]
    more: dict[str, Any] = {"rings": "flat"} if rng.random() < 0.25 else {}
    every = 1 + sum(4 * each.parameter_bytes + 3 * each.stash_bytes for each in nodes)
    share = rng.choice([None, None, 0.2, 0.35, 0.6])
    rules = MemoryRules(
        optimizer_ratio=rng.choice([0.0, 2.0, 6.0]),
        recompute=rng.choice(RECOMPUTE),
        sharding=rng.choice([("none",), ("none", "full"), ("full",)]),
    )
    model = Model(profile, rules)
    topology = Topology(Cluster(levels=tuple(levels), **more), memory_limit=None if share is None else share * every)
    return rng, PlanEvaluator(topology, lambda _size, _tensor: model, norm=rng.choice([None, 0.1])), model


def least_simulated(evaluator: PlanEvaluator, c: Any, num_nodes: int) -> float:
    """Of every contiguous cut that fits, under its best treatments [s]; each bound of a candidate is below it."""
    best = math.inf
    for inner in combinations(range(1, num_nodes), c.num_stages - 1):
        try:
            for choice in evaluator.choices(c, (0, *inner, num_nodes), exact=True)[:6]:
                seconds = evaluator.simulate(choice).simulated_seconds
                known = choice.bound, choice.bottleneck * c.batch, evaluator.least_seconds(c, choice.ends)
                assert max(known) <= seconds * (1 + 1e-9)
                best = min(best, seconds)
        except (DoesNotFitError, SizesError):
            continue
    return best


@pytest.mark.thorough(but=["few"])
@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 150), marks=pytest.mark.thorough)], ids=["few", "many"]
)
def test_no_cuts_take_less_than_their_bounds(seeds: range) -> None:
    """The program of the schedule, where there is one; the bound before anything is cut; those of each cut."""
    shares = list[float]()
    for seed in seeds:
        rng, evaluator, model = problem(seed)
        num_nodes, num_devices = len(model.profile.nodes), evaluator.topology.num_devices
        for _ in range(3):
            (schedule, chunks), data = rng.choice(SCHEDULES + OTHERS), rng.choice([1, 2, 3])
            pipeline = rng.randint(1, min(num_devices // data, 4))
            M = rng.randint(1, 6) * (pipeline if schedule == "interleaved" else 1) * data
            sizes = {"pipeline": pipeline, "data": data, "num_chunks": chunks, "num_microbatches": M}
            c = configuration(schedule=schedule, **sizes, by_replica=rng.random() < 0.3 and min(data, pipeline) > 1)
            if c.num_stages > num_nodes:
                continue
            least, best = least_of_any_cuts(evaluator, c), least_simulated(evaluator, c, num_nodes)
            bounds = LeastSeconds(evaluator.topology, norm=evaluator.norm)
            known = [least, bounds.of_configuration(c, model)]
            known += [bounds.of_schedule(schedule, model, c.batch)] * (chunks == 1)  # of any number of stages
            above = [times * best for times in (1, 1.01, 1.1) if best < math.inf]
            known += [least_of_any_cuts(evaluator, c, most) for most in above]
            assert max(known) <= best * (1 + 1e-9), (seed, c.label())
            shares += [least / best] * (least > 0 and best < math.inf)
    assert sorted(shares)[len(shares) // 2] > 0.85  # not all of it is left out


def test_replicas_in_a_row_may_exchange_faster_than_stages_in_a_row() -> None:
    """One rank of each node; stages in a row have two of a node, which share its card. The bound was that of these."""
    levels = (Level(name="node", size=2, bandwidth=1.0), Level(name="rack", size=3, bandwidth=4.0))
    profile = replace(chain(2, parameter_bytes=30.0), gradient_ratio=2.0)
    evaluator, model = evaluator_of(profile, Cluster(levels=levels, rings="flat"), "full")
    c = configuration(schedule="1f1b", pipeline=2, data=3, num_microbatches=6, by_replica=True)
    in_order = replace(c, by_replica=False, ranks=tuple(map(tuple, c.stage_ranks)))
    bounds, least = LeastSeconds(evaluator.topology), least_simulated(evaluator, c, 2)
    assert 0.8 * least < bounds.of_configuration(c, model) == bounds.of_configuration(in_order, model) <= least


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 200), marks=pytest.mark.thorough)])
def test_whole_layers_are_bounded_more_tightly_and_never_above_any_cuts(seeds: range) -> None:
    """Equal layers between two others, in every cut: a rank has whole layers, and divides the state of all or none."""
    gains = list[float]()
    for rng in map(random.Random, seeds):
        kind = {"forward_seconds": 1.0, "backward_seconds": rng.uniform(1, 2), "activation_bytes": 0.1 * rng.random()}
        kind |= {"parameter_bytes": rng.uniform(0.5, 4), "stash_bytes": rng.choice([0.1, 1, 3]), "workspace_bytes": 1.0}
        light = {"forward_seconds": 0.4 * rng.random(), "backward_seconds": 0.3, "parameter_bytes": rng.random()}
        layers = [Node(name=f"n{i}", **kind) for i in range(rng.randint(5, 8))]
        profile = Profile(nodes=(Node(name="a", **light), *layers, Node(name="b", **light)), microbatch_size=1)
        model = Model(
            profile, MemoryRules(optimizer_ratio=6.0, recompute=rng.choice(RECOMPUTE), sharding=("none", "full"))
        )
        every = sum(8 * each.parameter_bytes + 3 * each.stash_bytes for each in profile.nodes)
        limit = rng.choice([None, 0.3 * every, 0.5 * every, 0.8 * every])
        cluster = Cluster.from_levels([(4, rng.choice([5.0, 100.0])), (2, 5.0)])
        evaluator = PlanEvaluator(Topology(cluster, memory_limit=limit), lambda _size, _tensor, own=model: own)
        (schedule, chunks), pipeline, data = (
            rng.choice([*SCHEDULES[3:], ("1f1b", 1)]),
            rng.randint(2, 3),
            rng.randint(1, 2),
        )
        sizes = {"pipeline": pipeline, "data": data, "num_chunks": chunks, "schedule": schedule}
        c = configuration(**sizes, num_microbatches=data * pipeline * rng.randint(1, 3))
        best, plain = least_simulated(evaluator, c, len(profile.nodes)), least_of_any_cuts(evaluator, c)
        for times in (0.9, 0.96, 1.0, 1.02, 1.2) if best < math.inf else ():
            found = least_of_any_cuts(evaluator, c, times * best)
            assert found <= min(times, 1 + 1e-9) * best, (c.label(), times)
            gains.append(found / min(plain, times * best))
    assert max(gains) > 1.05


@pytest.mark.parametrize("limit", [3.0, 4.0])
def test_of_long_steps_the_bound_is_as_of_short_ones(limit: float) -> None:
    """Without a unit of its own the solver said of steps of a day that nothing fits."""
    bounds = list[float]()
    for seconds in (1.0, 1000.0):
        kind = {"forward_seconds": seconds, "backward_seconds": 1.5 * seconds, "stash_bytes": 0.8}
        nodes = [Node(name=f"n{i}", parameter_bytes=0.004, activation_bytes=0.002, **kind) for i in range(6)]
        rules = MemoryRules(optimizer_ratio=6.0, recompute=("none", "full", "layer"), sharding=("full",))
        model, topology = (
            Model(Profile(nodes=nodes), rules),
            Topology(Cluster.from_levels([(4, 3.0)]), memory_limit=limit),
        )
        evaluator = PlanEvaluator(topology, lambda _size, _tensor, own=model: own)
        c = configuration(pipeline=1, num_chunks=2, schedule="looped-bfs", num_microbatches=4)
        bounds.append(least_of_any_cuts(evaluator, c) / seconds)
    assert bounds[1] == pytest.approx(bounds[0], rel=1e-4)


def test_messages_wait_for_sums_of_gradients_in_the_bound_of_any_cuts() -> None:
    """Four nodes have one cut into four stages. When none waited in the bound, it was 9% below the step."""
    profile, cluster = (
        chain(4, backward_seconds=1.0, parameter_bytes=20.0, activation_bytes=0.1),
        Cluster.from_levels([(4, 10.0)]),
    )
    evaluator, _ = evaluator_of(profile, cluster)
    c = configuration(pipeline=2, data=2, num_chunks=2, schedule="interleaved", num_microbatches=8)
    best = least_simulated(evaluator, c, 4)
    assert 0.94 * best < least_of_any_cuts(evaluator, c) <= best * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["interleaved", "hanayo"])
def test_cuts_that_just_fit_are_not_below_the_bound(schedule: str) -> None:
    """Small gradients travel as copies after the last backward of a stage; at other moments no cut holds them."""
    kind = {"forward_seconds": 1.0, "backward_seconds": 2.0, "activation_bytes": 0.05, "stash_bytes": 1.0}
    nodes = [
        Node(name=f"n{i}", parameter_bytes=w, small_parameter_bytes=w, **kind)
        for i, w in enumerate((4.0, 0.2, 2.0, 0.2, 2.0))
    ]
    profile, cluster = Profile(nodes=nodes, microbatch_size=1), Cluster.from_levels([(4, 10.0)])
    c = configuration(pipeline=2, data=2, num_chunks=2, schedule=schedule, num_microbatches=4)
    for inner in combinations(range(1, 5), 3):
        (own,) = evaluator_of(profile, cluster)[0].choices(c, (0, *inner, 5), exact=True)
        evaluator, _ = evaluator_of(profile, cluster, limit=own.memory_bytes)
        assert least_of_any_cuts(evaluator, c) <= least_simulated(evaluator, c, 5) * (1 + 1e-9)


def test_of_many_devices_the_least_is_that_of_the_program() -> None:
    """Ten pairs of equal nodes on 72 devices: messages and sums that other bounds of any cuts do not have."""
    profile, cluster = chain(4, activation_bytes=9.0, parameter_bytes=9.0), Cluster.from_levels([(8, 30.0), (9, 10.0)])
    sizes: dict[str, Any] = {"pipeline_sizes": (4,), "data_sizes": (18,), "schedules": ("1f1b",)}
    found = plan(profile, cluster, global_batch=72, microbatch_sizes=(1,), **sizes)
    model = Model(profile, MemoryRules(optimizer_ratio=2.0, sharding=("none", "full")))
    c = configuration(pipeline=4, data=18, num_microbatches=72)
    other = LeastSeconds(Topology(cluster)).of_configuration(c, model)
    assert other * 1.05 < found.searched.least <= found.simulated_step_time * (1 + 1e-9)
