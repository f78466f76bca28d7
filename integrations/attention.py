"""Attention of models of transformers over parts of their sequences: context groups, and slices.

    import stagewright.integrations.attention
    model = AutoModelForCausalLM.from_config(config, attn_implementation="stagewright")
    pipe.train_step({"input_ids": x, "position_ids": positions, "target": y})

transformers makes masks of the tokens that a model is given, as [B, 1, T, T]. "stagewright" makes none: it reads what
they would say from the model's own words, and `stagewright.attend` looks at positions and at padding of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getclosurevars
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..pipe.stage.attending import attend

NAME = "stagewright"
_OWN = ("packed_sequence_mask_function", "padding_mask_function")  # found in position_ids, and attention_mask
_KINDS = {"full_attention": False, "sliding_attention": True}  # whether there is a window


class _Sees(NamedTuple):
    is_causal: bool = False
    window: int | None = None
    positions: Tensor | None = None


def _read(function: Callable[..., object]) -> _Sees:
    """Meaning of a mask function of transformers. Raises ValueError for another than causal and sliding ones."""
    name, parts = function.__qualname__.partition(".")[0], getclosurevars(function).nonlocals
    if name == "causal_mask_function":
        return _Sees(is_causal=True)
    if name == "bidirectional_mask_function" or name in _OWN:
        return _Sees()
    if name == "sliding_window_overlay":
        return _Sees(window=parts["sliding_window"])
    if name == "remap_positions_for_packed_sequence":
        return _read(parts["mask_function"])._replace(positions=parts["position_ids"])
    if name == "and_masks":
        both = [*map(_read, parts["mask_functions"])]
        windows = [each.window for each in both if each.window is not None]
        places = [each.positions for each in both if each.positions is not None]
        return _Sees(any(each.is_causal for each in both), min(windows, default=None), next(iter(places), None))
    raise ValueError(
        f"attn_implementation={NAME!r} for a model that masks with {name}: expected causal or sliding masks, padding "
        f"and packed documents; or attn_implementation='sdpa', and neither slices nor a context group"
    )


def _mask(*, mask_function: Callable[..., object], attention_mask: Tensor | None = None, **_: object) -> Tensor | None:
    """[B, T] for `_attention`: bool, which tokens are no padding; or integers, positions in packed documents."""
    positions = _read(mask_function).positions
    return positions if attention_mask is None else attention_mask.bool()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    where = f"{type(module).__name__} with attn_implementation={NAME!r}"
    for name in ("softcap", "s_aux", "position_bias", "cache"):
        if options.get(name) is not None:
            raise ValueError(f"{where} and {name}=: expected a model without, or attn_implementation='eager'")
    if attention_mask is not None and attention_mask.dim() != 2:
        shape = tuple(attention_mask.shape)
        raise ValueError(f"{where} and attention_mask of shape {shape}: expected [B, T], 0 for padding")
    positions = None
    if attention_mask is not None and attention_mask.dtype is not torch.bool:
        attention_mask, positions = None, attention_mask
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{where} over {query.shape[2]} queries and {key.shape[2]} keys: expected training, without a cache; "
            f"to generate, model.set_attn_implementation('sdpa')"
        )
    is_causal, window = options.get("is_causal"), options.get("sliding_window")
    _check_window(module, window, where)
    found = attend(
        query,
        key,
        value,
        is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        key_mask=attention_mask,
        positions=positions,
        window=window,
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found.transpose(1, 2).contiguous(), None


def _check_window(module: nn.Module, window: int | None, where: str) -> None:
    """ValueError where a layer's attention is of another kind than its model's masks would say."""
    kinds, number = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[number] if kinds and isinstance(number, int) else None
    if kind is not None and _KINDS.get(kind) is not (window is not None):
        raise ValueError(f"{where} in a layer of {kind} with window {window}: expected {' or '.join(_KINDS)}")


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
