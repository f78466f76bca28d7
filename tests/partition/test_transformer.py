"""Profiles from formulas: shapes, device models, sums over rings, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from support.inside import (
    MEGATRON_CORE,
    PRESETS,
    DeviceModel,
    Split,
    Transformer,
    TransformerSource,
    fit_device,
    transformer_profile,
)

from stagewright.partition import Cluster, GivenStage, Profile, evaluate

A100 = DeviceModel.preset("A100-80GB")
SMALL = Transformer(layers=3, hidden=64, heads=8, vocabulary=1000, length=32)
NODES = Cluster.parse("4x8:nvlink=300GB/s,net=25GB/s")

# Computes 1 FLOP a second and does nothing else: seconds are FLOPs.
COUNTER = DeviceModel(
    name="counter", peak_flops=1.0, memory_bandwidth=1e30, memory_bytes=1e30, link_bandwidth=1e30, matrix_efficiency=1.0
)


def profile_of(model: Transformer, *, b: int = 1, t: int = 1, device: DeviceModel = A100, **more: Any) -> Profile:
    return transformer_profile(model, microbatch_size=b, tensor=t, device=device, **more)


def total(profile: Profile, figure: str) -> float:
    return sum(float(getattr(node, figure)) for node in profile.nodes)


# Closed forms.


def test_megatrons_formula_for_flops() -> None:
    model = Transformer(layers=96, hidden=12288, heads=96, vocabulary=51200, length=2048)
    B, s, l, h, V = 1536, model.length, model.layers, model.hidden, model.vocabulary
    published = 96 * B * s * l * h**2 * (1 + s / (6 * h) + V / (16 * l * h))
    assert model.flops(batch_size=B, recompute="layer") == pytest.approx(published, rel=1e-12)
    assert model.flops(batch_size=B) == pytest.approx(72 * B * s * l * h**2 * (1 + s / (6 * h) + V / (12 * l * h)))


def test_a_fused_loss_computes_logits_again_and_keeps_none() -> None:
    """For t = 2: B has one product more, and so have I and W alone; what is kept and held for a while has no n V."""
    stored, fused = (
        profile_of(replace(SMALL, loss=loss), b=2, t=2, device=COUNTER).nodes[-1] for loss in ("stored", "fused")
    )
    product = SMALL.head_flops(2 * SMALL.length) / 2
    assert fused.forward_seconds == stored.forward_seconds == pytest.approx(product)
    assert fused.backward_seconds == pytest.approx(3 * product)
    assert [fused.input_grad_seconds, fused.weight_grad_seconds] == pytest.approx([2 * product, 2 * product])
    tokens = 2 * SMALL.length
    assert stored.stash_bytes - fused.stash_bytes == 4 * tokens * (SMALL.vocabulary / 2 - 1)
    assert fused.workspace_bytes == 10 * tokens * 256  # rows of a chunk, at least
    wide = replace(SMALL, hidden=1024, vocabulary=8000, loss="fused")
    assert profile_of(wide, b=2, t=2).nodes[-1].workspace_bytes == 12 * tokens * 1024
    assert SMALL.hidden < 256 < wide.hidden


def test_later_predictions_are_a_layer_and_a_head_each() -> None:
    """The first head's stage passes on what it took; figures of the profile are those of the shape."""
    model = replace(SMALL, predictions=3, head="untied")
    profile = profile_of(model, b=2, device=COUNTER)
    assert [node.name for node in profile.nodes][-5:] == ["head", "later1", "head1", "later2", "head2"]
    assert [node.activation_bytes > 0 for node in profile.nodes][-5:] == [True, True, True, True, False]
    assert total(profile, "parameter_bytes") == 2 * model.num_parameters
    seconds = total(profile, "forward_seconds") + total(profile, "backward_seconds")
    assert seconds == pytest.approx(model.flops(batch_size=2))


def test_a_layer_on_a_device_of_round_figures() -> None:
    device = DeviceModel(
        name="round",
        peak_flops=2e9,
        memory_bandwidth=1e6,
        memory_bytes=1.0,
        link_bandwidth=1e3,
        matrix_efficiency=0.5,
        link_efficiency=0.5,
    )
    b, t, s, h, a = 2, 4, SMALL.length, SMALL.hidden, SMALL.heads
    n = b * s
    layer = profile_of(SMALL, b=b, t=t, device=device).nodes[1]
    sums = 2 * 2 * (t - 1) / t * 2 * n * h / 500
    weights = 24 * n * h**2 / t / 1e9
    scores = 4 * n * s * h / t / 1e9
    forward = (22 * n * h + 16 * n * h / t + 13 * n * a * s / t) / 1e6
    backward = (34 * n * h + 24 * n * h / t + 19 * n * a * s / t) / 1e6
    assert layer.forward_seconds == pytest.approx(weights + scores + forward + sums)
    assert layer.input_grad_seconds == pytest.approx(weights + 2 * scores + backward + sums)
    assert layer.weight_grad_seconds == pytest.approx(weights)
    assert layer.backward_seconds == layer.input_grad_seconds + layer.weight_grad_seconds
    assert layer.activation_bytes == 2 * n * h
    assert layer.parameter_bytes == 2 * (12 * h**2 // t + 7 * h // t + 6 * h)
    # 16-bit gradients: emptied 2, to float32 6, unscaled 8, norm 4, clipped 8, Adam 16 + 12, to 16 bits 6.
    assert layer.update_seconds == pytest.approx(layer.parameter_bytes / 2 * 62 / 1e6)
    wide = profile_of(replace(SMALL, gradients="float32"), b=b, t=t, device=device).nodes[1]
    assert wide.update_seconds == pytest.approx(layer.parameter_bytes / 2 * (4 + 8 + 4 + 8 + 28 + 6) / 1e6)


@pytest.mark.parametrize("split", ["tensor", "sequence"])
def test_what_a_layer_keeps(split: Split) -> None:
    """Korthikanti et al. 2022, Table 2, in units of n h bytes: all, selectively; what runs again is the scores' F."""
    b, t, s, h, a = 2, 4, SMALL.length, SMALL.hidden, SMALL.heads
    n = b * s
    layer = profile_of(replace(SMALL, split=split), b=b, t=t, device=COUNTER).nodes[1]
    kept = 10 + 24 / t if split == "tensor" else 34 / t
    assert layer.stash_bytes == pytest.approx((kept + 5 * a * s / (h * t)) * n * h)
    assert layer.selective_bytes == pytest.approx(kept * n * h)
    assert layer.selective_seconds == pytest.approx(SMALL.score_flops(n) / t)
    assert layer.activation_bytes == 2 * n * h  # what is kept by layer


def test_flops_of_recompute_and_of_flash_attention() -> None:
    by_layer, selective = (
        SMALL.flops(batch_size=2, recompute=each) - SMALL.flops(batch_size=2) for each in ("layer", "selective")
    )
    tokens = 2 * SMALL.length
    assert selective == SMALL.layers * 4 * tokens * SMALL.length * SMALL.hidden
    assert by_layer == pytest.approx(SMALL.layers * 24 * tokens * SMALL.hidden**2 + selective)
    stored, flash = (profile_of(replace(SMALL, attention=each), device=COUNTER) for each in ("stored", "flash"))
    again = SMALL.layers * 2 * SMALL.length**2 * SMALL.hidden
    assert total(flash, "backward_seconds") - total(stored, "backward_seconds") == pytest.approx(again)
    assert total(flash, "forward_seconds") == total(stored, "forward_seconds")
    assert flash.nodes[1].stash_bytes == 34 * SMALL.length * SMALL.hidden


def test_small_microbatches_and_narrow_slices_cost_more_a_flop() -> None:
    """Outputs of the products with Q K V, behind the attention, up and down, and of the scores, over t."""
    model = Transformer(layers=1, hidden=1024, heads=16, vocabulary=100, length=512)
    device = replace(COUNTER, wave_outputs=2e6)

    def forward(b: int, t: int) -> float:
        n, h = 512 * b, 1024
        outputs = (3 * n * h / t, n * h, 4 * n * h / t, n * h, n * 16 * 512 / t)
        flops = (6 * n * h * h / t, 2 * n * h * h / t, 8 * n * h * h / t, 8 * n * h * h / t, 4 * n * 512 * h / t)
        return sum(f * (o + 1e6) / o for f, o in zip(flops, outputs, strict=True))

    for b, t in ((1, 1), (4, 1), (1, 4), (4, 4)):
        layer = profile_of(model, b=b, t=t, device=device).nodes[1]
        assert layer.forward_seconds == pytest.approx(forward(b, t))
    assert forward(4, 1) < 4 * forward(1, 1)
    assert forward(1, 4) > forward(1, 1) / 4


def test_what_the_profile_says_of_itself() -> None:
    profile = profile_of(SMALL, b=3, t=2)
    assert [node.name for node in profile.nodes] == ["embedding", "layer0", "layer1", "layer2", "head"]
    assert profile.edges == (("embedding", "layer0"), ("layer0", "layer1"), ("layer1", "layer2"), ("layer2", "head"))
    assert (profile.origin, profile.device, profile.dtype) == ("formula", "A100-80GB", "bfloat16")
    assert (profile.microbatch_size, profile.optimizer_ratio) == (3, 6.0)
    assert [node.runs_again for node in profile.nodes] == [False, True, True, True, False]
    assert profile.knows("selective")
    assert Profile.from_json(profile.to_json()) == profile


def test_sixteen_bytes_a_parameter_or_eighteen() -> None:
    assert (SMALL.bytes_per_parameter, SMALL.optimizer_ratio) == (16, 6.0)
    wide = replace(SMALL, gradients="float32")
    assert (wide.bytes_per_parameter, wide.optimizer_ratio) == (18, 7.0)
    profile = profile_of(SMALL)
    tied_twice = SMALL.vocabulary * SMALL.hidden
    assert total(profile, "parameter_bytes") == 2 * (SMALL.num_parameters + tied_twice)
    assert total(profile_of(replace(SMALL, head="untied")), "parameter_bytes") == total(profile, "parameter_bytes")


def test_a_source_makes_each_profile_once() -> None:
    source = TransformerSource(transformer=SMALL, device=A100, cluster=NODES)
    assert source.profile(microbatch_size=2, tensor=4) is source.profile(microbatch_size=2, tensor=4)
    assert source.profile(microbatch_size=2) == profile_of(SMALL, b=2)
    assert source == TransformerSource(transformer=SMALL, device=A100, cluster=NODES)


@pytest.mark.parametrize(
    ("heads", "cluster", "limit", "sizes"),
    [
        (8, NODES, None, (1, 2, 4, 8)),
        (12, NODES, None, (1, 2, 3, 4, 6)),
        (12, None, None, (1, 2, 3, 4, 6, 12)),
        (12, NODES, 3, (1, 2, 3)),
    ],
)
def test_tensor_sizes(heads: int, cluster: Cluster | None, limit: int | None, sizes: tuple[int, ...]) -> None:
    model = Transformer(layers=1, hidden=heads * 16, heads=heads, vocabulary=10, length=4)
    assert TransformerSource(transformer=model, device=A100, cluster=cluster).tensor_sizes(limit) == sizes


def test_presets_are_named_once_and_found_in_any_case() -> None:
    assert len({each.name.lower() for each in PRESETS}) == len(PRESETS)
    assert DeviceModel.preset("v100-32gb").memory_bytes == 32e9
    with pytest.raises(ValueError, match=r"unknown device 'A100-80G': expected one of V100-16GB, .*'A100-80GB'\?"):
        DeviceModel.preset("A100-80G")
    with pytest.raises(ValueError, match=r"unknown device 'abacus': expected one of .* of your own$"):
        DeviceModel.preset("abacus")


def test_bad_devices_and_fits() -> None:
    for wrong, message in (
        ({"peak_flops": 0}, r"device 'A100-80GB': peak_flops: 0: expected a finite number above 0"),
        ({"wave_outputs": -1}, r"wave_outputs: -1: expected a finite number of at least 0"),
        ({"matrix_efficiency": 64}, r"matrix_efficiency: 64: expected a number above 0 and at most 1"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(A100, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"constants: \('speed',\): expected some of matrix_efficiency, wave_outputs"):
        fit_device(A100, [1.0], lambda _: [1.0], constants=("speed",))
    with pytest.raises(ValueError, match=r"measured: \(1\.0,\): expected at least 2 runs for 2 constants"):
        fit_device(A100, [1.0], lambda _: [1.0], constants=("matrix_efficiency", "wave_outputs"))
    with pytest.raises(ValueError, match=r"measured\[0\]: 0: expected a finite number above 0"):
        fit_device(A100, [0], lambda _: [1.0])
    with pytest.raises(ValueError, match=r"predict: \[1\.0, 2\.0\]: expected 1 numbers of seconds"):
        fit_device(A100, [1.0], lambda _: [1.0, 2.0])


# Later models.

LLAMA = Transformer(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    vocabulary=128256,
    length=8192,
    mlp_ratio=3.5,
    head="untied",
    style="llama",
    attention="flash",
    split="sequence",
)
MIXTRAL = replace(LLAMA, vocabulary=32000, experts=8, top_k=2)
FEW = Transformer(
    layers=3, hidden=64, heads=8, kv_heads=2, vocabulary=1000, length=32, mlp_ratio=3.5, head="untied", style="llama"
)
ROUTED = replace(FEW, experts=4, top_k=2)


def test_parameters_of_published_models() -> None:
    gpt2 = Transformer(layers=12, hidden=768, heads=12, vocabulary=50257, length=1024)
    assert gpt2.num_parameters == 124_439_808
    assert replace(gpt2, head="untied").num_parameters == 124_439_808 + 50257 * 768
    assert LLAMA.num_parameters == 8_030_261_248
    assert replace(LLAMA, layers=80, hidden=8192, heads=64).num_parameters == 70_553_706_496
    assert MIXTRAL.num_parameters == 46_702_792_704


@pytest.mark.parametrize("model", [FEW, ROUTED], ids=["few heads of keys", "experts"])
def test_what_all_ranks_compute_is_what_the_formula_counts(model: Transformer) -> None:
    for t in (1, 2, 8):
        profile = profile_of(SMALL, b=2, t=t, device=COUNTER)
        assert t * sum(node.seconds for node in profile.nodes) == pytest.approx(SMALL.flops(batch_size=2))
    n, h, k, chooser = 2 * 32, 64, model.top_k, 4 if model.experts > 1 else 0
    layer = 2 * n * h * (h + 2 * h / 4 + h + k * 3 * 3.5 * h + chooser) + 4 * n * 32 * h
    assert model.flops(batch_size=2) == 3 * (3 * layer + 2 * n * h * 1000)
    for t, c, e in ((1, 1, 1), (2, 1, 1), (1, 4, 1), (2, 2, model.experts)):
        found = profile_of(model, b=2, t=t * c, device=COUNTER, context=c, expert=e)
        # Each tensor rank chooses, and computes all of what replicas divide.
        again = chooser + (k * 3 * 3.5 * h if e > 1 else 0)
        whole = model.flops(batch_size=2) + 3 * 3 * 2 * n * h * again * (t - 1)
        assert t * c * sum(node.seconds for node in found.nodes) == pytest.approx(whole)
        held = 2 * model.layer_parameters(t, e)
        assert [found.nodes[1].parameter_bytes, found.nodes[0].activation_bytes] == [held, 2 * n * h]
        assert (found.context, found.expert) == (c, e)
    experts = 4 * 3 * 3.5 * h * h if model.experts > 1 else 0
    assert model.layer_parameters(1, 1) - model.layer_parameters(1, model.experts) == experts * 3 / 4


def test_products_in_fp8_take_half_the_time() -> None:
    device = replace(COUNTER, fp8_flops=2.0)
    with pytest.raises(ValueError, match=r"fp8_flops: 0\.5: expected FLOP/s, at least peak_flops=1"):  # as TFLOP/s are
        replace(COUNTER, fp8_flops=0.5)
    n, h = 2 * 32, 64
    weights = 2 * n * h * (2.5 * h + 3 * 3.5 * h)
    layers = [profile_of(replace(FEW, precision=each), b=2, device=device).nodes[1] for each in ("16-bit", "fp8")]  # type: ignore[arg-type]
    assert layers[0].forward_seconds - layers[1].forward_seconds == pytest.approx(weights / 2)
    assert layers[0].seconds - layers[1].seconds == pytest.approx(3 * weights / 2)
    inputs = n * (3 + 3.5) * h
    assert layers[0].stash_bytes - layers[1].stash_bytes == inputs  # a byte less each
    alone = profile_of(replace(FEW, precision="fp8"), b=2, device=device, runtime=MEGATRON_CORE).nodes[1]
    assert (layers[1].buffer_bytes, alone.buffer_bytes) == (layers[1].parameter_bytes, 0)  # two casts of a byte
    slow = replace(device, memory_bandwidth=1.0)
    moved = [profile_of(replace(FEW, precision=each), b=2, device=slow).nodes[1] for each in ("16-bit", "fp8")]  # type: ignore[arg-type]
    assert moved[1].forward_seconds - moved[0].forward_seconds == pytest.approx(4 * inputs - weights / 2)
    outputs = n * (1.5 + 1 + 2 * 3.5 + 1) * h
    assert moved[1].backward_seconds - moved[0].backward_seconds == pytest.approx(4 * outputs - weights)
    with pytest.raises(
        ValueError, match="precision on 'A100-80GB': 'fp8': expected 16-bit, or a device with fp8_flops"
    ):
        profile_of(replace(FEW, precision="fp8"))


def test_what_later_models_keep() -> None:
    n, h, a, s = 2 * 32, 64, 8, 32
    scores, mlp = 5 * n * a * s, 3.5 * n * h
    assert profile_of(FEW, b=2).nodes[1].stash_bytes == (8 + 4 * 1.25) * n * h + 6 * mlp + scores
    apart = profile_of(FEW, b=2, t=4, context=4).nodes[1].stash_bytes  # own tokens, and all keys and values
    assert apart == ((8 + 4) * n * h + 6 * mlp + scores) / 4 + 4 * 0.25 * n * h
    assert profile_of(ROUTED, b=2).nodes[1].stash_bytes == (8 + 4 * 1.25 + 8) * n * h + 2 * 6 * mlp + scores


def test_keys_are_gathered_and_tokens_sent_to_their_experts() -> None:
    """Links alone take time: a byte a second each way."""
    device = replace(COUNTER, peak_flops=1e30, link_bandwidth=1.0)
    n, h, t, c = 2 * 32, 64, 2, 4
    one, apart = (profile_of(FEW, b=2, t=t * each, device=device, context=each).nodes[1] for each in (1, c))
    gather, sums = (c - 1) / c * 2 * 2 * n * h / 4 / t, 2 * 2 * n * h
    assert one.forward_seconds == one.backward_seconds == pytest.approx(sums)
    assert apart.forward_seconds == pytest.approx(sums / c + gather)
    assert apart.backward_seconds == apart.input_grad_seconds == pytest.approx(sums / c + 2 * gather)
    routed = profile_of(ROUTED, b=2, device=device, expert=4).nodes[1]
    rows = 2 * 3 / 4 * 2 * 2 * n * h
    assert routed.forward_seconds == routed.backward_seconds == pytest.approx(rows)
    # Tensor ranks with whole experts send all rows, and sum attention alone; divided tokens are gathered besides.
    for split, halves in (("tensor", 2), ("sequence", 3)):
        both = profile_of(replace(ROUTED, split=split), b=2, t=t, device=device, expert=4).nodes[1]  # type: ignore[arg-type]
        assert both.forward_seconds == both.backward_seconds == pytest.approx(rows + halves / 2 * 2 * n * h)


def test_replicas_sum_what_they_share() -> None:
    """Experts' gradients go round half of four replicas, each in two parts of the sequence; the others round all."""
    source = TransformerSource(
        transformer=ROUTED, device=COUNTER, context=2, expert=4, cluster=Cluster.parse("8:net=1B/s")
    )
    assert replace(source, expert=1).tensor_sizes() == (2, 4)
    nodes = source.profile(microbatch_size=1, tensor=2).nodes
    stages = [GivenStage([node.name for node in nodes], range(8), 2)]
    found = evaluate(source, source.cluster, stages, num_microbatches=8, microbatch_size=1)
    experts = 3 * 2 * ROUTED.expert_parameters(1)
    others = 2 * ROUTED.num_parameters - 4 * experts
    assert found.links.sums[0].seconds == pytest.approx(2 * 7 / 8 * others + 2 * 1 / 2 * experts)
    shared = [stages[0]._replace(optimizer_shards=4)]
    divided = evaluate(source, source.cluster, shared, num_microbatches=8, microbatch_size=1)
    assert divided.memory[0].optimizer == pytest.approx(6 * (others / 8 + experts / 2))  # as `_over_tensors` runs
    with pytest.raises(ValueError, match=r"\(1,\) replicas: expected multiples of expert=4"):
        evaluate(source, source.cluster, [stages[0]._replace(ranks=[0, 1])], num_microbatches=8, microbatch_size=1)
    with pytest.raises(ValueError, match="schedule='seq1f1b' with context: 2: expected 1"):
        evaluate(
            source,
            source.cluster,
            stages,
            num_microbatches=8,
            microbatch_size=1,
            schedule="seq1f1b",
            slice_lengths=(16, 16),
        )


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"layers": 0}, {}, r"transformer: layers: 0: expected a whole number of at least 1"),
        ({"heads": 7}, {}, r"transformer: hidden: 64: expected a multiple of heads=7"),
        ({"mlp_ratio": 1e-9}, {}, r"transformer: mlp_ratio: 1e-09: expected a multiple of 1/64"),
        ({"gradients": "float64"}, {}, r"transformer: gradients: 'float64': expected one of 16-bit, float32"),
        ({"kv_heads": 3}, {}, "kv_heads: 3: expected a divisor of heads=8"),
        ({"top_k": 2}, {}, "top_k: 2: expected at most the 1 experts"),
        ({"style": "t5"}, {}, "style: 't5': expected one of gpt, llama"),
        ({}, {"microbatch_size": 0}, r"microbatch_size: 0: expected a whole number of at least 1"),
        ({}, {"tensor": 3}, r"tensor: 3: expected a divisor of heads=8"),
        ({}, {"tensor": 4}, "tensor: 4: expected a divisor of kv_heads=2"),
        ({}, {"tensor": 3, "context": 2}, "tensor: 3: expected a multiple of context=2"),
        ({}, {"tensor": 3, "context": 3}, "length: 32: expected a multiple of context=3"),
        ({"kv_heads": 8}, {"tensor": 8, "cluster": Cluster.parse("4:net=1B/s")}, "tensor: 8: expected at most the 4 "),
        ({"experts": 4}, {"expert": 3}, "expert: 3: expected a divisor of the model's experts=4"),
    ],
)
def test_mistakes(changes: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transformer_profile(replace(FEW, **changes), **{"microbatch_size": 1, "device": COUNTER, **options})
