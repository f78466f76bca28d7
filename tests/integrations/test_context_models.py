"""Models of transformers over context and expert groups: exact against one process, also packed and padded."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import inside
from support.grids import nightly
from support.parts import Parts
from support.pool import Pool
from torch import Tensor, nn

from stagewright import Inputs, PipelineModule

transformers = pytest.importorskip("transformers")

_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
}
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "output_router_logits": False,
    "experts_implementation": "eager",  # others take no float64
}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_MODELS: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "MistralConfig": {"sliding_window": 6},
    "Qwen3Config": {"head_dim": 8},
    "Olmo2Config": {"tie_word_embeddings": False},  # Gemma multiplies its norms in float32: weights 2e-10 apart
    "MixtralConfig": _MOE,
    "Qwen3MoeConfig": _MOE | {"head_dim": 8},
    "OlmoeConfig": _MOE,
    "DeepseekV3Config": _MOE | _DEEPSEEK,
}
_SCHEDULES: dict[str, dict[str, Any]] = {"1f1b": {}, "interleaved": {"num_chunks": 2}, "zb-h1": {}, "2bw": {}}
_LENGTH, _RATE = 16, 0.05


def _model(config: str, attention: str, **options: Any) -> nn.Module:
    assert inside.read_mask  # with it "stagewright" is registered
    own = getattr(transformers, config)(**(_SMALL | _MODELS[config] | options))
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(own, attn_implementation=attention).double()
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.02 * torch.randn_like(parameter)
    return model


def _loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def _batches(kind: str) -> list[dict[str, Tensor]]:
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(3):
        tokens, target = torch.randint(64, (2, 4, _LENGTH), generator=generator).unbind()
        place = torch.arange(_LENGTH).expand(4, _LENGTH).clone()
        if kind == "packed":
            place[1:] = torch.cat([torch.arange(5), torch.arange(7), torch.arange(4)])
        found.append({"input_ids": tokens, "position_ids": place, "target": target})
        if kind == "padded":
            found[-1]["attention_mask"] = (torch.arange(_LENGTH) < torch.tensor([[16], [12], [9], [16]])).long()
    return found


def _plainly(config: str, batches: list[dict[str, Tensor]], *, delay: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of SGD in one process, whose gradients are of the weights `delay` updates ago."""
    model, losses = _model(config, "sdpa"), []
    versions = [copy.deepcopy(model.state_dict())] * (delay + 1)
    for each in batches:
        model.load_state_dict(versions[-1 - delay])
        model.zero_grad()
        inputs = {name: x for name, x in each.items() if name != "target"}
        loss = _loss(model(**inputs), each["target"])
        loss.backward()
        losses.append(loss.item())
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        newest = versions[-1]
        versions.append({name: x - _RATE * gradients[name] if name in gradients else x for name, x in newest.items()})
    return losses, versions[-1]


def _piped(config: str, schedule: str, kind: str, axis: str) -> tuple[float, float]:
    """Largest differences of a loss and of a weight from those of one process."""
    warnings.filterwarnings("ignore", message="the schedule splits the backward")  # experts give little to W
    batches = _batches(kind)
    losses, expected = _plainly(config, batches, delay=int(schedule == "2bw"))
    with PipelineModule(
        _model(config, "stagewright"),
        mesh={"pipe": 1, "context": 2, "expert": 2} if axis == "both" else {"pipe": 2, axis: 2},
        schedule=schedule,
        num_microbatches=2,
        loss_fn=_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=_RATE),
        **_SCHEDULES[schedule],
    ) as pipe:
        own = slice(pipe.replica[0], None, pipe.replica[1])  # members of an expert group pass samples of their own
        mine = [{name: x[own] for name, x in each.items()} for each in batches]
        results = [pipe.train_step(each) for each in mine] + pipe.flush()
        found = [result.loss for result in results if result.loss is not None]
        state = pipe.full_state_dict()
    worst = max(float((state[name] - x).abs().max()) for name, x in expected.items() if name in state)
    return max(abs(one - other) for one, other in zip(found, losses, strict=True)), worst


_EXPERTS = [name for name, options in _MODELS.items() if "num_experts" in options]
_CASES = [
    ("LlamaConfig", "1f1b", "packed", "context"),
    ("MistralConfig", "1f1b", "padded", "context"),
    ("MixtralConfig", "1f1b", "packed", "context"),
    ("MixtralConfig", "1f1b", "padded", "expert"),
    ("MixtralConfig", "1f1b", "packed", "both"),  # a context group of expert groups
]
_AXES: dict[str, Any] = {"context": _MODELS, "expert": _EXPERTS}
_MORE = [(name, how, "packed", axis) for axis, own in _AXES.items() for name in own for how in _SCHEDULES]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config", "schedule", "kind", "axis"), [*_CASES, *(nightly(*case) for case in _MORE if case not in _CASES)]
)
def test_models_are_exact_over_context_and_expert_groups(
    gloo: Pool, config: str, schedule: str, kind: str, axis: str
) -> None:
    for differences in gloo.run(_piped, ranks=4, args=(config, schedule, kind, axis)):
        assert max(differences) < 1e-10


def _of_other_forms(config: str) -> float:
    """The largest difference of a loss and of a weight from those of one process, after a step."""
    sizes = {"num_hidden_layers": 2, "head_dim": 8, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 1}
    if config == "SwitchTransformersConfig":
        sizes = {**dict.fromkeys(("d_model", "d_ff"), 32), "d_kv": 8, "num_heads": 4, "num_layers": 2}
        sizes |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "decoder_start_token_id": 0}
        sizes |= {"dropout_rate": 0.0, "router_jitter_noise": 0.0, "vocab_size": 64, "num_experts": 4}
    else:
        sizes = _SMALL | _MOE | sizes
    own = getattr(transformers, config)(**sizes)
    torch.manual_seed(0)
    kind = transformers.SwitchTransformersForConditionalGeneration
    plain = kind(own) if "d_model" in sizes else transformers.AutoModelForCausalLM.from_config(own)
    for module in plain.modules():
        if type(module).__name__ == "SwitchTransformersTop1Router":
            module.dtype = torch.float64  # into which its forward turns weights
    plain, tokens = plain.double(), torch.randint(3, 60, (8, 6), generator=torch.Generator().manual_seed(1))
    names = ["input_ids", "decoder_input_ids"] if "d_model" in sizes else ["input_ids"]
    with PipelineModule(
        copy.deepcopy(plain),
        mesh={"pipe": 2, "expert": 2},
        num_microbatches=2,
        loss_fn=_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=_RATE),
    ) as pipe:
        mine = tokens.chunk(2)[pipe.replica[0]]
        found = pipe.train_step(dict.fromkeys(names, mine), mine).loss or 0.0
        state = pipe.full_state_dict()
    losses = [_loss(plain(**dict.fromkeys(names, x)), x) / 4 for x in tokens.chunk(4)]
    for loss in losses:
        loss.backward()
    with torch.no_grad():
        for p in plain.parameters():
            p -= _RATE * (0.0 if p.grad is None else p.grad)
    worst = max(float((state[name] - x).abs().max()) for name, x in plain.state_dict().items())
    return max(worst, abs(found - sum(loss.item() for loss in losses)))


@pytest.mark.thorough
@pytest.mark.parametrize("config", ["GptOssConfig", "Llama4TextConfig", "SwitchTransformersConfig"])
def test_experts_of_other_forms_are_exact_over_an_expert_group(gloo: Pool, config: str) -> None:
    assert max(gloo.run(_of_other_forms, ranks=4, args=(config,))) < 1e-10


def _routed(config: str) -> float:
    """With the model's own loss, to which its routers add one: the largest difference of it and of a gradient."""
    own: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    # 64 labels count: routers work in float32, whose gradients are exact multiples where a power of 2 divides them.
    batch = torch.randint(64, (4, _LENGTH + 1), generator=torch.Generator().manual_seed(1))
    plain, losses = _model(config, "sdpa", **own), []
    for tokens in batch.chunk(4):
        losses.append(plain(input_ids=tokens, labels=tokens).loss / 4)
        losses[-1].backward()
    with PipelineModule(
        _model(config, "sdpa", **own), mesh={"pipe": 2, "expert": 2}, num_microbatches=2, loss_fn="model"
    ) as pipe:
        tokens = batch.chunk(2)[pipe.replica[0]]
        found = pipe.forward_backward({"input_ids": tokens, "labels": tokens}).loss
        differences = [abs(found - sum(loss.item() for loss in losses))]
        for name, parameter in pipe.named_parameters():
            expected = plain.get_parameter(name).grad
            if parameter.grad is not None and expected is not None:
                each = expected.chunk(len(expected) // len(parameter))[pipe.replica[0] if "experts" in name else 0]
                differences.append(float((parameter.grad - each).abs().max()))
    return max(differences)


@pytest.mark.thorough
@pytest.mark.parametrize("config", ["MixtralConfig", "Qwen3MoeConfig"])
def test_losses_of_routers_are_exact_over_an_expert_group(gloo: Pool, config: str) -> None:
    assert max(gloo.run(_routed, ranks=4, args=(config,))) < 1e-10


def _own_loss() -> dict[str, float]:
    """Differences from one process with the model's own loss, a mean over labels that members share unevenly."""
    tokens = torch.randint(64, (4, _LENGTH), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[1, 9:] = labels[2, :3] = labels[3, 2:7] = -100
    batch = {"input_ids": tokens, "labels": labels, "position_ids": torch.arange(_LENGTH).expand(4, -1)}
    plain = _model("LlamaConfig", "sdpa")
    found: dict[str, float] = {}
    with PipelineModule(
        _model("LlamaConfig", "stagewright"),
        mesh={"pipe": 1, "context": 2},
        num_microbatches=2,
        loss_fn="model",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=_RATE),
        verify=True,
    ) as pipe:
        optimizer = torch.optim.SGD(plain.parameters(), lr=_RATE)
        for step in range(2):
            loss = plain(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found[f"loss {step}"] = abs((pipe.train_step(batch).loss or 0.0) - loss.item())
        state = pipe.full_state_dict()
        weights = plain.state_dict()
        found |= {f"weight {name}": float((x - weights[name]).abs().max()) for name, x in state.items()}
        with torch.no_grad():
            expected = plain.eval()(**batch)
        evaluated, predicted = pipe.eval_step(batch), pipe.predict(batch)
        found["evaluated"] = abs((evaluated.loss or 0.0) - expected.loss.item())
        for kind, each in {"eval_step": evaluated.output, "predict": predicted}.items():
            found[f"loss of {kind}"] = float((each.loss - expected.loss).abs())
            found[f"logits of {kind}"] = float((each.logits - expected.logits).abs().max())
    return found


def test_a_models_own_loss_is_exact_over_a_context_group(gloo: Pool) -> None:
    """Shifted before the tokens are divided: each member would lose the label after its last token."""
    for found in gloo.run(_own_loss, ranks=2):
        assert max(found.values()) < 1e-6, found  # transformers takes the cross entropy in float32


class _Shifts(Parts, embedding=lambda: nn.Embedding(64, 8), head=lambda: nn.Linear(8, 64)):
    """A model that shifts its labels, and takes none that are shifted already."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embedding(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def _losses_refused() -> None:
    tokens = torch.randint(64, (4, _LENGTH), generator=torch.Generator().manual_seed(1))
    place = torch.arange(_LENGTH).expand(4, -1)
    options: dict[str, Any] = {"mesh": {"pipe": 1, "context": 2}, "num_microbatches": 2, "loss_fn": "model"}
    shifted, labels = Inputs(loss_weight="shifted_labels"), Inputs(loss_weight="labels")
    with pytest.raises(ValueError, match="its forward takes no shift_labels=, labels that are shifted already"):
        PipelineModule(_Shifts(), example_inputs=shifted, **options)
    pipe = PipelineModule(_Shifts(), example_inputs=labels, **options)
    with pytest.raises(ValueError, match=r"the model's loss is .*, a mean over 32 items, for whole sequences, and"):
        pipe.forward_backward(tokens, labels=tokens)
    own = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    pipe = PipelineModule(_model("MixtralConfig", "stagewright", **own), **options)
    with pytest.raises(ValueError, match=r"expected a mean over tokens, .*, which has no other terms"):
        pipe.forward_backward(input_ids=tokens, labels=tokens, position_ids=place)


@pytest.mark.thorough
def test_own_losses_that_are_no_mean_over_tokens_are_refused(gloo: Pool) -> None:
    gloo.run(_losses_refused, ranks=2)


@pytest.mark.thorough
def test_masks_that_are_not_known_are_refused() -> None:
    with pytest.raises(ValueError, match="masks with chunked_overlay: expected causal or sliding masks"):
        inside.read_mask(mask_function=transformers.masking_utils.chunked_causal_mask_function(4, torch.zeros(1)))
    mask = inside.read_mask(mask_function=transformers.masking_utils.sliding_window_causal_mask_function(4))
    assert mask is None


def test_generating_with_a_cache_is_refused_by_name() -> None:
    model = _model("LlamaConfig", "stagewright")
    with pytest.raises(ValueError, match=r"over 1 queries and 5 keys: .* model.set_attn_implementation\('sdpa'\)"):
        model.generate(torch.randint(1, 64, (1, 4)), max_new_tokens=3, use_cache=True, do_sample=False)
