"""Terms of formulas by closed form: what runtimes overlap, what travels for an update, products in 4 bits."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from support.inside import (
    MEGATRON_CORE,
    NANOTRON,
    PLAIN,
    DeviceModel,
    Runtime,
    Topology,
    Transformer,
    TransformerSource,
    simulated_simulated,
)

from stagewright.partition import Cluster, GivenStage, Level, Plan, evaluate, plan
from stagewright.schedules import AllReduce

from .small import chain
from .test_transformer import COUNTER, FEW, SMALL, profile_of

MEMORY = replace(COUNTER, memory_bandwidth=1.0, peak_flops=1e30)  # a second a byte, products at once


def test_products_in_fp4_and_what_they_keep() -> None:
    device = replace(COUNTER, fp4_flops=4.0, fp4_efficiency=0.5)
    n, h = 2 * 32, 64
    weights, inputs = 2 * n * h * (2.5 * h + 3 * 3.5 * h), n * (3 + 3.5) * h
    plain, narrow = (
        profile_of(replace(FEW, precision=each), b=2, device=device).nodes[1] for each in ("16-bit", "fp4")
    )  # type: ignore[arg-type]
    assert plain.forward_seconds - narrow.forward_seconds == pytest.approx(weights / 2)
    assert plain.stash_bytes - narrow.stash_bytes == (2 - 9 / 16) * inputs
    assert narrow.buffer_bytes == 9 / 16 * narrow.parameter_bytes
    slow = replace(device, memory_bandwidth=1.0, peak_flops=4.0)
    plain, narrow = (profile_of(replace(FEW, precision=each), b=2, device=slow).nodes[1] for each in ("16-bit", "fp4"))  # type: ignore[arg-type]
    amax, read, written = 2, 2, 2 * 9 / 16  # by rows and by columns
    moved = narrow.forward_seconds - plain.forward_seconds - weights / 4
    assert moved == pytest.approx((amax + read + written) * inputs)


def test_casts_and_products_in_8_bits_by_device_and_recipe() -> None:
    """Inputs of columns and gradients of rows are cast before they go round, and transposed on Hopper alone, which adds
    forward in fewer bits; sums that userbuffers scatters are read in T parts, and written."""
    t, n, h = 2, FEW.length, FEW.hidden
    own, heads, mlp, products = 2 * n * h / t, n * h / t, 3.5 * n * h / t, n * h * h * (2.5 + 3 * 3.5)
    for fp4, turned, speed in ((None, 2, 1.042), (1e30, 0, 1.0)):
        models = [replace(FEW, precision=each, split="sequence") for each in ("16-bit", "fp8")]  # type: ignore[arg-type]
        device = replace(MEMORY, fp8_flops=1e30, fp4_flops=fp4)
        plain, narrow = (profile_of(each, t=t, device=device, runtime=MEGATRON_CORE).nodes[1] for each in models)
        more = 4 * (own + heads + mlp) + (turned + 2) * 2 * n * h + 2 * own
        assert narrow.forward_seconds - plain.forward_seconds == pytest.approx(more)
        more = 4 * (own + 1.5 * heads + 2 * mlp) + turned * 2 * n * h
        assert narrow.backward_seconds - plain.backward_seconds == pytest.approx(more)
        device = replace(COUNTER, fp8_flops=2.0, fp4_flops=fp4)
        for blocks in (1.0, 0.951):
            runtime = Runtime(adds_fast=True, scales_blocks=blocks < 1)
            plain, narrow = (profile_of(models[1], device=device, runtime=each).nodes[1] for each in (PLAIN, runtime))
            less = plain.forward_seconds - narrow.forward_seconds
            assert less == pytest.approx(products * (1 - 1 / speed / blocks))
            assert narrow.weight_grad_seconds == pytest.approx(products / blocks)


@pytest.mark.parametrize(("split", "more"), [("tensor", 0), ("sequence", 1)])
def test_nanotrons_products_are_in_pieces_and_inputs_gathered_again(split: Any, more: int) -> None:
    """Half a wave for each of three pieces: Q K V and up forward, gradients of their outputs' and down's inputs."""
    h, sums = SMALL.hidden, 2 * 3 / 4 * 2 * SMALL.length * SMALL.hidden / 1e3
    model, device = replace(SMALL, split=split), replace(COUNTER, link_bandwidth=1e3, wave_outputs=2e3)
    nodes = [profile_of(model, t=4, device=device, runtime=each).nodes[1] for each in (PLAIN, NANOTRON)]
    for name, gathered in (("forward_seconds", 0), ("backward_seconds", more * sums)):
        plain, own = (getattr(node, name) for node in nodes)
        assert own - plain == pytest.approx(2 * (2 * 2e3 / 2) * 2 * h + gathered)


def test_sums_over_tensor_ranks_overlap_with_products_in_parts() -> None:
    """P of products and S of sums, in T parts each: all but a part of the shorter travel meanwhile."""
    t, n, h = 4, 32, SMALL.hidden
    products, scores = 24 * n * h**2 / t, 4 * n * SMALL.length * h / t
    for link, precision in itertools.product((1e-3, 1e3), ("16-bit", "fp8", "fp4")):
        device = replace(COUNTER, link_bandwidth=link, fp8_flops=1.0, fp4_flops=1.0)
        model = replace(SMALL, precision=precision)  # type: ignore[arg-type]
        sums = 2 * 2 * (t - 1) / t * 2 * n * h / link
        plain, apart = (profile_of(model, t=t, device=device, runtime=each).nodes[1] for each in (PLAIN, MEGATRON_CORE))
        assert plain.forward_seconds == pytest.approx(products + scores + sums)
        sums *= {"16-bit": 1, "fp8": 3 / 4, "fp4": 41 / 64}[precision]  # half is gathered, in 1 or 9/16 bytes a value
        longer, shorter = max(products, sums), min(products, sums)
        alone = 1 if precision == "fp4" else 1 / t  # userbuffers do not take it
        assert apart.forward_seconds == pytest.approx(scores + longer + alone * shorter)


def test_whole_experts_hide_no_sums() -> None:
    """Attention's products alone travel beside its gather and its sum; what experts gather waits."""
    t, e, n, h = 2, 4, FEW.length, FEW.hidden
    model = replace(FEW, experts=4, top_k=2, split="sequence")
    for link in (1e-6, 1e3):
        device = replace(COUNTER, link_bandwidth=link)
        plain, overlapped = (
            profile_of(model, t=t, expert=e, device=device, runtime=Runtime(overlaps_sums=each)).nodes[1]
            for each in (False, True)
        )
        attention, sums = 2 * n * h * (1.5 * h + h) / t, 2 * (t - 1) / t * 2 * n * h / link
        hidden = (1 - 1 / t) * min(attention, sums)
        assert plain.forward_seconds - overlapped.forward_seconds == pytest.approx(hidden, rel=1e-4)


def test_products_that_overlap_have_fewer_outputs_each() -> None:
    t, n, h = 4, 32, SMALL.hidden
    device = replace(COUNTER, wave_outputs=2e3, fp4_flops=1.0)
    every = [(3 * h, 3 * h / t), (h, h), (4 * h, 4 * h / t), (4 * h, h)]  # columns of all ranks, and of this one
    scores = 4 * n * SMALL.length * h / t / device.efficiency(n * SMALL.heads * SMALL.length / t)
    for model, parts in (SMALL, t), (replace(SMALL, precision="fp4"), 1):
        layer = profile_of(model, t=t, device=device, runtime=MEGATRON_CORE).nodes[1]
        products = sum(2 * n * h * width / t / device.efficiency(n * own / parts) for width, own in every)
        assert layer.forward_seconds == pytest.approx(scores + products)


def test_keys_in_a_ring_travel_while_parts_attend() -> None:
    n, h, c = FEW.length, FEW.hidden, 4
    for link in (1e-3, 1e3):
        plain, ring = (
            profile_of(
                FEW,
                t=c,
                context=c,
                device=replace(COUNTER, link_bandwidth=link),
                runtime=Runtime(overlaps_context=each),
            ).nodes[1]
            for each in (False, True)
        )
        keys, attending = (c - 1) / c * 2 * 2 * n * h / 4 / link, (c - 1) / c * 4 * n * n * h / c
        assert plain.forward_seconds - ring.forward_seconds == pytest.approx(min(keys, attending))
        assert plain.backward_seconds - ring.backward_seconds == pytest.approx(2 * min(keys, attending))


def test_gradients_are_read_and_written_where_a_microbatch_adds_its_own() -> None:
    t, h, n = 2, 64, 32
    device = replace(COUNTER, memory_bandwidth=1.0)
    for gradients, each in (("16-bit", 2), ("float32", 4)):
        model = replace(SMALL, gradients=gradients)  # type: ignore[arg-type]
        plain, adding = (
            profile_of(model, t=t, device=device, runtime=runtime).nodes
            for runtime in (PLAIN, Runtime(adds_gradients=True))
        )
        assert plain[1].weight_grad_seconds == pytest.approx(24 * n * h**2 / t)
        for at, parameters in ((1, 12 * h**2 / t), (-1, 1000 / t * h)):
            more = adding[at].weight_grad_seconds - plain[at].weight_grad_seconds
            assert more == pytest.approx(2 * each * parameters)


def test_what_travels_for_an_update() -> None:
    """Of four replicas: gradients once round, or to their owners and weights back, in their own bytes."""
    model, cluster = replace(FEW, precision="fp8"), Cluster.parse("4:net=1B/s")
    device = replace(COUNTER, fp8_flops=2.0)

    def sums(shards: int, runtime: Runtime = PLAIN, **changes: Any) -> AllReduce:
        source = TransformerSource(
            transformer=replace(model, **changes), device=device, cluster=cluster, runtime=runtime
        )
        names = [node.name for node in source.profile(microbatch_size=1).nodes]
        stages = [GivenStage(names, range(4), optimizer_shards=shards)]
        found = evaluate(source, cluster, stages, num_microbatches=4, microbatch_size=1).links
        return found.sums[0]

    weights = 2 * model.num_parameters
    assert sums(1).seconds == pytest.approx(2 * 3 / 4 * weights)
    assert sums(1, gradients="float32").seconds == pytest.approx(2 * 2 * 3 / 4 * weights)
    divided, wide, ahead = sums(4), sums(4, gradients="float32"), sums(4, MEGATRON_CORE)
    assert (divided.seconds, divided.gather) == pytest.approx((3 / 4 * weights, 3 / 4 * weights))
    assert (wide.seconds, wide.gather) == pytest.approx((2 * 3 / 4 * weights, 3 / 4 * weights))
    assert (ahead.seconds, ahead.gather) == pytest.approx((3 / 4 * weights, 3 / 8 * weights))
    assert (divided.unshards, ahead.unshards) == (False, True)
    assert sums(4, MEGATRON_CORE, precision="16-bit").gather == divided.gather
    assert sums(4, MEGATRON_CORE._replace(gathers_bytes=False)).gather == divided.gather


def test_each_large_gradient_has_a_ring_of_its_own() -> None:
    """Of a layer's matrices three are as large as the largest, or together as large; vectors travel in one bucket."""
    model = Transformer(layers=5, hidden=512, heads=8, vocabulary=1000, length=32, head="untied")
    cluster = Cluster.parse("4:net=1000000GB/s@1s")
    profile = profile_of(model, device=COUNTER)
    assert profile.nodes[1].largest_parameter_bytes == 2 * 4 * 512**2
    assert profile.nodes[1].small_parameter_bytes == profile.nodes[1].parameter_bytes - 2 * 12 * 512**2
    found = evaluate(
        profile, cluster, [GivenStage([node.name for node in profile.nodes], range(4))], num_microbatches=4
    )
    assert found.links.sums[0].seconds == pytest.approx((5 * 3 + 2 + 1) * 2 * 3, rel=1e-3)


def test_the_runtime_takes_its_time_around_each_action() -> None:
    profile = profile_of(SMALL, device=replace(COUNTER, action_seconds=1e3))
    plain = profile_of(SMALL, device=COUNTER)
    stages = [GivenStage([node.name for node in profile.nodes], [0])]
    steps = [
        evaluate(each, Cluster.parse("1:net=1GB/s"), stages, num_microbatches=5).simulated_step_time or 0.0
        for each in (plain, profile)
    ]
    assert steps[1] - steps[0] == pytest.approx(5 * 2 * 1e3)


def test_weights_that_are_gathered_first_are_waited_for() -> None:
    """With one stage nothing hides the gather before the first forward; the plan's file keeps when it comes."""
    after, ahead = (replace(chain("abcd", parameter_bytes=4e9), gathers_ahead=each) for each in (False, True))
    stages, cluster = [GivenStage("abcd", [0, 1], 1, "none", 2)], Cluster.from_levels([(2, 1e9)])
    found = [evaluate(profile, cluster, stages, num_microbatches=4) for profile in (after, ahead)]
    assert [each.simulated_step_time for each in found] == [4 / 2 * 12 + 8 + 8] * 2  # work, sums, gather
    again = Plan.from_json(found[1].to_json())
    assert again == found[1]
    assert simulated_simulated(again).timeline.makespan == pytest.approx(40)


LARGE = {"parameter_bytes": 4e9, "largest_parameter_bytes": 4e9, "small_parameter_bytes": 0.0}


@pytest.mark.parametrize(("rate", "step"), [(1e9, 4 + 2 + 4 * 4), (4e9, 4 + 8 + 1)], ids=["links-wait", "work-waits"])
def test_buckets_are_summed_as_the_last_backward_makes_them(rate: float, step: float) -> None:
    """Four buckets, one after every two seconds of the backward, each 4e9 bytes over a ring of two."""
    profile, cluster = replace(chain("abcd", **LARGE), sums_early=True), Cluster.from_levels([(2, rate)])
    found = evaluate(profile, cluster, [GivenStage("abcd", [0, 1])], num_microbatches=2)
    assert found.simulated_step_time == pytest.approx(step)
    again = Plan.from_json(found.to_json())
    assert again == found
    assert simulated_simulated(again).timeline.makespan == pytest.approx(step)


def test_sums_of_a_divided_optimizer_may_be_whole_and_wait_for_all_of_the_backward() -> None:
    """One sum, as long as an undivided optimizer's, then a part of each parameter from each replica by itself."""
    profile = replace(chain("ab", part_seconds=0.5, **LARGE), sums_early=True, sums_whole=True)
    cluster = Cluster(levels=(Level(name="net", size=4, bandwidth=1e9, latency=0.25),))
    sums = {}
    for shards in (1, 4):
        found = evaluate(profile, cluster, [GivenStage("ab", range(4), optimizer_shards=shards)], num_microbatches=4)
        sums[shards] = found.links.sums[0]
    hops, moved = 2 * 3 * 0.25, 2 * 3 / 4 * 8
    assert (sums[1].seconds, sums[1].early, sums[1].gather) == pytest.approx((2 * hops + moved, 4 / 2, 0))
    assert (sums[4].seconds, sums[4].early, sums[4].gather) == pytest.approx(
        (hops + moved, 0, hops / 2 + moved / 2 + 4)
    )


@pytest.mark.parametrize("schedule", ["interleaved", "1f1b"])
def test_chunks_of_a_rank_are_a_bucket_each(schedule: str) -> None:
    """Their latency counts once, and nothing of them is summed before their last backward ends."""
    profile = replace(chain("abcdefgh", **LARGE), sums_early=True, sums_by_chunk=True)
    cluster, chunks = Cluster.parse("4:net=4GB/s@0.25s"), 2 if schedule == "interleaved" else 1
    places, own_nodes = [range(2), range(2, 4)] * chunks, ("ab", "cd", "ef", "gh") if chunks == 2 else ("abcd", "efgh")
    stages = [GivenStage(own, at) for own, at in zip(own_nodes, places, strict=True)]
    found = evaluate(profile, cluster, stages, num_microbatches=4, schedule=schedule)
    one, four = (
        (0.5 + 2.0, 0.0),
        (4 * 0.5 + 4.0, 3 / 4 * 6),
    )  # of a bucket, and of four: seconds, and those that are early
    assert [(each.seconds, each.early) for each in found.links.sums] == [one if chunks == 2 else four] * 2 * chunks


def test_attention_is_as_fast_as_its_kernels_fused_or_not() -> None:
    """Causal FLOPs, half of all and the start's, over those of products; backward two and a half times as many."""
    device = DeviceModel(name="slow", peak_flops=1e12, memory_bandwidth=1e30, memory_bytes=1e12, link_bandwidth=1e30)
    model = replace(SMALL, attention="flash")
    some = [Runtime(attention=each) for each in (None, (0.5, 0.25, model.length))]
    plain, own = (profile_of(model, device=device, runtime=each).nodes[1] for each in some)
    scores = model.score_flops(model.length)
    usual = device.matrix_seconds(scores, outputs=1e30)
    assert own.forward_seconds - plain.forward_seconds == pytest.approx(usual / 0.5 - usual)
    assert own.backward_seconds - plain.backward_seconds == pytest.approx(2.5 * (usual / 0.25 - usual))
    ring = (each._replace(overlaps_context=True) for each in some)
    plain, own = (profile_of(model, t=2, context=2, device=device, runtime=each).nodes[1] for each in ring)
    assert own.forward_seconds - plain.forward_seconds == pytest.approx(usual)  # each part of a ring starts anew
    assert len({profile_of(SMALL, device=device, runtime=each).nodes for each in some}) == 1
    # Bytes that a person counts in nanotron's layer: SiLU and the product apart; Q K V, K V and the output copied.
    model = replace(SMALL, style="llama", attention="flash")
    fused, apart = (profile_of(model, device=MEMORY, runtime=Runtime(fuses=each)).nodes for each in (True, False))
    heads, mlp, logits = (model.length * width for width in (model.hidden, model.mlp_width, model.vocabulary))
    assert apart[1].forward_seconds - fused[1].forward_seconds == pytest.approx(4 * mlp + (36 - 16) * heads)
    assert apart[1].backward_seconds - fused[1].backward_seconds == pytest.approx(16 * mlp + (40 - 20) * heads)
    assert apart[-1].forward_seconds - fused[-1].forward_seconds == pytest.approx(20 * logits)
    adding = (Runtime(adds_gradients=True, fuses=each) for each in (True, False))
    once, again = (profile_of(model, device=MEMORY, runtime=each).nodes[1].weight_grad_seconds for each in adding)
    assert (again or 0.0) - (once or 0.0) == pytest.approx(4 * sum(model.layer_matrices(1)))
    parts = profile_of(model, device=MEMORY, runtime=Runtime(part_seconds=1.0)).nodes
    assert [node.part_seconds for node in parts[1:]] == [6] * model.layers + [2]


@pytest.mark.parametrize(
    "field", ["gradient_ratio", "gather_ratio", "gathers_ahead", "sums_early", "sums_whole", "sums_by_chunk"]
)
def test_profiles_of_one_model_have_one_kind_of_gradients(field: str) -> None:
    other: dict[str, Any] = {"gradient_ratio": 2.0, "gather_ratio": 0.5}
    profiles = [chain("a"), replace(chain("a"), microbatch_size=2, **{field: other.get(field, True)})]
    with pytest.raises(ValueError, match=field):
        plan(profiles, Cluster.from_levels([(1, 1e9)]), global_batch=2)


def test_members_that_share_weights_sum_them_with_all_replicas() -> None:
    """Of a sequence in eight parts all eight members of a node hold the same: sums are scattered over them first."""
    model = Transformer(layers=4, hidden=1024, heads=8, vocabulary=51200, length=512)
    cluster, device = Cluster.parse("4x8:nvlink=600GB/s,net=2GB/s"), DeviceModel.preset("A100-80GB")
    source = TransformerSource(transformer=model, device=device, cluster=cluster, context=8)
    names = ["embedding", *(f"layer{i}" for i in range(4)), "head"]
    halves = [GivenStage(names[:3], range(16), 8), GivenStage(names[3:], range(16, 32), 8)]
    given = evaluate(source, cluster, halves, num_microbatches=4, microbatch_size=1)
    ((_, tied),) = given.costs.tied
    ring = Topology(device.reached(cluster)).ring(range(32)).seconds(2 * 51200 * 1024)
    assert tied == pytest.approx(ring, rel=0.01)
    model = replace(model, heads=32, length=2048, head="untied")
    cluster = Cluster.parse("4x8:nvlink=600GB/s,net=10GB/s")
    source = TransformerSource(transformer=model, device=device, cluster=cluster, context=8)
    options: dict[str, Any] = {
        "microbatch_sizes": [1],
        "tensor_sizes": [8],
        "schedules": "1f1b",
        "recompute": ("none",),
    }
    best = plan(source, cluster, global_batch=64, **options)
    whole = evaluate(source, cluster, [GivenStage(names, range(32), 8)], num_microbatches=64, microbatch_size=1)
    least, found, given = best.searched.least, best.simulated_step_time or 0.0, whole.simulated_step_time or 0.0
    assert least <= found <= given  # its bound left it out, once
