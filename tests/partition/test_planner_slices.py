"""Plans over slices of the sequence: against every family, cut and length by hand, and what their memory holds."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
from support.inside import BuiltSchedules, DeviceModel, Transformer, TransformerSource
from support.inside import simulated_simulated as simulated

from stagewright.partition import Cluster, GivenStage, Level, Node, Plan, Profile, evaluate, plan
from stagewright.schedules import Costs, Link, Links, Op, build, equal_work_lengths, shortest_lengths, simulate

from .small import configuration

WHOLE, SLICED = ("1f1b", "gpipe"), ("seq1f1b", "terapipe")


def cuts(total: int) -> list[tuple[int, ...]]:
    """All ways to cut so many in two or more."""
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
    cluster = Cluster(levels=(link,))
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
                yield simulate(
                    build(name, num_ranks=P, num_microbatches=M, num_slices=len(lengths)),
                    Costs(forward=rows[0], backward=rows[1], overhead=profile.action_seconds),
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


EQUAL = Profile(
    nodes=[Node(name=f"n{i}", forward_seconds=1, backward_seconds=2) for i in range(4)],
    microbatch_size=1,
    sequence_tokens=64,
    pair_share=0.5,
    slice_share=0.02,
)
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
    assert len(found.slice_lengths) == 3
    cost = sequence.slice_cost
    assert found.slice_lengths == shortest_lengths(9, cost, num_ranks=4, num_microbatches=2)
    other = plan(sequence, FREE, global_batch=2, schedules="seq1f1b", pipeline_sizes=(4,))
    assert other.slice_lengths == equal_work_lengths(9, len(other.slice_lengths), cost)


@pytest.mark.thorough
def test_a_long_sequence_alone_keeps_four_ranks_busy() -> None:
    """One microbatch on four ranks: without slices three wait while one computes."""
    options: dict[str, Any] = {"global_batch": 1, "pipeline_sizes": (4,), "max_simulated": 200}
    whole = plan(EQUAL, FREE, schedules=("1f1b", "interleaved", "gpipe", "zb-h1"), **options)
    sliced = plan(EQUAL, FREE, schedules=("1f1b", "seq1f1b", "terapipe"), **options)
    assert whole.simulated_step_time == pytest.approx(9.0)  # zb-h1; 12 where backwards are whole
    assert sliced.simulated_step_time / 9.0 < 0.6
    assert len(sliced.slice_lengths) >= 8
    assert sliced.slice_lengths[0] > sliced.slice_lengths[-1]
    assert f"slices of {'-'.join(map(str, sliced.slice_lengths))}" in " ".join(sliced.explain().split())
    again = Plan.from_json(sliced.to_json())
    assert again == sliced
    assert again.build_schedule().num_slices == len(sliced.slice_lengths)


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


@pytest.mark.thorough(but=["0.6-0.05-seq1f1b"])
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
