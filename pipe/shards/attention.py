"""Styles of modules with several weights: torch.nn.MultiheadAttention by heads, and layers of experts."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .shard import Shard
from .style import Style, StyleError, not_divided, numbers_of, shard_of
from .tensor_group import TensorGroup, enter, gather, leave


class Heads(Style):
    """A torch.nn.MultiheadAttention of which each member computes its part of the heads.

    The fused projection [q | k | v] is divided block by block, the output projection by its inputs.
    """

    def check(self, name: str, module: nn.Module, count: int) -> None:
        if not isinstance(module, nn.MultiheadAttention):
            raise StyleError(f"module {name!r} is {type(module).__name__}: expected a torch.nn.MultiheadAttention")
        if type(module).forward is not nn.MultiheadAttention.forward:
            raise StyleError(f"module {name!r} has its own forward: expected torch.nn.MultiheadAttention's")
        if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
            raise StyleError(f"module {name!r} adds keys and values: expected add_bias_kv=False, add_zero_attn=False")
        if module.num_heads % count:
            raise StyleError(not_divided(name, "heads", module.num_heads, count, count))

    def shards(self, module: nn.Module, *, index: int, count: int) -> dict[str, Shard]:
        found = {}
        for key, _ in module.named_parameters():
            if key != "out_proj.bias":
                dim, blocks = int(key == "out_proj.weight"), 3 if key.startswith("in_proj") else 1
                found[key] = shard_of(module, key, dim, index=index, count=count, blocks=blocks)
        return found

    def attributes(self, module: nn.Module, count: int) -> dict[str, Any]:
        return numbers_of(module, ("num_heads",), count)

    def forward(self, module: nn.Module, plain: type[nn.Module], group: TensorGroup, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(module, nn.MultiheadAttention)
        return _attend(module, group, *args, **kwargs)


_Options = namedtuple(  # of a MultiheadAttention, after query, key and value
    "_Options",
    "key_padding_mask need_weights attn_mask average_attn_weights is_causal",
    defaults=(None, True, None, True, False),
)


def _attend(
    module: nn.MultiheadAttention,
    group: TensorGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *options: Any,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """The outputs of torch.nn.MultiheadAttention.forward: [B, T, D] ([T, B, D], or [T, D]) and weights [B, T, S]."""
    key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal = _Options(*options, **named)
    if is_causal and attn_mask is None:
        raise ValueError("is_causal=True without attn_mask: expected the mask, too, as torch requires")
    entered = {id(x): enter(x, group) for x in (query, key, value)}
    query, key, value = (entered[id(x)] for x in (query, key, value))
    batched = query.dim() == 3
    if not batched:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    elif not module.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    weights, biases = _projections(module)
    shape = (module.num_heads, module.head_dim)
    q, k, v = (  # [B, H/t, T, D/H] each
        F.linear(x, weight, bias).view(*x.shape[:-1], *shape).transpose(1, 2)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    mask = _mask(module, group, attn_mask, key_padding_mask, like=q)
    dropout = module.dropout if module.training else 0.0
    kept: Tensor | None = None
    if need_weights:
        scores = (q * math.sqrt(1.0 / module.head_dim)) @ k.transpose(-2, -1)
        kept = F.dropout(torch.softmax(scores if mask is None else scores + mask, dim=-1), dropout)
        mixed = kept @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    out = leave(F.linear(mixed.transpose(1, 2).flatten(2), module.out_proj.weight), group)
    if module.out_proj.bias is not None:
        out = out + module.out_proj.bias
    if not batched:
        out = out.squeeze(0)
    elif not module.batch_first:
        out = out.transpose(0, 1)
    if kept is not None:
        kept = leave(kept.mean(dim=1), group) / group.count if average_attn_weights else gather(kept, group, dim=1)
        kept = kept if batched else kept.squeeze(0)
    return out, kept


def _projections(module: nn.MultiheadAttention) -> tuple[list[Tensor], list[Tensor | None]]:
    if module._qkv_same_embed_dim:
        weights = list(module.in_proj_weight.chunk(3))
    else:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    biases: list[Tensor | None] = [None] * 3 if module.in_proj_bias is None else list(module.in_proj_bias.chunk(3))
    return weights, biases


def _mask(
    module: nn.MultiheadAttention,
    group: TensorGroup,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    *,
    like: Tensor,
) -> Tensor | None:
    """Mask that is added to the scores [B, H/t, T, S]; a mask by head may have all heads, or this member's."""
    masks = []
    if attn_mask is not None:
        mask = _added(attn_mask, like)
        if mask.dim() == 3:
            mask = mask.view(like.shape[0], -1, *mask.shape[1:])
            mask = mask if mask.shape[1] == module.num_heads else group.own(mask, 1)
        masks.append(mask)
    if key_padding_mask is not None:
        masks.append(_added(key_padding_mask, like)[:, None, None, :])
    return sum(masks[1:], masks[0]) if masks else None


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))
    return mask.to(like.dtype)


class Experts(Style):
    """A module that holds the weights of many experts as tensors; each member computes its part of each expert.
    `parameters`: by name: the dimension that is divided, and blocks in it."""

    def __init__(self, parameters: Mapping[str, tuple[int, int]]) -> None:
        super().__init__()
        self.parameters = dict(parameters)

    def check(self, name: str, module: nn.Module, count: int) -> None:
        for key, (dim, blocks) in self.parameters.items():
            parameter = module._parameters.get(key)
            if parameter is None or parameter.dim() < 2:
                raise StyleError(f"module {name!r} has no parameter {key!r} of experts: expected one in its plan")
            size = parameter.shape[dim]
            if size % (blocks * count):
                raise StyleError(not_divided(f"{name}.{key}", f"in dimension {dim}", size, count, blocks * count))
        if not self.parameters:
            raise StyleError(f"module {name!r}: the plan cuts none of its parameters: expected some, as packed_colwise")

    def shards(self, module: nn.Module, *, index: int, count: int) -> dict[str, Shard]:
        cut = partial(shard_of, module, index=index, count=count)
        return {key: cut(key, dim, blocks=blocks) for key, (dim, blocks) in self.parameters.items()}

    def attributes(self, module: nn.Module, count: int) -> dict[str, Any]:
        names = ("intermediate_dim", "intermediate_size", "moe_intermediate_size", "expert_dim")
        return numbers_of(module, names, count)

    def forward(self, module: nn.Module, plain: type[nn.Module], group: TensorGroup, *args: Any, **kwargs: Any) -> Any:

        def own(x: Any) -> Any:
            return enter(x, group) if isinstance(x, Tensor) and x.is_floating_point() else x

        args, kwargs = tuple(map(own, args)), {key: own(value) for key, value in kwargs.items()}
        return leave(plain.forward(module, *args, **kwargs), group)
