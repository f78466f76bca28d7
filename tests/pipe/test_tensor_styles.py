"""Models cut for a tensor group compute what the plain model computes, forwards and backwards."""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.inside import (
    GPT,
    Arguments,
    Column,
    GPTConfig,
    Heads,
    TensorGroup,
    TensorParallelLike,
    cut_by_styles,
    read_tensor_parallel,
    uncut,
)
from support.parts import GIVEN, Parts
from support.pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its arguments and how it is cut; `num_cut` of its parameters are divided."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    option: TensorParallelLike = "auto"
    num_cut: int


def tokens(*shape: int, most: int = 32) -> Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(3))


def numbers(*shape: int, seed: int = 4) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocabulary=32, length=8, layers=2, width=24, heads=4, tied=True))


def tiny(name: str, **options: Any) -> nn.Module:
    """A model of transformers, as "Llama ForCausalLM"."""
    import transformers

    kind, _, task = name.partition(" ")
    config = getattr(transformers, f"{kind}Config")(**options)
    return getattr(transformers, f"{kind}{task}")(config)


def grouped(name: str, **options: Any) -> nn.Module:
    """One whose heads share keys and values."""
    sizes = {"vocab_size": 32, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1}
    return tiny(name, **(sizes | {"num_attention_heads": 4, "num_key_value_heads": 2} | options))


def llama() -> nn.Module:
    return grouped("Llama ForCausalLM", num_hidden_layers=2)


SMALL = {"vocab_size": 32, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 40, "max_position_embeddings": 16, "num_labels": 5}


def adapted_electra() -> nn.Module:
    model: Any = tiny("Electra ForMaskedLM", **SMALL, embedding_size=12)
    attention = model.electra.encoder.layer[0].attention
    attention.self.query, attention.output.dense = Adapted(attention.self.query), Adapted(attention.output.dense)
    return model


ALIBI = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
POSITIONS = {"relative_attention": True, "pos_att_type": "c2p|p2c"}
PYRAMID = {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 16], "num_attention_heads": [2, 4]}
PYRAMID |= {"sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2], "mlp_ratios": [4, 4]}


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 40, batch_first=True, dropout=0.0), 2)


class Attention(nn.Module):
    """Grouped queries, a gate beside them, and weights: as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.size = 4, 2, 24
        self.q, self.k, self.v = nn.Linear(24, 24), nn.Linear(24, 12), nn.Linear(24, 12)
        self.gate, self.back = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.n_heads, 6).transpose(1, 2)
        k, v = (f(x).view(b, t, self.n_kv_heads, 6).transpose(1, 2) for f in (self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.back(out.transpose(1, 2).reshape(b, t, self.size) * self.gate(x).sigmoid())


class Words(nn.Module):
    """An embedding and a head cut by vocabulary, norms cut by positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(33, 24, padding_idx=20)
        self.places = nn.Embedding(8, 24)
        self.norm = nn.LayerNorm(24)
        self.attention = Attention()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)
        self.head = nn.Linear(24, 34)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x) + self.places(torch.arange(x.shape[1]))
        hidden = hidden + self.attention(self.norm(hidden))
        return self.head(hidden + self.down(F.gelu(self.up(hidden))))


class Adapted(nn.Module):
    """As PEFT's LoRA wraps a Linear."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 3, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, base_layer.out_features, bias=False)})
        self.lora_magnitude_vector = nn.ModuleDict()

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2 * self.lora_B["default"](self.lora_A["default"](x))


def adapted() -> nn.Module:
    model = llama()
    for layer in model.model.layers:  # type: ignore[union-attr]
        for module, names in ((layer.self_attn, ("q_proj", "v_proj", "o_proj")), (layer.mlp, ("down_proj",))):  # type: ignore[union-attr]
            for name in names:
                setattr(module, name, Adapted(getattr(module, name)))
    return model


class SplitBrain(nn.Module):
    """Convolutions in front of large linear layers, whose filters two paths share."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.MaxPool2d(2))
        self.up, self.down = nn.Linear(54, 40), nn.Linear(40, 10)

    def forward(self, x: Tensor) -> Tensor:
        both = self.features(x) + self.features(x.flip(-1))
        return self.down(F.relu(self.up(both.flatten(1)))) + self.features[0].weight.sum()


WORDS: TensorParallelLike = {
    "words": "row",
    "places": "column",
    "norm": "sequence",
    "attention.[qkv]": "column",
    "attention.gate": "column",
    "attention.back": "row",
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "head": Column(gather_output=True),
}

# Models of transformers, and the parameters that are divided. Mixtral's default kernel takes no float64.
TINY: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "gpt2": (lambda: tiny("GPT2 LMHeadModel", **SMALL), 6),
    "adapted": (adapted, 2 * (7 + 4)),
    "mixtral": (lambda: grouped("Mixtral ForCausalLM", num_local_experts=4, experts_implementation="eager"), 6),
    "qwen": (lambda: grouped("Qwen3 ForCausalLM", head_dim=6), 7),
    "falcon": (lambda: tiny("Falcon ForCausalLM", **SMALL), 4),
    "falcon-groups": (lambda: tiny("Falcon ForCausalLM", **SMALL, num_kv_heads=2, new_decoder_architecture=True), 4),
    "falcon-alibi": (lambda: tiny("Falcon ForCausalLM", **SMALL, **ALIBI), 6),
    "bloom": (lambda: tiny("Bloom ForCausalLM", **SMALL, n_layer=1, n_head=4), 6),
    "electra": (lambda: tiny("Electra ForMaskedLM", **SMALL, embedding_size=12), 10),
    "electra-adapted": (adapted_electra, 12),
    "deberta": (lambda: tiny("Deberta ForMaskedLM", **SMALL, **POSITIONS), 10),
    "deberta-v2": (lambda: tiny("DebertaV2 ForMaskedLM", **SMALL, **POSITIONS, position_buckets=8), 14),
    "segformer": (lambda: tiny("Segformer ForImageClassification", **PYRAMID, num_labels=5), 2 * 12),
}

CASES = {
    "gpt": Case(make=gpt, inputs=lambda: {"tokens": tokens(3, 8)}, num_cut=2 * 6),
    **{
        name: Case(make=make, inputs=lambda: {"input_ids": tokens(3, 8)}, num_cut=num_cut)
        for name, (make, num_cut) in TINY.items()
    },
    "encoder": Case(
        make=encoder,
        inputs=lambda: {
            "src": numbers(3, 5, 24),
            "src_key_padding_mask": torch.arange(5) >= torch.tensor([[5], [4], [2]]),
        },
        num_cut=2 * 6,
    ),
    "decoder": Case(
        make=lambda: nn.TransformerDecoder(
            nn.TransformerDecoderLayer(24, 4, 40, dropout=0.0, activation="gelu", norm_first=True, bias=False), 1
        ),
        inputs=lambda: {
            "tgt": numbers(5, 3, 24),
            "memory": numbers(7, 3, 24, seed=5),
            "tgt_mask": nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64),
            "tgt_is_causal": True,
        },
        num_cut=6,
    ),
    "samples": Case(
        make=SplitBrain,
        inputs=lambda: {"x": numbers(4, 3, 8, 8)},
        option={"features": "samples", "up": "column", "down": "row"},
        num_cut=3,
    ),
    "words": Case(make=Words, inputs=lambda: {"x": tokens(3, 8)}, option=WORDS, num_cut=2 + 9 + 3 + 2),
}
CASES["segformer"] = replace(CASES["segformer"], inputs=lambda: {"pixel_values": numbers(3, 3, 16, 16)})


def made(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = case.make().double().train()
    if hasattr(model, "config"):
        model.eval()  # transformers' dropout draws other numbers for other sizes
    return model


def output(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    found = model(**inputs)
    return found if isinstance(found, Tensor) else found.logits


def outcome(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor | None]]:
    given = {key: inputs[key].clone().requires_grad_() for key in ("src", "tgt", "memory") if key in inputs}
    out = output(model, inputs | given)
    (out * numbers(*out.shape, seed=6)).sum().backward()
    leaves = dict(model.named_parameters()) | given
    return out.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def departures(name: str) -> tuple[int, dict[str, float]]:
    """How many parameters are cut, and how far each figure is from the plain model's, relative."""
    case = CASES[name]
    plain, model = made(case), made(case)
    mesh, inputs = init_device_mesh("cpu", (2,)), case.inputs()
    expected, gradients = outcome(plain, inputs)
    own = {key: id(p) for key, p in model.named_parameters()}
    styles = read_tensor_parallel(case.option, model, count=2, example=Arguments.of_example(inputs))
    shards = cut_by_styles(model, styles.styles, TensorGroup.of_mesh(mesh), mesh=mesh)
    assert {key: id(p) for key, p in model.named_parameters()} == own
    model = copy.deepcopy(model)
    found, ours = outcome(model, inputs)
    apart = {"output": far(found, expected)}
    for key, grad in gradients.items():
        if grad is None:
            assert ours[key] is None, key
            continue
        shard = shards.get(key)
        apart[key] = far(ours[key], grad if shard is None else shard.take(grad))
    with torch.no_grad():  # torch's short cut in evaluation reads all weights at once, as whole ones
        evaluated = output(model.eval(), inputs)
        torch.backends.mha.set_fastpath_enabled(False)
        apart["evaluation"] = far(evaluated, output(plain.eval(), inputs))
        torch.backends.mha.set_fastpath_enabled(True)
    return len(shards), apart


def far(found: Tensor | None, expected: Tensor) -> float:
    assert found is not None
    assert found.shape == expected.shape
    assert type(found.detach()) in (Tensor, nn.Parameter)
    return float((found - expected).abs().max() / max(1.0, float(expected.abs().max())))


@pytest.mark.thorough(but=["gpt2", "mixtral", "falcon", "falcon-alibi", "encoder", "decoder", "samples", "words"])
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_plain_model(gloo: Pool, name: str) -> None:
    if name in TINY:
        pytest.importorskip("transformers")
    for num_cut, apart in gloo.run(departures, ranks=2, args=(name,)):
        assert num_cut == CASES[name].num_cut
        allowed = 1e-6 if name in ("adapted", "mixtral", "qwen") else 1e-12  # their norms are taken in float32
        assert {key: value for key, value in apart.items() if not value <= allowed} == {}


def read(option: Any, model: nn.Module, count: int = 2) -> list[str]:
    return list(read_tensor_parallel(option, model, count=count).styles)


def mixed() -> nn.Module:
    """Modules that one may try to cut, and attention that nobody recognises."""
    linears = {"up": nn.Linear(24, 40), "down": nn.Linear(40, 24), "odd": nn.Linear(24, 9)}
    norms = {"norm": nn.LayerNorm(24), "conv": nn.Conv2d(3, 3, 3), "batch": nn.BatchNorm1d(24)}
    return nn.ModuleDict(linears | norms | {"multihead": nn.MultiheadAttention(24, 3), "strange": Strange()})


class Strange(Parts, heads=4, qkv=lambda: nn.Linear(24, 72), out=lambda: nn.Linear(24, 24)):
    """Heads in an order of its own: [head, q | k | v]."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("option", "story"),
    [
        ("autom", "tensor_parallel='autom': expected 'auto', or"),
        (["up"], "tensor_parallel=['up']: expected 'auto', or"),
        ({"upp": "column"}, "{'upp': ...} matches no module: .* such as 'up'"),
        ({"up": "columns"}, "{'up': 'columns'}: expected 'column', 'row', 'sequence', 'samples', or a ParallelStyle"),
        ({"up": "column", "u*": "row"}, "has 'up' and 'u*' for module 'up': expected one pattern"),
        ({"norm": "column"}, "module 'norm' (LayerNorm) cannot be cut by 'column': expected a torch.nn.Linear"),
        ({"batch": "sequence"}, "module 'batch' (BatchNorm1d) cannot be cut by 'sequence': expected a module that"),
        ({"batch": "samples"}, "module 'batch' (BatchNorm1d) has all samples in its mean, and cannot be cut by 'samp"),
        ({"strange": "samples", "strange.out": RowwiseParallel()}, "'strange.out' is cut inside 'strange', of which"),
        ({"strange": "sequence"}, "module 'strange' (Strange) cannot be cut by 'sequence'"),
        ({"odd": "column"}, "module 'odd' has 9 outputs, over 2 tensor ranks: expected a multiple of 2, such as 8"),
        ({"up": "column"}, "module 'up' is cut by 'column' and no module next to it by 'row'"),
        ({"multihead": "column"}, "module 'multihead' is a MultiheadAttention: expected Heads()"),
        ({"multihead": Heads()}, "module 'multihead' has 3 heads, over 2 tensor ranks: expected a multiple of 2"),
        ({"strange.qkv": "column"}, "'strange' (Strange), which has heads=4 and is not recognised"),
    ],
)
def test_refused_by_name(option: Any, story: str) -> None:
    with pytest.raises(ValueError, match=re.escape(story).replace(re.escape(" .* "), " .* ")):
        read(option, mixed())


def test_attention_is_cut_whole_or_not() -> None:
    """Heads decide: a fused projection is divided block by block, beside the one that takes it."""
    model = gpt()
    words = {"blocks.*.attention.qkv": "column", "blocks.*.attention.out": "row"}
    styles = map(str, read_tensor_parallel(words, model, count=2).styles.values())
    assert list(styles) == ["<local heads/t>", "<column x3>", "<row>"] * 2
    with pytest.raises(ValueError, match=r"'blocks.0.attention.qkv' is cut and 'blocks.0.attention.out' is not"):
        read({"blocks.*.attention.qkv": "column", "blocks.*.down": "row"}, model)
    with pytest.raises(ValueError, match=r"'blocks.0.attention.out' cannot be cut by 'column': expected 'row'"):
        read({"blocks.*.attention.*": "column"}, model)
    with pytest.raises(ValueError, match=r"'blocks.0.attention' has 4 heads, over 3 tensor ranks"):
        read("auto", model, 3)
    with pytest.raises(ValueError, match=r"'embedding.tokens' is cut and .*'head.linear.weight' is one tensor"):
        read({"embedding.tokens": "row"}, model)


def test_recognised_by_what_it_computes() -> None:
    """Models that look alike are not taken for it: weights or x inside the body, other outputs, no elementwise."""

    linears = {"up": lambda: nn.Linear(8, 16), "down": lambda: nn.Linear(16, 8)}

    class Looks(Parts, kind=GIVEN, scale=lambda: nn.Parameter(torch.rand(1)), **linears):
        def forward(self, x: Tensor) -> Tensor:
            inner = self.up(x).relu()
            if self.kind == "softmax":
                inner = inner.softmax(-1)
            if self.kind == "scale":
                inner = inner * self.scale
            if self.kind == "input":
                inner = inner * x.mean()
            return self.down(inner) + (inner.mean() if self.kind == "elsewhere" else 0.0)

    for kind in ("softmax", "scale", "input", "elsewhere"):
        with pytest.raises(ValueError, match="recognises nothing"):
            read("auto", Looks(kind))
    assert read("auto", nn.Sequential(Looks("plain"), Looks("softmax"))) == ["0.up", "0.down"]


def test_attention_of_which_single_heads_are_read_or_mixed_stays_whole() -> None:
    """And the table says so; heads that do not divide are refused by name."""
    pytest.importorskip("transformers")
    inputs = Arguments.of_example({"input_ids": tokens(3, 8)})
    for name, options in (
        ("Bloom ForCausalLM", {"n_layer": 1, "n_head": 4, "output_attentions": True}),
        ("Deberta ForMaskedLM", POSITIONS | {"talking_head": True}),
    ):
        model = tiny(name, **SMALL | options)
        styles = read_tensor_parallel("auto", model, count=2, example=inputs)
        assert len(styles.styles) == 2
        assert "whole: its heads are not found to compute apart" in styles.table(model)
    with pytest.raises(ValueError, match=r"'electra.encoder.layer.0.attention.self' has 4 num_attention_heads, over 3"):
        read_tensor_parallel("auto", tiny("Electra ForMaskedLM", **SMALL), count=3, example=inputs)


def test_a_plan_of_the_model() -> None:
    """Grouped heads that do not divide, words that are not known, and adapters of other kinds are refused by name."""
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"'model.layers.0.self_attn.k_proj' has 2 heads of 6, over 4 tensor ranks"):
        read("auto", llama(), 4)
    model = llama()
    model.config.base_model_tp_plan = {"layers.*.mlp.up_proj": "diagonal"}
    message = r"base_model_tp_plan\['layers.\*.mlp.up_proj'\] = 'diagonal': expected one of"
    with pytest.raises(ValueError, match=message):
        read("auto", model)
    model: Any = adapted()
    model.model.layers[1].self_attn.v_proj.lora_magnitude_vector["default"] = nn.Linear(1, 1)
    message = r"'model.layers.1.self_attn.v_proj' is wrapped by an adapter of lora_A, .*expected .*merge_and_unload\(\)"
    with pytest.raises(ValueError, match=message):
        read("auto", model)


def test_the_table_tells_what_stays_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8))
    assert read_tensor_parallel("auto", model, count=2).table(model).splitlines() == [
        "module  how     modules  parameters each",
        "*       column        1               72",
        "*       row           1               72",
        "*       whole         1               16",
    ]


def test_undone() -> None:
    """Classes and attributes are the user's again; the parameters were the same objects all along."""
    model = encoder()
    kinds = [type(module) for module in model.modules()]
    parameters = list(model.parameters())
    cut_by_styles(model, read_tensor_parallel("auto", model, count=2).styles, TensorGroup(None, index=1, count=2))
    assert [type(module) for module in model.modules()] != kinds
    layer = model.layers[0]
    assert (layer.self_attn.num_heads, layer.linear1.out_features) == (2, 20)
    uncut(model)
    assert [type(module) for module in model.modules()] == kinds
    assert (layer.self_attn.num_heads, layer.linear1.out_features, layer.activation_relu_or_gelu) == (4, 40, 1)
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
