"""Activations that a backward can make again at little cost, and so are not kept for it (Tempo, NeurIPS 2022).

gelu        h ---GELU---> a ---Linear--->      a is not kept: the Linear's backward makes it again of h, which the
                                               GELU's own keeps. Gradients are equal to the last bit
layernorm   x ---LayerNorm---> y --->          x is not kept: (x - mean) / std = (y - bias) / weight, of y, which
                                               what follows keeps anyway. Rounds otherwise
attention   softmax(q k) and its dropout       fused (scaled_dot_product_attention): nothing of L x L is kept
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_LEAST_WEIGHT = 1e-3  # of a LayerNorm, by which its backward divides


class _What(NamedTuple):
    """A word of keep_less: which modules in one it is about, and what is done to each (or to the one around them)."""

    is_one: Callable[[nn.Module], bool]
    change: Callable[[nn.Module, list[nn.Module]], None]
    expected: str

    def find(self, name: str, module: nn.Module) -> list[nn.Module]:
        """The modules concerned. Raises ValueError where there is none."""
        found = [each for each in module.modules() if self.is_one(each)]
        if not found:
            raise ValueError(f"keep_less of {name!r}, a {type(module).__name__}: expected {self.expected}")
        return found


def keep_less(what: str, name: str, module: nn.Module) -> None:
    """Change a module so that its backward keeps less."""
    WHAT[what].change(module, WHAT[what].find(name, module))


# GELU


class _Made(NamedTuple):
    """A tensor that a function of another made."""

    run: Callable[[Tensor], Tensor]
    source: Tensor
    version: int

    def again(self) -> Tensor:
        if self.source._version != self.version:
            raise RuntimeError(
                "the input of an activation was changed in place behind it: expected inplace=False, or no keep_less"
            )
        with torch.no_grad():
            return self.run(self.source)


class _Again(NamedTuple):
    """In place of a saved tensor: how it was made, and which view of that it is."""

    made: _Made
    view: tuple[torch.Size, tuple[int, ...], int]


def _is_gelu(module: nn.Module) -> bool:
    return "gelu" in type(module).__name__.lower() and not any(True for _ in module.parameters())


def _without_activations(module: nn.Module, activations: list[nn.Module]) -> None:
    module.forward = partial(_keeping_sources, activations, module.forward)


def _keeping_sources(activations: list[nn.Module], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    made: dict[int, tuple[Tensor, _Made]] = {}  # by address; the tensors themselves, so that none gets another's

    versions: dict[nn.Module, int] = {}

    def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        versions[module] = inputs[0]._version

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        source = inputs[0]
        if source._version != versions[module]:  # it changes its input, and can run once alone
            return
        made[output.untyped_storage().data_ptr()] = output, _Made(module.forward, source.detach(), source._version)

    def pack(x: Tensor) -> Tensor | _Again:
        known = made.get(x.untyped_storage().data_ptr())
        if known is None or known[0]._version != 0 or known[0].dtype != x.dtype:
            return x
        return _Again(known[1], (x.size(), x.stride(), int(x.storage_offset())))

    def unpack(kept: Tensor | _Again) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept.made.again().as_strided(*kept.view)

    hooks = [each.register_forward_hook(note) for each in activations]
    hooks += [each.register_forward_pre_hook(look) for each in activations]
    try:
        with saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()


# LayerNorm


class _FromOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        shape = tuple(weight.shape)
        y, _, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(y, rstd, weight, *(() if bias is None else (bias,)))
        ctx.num_dims = len(shape)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (y, rstd, weight, *bias) = grads, ctx.saved_tensors
        normal = (y - bias[0] if bias else y) / weight
        inner, outer = tuple(range(-ctx.num_dims, 0)), tuple(range(grad.dim() - ctx.num_dims))
        scaled = grad * weight
        mean, along = scaled.mean(inner, keepdim=True), (scaled * normal).mean(inner, keepdim=True)
        grad_x = rstd * (scaled - mean - normal * along)
        return grad_x, (grad * normal).sum(outer), grad.sum(outer) if bias else None, None


def _is_norm(module: nn.Module) -> bool:
    return type(module) is nn.LayerNorm and module.elementwise_affine


def _from_outputs(module: nn.Module, norms: list[nn.Module]) -> None:
    for norm in norms:
        norm.forward = partial(_normed, norm)


def _normed(norm: Any, x: Tensor) -> Tensor:
    least = norm.weight.detach().abs().min()
    if least < _LEAST_WEIGHT:
        raise ValueError(
            f"keep_less('layernorm'): a weight of {least:.1e}, by which the backward would divide: expected at least "
            f"{_LEAST_WEIGHT:g}, or this norm without keep_less"
        )
    if not torch.is_grad_enabled():
        return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    made: Tensor = _FromOutput.apply(x, norm.weight, norm.bias, norm.eps)  # type: ignore[no-untyped-call]
    return made


# Attention


def _is_eager(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    return isinstance(module, nn.MultiheadAttention) or (
        getattr(config, "_attn_implementation", None) == "eager" and any(True for _ in module.children())
    )


def _fused(module: nn.Module, attentions: list[nn.Module]) -> None:
    configs: dict[int, Any] = {}
    for each in attentions:
        if isinstance(each, nn.MultiheadAttention):
            each.forward = partial(_without_weights, each.forward)  # type: ignore[method-assign]
        else:
            config: Any = each.config
            own = configs.setdefault(id(config), copy.deepcopy(config))
            own._attn_implementation = "sdpa"
            each.config = own


def _without_weights(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **{**kwargs, "need_weights": False})


WHAT: Mapping[str, _What] = MappingProxyType(
    {
        "gelu": _What(_is_gelu, _without_activations, "a module with a GELU and what follows it, such as an MLP"),
        "layernorm": _What(_is_norm, _from_outputs, "an nn.LayerNorm with weights, or a module with such"),
        "attention": _What(_is_eager, _fused, "nn.MultiheadAttention, or eager attention of transformers"),
    }
)
