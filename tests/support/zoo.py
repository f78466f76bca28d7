"""Small models of the `transformers` and `torchvision` packages, as these packages build them, and a batch for each.

Made from configurations alone (no weights are downloaded), in float64, without dropout (its numbers depend on who
draws them). Everything else is as the package has it by default, caches and attention kernels too.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

Batch = dict[str, torch.Tensor]

ASIDE = Path(__file__).resolve().parents[2] / ".venv" / "torchvision"
VOCABULARY = 61
LENGTH = 10
SAMPLES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its batch.

    Arguments:
        make: the model; the same weights each time.
        batch: keywords of its forward, labels among them where it returns a loss.
        unlabelled: labels at the front of each sequence over which its loss is no mean.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    unlabelled: int = 0


def _tokens(length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (SAMPLES, length), generator=torch.Generator().manual_seed(seed))


def _images(size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 3, size, size, dtype=torch.float64, generator=generator)


def _mask() -> torch.Tensor:
    mask = torch.ones(SAMPLES, LENGTH, dtype=torch.long)
    mask[1, -3:] = 0
    mask[3, -1:] = 0
    return mask


def _causal() -> Batch:
    tokens, mask = _tokens(), _mask()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def _built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return make().double().train()


def _of(family: str, head: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = importlib.import_module("transformers")
        config = getattr(transformers, f"{family}Config")(**sizes)
        return _built(lambda: getattr(transformers, f"{family}For{head}" if head[0] != "L" else family + head)(config))

    return make


def _without(*dropouts: str) -> dict[str, float]:
    return dict.fromkeys((f"{name}_dropout" for name in dropouts), 0.0)


_PLAIN: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
_WORDS: dict[str, Any] = {**_PLAIN, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
_GROUPED: dict[str, Any] = {**_WORDS, "num_attention_heads": 4, "num_key_value_heads": 2}
# Sparse experts, whose share of the tokens depends on the values; the default's kernel takes no float64.
_EXPERTS: dict[str, Any] = {
    **_GROUPED, "num_hidden_layers": 2, "num_experts_per_tok": 2, "experts_implementation": "eager",
}  # fmt: skip
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_HEARD: dict[str, Any] = {
    "num_mel_bins": 8, "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "decoder_layers": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_source_positions": 12,
    "max_target_positions": 32, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    **_without("attention", "activation"),
}  # fmt: skip
_SPOKEN: dict[str, Any] = {
    "conv_dim": [8, 8], "conv_stride": [4, 2], "conv_kernel": [8, 4], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "apply_spec_augment": False,
    "ctc_loss_reduction": "mean", **_without("hidden", "attention", "feat_proj", "activation", "final"),
}  # fmt: skip


def llava() -> nn.Module:
    """Images among the tokens, whose numbers are checked."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {**_PLAIN, "num_hidden_layers": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, image_size=16, patch_size=4),
        text_config=LlamaConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=64),
        image_token_index=3,
        image_seq_length=16,
    )
    return _built(lambda: LlavaForConditionalGeneration(config))


def _answers() -> torch.Tensor:
    """16 of 24 labels count: a division by 16 rounds nothing, wherever it stands before what is in float32."""
    labels = _tokens(6, seed=3)
    labels[0, 2:] = labels[1, 5:] = labels[2, 3:] = -100
    return labels


def _speech() -> Batch:
    features = torch.randn(SAMPLES, 8, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return {"input_features": features, "labels": _answers()}


def _translation() -> Batch:
    return {"input_ids": _tokens(), "attention_mask": _mask(), "labels": _answers()}


def _classes() -> torch.Tensor:
    return torch.randint(0, 5, (SAMPLES,), generator=torch.Generator().manual_seed(4))


# Tied embeddings; rotary positions and grouped keys; experts; masked labels; encoder and decoder that share their
# embedding; images in patches; speech through convolutions, an encoder and a decoder.
TRANSFORMERS = {
    "gpt2": Case(
        make=_of(
            "GPT2", "LMHeadModel", vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=3, n_head=2,
            bos_token_id=0, eos_token_id=0, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        ),
        batch=_causal,
        unlabelled=1,
    ),
    "llama": Case(make=_of("Llama", "CausalLM", **_GROUPED, num_hidden_layers=3), batch=_causal, unlabelled=1),
    "mixtral": Case(make=_of("Mixtral", "CausalLM", **_EXPERTS, num_local_experts=4), batch=_causal, unlabelled=1),
    "bert": Case(make=_of("Bert", "MaskedLM", **_WORDS, **_NO_DROPOUT, num_hidden_layers=3), batch=_causal),
    "t5": Case(
        make=_of(
            "T5", "ConditionalGeneration", vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2,
            num_decoder_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0,
        ),
        batch=_translation,
    ),
    "vit": Case(
        make=_of(
            "ViT", "ImageClassification", **_PLAIN, **_NO_DROPOUT, num_hidden_layers=3, image_size=16, patch_size=4,
            num_labels=5,
        ),
        batch=lambda: {"pixel_values": _images(16), "labels": _classes()},
    ),
    "whisper": Case(
        make=_of("Whisper", "ConditionalGeneration", vocab_size=VOCABULARY, decoder_start_token_id=1, **_HEARD),
        batch=_speech,
    ),
}  # fmt: skip


def load_torchvision() -> None:
    """Import torchvision; pytest.skip where it is not installed.

    Beside a torch without CUDA the compiled part of PyPI's wheel does not load, and its import fails for want of two
    operators, although its models are plain Python. `make extras` puts it into a folder of its own, so that nothing
    else finds it; here the operators are declared first.
    """
    if importlib.util.find_spec("torchvision") is None:
        if not ASIDE.exists():
            pytest.skip("needs torchvision: make extras")
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        sys.path.append(str(ASIDE))  # not for longer: processes that are started later would find it there
        try:
            importlib.import_module("torchvision")
        finally:
            sys.path.remove(str(ASIDE))


def resnet() -> nn.Module:
    load_torchvision()
    from torchvision.models.resnet import BasicBlock, ResNet

    return _built(lambda: ResNet(BasicBlock, [2, 1, 1, 1], num_classes=5, width_per_group=64))


def swin() -> nn.Module:
    load_torchvision()
    from torchvision.models.swin_transformer import SwinTransformer

    twos, sizes = [2, 2], {"embed_dim": 8, "window_size": [4, 4], "stochastic_depth_prob": 0.0, "num_classes": 5}
    return _built(lambda: SwinTransformer(patch_size=twos, depths=twos, num_heads=twos, **sizes))


TORCHVISION = {
    "resnet": Case(make=resnet, batch=lambda: {"x": _images(32), "target": _classes()}),
    "swin": Case(make=swin, batch=lambda: {"x": _images(16), "target": _classes()}),
}


def _pictures() -> Batch:
    tokens = _tokens(24) + 1
    tokens[:, 1:17] = 3  # an image
    tokens.clamp_(max=VOCABULARY - 1)
    labels = torch.full_like(tokens, -100)
    for row, count in enumerate((4, 2, 5, 5)):
        labels[row, -count:] = tokens[row, -count:]
    return {"input_ids": tokens, "pixel_values": _images(16), "labels": labels}


def _waves() -> Batch:
    waves = torch.randn(SAMPLES, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return {"input_values": waves, "labels": _answers()}


# Models whose code checks values (of labels of any length, too) or collects what units do not return (logits of
# routers, by a hook), with what their loss is a mean over.
CHECKING = {
    "qwen3-moe": (
        Case(
            make=_of(
                "Qwen3Moe", "CausalLM", **_EXPERTS, moe_intermediate_size=24, head_dim=4, num_experts=4,
                output_router_logits=True, router_aux_loss_coef=0.5,
            ),
            batch=_causal,
            unlabelled=1,
        ),
        "shifted_labels",
    ),
    "llava": (Case(make=llava, batch=_pictures, unlabelled=1), "shifted_labels"),
    "wav2vec2": (
        Case(
            make=_of("Wav2Vec2", "CTC", vocab_size=VOCABULARY, num_hidden_layers=2, **_PLAIN, **_SPOKEN),
            batch=_waves,
        ),
        "samples",
    ),
}  # fmt: skip
