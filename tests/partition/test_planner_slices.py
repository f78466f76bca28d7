"""Plans over slices of the sequence: against every family, cut and length by hand, and what their memory holds.

Plans that choose over how many ranks sequences and experts are divided.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, combinations, pairwise, product
from typing import Any

import pytest
from support.inside import BuiltSchedules, DeviceModel, Transformer, TransformerSource, layout_of_plan
from support.inside import simulated_simulated as simulated

from stagewright.comm import World
from stagewright.partition import Cluster, GivenStage, Level, Node, Plan, PlanStage, Profile, evaluate, plan
from stagewright.schedules import (
    Costs,
    Link,
    Links,
    Op,
    build,
    equal_work_lengths,
    shortest_lengths,
    simulate,
    with_overlap,
)

from .small import chain, configuration

WHOLE, SLICED = ("1f1b", "gpipe"), ("seq1f1b", "terapipe")


def cuts(total: int) -> list[tuple[int, ...]]:
    inner = [each for n in range(1, total) for each in combinations(range(1, total), n)]
    return [tuple(b - a for a, b in pairwise((0, *each, total))) for each in inner]


def part(profile: Profile, length: int, offset: int) -> float:
    """Seconds of a slice in those of its sequence: fixed ones, by tokens, and by pairs of tokens that meet."""
    T = profile.sequence_tokens or 0
    pairs = length * offset + length**2 / 2
    rest = 1 - profile.slice_share - profile.pair_share
    return profile.slice_share + rest * length / T + profile.pair_share * pairs / (T * T / 2)


def drawn(seed: int) -> tuple[Profile, Cluster, dict[str, Any]]:
    rng = random.Random(seed)
    nodes = tuple(
        Node(
            name=f"n{i}",
            forward_seconds=rng.randint(1, 8) / 4,
            backward_seconds=rng.randint(1, 16) / 4,
            activation_bytes=rng.randint(0, 8) / 4,
        )
        for i in range(rng.randint(2, 5))
    )
    pairs = rng.choice((0.0, 0.3, 0.7))
    profile = Profile(
        nodes=nodes,
        microbatch_size=1,
        sequence_tokens=rng.randint(2, 5),
        pair_share=pairs,
        slice_share=rng.choice((0.0, 0.02, 0.2)),
        action_seconds=rng.choice((0.0, 0.05)),
    )
    ranks = rng.choice((2, 3))
    link = Level(name="net", size=ranks, bandwidth=rng.choice((2.0, 20.0)), latency=rng.choice((0.0, 0.1)))
    cluster = Cluster(levels=(replace(link, message_bandwidth=rng.choice((None, 9.0))),))
    return profile, cluster, {"global_batch": rng.randint(1, 3), "data_sizes": (1,), "chunk_sizes": (99,)}


def every_step(profile: Profile, cluster: Cluster, M: int) -> Iterator[float]:
    """Simulated seconds of all there is, one stage a rank: each action's own number, each message's own way."""
    T, way = profile.sequence_tokens or 0, cluster.levels[0]
    for P in range(1, min(cluster.num_devices, len(profile.nodes)) + 1):
        for inner in combinations(range(1, len(profile.nodes)), P - 1):
            stages = [profile.nodes[a:b] for a, b in pairwise((0, *inner, len(profile.nodes)))]
            for name, lengths in [(name, (T,)) for name in WHOLE] + [(n, each) for n in SLICED for each in cuts(T)]:
                offsets = [0, *accumulate(lengths)][:-1]
                parts = (
                    [part(profile, *each) for each in zip(lengths, offsets, strict=True)] if len(lengths) > 1 else [1]
                )
                rows = [
                    [[sum(getattr(n, what) for n in own) * each for each in parts] * M for own in stages]
                    for what in ("forward_seconds", "backward_seconds")
                ]
                rate = len(lengths) * (way.message_bandwidth or math.inf)
                sent = [0.0, *(own[-1].activation_bytes / rate for own in stages[:-1]), 0.0]
                busy = [*map(sum, pairwise(sent))]
                yield simulate(
                    build(name, num_ranks=P, num_microbatches=M, num_slices=len(lengths)),
                    Costs(forward=rows[0], backward=rows[1], overhead=profile.action_seconds, message_overhead=busy),
                    links(stages, lengths, way.latency, 1 / way.bandwidth),
                ).makespan


def links(stages: Sequence[Sequence[Node]], lengths: Sequence[int], latency: float, a_byte: float) -> Links:
    ways = {
        (a, b): Link(latency=latency, seconds_per_byte=a_byte, sending=a, receiving=b)
        for a in range(len(stages))
        for b in (a - 1, a + 1)
    }
    parts = tuple(each / sum(lengths) for each in lengths)
    sizes = [own[-1].activation_bytes for own in stages[:-1]]
    return Links(network=ways, activation_bytes=sizes, index_factors=parts)


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 120, 12))
def test_as_fast_as_the_best_of_all_families_cuts_and_lengths(first: int) -> None:
    """Sequences of up to 5 units, of which each way to cut is tried; what bounds promise is above none of them."""
    chosen = set()
    for seed in range(first, first + 12):
        profile, cluster, options = drawn(seed)
        found = plan(profile, cluster, schedules=(*WHOLE, *SLICED), max_simulated=10_000, **options)
        least = min(every_step(profile, cluster, options["global_batch"]))
        assert found.simulated_step_time == pytest.approx(least, rel=1e-8), seed
        assert found.searched.least <= least * (1 + 1e-9), seed
        assert simulated(found).timeline.batch_seconds == pytest.approx(found.simulated_step_time, rel=1e-9)
        assert Plan.from_json(found.to_json()) == found
        chosen.add(bool(found.slice_lengths))
    assert True in chosen


EQUAL = replace(chain(4), sequence_tokens=64, pair_share=0.5, slice_share=0.02)
FREE = Cluster.from_levels([(4, 1e12)])


@pytest.mark.thorough
def test_what_is_promised_of_more_lengths_than_are_tried() -> None:
    """terapipe on equal stages: no lengths are faster, of however many. seq1f1b: the longest slice is the shortest."""
    sequence = replace(EQUAL, sequence_tokens=9, slice_share=0.1)
    found = plan(sequence, FREE, global_batch=2, schedules="terapipe", pipeline_sizes=(4,))
    assert len(cuts(9)) > 64
    steps = []
    for lengths in cuts(9):
        parts = [part(sequence, *each) for each in zip(lengths, [0, *accumulate(lengths)], strict=False)]
        schedule = build("terapipe", num_ranks=4, num_microbatches=2, num_slices=len(lengths))
        steps.append(simulate(schedule, Costs(forward=1.0, backward=2.0, index_factors=parts * 2)).makespan)
    assert found.simulated_step_time == pytest.approx(min(steps), rel=1e-9)
    assert len(found.slice_lengths) == found.build_schedule().num_slices == 3
    assert f"slices of {'-'.join(map(str, found.slice_lengths))}" in " ".join(found.explain().split())
    cost = sequence.slice_cost
    assert found.slice_lengths == shortest_lengths(9, cost, num_ranks=4, num_microbatches=2)
    other = plan(sequence, FREE, global_batch=2, schedules="seq1f1b", pipeline_sizes=(4,))
    assert other.slice_lengths == equal_work_lengths(9, len(other.slice_lengths), cost)


@pytest.mark.thorough
def test_formulas_of_a_transformer_say_what_slices_cost() -> None:
    """A long sequence of which scores take most is cut; the formulas' profile says so without being asked."""
    shape = Transformer(layers=8, hidden=1024, heads=16, vocabulary=32_000, length=16_384, attention="flash")
    cluster = Cluster.parse("4:nvlink=300GB/s@2us")
    source = TransformerSource(transformer=shape, device=DeviceModel.preset("A100-80GB"), cluster=cluster)
    options: dict[str, Any] = {"global_batch": 2, "tensor_sizes": (1,), "pipeline_sizes": (4,), "chunk_sizes": (2,)}
    whole, sliced = (plan(source, cluster, schedules=names, **options) for names in ("1f1b", ("1f1b", "seq1f1b")))
    assert sliced.simulated_step_time < 0.8 * whole.simulated_step_time


@pytest.mark.parametrize("name", SLICED)
def test_slices_hold_their_tokens_and_the_keys_and_values_of_all(name: str) -> None:
    """Counted by hand along each program: what slices keep, and beside it keys and values of whole sequences from their
    first forward to their last backward."""
    lengths, M, P, kv = (5, 2, 1), 3, 3, 0.25
    schedule = build(name, num_ranks=P, num_microbatches=M, num_slices=3)
    c = configuration(pipeline=P, schedule=name, num_microbatches=M, lengths=lengths, shares=(0.5, 0.25, 0.25))
    for program, moments in zip(schedule.programs, BuiltSchedules().in_flight(c, exact=True, kv_share=kv), strict=True):
        tokens: dict[int, set[int]] = defaultdict(set)
        most = 0.0
        for _, op, index in program:
            k, q = divmod(index, 3)
            tokens[k] |= {q}
            most = max(most, sum(sum(lengths[q] for q in own) / 8 + kv for own in tokens.values() if own))
            tokens[k] -= {q} if op is Op.B else set()
        everything = moments.counts[:, 0].max()
        assert everything == pytest.approx(most, abs=1e-5)


@pytest.mark.thorough
def test_less_memory_than_whole_sequences_is_enough() -> None:
    """Where only slices fit, they are what the plan has; where neither does, it says so."""
    nodes = [replace(node, stash_bytes=8.0) for node in EQUAL.nodes]
    profile = replace(EQUAL, nodes=tuple(nodes), kv_share=0.125)
    options: dict[str, Any] = {"global_batch": 4, "pipeline_sizes": (4,), "recompute": ("none",)}
    whole = plan(profile, FREE, schedules="1f1b", **options)
    assert max(whole.memory_bytes.values()) == 4 * 8
    found = plan(profile, FREE, schedules=("1f1b", "seq1f1b"), memory_limit=20.0, **options)
    assert found.schedule == "seq1f1b"
    assert max(found.memory_bytes.values()) <= 20
    with pytest.raises(ValueError, match="nothing fits the memory"):
        plan(profile, FREE, schedules=("1f1b", "seq1f1b"), memory_limit=9.0, **options)


def test_what_slices_do_not_go_with_is_refused_by_name() -> None:
    plain = replace(EQUAL, sequence_tokens=None)
    assert plan(plain, FREE, global_batch=2).slice_lengths == ()
    assert plan(EQUAL, FREE, global_batch=2).slice_lengths == ()  # nobody named them
    for wrong, said in (
        ({"source": plain}, r"does not say what a slice costs: expected sequence_tokens, .*sequence_dim=1"),
        ({"recompute": ("full",)}, r"'seq1f1b' with recompute=full and tensor_sizes=1: expected 'none' and 1"),
        ({"schedules": "seq-zb-h1"}, r"schedules: 'seq-zb-h1': .*expected some of .*seq1f1b"),
        ({"schedules": "slimpipe"}, r"schedules: 'slimpipe': "),
    ):
        options = {"source": EQUAL, "schedules": "seq1f1b", "global_batch": 2} | wrong  # type: ignore[operator]
        with pytest.raises(ValueError, match=said):
            plan(options.pop("source"), FREE, **options)
    for field, number in (("pair_share", 1.5), ("sequence_tokens", 0)):
        with pytest.raises(ValueError, match=field):
            replace(EQUAL, **{field: number})  # type: ignore[arg-type]


@pytest.mark.thorough
@pytest.mark.parametrize(("pairs", "fixed", "schedule"), [(0.6, 0.05, "seq1f1b"), (0.6, 0.05, "terapipe")])
def test_slices_are_moved_from_the_first_ones_to_better_ones(pairs: float, fixed: float, schedule: str) -> None:
    """A sequence has more ways to be cut than are looked at: the plan is within half a percent of the best of all."""
    seconds = {"a": 2.0, "b": 1.1}
    nodes = [Node(name=n, forward_seconds=s, backward_seconds=2 * s, activation_bytes=0.5) for n, s in seconds.items()]
    shares = {"pair_share": pairs, "slice_share": fixed, "kv_share": 0.1}
    profile = Profile(nodes=nodes, microbatch_size=1, sequence_tokens=8, **shares)
    cluster = Cluster.from_levels([(2, 3.0)])
    options: dict[str, Any] = {"recompute": ("none",), "pipeline_sizes": (2,), "data_sizes": (1,)}
    found = plan(profile, cluster, global_batch=1, schedules=(schedule,), **options)
    stages = [GivenStage(n, [rank]) for rank, n in enumerate("ab")]
    every = [
        evaluate(profile, cluster, stages, num_microbatches=1, schedule=schedule, slice_lengths=lengths)
        for lengths in cuts(8)
    ]
    best = min(each.simulated_step_time or 0.0 for each in every)
    assert best <= (found.simulated_step_time or 0.0) <= 1.005 * best


A100 = DeviceModel.preset("A100-80GB")
PLAIN: dict[str, Any] = {"schedules": ("1f1b",), "recompute": ("none",), "optimizer_sharding": ("none",)}


def moe(seed: int) -> tuple[TransformerSource, int]:
    """Two layers with experts on two nodes of two devices each, and a batch."""
    draw = random.Random(seed).choice
    model = Transformer(
        experts=draw([2, 4]),
        layers=2,
        hidden=draw([512, 1024]),
        heads=4,
        vocabulary=draw([1000, 50000]),
        length=draw([512, 4096]),
        top_k=draw([1, 2]),
        style="llama",
        attention="flash",
    )
    nvlink, latency, ib = draw([300, 3]), draw([0, 50]), draw([25, 1])
    cluster = Cluster.parse(f"2x2:nvlink={nvlink}GB/s@{latency}us,ib={ib}GB/s@5us:80GB")
    splits = tuple(product((1, 2, 4), (1, 2)))
    return TransformerSource(transformer=model, device=A100, cluster=cluster, splits=splits), draw([4, 8])


@pytest.mark.thorough(but=["3"])
@pytest.mark.parametrize("seed", [3, 4, 5, 15])
def test_none_of_all_splits_is_faster(seed: int) -> None:
    """Every context, expert, P, D, T, microbatch and cut, by brute force. The fastest one of each seed has another
    split: experts, experts over more replicas, both with stages, the same with other sizes. None has tensor
    ranks, which do not divide an expert that replicas divide."""
    source, batch = moe(seed)
    names = [node.name for node in source.profile(microbatch_size=1).nodes]
    least = float("inf")
    for (_, own), P, D, T, size in product(source.alternatives(), *3 * [(1, 2, 4)], (1, 2, 4)):
        c = own.context
        if P * D * T > 4 or T % c or T // c > 2 or D % own.expert or batch // size % D:
            continue
        for cut in combinations(range(1, len(names)), P - 1):
            ends = enumerate(pairwise((0, *cut, len(names))))
            stages = [GivenStage(names[a:b], range(i * D * T, (i + 1) * D * T), T) for i, (a, b) in ends]
            found = evaluate(own, source.cluster, stages, num_microbatches=batch // size, microbatch_size=size)
            least = min(least, found.simulated_step_time or 0.0)
    best = plan(source, source.cluster, global_batch=batch, **PLAIN)
    assert best.context * best.expert > 1
    assert best.simulated_step_time <= least * (1 + 1e-9)
    assert best.searched.least <= least * (1 + 1e-9)
    assert Plan.from_json(best.to_json()) == best
    assert f"experts over {best.expert}" in best.explain()
    assert "note: with whole sequences and experts: " in best.explain()


@pytest.mark.thorough
def test_no_split_that_is_given_fits() -> None:
    """Four parts with two experts each, the last split, need 8 devices."""
    source, batch = moe(15)
    with pytest.raises(ValueError, match=r"nothing fits the memory: nearest is pipe 1 x context 4, 1f1b"):
        plan(source, source.cluster, global_batch=batch, memory_limit=1e6, **PLAIN)
    many = replace(source, splits=((4, 2),))
    with pytest.raises(ValueError, match="tensor x context x expert: 8: expected at most the 4 devices of the cluster"):
        plan(many, source.cluster, global_batch=batch, **PLAIN)
    with pytest.raises(ValueError, match="expert: 0: expected a whole number of at least 1"):
        TransformerSource(transformer=source.transformer, device=A100, splits=((1, 0),))


@pytest.mark.parametrize(
    ("split", "wrong", "text"),
    [
        ((2, 1), {"context": 4}, "a plan with context=4, .* replicas, tensor=2 and .*: expected a multiple of 4"),
        ((1, 2), {"expert": 8}, "a plan with expert=8, .* replicas, tensor=1 and .* is a multiple of 8"),
        ((2, 2), {"context": 4}, "a plan with context=4 and expert=2, .2,. replicas, tensor=2 and .*: expected a mult"),
    ],
)
def test_the_runtime_divides_as_planned(split: tuple[int, int], wrong: dict[str, int], text: str) -> None:
    """Sequences too, which it refused: the mesh, and each rank's first process."""
    source, batch = moe(15)
    best = plan(replace(source, splits=(split,)), source.cluster, global_batch=batch, runnable=True, **PLAIN)
    layout = layout_of_plan(best, World(rank=0, size=4), num_microbatches=None)
    mesh, members = layout.place.mesh, best.context
    assert (best.context, best.expert) == (mesh.context, mesh.expert) == split
    assert layout.schedule.num_microbatches == members * (best.num_microbatches or 0)
    assert ", tensor " not in best.explain()  # as rows of stages had for parts of sequences
    for stage, owners in zip(best.stages, layout.schedule.owners, strict=True):
        assert [process for rank in owners for process in mesh.members(rank)] == [*stage.ranks]
    with pytest.raises(ValueError, match=text):
        layout_of_plan(replace(best, **wrong), World(rank=0, size=4), num_microbatches=None)
    what = "sequences .* context=1" if split[0] > 1 else "experts .* expert=1"
    with pytest.raises(ValueError, match="divides " + what.replace(".*", "over 2 ranks, which are .* expected 4 .*")):
        layout_of_plan(best, World(rank=0, size=1), num_microbatches=None)


@pytest.mark.parametrize("sizes", [{"context": 2}, {"expert": 2}])
def test_a_plan_pipeline_by_pipeline_has_figures_of_its_own_processes(sizes: dict[str, int]) -> None:
    """A trace gave a rank the memory limit of another stage's."""
    width = sizes.get("context", 1)
    rows = [[r for d in (0, 2) for r in range((p + d) * width, (p + d + 1) * width)] for p in (0, 1)]
    stages = [
        PlanStage(nodes=(str(p),), ranks=tuple(row), tensor=width, step_seconds=1, memory_limit=p + 1.0)
        for p, row in enumerate(rows)
    ]
    found = Plan(
        stages=tuple(stages),
        num_devices=4 * width,
        costs=Costs(forward=1, backward=2),
        cost_model="default",
        bottleneck=1,
        bound=1,
        schedule="1f1b",
        num_microbatches=4,
        **sizes,
    )
    layout = layout_of_plan(found, World(rank=0, size=4 * width), num_microbatches=None)
    mesh = layout.place.mesh
    assert mesh.order[0] == "data"
    limits = found.by_group(found.memory_limits, [mesh.members(rank)[0] for rank in range(mesh.num_ranks)])
    for stage, owners in enumerate(layout.schedule.owners):
        assert {limits[rank] for rank in owners} == {stage + 1.0}


def test_pairs_are_chosen_where_they_take_less_and_can_run() -> None:
    """Against the schedule with pairs, simulated apart from the search; the runtime has pairs of experts on the CPU."""
    model = Transformer(experts=4, top_k=2, layers=4, hidden=512, heads=4, vocabulary=1000, length=1024)
    cluster = Cluster.parse("4:nvlink=10GB/s:80GB")
    profile = TransformerSource(transformer=model, device=A100, cluster=cluster, expert=2).profile(
        microbatch_size=1, tensor=1
    )
    find = partial(
        plan, cluster=cluster, global_batch=16, pipeline_sizes=(2,), **{**PLAIN, "schedules": ("dualpipe-v",)}
    )
    found = find(profile)
    assert found.overlaps
    schedule = with_overlap(build("dualpipe-v", num_ranks=2, num_microbatches=8))
    own = simulate(schedule, found.costs, found.links).batch_seconds
    assert found.simulated_step_time == own
    assert own < simulate(replace(schedule, overlapped=()), found.costs, found.links).batch_seconds
    assert found.build_schedule().overlapped
    text = "one after the other, pipe 2 x data 2 x experts over 2, dualpipe-v V=2, ordered for its costs, micro"
    assert any(text in note for note in found.notes)
    assert Plan.from_json(found.to_json()) == found
    # What can't run, or gains nothing
    assert not find(profile, runnable=True).overlaps
    assert find(replace(profile, device="cpu"), runnable=True).overlaps
    assert not find(profile, recompute=("full",)).overlaps
    needed = max(found.memory_bytes.values()) + 300e6  # of CUDA's context
    assert find(profile, memory_limit=needed).overlaps
    assert not find(profile, memory_limit=needed - 1).overlaps
    free = [replace(n, forward_exchange_seconds=0.0, backward_exchange_seconds=0.0) for n in profile.nodes]
    assert not find(replace(profile, nodes=free)).overlaps


@pytest.mark.parametrize(("context", "expert"), [(1, 2), (2, 1), (2, 2), (1, 1)])
def test_exchanges_are_what_links_that_take_no_time_save(context: int, expert: int) -> None:
    model = Transformer(
        experts=4, top_k=2, layers=4, hidden=512, heads=4, vocabulary=1000, length=512, attention="flash"
    )
    clusters = [Cluster.parse(f"8:nvlink={speed}GB/s:80GB") for speed in (1, 1000000000)]
    slow, fast = (
        TransformerSource(transformer=model, device=A100, cluster=each, context=context, expert=expert)
        for each in clusters
    )
    exchanges = {}
    for way in ("forward", "backward"):
        one, other = (
            [getattr(node, f"{way}_seconds") for node in each.profile(microbatch_size=1, tensor=context).nodes]
            for each in (slow, fast)
        )
        saved = [a - b for a, b in zip(one, other, strict=True)]
        nodes = slow.profile(microbatch_size=1, tensor=context).nodes
        assert [getattr(node, f"{way}_exchange_seconds") for node in nodes] == pytest.approx(saved, rel=1e-6, abs=1e-9)
        exchanges[way] = saved
    stages = [
        GivenStage(("embedding", "layer0", "layer1"), range(2 * context), context),
        GivenStage(("layer2", "layer3", "head"), range(2 * context, 4 * context), context),
    ]
    found = evaluate(slow, clusters[0], stages, num_microbatches=4, microbatch_size=1)
    for way, by_node in exchanges.items():
        expected = [sum(by_node[:3]), sum(by_node[3:])]
        given = getattr(found.costs, f"{way}_exchange")
        assert (given if any(expected) else [given] * 2) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert Plan.from_json(found.to_json()).costs == found.costs
