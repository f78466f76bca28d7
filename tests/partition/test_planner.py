"""The planner in plain cases: decisions, refusals, reasons, work counted in steps, and one test per past fault."""

import re
import warnings
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from support.inside import DeviceModel, SearchSpace, Transformer, TransformerSource, in_all_orders

from stagewright.partition import Cluster, DeviceKind, GivenStage, Level, Node, Plan, Profile, evaluate, partition, plan
from stagewright.schedules import Costs, Op, build, simulate

from .small import chain, configuration

FOUR = Cluster.from_levels([(4, 1e9)])


def test_the_optimizer_is_sharded_where_that_makes_it_fit() -> None:
    options = {"global_batch": 8, "pipeline_sizes": (1,), "data_sizes": (4,), "schedules": "1f1b"}
    profile = chain(2, parameter_bytes=10.0)
    roomy = plan(profile, FOUR, **options)  # type: ignore[arg-type]
    tight = plan(profile, FOUR, memory_limit=86.0, **options)  # type: ignore[arg-type]
    assert [found.stages[0].optimizer_shards for found in (roomy, tight)] == [1, 4]
    assert tight.memory[0].optimizer == 10.0
    assert tight.memory[0].communication == 35.0  # a bucket of all, and the parts of three others
    for largest, small, bucket in ((6.0, 4.0, 8.0), (9.0, 1.0, 9.0)):  # small ones of both nodes, or the largest alone
        known = chain(2, parameter_bytes=10.0, largest_parameter_bytes=largest, small_parameter_bytes=small)
        found = plan(known, FOUR, memory_limit=86.0 - 20 + bucket, **options)  # type: ignore[arg-type]
        assert found.memory[0].communication == 15 + bucket
    # As many bytes: half of them in front of the step, half behind it.
    assert tight.simulated_step_time == pytest.approx(roomy.simulated_step_time, rel=1e-12)
    with pytest.raises(ValueError, match="nothing fits the memory"):
        plan(profile, FOUR, memory_limit=86.0, optimizer_sharding="none", **options)  # type: ignore[arg-type]
    stepping = plan(chain(2, parameter_bytes=10.0, update_seconds=4.0), FOUR, **options)  # type: ignore[arg-type]
    assert stepping.update_seconds[0] == pytest.approx(2.0, rel=1e-6)


def test_larger_microbatches_where_they_are_worth_it() -> None:
    """Twice the samples in 1.2 times the seconds."""
    profiles = {
        size: replace(chain(4, forward_seconds=seconds, backward_seconds=2 * seconds), microbatch_size=size)
        for size, seconds in ((1, 1.0), (2, 1.2), (3, 0.7))
    }
    found = plan(profiles, FOUR, global_batch=8)
    assert found.microbatch_size == 2  # 3 does not divide the batch
    assert found.num_microbatches == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 0}, "global_batch: 0: expected a whole number"),
        ({"schedules": ("1f2b",)}, "unknown schedule '1f2b': expected one of gpipe, .*v-min, terapipe, seq1f1b; did"),
        ({"schedules": "dualpipe"}, r"'dualpipe': plans are for stages on one rank each, .* some of gpipe,"),
        ({"schedules": ("seq-zb-h1",)}, r"'seq-zb-h1': plans are for .* and for whole sequences or slices with"),
        ({"schedules": ()}, r"schedules=\(\): expected at least one name"),
        ({"microbatch_sizes": (2,)}, "no profile of 2 samples: expected some of 1"),
        ({"recompute": ("half",)}, "recompute: 'half': expected some of none, full, layer, selective, keep_"),
        ({"recompute": ("none", "offload")}, r"'offload' in a cluster that does not say .*host_bandwidth=\), as 25e9"),
        ({"optimizer_sharding": "layer"}, "optimizer_sharding: 'layer': expected some of none, full$"),
        ({"tensor_sizes": (2,)}, "tensor_sizes=2: expected some of 1"),
        ({"data_sizes": (3,)}, "no configuration of a batch of 8 on 4 devices with data_sizes=3: expected"),
        ({"chunk_sizes": (1, 2)}, r"chunk_sizes: 1: expected at least 2 \(a schedule with one stage a rank is 1f1b\)"),
        ({"pipeline_sizes": ()}, r"pipeline_sizes=\(\): expected at least one size"),
        ({"memory_limit": -1.0}, "memory_limit: -1.0: expected a finite number"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(chain(4), FOUR, **{"global_batch": 8, **options})  # type: ignore[arg-type]


def test_bad_sources() -> None:
    with pytest.raises(ValueError, match="global_batch=7 is no multiple of any microbatch size"):
        plan({2: replace(chain(4), microbatch_size=2)}, FOUR, global_batch=7)
    with pytest.raises(ValueError, match="microbatches of 1 under microbatch size 2"):
        plan({2: chain(4)}, FOUR, global_batch=8)
    with pytest.raises(ValueError, match="source of type str"):
        plan("profile.json", FOUR, global_batch=8)  # type: ignore[arg-type]


def test_a_schedule_that_refuses_some_sizes_does_not_end_the_search() -> None:
    """2BW needs more microbatches than a deep pipeline gets here."""
    found = plan(chain(6), Cluster.parse("4:l=1GB/s"), global_batch=2, schedules=["2bw", "1f1b"])
    assert found.schedule in ("2bw", "1f1b")
    assert found.searched.unfit > 0
    assert "do not fit the memory or the schedule" in " ".join(found.explain().split())
    sentences = [line.partition(":")[0] for line in found.explain().splitlines() if not line.startswith(" ")]
    assert [each for each in sentences if each in ("in short", "why", "close", "not searched")] == [
        *("in short", "why", "close", "not searched")
    ]
    with pytest.raises(ValueError, match=r"no configuration .* \(num_microbatches=2 under 2bw: expected at least 3"):
        plan(chain(6), FOUR, global_batch=2, schedules="2bw", pipeline_sizes=(4,), data_sizes=(1,))


@pytest.mark.parametrize(
    ("name", "stages", "seconds"),
    [
        ("eager-1f1b", 4, 33),
        ("zb-h1", 4, 27),
        ("zb-h2", 4, 27),
        ("zb-1p", 4, 27),
        ("interleaved-zb", 2, 49),
        ("gis", 2, 49),  # 50 in its own order
    ],
)
def test_every_schedule_in_turn_is_planned(name: str, stages: int, seconds: float) -> None:
    """Eight microbatches, F = I = W = 1. No bound hides what a split backward gains over 1F1B."""
    sizes = {"pipeline_sizes": (stages,), "data_sizes": (1,), "chunk_sizes": (2,)}
    found = plan(chain(4), FOUR, global_batch=8, schedules=("1f1b", name), **sizes)
    assert found.simulated_step_time == pytest.approx(seconds)
    assert found.schedule == (name if seconds != 33 else "1f1b")


@pytest.mark.parametrize(("longer", "name"), [(1.0, "zb-h1"), (1.6, "1f1b")])
def test_a_split_backward_takes_what_its_halves_do(longer: float, name: str) -> None:
    """Each walks the graph: I + W = 1.6 B costs ZB-H1 more than it gains. I and W that run as one take B."""
    nodes = [
        replace(node, input_grad_seconds=1.4 * longer, weight_grad_seconds=0.6 * longer) for node in chain(4).nodes
    ]
    profile, sizes = replace(chain(4), nodes=tuple(nodes)), {"pipeline_sizes": (4,), "data_sizes": (1,)}
    only = plan(profile, FOUR, global_batch=8, schedules="zb-h1", **sizes)
    halves = [[each * (longer if s else 1.0) for s in range(4)] for each in (1.4, 0.6)]  # all of stage 0 runs as one
    assert [only.seconds(op) for op in (Op.I, Op.W)] == [pytest.approx(tuple(half)) for half in halves]
    costs = Costs(forward=1.0, input_grad=halves[0], weight_grad=halves[1])
    assert only.simulated_step_time == pytest.approx(simulate(only.build_schedule(), costs).makespan)
    assert only.simulated_step_time < simulate(build("zb-h1", num_ranks=4, num_microbatches=8), costs).makespan
    assert plan(profile, FOUR, global_batch=8, schedules=("1f1b", "zb-h1"), **sizes).schedule == name


def test_idle_devices_are_told() -> None:
    """A batch of one sample keeps two nodes busy at most, and 62 devices of 64 idle."""
    many = Cluster.parse("64:net=1GB/s")
    with pytest.warns(UserWarning, match="63 of 64 devices stay idle: .*: expected a larger batch"):
        found = plan(chain(2), many, global_batch=1)
    assert "note: 63 of 64 devices stay idle: nothing that was looked at is faster with them" in " ".join(
        found.explain().split()
    )
    assert "idle:" not in " ".join(plan(chain(4), FOUR, global_batch=8).explain().split())
    three = plan(chain(3), FOUR, global_batch=3)  # most are busy: no warning
    assert "1 of 4 devices stay idle" in " ".join(three.explain().split())


def test_seconds_that_cannot_be_compared_are_refused() -> None:
    nothing = chain(4, forward_seconds=0.0, backward_seconds=0.0)
    with pytest.raises(ValueError, match=r"take 0 s and 0 s of F \+ B over all ranks: expected more than 0"):
        plan(nothing, FOUR, global_batch=4)
    # As where one of the profiles was measured on another machine, or in other units.
    fast = replace(chain(4, forward_seconds=0.01, backward_seconds=0.02), microbatch_size=2)
    with pytest.raises(ValueError, match=r"of 1 and 2, which take 12.0 s and 120 ms of F \+ B over all ranks"):
        plan([chain(4), fast], FOUR, global_batch=4)
    with pytest.raises(ValueError, match=r"tensor ranks 1 and 2, which take 12.0 s and 240 ms"):
        plan([chain(4), replace(fast, microbatch_size=1, tensor=2)], FOUR, global_batch=4)


@pytest.mark.thorough
def test_the_whole_counts_where_its_parts_say_less() -> None:
    """1,000 s measured at once, beside parts of 12 that were undisturbed; all of them count as much longer."""
    for whole, slowdown, times in (
        (1000.0, 1.0, 1000 / 12),
        (None, 1.5, 1.5),
        (24.0, 2.0, 4.0),
        (12.01, 1.0, 12.01 / 12),
    ):
        profile = replace(chain(4), step_seconds=whole, slowdown=slowdown)
        known = plan(chain(4), FOUR, global_batch=8)
        for found in (plan(profile, FOUR, global_batch=8), plan({1: profile}, FOUR, global_batch=8)):
            assert found.simulated_step_time == pytest.approx(known.simulated_step_time * times)
            assert ("all parts of the profile count" in " ".join(found.explain().split())) is (times > 1.005)
        assert partition(profile, FOUR).bottleneck == pytest.approx(3.0 * times)
        assert plan(profile.typical(), FOUR, global_batch=8) == replace(
            plan(profile, FOUR, global_batch=8), notes=plan(profile.typical(), FOUR, global_batch=8).notes
        )


@pytest.mark.thorough(but=["1-recompute0-1.0-figures0"])
@pytest.mark.parametrize("figures", [{"parameter_bytes": 10.0}, {"parameter_bytes": 1.5, "stash_bytes": 7.3}])
@pytest.mark.parametrize("limit", [1.0, 8.0, 13.0])
@pytest.mark.parametrize("recompute", [("none",), ("none", "full")])
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_the_nearest_miss_needs_is_enough(
    figures: dict[str, float], limit: float, recompute: tuple[str, ...], replicas: int
) -> None:
    """Once of the first rank that was too small, or of all ranks on average."""
    options = {"global_batch": 8, "recompute": recompute, "data_sizes": (replicas,)}
    with pytest.raises(ValueError, match="nothing fits the memory") as error:
        plan(chain(7, **figures), FOUR, memory_limit=limit, **options)  # type: ignore[arg-type]
    needed = re.search(r"needs ([\d,]+) bytes", str(error.value))
    enough = float(needed[1].replace(",", ""))
    assert max(plan(chain(7, **figures), FOUR, memory_limit=enough, **options).memory_bytes.values()) <= enough  # type: ignore[arg-type]


def test_a_batch_that_chunks_do_not_divide_fits_what_it_holds() -> None:
    """A shorter batch of 29 holds 100 bytes more at once than one of 35."""
    nodes = chain(12).nodes
    nodes = tuple(replace(node, stash_bytes=(37.0, 100.0)[at % 2]) for at, node in enumerate(nodes))
    profile, six = Profile(nodes=nodes), Cluster.from_levels([(6, 1e9)])
    options = {"global_batch": 35, "data_sizes": (1,), "schedules": ("interleaved",), "pipeline_sizes": (6,)}
    free = plan(profile, six, recompute=("none",), **options)  # type: ignore[arg-type]
    limited = plan(profile, six, recompute=("none",), memory_limit=max(free.memory_bytes.values()), **options)  # type: ignore[arg-type]
    assert limited.simulated_step_time == free.simulated_step_time


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype '.*' and 'bfloat16'"),
        ({"device": "other"}, "device '.*' and 'other'"),
        ({"nodes": chain(5).nodes, "edges": None}, "node 'n4' is only in the second"),
        ({"nodes": chain(4, parameter_bytes=3.0).nodes}, "node 'n0' has 0 and 3 bytes of parameters"),
        ({"edges": (("n0", "n1"), ("n0", "n2"), ("n2", "n3"))}, "edge n0 -> n2 is only in the second"),
    ],
)
def test_profiles_of_several_models(other: dict[str, object], message: str) -> None:
    second = replace(chain(4), microbatch_size=2, **other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"profiles of microbatches of 1 and of 2: {message}"):
        plan({1: chain(4), 2: second}, FOUR, global_batch=8)


@pytest.mark.parametrize("batch", [2, 3, 5])
def test_replicas_of_tensor_groups_need_not_divide_the_microbatches(batch: int) -> None:
    """Memory for two of two: stages on half of the devices each, as without such replicas, take a quarter longer."""

    def over(tensor: int) -> Profile:
        sizes = {"parameter_bytes": 10 / tensor, "stash_bytes": 1 / tensor}
        seconds = {"a": 1 / tensor, "b": 3 / tensor}
        nodes = [Node(name=n, forward_seconds=s, backward_seconds=2 * s, **sizes) for n, s in seconds.items()]
        return Profile(nodes=nodes, microbatch_size=1, tensor=tensor, optimizer_ratio=2.0)

    profiles, cluster = [over(1), over(2)], Cluster.from_levels([(4, 1e6)])
    given = evaluate(profiles, cluster, [GivenStage("ab", range(4), tensor=2)], num_microbatches=batch)
    options: dict[str, Any] = {"recompute": ("none",), "optimizer_sharding": ("none",), "memory_limit": 55.0}
    found = plan(profiles, cluster, global_batch=batch, schedules=("1f1b",), **options)
    assert found.simulated_step_time == given.simulated_step_time
    assert [(s.nodes, len(s.ranks), s.tensor) for s in found.stages] == [(("a", "b"), 4, 2)]


def transformer(cluster: Cluster, *, layers: int, hidden: int, batch: int, **options: Any) -> Plan:
    shape = Transformer(layers=layers, hidden=hidden, heads=hidden // 128, vocabulary=51200, length=2048)
    source = TransformerSource(transformer=shape, device=DeviceModel.preset("A100-80GB"), cluster=cluster)
    return plan(source, cluster, global_batch=batch, **options)


@pytest.mark.thorough
def test_bounds_leave_most_configurations_uncut() -> None:
    """With few microbatches most of them lose by their way through the stages alone, and so do unequal replicas."""
    cluster = Cluster.parse("2x8:nvlink=300GB/s@5us,infiniband=25GB/s@10us:80GB")
    found = transformer(cluster, layers=32, hidden=4096, batch=7)
    # And stages with tensor sizes of their own; replicas of tensor groups that do not divide 7; each replica in a row.
    assert found.searched.considered == 306 + 64 + 15 + 13
    # 19 where an exchange of divided updates counted as half a sum: the first plans are slower, and more look better.
    # 21 where bounds knew that nodes are whole.
    # And 14 of unequal tensor sizes, of which only the first microbatch's way and the members' work are known.
    # And 2 of replicas that do not divide 7, or that are in a row.
    assert found.searched.cut <= 24 + 14 + 2
    assert (
        found.searched.simulated <= 11
    )  # 9 with a head of its own: bounds of cuts know the sum of tied weights, those before not


def test_configurations_of_ten_thousand_devices_are_few_and_list_no_ranks() -> None:
    """Each with its ranks took 417 seconds, and most had numbers of replicas that do not divide the microbatches: where
    the busiest replica has as many of these, fewer replicas are as fast."""
    cluster, M = Cluster.parse("1249x8:nvlink=300GB/s,infiniband=25GB/s"), 6000
    sizes: dict[str, Any] = {"microbatch_sizes": (1,), "tensor_sizes": (1, 8), "max_stages": 97}
    schedules: Any = [("1f1b", (1,))]
    space = SearchSpace(num_devices=cluster.num_devices, global_batch=M, schedules=schedules, **sizes)
    every = list(in_all_orders(space, cluster))
    assert {c.ranks for c in every} == {None}
    assert {c.tensor for c in every if c.by_replica} == {1}  # nodes of eight are as far apart as any
    assert {c.pipeline for c in every if c.by_replica} <= {2, 4, 8}  # a replica on one node
    assert len(every) < 1000
    looked_at: dict[int, list[int]] = {}
    for c in every:
        looked_at.setdefault(c.pipeline if c.tensor == 8 else 0, []).append(c.data)
    for pipeline in range(1, 98):
        for data in range(-(-7 * 1249 // (8 * pipeline)), 1249 // pipeline + 1):
            assert min(-(-M // each) for each in looked_at[pipeline]) <= -(-M // data)
            assert any(-(-M // each) <= -(-M // data) and each <= data for each in looked_at[pipeline]), (
                pipeline,
                data,
            )


def test_replicas_in_a_row_have_the_ranks_that_stages_lack() -> None:
    for tensor in (1, 2):
        c = configuration(pipeline=3, data=2, tensor=tensor, by_replica=True)
        stages = [[*ranks] for ranks in c.stage_ranks]
        assert stages == [[d * 3 * tensor + p * tensor + t for d in (0, 1) for t in range(tensor)] for p in range(3)]


def test_tensor_groups_on_two_nodes_pay_for_the_link_between_them() -> None:
    """Groups of six on nodes of eight: 0-5 and 18-23 stand on one, 6-11 and 12-17 on two; the slowest sets the pace."""
    cluster = Cluster.parse("3x8:nvlink=300GB/s,net=2.5GB/s")
    model = Transformer(layers=4, hidden=96 * 16, heads=96, vocabulary=1000, length=512)
    device = replace(DeviceModel.preset("A100-80GB"), link_efficiency=1.0)
    source = TransformerSource(transformer=model, device=device, cluster=cluster)
    inside = replace(source, cluster=Cluster.parse("8:nvlink=300GB/s"))
    across = 2 * 3 / 4 / 300e9 + 2 * 1 / 2 / 2 / 2.5e9 - 2 * 5 / 6 / 300e9  # four of six on one node, two on the other
    sizes = {"microbatch_size": 1, "tensor": 6}
    layer, fast = (each.profile(**sizes).nodes[1] for each in (source, inside))
    assert layer.forward_seconds - fast.forward_seconds == pytest.approx(2 * 2 * 512 * model.hidden * across)
    assert source.profile(microbatch_size=1, tensor=8) == inside.profile(microbatch_size=1, tensor=8)


def test_layouts_that_leave_much_idle_are_tried_where_nothing_else_fits() -> None:
    """More than 64 devices, and five microbatches: 5 replicas of 11 nodes at most, of 128 devices."""
    found = plan(chain(11), Cluster.from_levels([(128, 1e9)]), global_batch=5, schedules=("1f1b",))
    assert sum(stage.replicas for stage in found.stages) <= 55


def test_one_large_workspace_is_charged_to_its_own_stage() -> None:
    """Forty nodes, the last of which needs a lot for a while; the first keep most, so that an even cut does not fit."""
    stash = [10.0] * 20 + [1.0] * 20
    nodes = [replace(node, stash_bytes=kept) for node, kept in zip(chain(40).nodes, stash, strict=True)]
    nodes[-1] = replace(nodes[-1], workspace_bytes=300.0)
    options = {"global_batch": 16, "pipeline_sizes": (4,), "data_sizes": (1,), "schedules": "1f1b"}
    cluster = Cluster.from_levels([(4, 1e9)])
    profile = Profile(nodes=nodes, microbatch_size=1)
    found = plan(profile, cluster, memory_limit=330.0, recompute=("none",), **options)  # type: ignore[arg-type]
    assert max(found.memory_bytes.values()) <= 330.0


def unequal(order: tuple[str, ...]) -> Cluster:
    kinds = (DeviceKind(name="slow", speed=0.5), DeviceKind(name="mid"), DeviceKind(name="fast", speed=2.0))
    levels = (Level(name="in", size=2, bandwidth=1e3), Level(name="out", size=len(order), bandwidth=10.0))
    return Cluster(levels=levels, kinds=kinds, nodes=order)


@pytest.mark.thorough
@pytest.mark.parametrize("names", [("slow", "mid", "fast"), ("slow", "slow", "fast", "mid")], ids=str)
def test_the_order_in_which_nodes_are_listed_does_not_matter(names: tuple[str, ...]) -> None:
    profile = chain(6, parameter_bytes=20.0, activation_bytes=5.0)
    orders = sorted(set(permutations(names)))[::3]
    found = [plan(profile, unequal(order), global_batch=12) for order in orders]
    assert len({round(each.simulated_step_time or 0, 9) for each in found}) == 1
    for each, order in zip(found, orders, strict=True):
        speeds = {"slow": 0.5, "mid": 1.0, "fast": 2.0}
        slowest = [min(speeds[order[rank // 2]] for rank in stage.ranks) for stage in each.stages]
        assert each.seconds(Op.F) == pytest.approx(
            [len(stage.nodes) / speed for stage, speed in zip(each.stages, slowest, strict=True)]
        )


def test_a_batch_and_seconds_beyond_all_reason_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="global_batch=99999999999999: expected at most"):
        plan(chain(4), Cluster.from_levels([(4, 1e9)]), global_batch=99999999999999, schedules="2bw")
    with pytest.raises(ValueError, match="num_microbatches=99999999999999: expected at most"):
        partition(chain(4), Cluster.from_levels([(4, 1e9)]), num_microbatches=99999999999999, schedule="2bw")
    rounds = partition(chain(4), Cluster.from_levels([(4, 1e9)]), num_microbatches=99999999999999)
    assert rounds.simulated_step_time == pytest.approx(rounds.bottleneck * 99999999999999)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=r"node n0: forward_seconds: 1e\+300: expected .* at most 1e\+100"):
            chain(3, forward_seconds=1e300)
        assert partition(chain(3, forward_seconds=1e99), Cluster.from_levels([(2, 1e9)]), num_microbatches=4)


@pytest.mark.parametrize("name", ["a\nb", "a\tb", "\x1b[1m"])
def test_names_are_printable(name: str) -> None:
    with pytest.raises(ValueError, match="expected printable text in one line"):
        Node(name=name, forward_seconds=1, backward_seconds=1)
    with pytest.raises(ValueError, match="expected printable text in one line"):
        DeviceKind(name=name)
    with pytest.raises(ValueError, match="expected printable text in one line"):
        Level(name=name, size=1, bandwidth=1.0)
