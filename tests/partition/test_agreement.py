"""`partition()` and `plan()` say the same of the same stage; simulated costs of stages on their ranks."""

import random
from collections import Counter
from dataclasses import replace
from itertools import accumulate, combinations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.inside import (
    SCHEDULES,
    Candidate,
    DoesNotFitError,
    MemoryRules,
    Model,
    PlanEvaluator,
    RangeCosts,
    SizesError,
    Topology,
    defer_updates,
    steady_in_flight,
)

from stagewright.partition import Cluster, Node, Profile, plan
from stagewright.schedules import AllReduce, Costs, Link, Links, build, simulate

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

    def exact(self) -> Candidate:
        if self.num_microbatches is not None:
            return self.evaluator.choices(self.configuration, self.ends, exact=True)[0]
        in_flight = steady_in_flight(self.schedule, self.counts, None)
        return self.evaluator.choices(self.configuration, self.ends, in_flight=in_flight)[0]

    def by_range(self) -> tuple[list[float], list[float]]:
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


@pytest.mark.thorough
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


CLUSTER = Cluster.parse("4:net=10B/s@1s")
NODES = (
    Node(name="a", forward_seconds=2, backward_seconds=4, activation_bytes=5, parameter_bytes=20),
    Node(name="b", forward_seconds=1, backward_seconds=2, activation_bytes=7),
)


def evaluated(schedule: str, replicas: tuple[int, int], nodes: tuple[Node, ...] = NODES) -> tuple[Candidate, Candidate]:
    model = Model(Profile(nodes=nodes), MemoryRules(optimizer_ratio=2.0))
    evaluator = PlanEvaluator(Topology(CLUSTER), lambda _size, _tensor: model)
    c = configuration(
        data=replicas[0], schedule=schedule, ranks=(tuple(range(replicas[0])), tuple(range(replicas[0], sum(replicas))))
    )
    found = evaluator.choices(c, (0, 1, 2), exact=True)[0]
    return found, evaluator.simulate(found)


def test_groups_that_hold_the_same_weights_sum_together() -> None:
    """With two such groups in each replica of four tensor ranks, and with one, on the same ranks."""
    topology = Topology(Cluster.from_levels([(4, 100), (2, 1)]))
    profiles = {size: Profile(nodes=NODES, tensor=4, context=size) for size in (1, 2)}
    evaluator = PlanEvaluator(topology, lambda size, _tensor: Model(profiles[size], MemoryRules(optimizer_ratio=2.0)))
    c = configuration(pipeline=1, data=2, tensor=4)
    rings = [evaluator.placement(replace(c, microbatch_size=size)).on.rings for size in (1, 2)]
    assert rings == [(topology.ring((0, 4), tensor=4),), (topology.ring((0, 2, 4, 6), tensor=2),)]


def test_memory_is_that_of_the_configuration_at_hand() -> None:
    """Between two evaluations of the same cuts the batch grows, and more is in flight, or its microbatches do."""
    profiles = [Profile(nodes=[replace(node, stash_bytes=each) for node in NODES]) for each in (0.0, 100.0, 200.0)]
    models = [Model(each, MemoryRules(optimizer_ratio=2.0)) for each in profiles]
    evaluator = PlanEvaluator(Topology(CLUSTER), lambda size, _tensor: models[size])
    small = configuration(num_microbatches=1)
    every = small, replace(small, num_microbatches=2), replace(small, microbatch_size=2), small
    held = [evaluator.choices(c, (0, 1, 2))[0].memories[0] for c in every]
    assert [each.in_flight for each in held] == [(1,), (2,), (1,), (1,)]
    assert [each.uses[0].activations for each in held] == [100, 200, 200, 100]


def test_a_divided_optimizer_steps_a_share_of_its_weights_on_each_rank() -> None:
    nodes = tuple(replace(node, update_seconds=3.0) for node in NODES)
    model = Model(Profile(nodes=nodes), MemoryRules(optimizer_ratio=2.0, sharding=("full",)))
    evaluator = PlanEvaluator(Topology(CLUSTER), lambda _size, _tensor: model)
    c = configuration(data=2, ranks=((0, 1), (2,)))
    assert evaluator.choices(c, (0, 1, 2), exact=True)[0].seconds.step.tolist() == [1.5, 3.0]


def test_replicas_without_a_flush() -> None:
    evaluation, found = evaluated("2bw", (2, 1))
    schedule = defer_updates(build("2bw", num_ranks=3, num_microbatches=4, replicas=(2, 1)))
    pairs = [(0, 2), (1, 2), (2, 0), (2, 1), (0, 1), (1, 0)]
    ways = {pair: Link(latency=1, seconds_per_byte=1 / 10, sending=pair[0], receiving=pair[1]) for pair in pairs}
    gradients = AllReduce(stage=0, seconds=2 * (1 + 20 / 2 / 10), ways=((0, 1), (1, 0)))
    links = Links(network=ways, activation_bytes=5, sums=(gradients,))
    timeline = simulate(schedule, Costs(forward=[2, 1], backward=[4, 2]), links)
    assert found.simulated_seconds == pytest.approx(timeline.batch_seconds)
    # Messages queue behind the sum on the cards, and two microbatches in flight a replica leave no slack.
    assert found.simulated_seconds > 4 * 3.0
    # Sums overlap with compute: half of the messages and a ring of 20 bytes and two latencies in four microbatches.
    links = 5 / 10 * 2 / 4 + (2 * 1.0 + 2 * 1 / 2 * 20 / 10) / 4
    assert evaluation.bottleneck == max(3.0, links) == 3.0


@pytest.mark.thorough
def test_what_must_run_again_is_known_before_it_is_chosen() -> None:
    """Never above the bound of what is chosen then, and above what it is without a look at the memory."""
    draw, higher = random.Random(0), Counter[bool]()
    for _ in range(10):
        nodes = tuple(
            Node(
                name=f"n{i}",
                forward_seconds=draw.random(),
                backward_seconds=2 * draw.random(),
                activation_bytes=draw.random(),
                parameter_bytes=draw.random(),
                stash_bytes=9 * draw.random(),
                selective_bytes=draw.random(),
                selective_seconds=draw.random() / 4,
            )
            for i in range(7)
        )
        rules = MemoryRules(
            optimizer_ratio=2.0, recompute=("none", "full", "layer", "selective"), sharding=("none", "full")
        )
        model = Model(Profile(nodes=nodes), rules)
        limit = draw.uniform(40, 120)
        evaluator = PlanEvaluator(Topology(CLUSTER, memory_limit=limit), lambda _s, _t, m=model: m)
        for schedule, pipeline, chunks in (("1f1b", 2, 1), ("interleaved", 2, 2), ("interleaved", 2, 3)):
            c = configuration(pipeline=pipeline, data=2, schedule=schedule, num_chunks=chunks, num_microbatches=12)
            in_flight = evaluator.schedules.in_flight(c, exact=True)
            for inner in combinations(range(1, 7), c.num_stages - 1):
                ends = (0, *inner, 7)
                plain, least = evaluator.least_seconds(c, ends), evaluator.least_seconds(c, ends, in_flight=in_flight)
                try:
                    found = evaluator.choices(c, ends, in_flight=in_flight)[0]
                except DoesNotFitError:
                    continue
                again = any(name != "none" for each in found.memories for name in each.recompute)
                assert plain <= least <= found.bound * (1 + 1e-9)
                higher[least > plain] += again
    assert higher[True] > 60
    assert higher[True] > 2 * higher[False]


def test_one_stage_has_tied_weights_once() -> None:
    """As if the second of the two nodes had none of them; stages apart have them both."""

    def ends(parameters: float, update: float, **more: object) -> Profile:
        nodes = [
            Node(name="in", forward_seconds=1.0, backward_seconds=2.0, parameter_bytes=30.0, update_seconds=3.0),
            Node(name="mid", forward_seconds=1.0, backward_seconds=2.0, parameter_bytes=10.0, update_seconds=1.0),
            Node(
                name="out", forward_seconds=1.0, backward_seconds=2.0, parameter_bytes=parameters, update_seconds=update
            ),
        ]
        return Profile(nodes=nodes, **more)  # type: ignore[arg-type]

    twice, once = ends(40.0, 4.0, tied=((("in", "out"), 30.0),)), ends(10.0, 1.0)
    cluster = Cluster.parse("2:net=10B/s@1s")
    for data in (1, 2):
        options = {"global_batch": 4, "pipeline_sizes": (1,), "data_sizes": (data,), "schedules": "1f1b"}
        found, wanted = (plan(each, cluster, **options) for each in (twice, once))  # type: ignore[arg-type]
        assert found.simulated_step_time == wanted.simulated_step_time
        assert found.memory_bytes == wanted.memory_bytes
        assert found.update_seconds == wanted.update_seconds
    apart = Model(twice, MemoryRules(optimizer_ratio=2.0)).stages((0, 1, 3))
    assert (apart.weights.tolist(), apart.update.tolist()) == ([30.0, 50.0], [3.0, 5.0])
