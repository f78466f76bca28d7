"""Activations that a backward can make again at little cost, and so are not kept for it (Tempo, NeurIPS 2022).

gelu        h ---GELU---> a ---Linear--->      a is not kept: the Linear's backward makes it again of h, which the
                                               GELU's own keeps. Gradients are equal to the last bit
layernorm   x ---LayerNorm---> y --->          x is not kept: (x - mean) / std = (y - bias) / weight, of y, which
                                               what follows keeps anyway. Rounds otherwise
attention   softmax(q k) and its dropout       fused (scaled_dot_product_attention): nothing of L x L is kept; where
            torch has no kernel that keeps nothing, as with dropout on a CPU, all is made again in the backward

gelu: where a or h is handed out past autograd, as `.data` or numpy, all is kept as ever. Not noticed: writes by address
(data_ptr, a storage), and past autograd into h from outside of the edited module. `edits.verify` finds these, too.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torchs

from .calls import Calls
from .memory import memory_of
from .untouched import torch_generators

_LEAST_WEIGHT = 1e-3  # of a LayerNorm, by which its backward divides
_PAST_AUTOGRAD = (Tensor.data.__get__, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)  # type: ignore[attr-defined]
_PURE = ("torch", "transformers")  # whose GELUs draw no random numbers


def find(name: str, module: nn.Module, root: nn.Module, *, what: str) -> list[nn.Module]:
    """The modules in one that a word is about. Raises ValueError where there is none, and for another word."""
    if what not in [*WHAT]:
        raise ValueError(f"keep_less({what!r}): expected one of {', '.join(map(repr, WHAT))}")
    is_one, _, expected = WHAT[what]
    found = [each for each in module.modules() if is_one(each)]
    if not found:
        raise ValueError(f"keep_less of {name!r}, a {type(module).__name__}: expected {expected}")
    return found


def keep_less(name: str, module: nn.Module, root: nn.Module, *, what: str) -> None:
    WHAT[what][1](module, find(name, module, root, what=what))


# GELU


class _Again(NamedTuple):
    """A record that replaces a saved tensor: how it was made, and which view of the result it is."""

    run: Callable[[Tensor], Tensor]
    source: Any  # as the saved tensors around keep it
    # stride, version, memory: of the source
    stride: tuple[int, ...]
    version: int
    memory: object
    autocast: dict[str, Any]  # arguments of torch.autocast
    view: tuple[torch.Size, tuple[int, ...], int]
    values: list[Tensor]  # made already, where the source has been handed out since

    def made(self, unpack: Callable[[Any], Tensor]) -> Tensor:
        if self.values:
            return self.values[0].as_strided(*self.view)
        source = unpack(self.source)
        if source is self.source and source._version != self.version:
            raise RuntimeError(
                "the input of an activation was changed in place after it: expected inplace=False, or no keep_less"
            )
        if source.stride() != self.stride:  # the saved tensors around keep values alone
            source = source.new_empty_strided(source.shape, self.stride).copy_(source)
        with torch.no_grad(), torch.autocast(**self.autocast):
            return self.run(source).as_strided(*self.view)


def _has_gelu(module: nn.Module) -> bool:
    """Whether it is one, without weights and state, or its forward calls torch's function."""
    try:
        calls = "gelu(" in inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        calls = False
    return _is_gelu(module) or calls or any(each is F.gelu for each in vars(module).values())


def _is_gelu(module: nn.Module) -> bool:
    return "gelu" in type(module).__name__.lower() and not [*module.parameters(), *module.buffers()]


class _Gelus(TorchFunctionMode):
    """Within: calls of torch's function go through another; tensors that leave it past autograd are reported."""

    def __init__(self, through: Callable[..., Tensor], handed_out: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._through, self._handed_out = through, handed_out

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.gelu and args:
            return self._through(partial(func, **(kwargs or {})), args[0])
        if func in _PAST_AUTOGRAD or "unsafe_" in getattr(func, "__name__", ""):  # chunks, with own versions
            self._handed_out(args[0])
        return func(*args, **(kwargs or {}))


def without_activations(modules: Iterable[nn.Module]) -> dict[nn.Module, Callable[..., Any]]:
    """Functions for `Calls`, of those of the modules with a GELU in them."""
    found = {module: [each for each in module.modules() if _has_gelu(each)] for module in modules}
    return {
        module: partial(_keeping_sources, [each for each in gelus if _is_gelu(each)])
        for module, gelus in found.items()
        if gelus
    }


def _without_activations(module: nn.Module, found: list[nn.Module]) -> None:
    module.forward = partial(without_activations([module])[module], module.forward)


def _keeping_sources(activations: list[nn.Module], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_checkpoint():
        return forward(*args, **kwargs)
    keep, give = torch._C._autograd._top_saved_tensors_default_hooks(True) or (lambda x: x,) * 2
    # By memory, whose place no other gets as long as there is a weak reference.
    made: dict[object, tuple[StorageWeakRef, torch.dtype, _Again]] = {}
    out: dict[object, StorageWeakRef] = {}  # handed out

    def handed_out(x: Tensor) -> None:
        if (memory := memory_of(x)) is None:
            return
        out[memory] = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
        made.pop(memory, None)
        for *_, again in made.values():
            if again.memory == memory:
                again.values.append(again.made(give))

    def run(users: nn.Module | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return function(*args, **kwargs)
        (source,), held = args, {} if users is None else dict(vars(users))
        version, random, memory = source._version, _generators_of(source, users is not None), memory_of(source)
        output = function(source)
        # One that changes its input or itself, or draws, can run once alone.
        is_pure = source._version == version and _generators_of(source, users is not None) == random
        is_pure = is_pure and (users is None or [*map(id, vars(users).values())] == [*map(id, held.values())])
        if users is not None:
            function = partial(_as_it_was, users, held, function)
        if type(output) is Tensor and is_pure and memory not in out:
            kept, autocast = keep(source.detach()), _autocast(source)
            again = _Again(function, kept, source.stride(), version, memory, autocast, _view(output), [])
            made[memory_of(output)] = StorageWeakRef(output.untyped_storage()), output.dtype, again  # type: ignore[no-untyped-call]
        return output

    def pack(x: Tensor) -> Any:
        _, dtype, again = made.get(memory_of(x), (None, None, None))
        if again is None or x._version != 0 or dtype != x.dtype:
            return keep(x)
        return again._replace(view=_view(x))

    def unpack(kept: Any) -> Tensor:
        return kept.made(give) if isinstance(kept, _Again) else give(kept)

    users = {each: type(each).__module__.partition(".")[0] not in _PURE for each in activations}
    through = {each: partial(run, each if is_users else None) for each, is_users in users.items()}
    try:
        with saved_tensors_hooks(pack, unpack), _Gelus(partial(run, None), handed_out), Calls(through).through():
            return forward(*args, **kwargs)
    finally:
        made.clear()  # autograd holds `pack` for as long as what it packed


def _as_it_was(module: nn.Module, held: dict[str, Any], function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The function of a module with the attributes that it had then."""
    own, now = vars(module), dict(vars(module))
    own.update(held)
    try:
        return function(x)
    finally:
        own.clear()
        own.update(now)


def in_checkpoint() -> bool:
    """Whether a checkpoint of torch's is around, in its first run or its second: nothing is kept but by it."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == torchs.__name__


def _generators_of(x: Tensor, is_users: bool) -> list[list[int]]:
    return [generator.get_state().tolist() for generator in torch_generators(x.device)] if is_users else []


def _autocast(x: Tensor) -> dict[str, Any]:
    kind = x.device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return {"device_type": kind, "enabled": enabled, "dtype": dtype, "cache_enabled": False}


def _view(x: Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return x.size(), x.stride(), int(x.storage_offset())


# LayerNorm


class _FromOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        shape = tuple(weight.shape)
        y, _, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(y, rstd, weight, *(() if bias is None else (bias,)))
        ctx.num_dims, ctx.digest = len(shape), _digest(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.equal(_digest(ctx.saved_tensors[0]), ctx.digest):
            raise RuntimeError("the output of a norm was changed after it, past autograd: expected no keep_less")
        wide = torch.promote_types(grads[0].dtype, torch.float32)  # as the plain one computes short types
        grad, y, rstd, weight, *bias = (x.to(wide) for x in (*grads, *ctx.saved_tensors))
        normal = (y - bias[0] if bias else y) / weight
        inner, outer = tuple(range(-ctx.num_dims, 0)), tuple(range(grad.dim() - ctx.num_dims))
        scaled = grad * weight
        mean, along = scaled.mean(inner, keepdim=True), (scaled * normal).mean(inner, keepdim=True)
        grad_x = rstd * (scaled - mean - normal * along)
        return grad_x, (grad * normal).sum(outer), grad.sum(outer) if bias else None, None


def _digest(x: Tensor) -> Tensor:
    return x.view(getattr(torch, f"int{8 * x.itemsize}")).sum()


def _is_norm(module: nn.Module) -> bool:
    return type(module) is nn.LayerNorm and module.elementwise_affine


def _from_outputs(module: nn.Module, norms: list[nn.Module]) -> None:
    for norm in norms:
        norm.forward = partial(_normed, norm)


def _normed(norm: Any, x: Tensor) -> Tensor:
    weight = norm.weight.detach().abs()
    if (least := weight.min()) < _LEAST_WEIGHT:
        raise ValueError(
            f"keep_less('layernorm'): a weight of {least:.1e}, by which the backward would divide: expected at least "
            f"{_LEAST_WEIGHT:g}, or this norm without keep_less"
        )
    if not torch.is_grad_enabled():
        return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    made: Tensor = _FromOutput.apply(x, norm.weight, norm.bias, norm.eps)  # type: ignore[no-untyped-call]
    if norm.bias is not None:
        times = (norm.bias.detach().abs() / weight).max()  # so many halves of eps are rounded away
        most = 2 * (5e-2 if made.dtype.itemsize < 4 else 1e-4) / torch.finfo(made.dtype).eps
        if times > most:
            raise ValueError(
                f"keep_less('layernorm'): a bias of {times:.3g} times its weight: next to it {made.dtype} rounds the "
                f"rest away: expected at most {most:.3g} times, or this norm without keep_less"
            )
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
            inner = partial(_attending, each.forward)
            each.forward = partial(_without_weights, inner)  # type: ignore[method-assign]
        else:
            config: Any = each.config
            if getattr(config, "output_attentions", False):
                _refuse_weights()
            own = configs.setdefault(id(config), copy.deepcopy(config))
            own._attn_implementation = "sdpa"
            each.config = own
            if "attention" in type(each).__name__.lower():
                each.forward = partial(_attending, each.forward)


def _attending(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Within a forward, attention for which torch has no kernel that keeps nothing is made again in the backward."""
    fused: Any = F.scaled_dot_product_attention  # by that name, since a mode does not see what functions of torch call
    if torch.compiler.is_compiling() or isinstance(fused, partial):
        return forward(*args, **kwargs)
    with patch.object(F, "scaled_dot_product_attention", partial(_attention, fused)):
        return forward(*args, **kwargs)


def _attention(fused: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
    keeps = torch.is_grad_enabled() and not in_checkpoint()
    if keeps and torch._fused_sdp_choice(*args, **kwargs) == SDPBackend.MATH.value:
        return torchs.checkpoint(partial(fused, **kwargs), *args, use_reentrant=False)
    return fused(*args, **kwargs)


def _without_weights(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if any(args[4:5]) or kwargs.get("need_weights"):
        _refuse_weights()
    if args[4:] or "need_weights" in kwargs:
        return forward(*args, **kwargs)
    return forward(*args, **kwargs, need_weights=False)[0], _NoWeights()


def _refuse_weights(*args: object, **kwargs: object) -> NoReturn:
    raise ValueError(
        "keep_less('attention'): its weights are asked for, and nothing makes them: expected need_weights=False, "
        "output_attentions=False, or this attention without keep_less"
    )


# In place of weights that are returned by default: most models pass over them, and any use is refused.
_USES: tuple[str, ...] = ("getattr", "getitem", "iter", "len", "neg", "abs", "lt", "gt", "le", "ge", "pow", "matmul")
_USES += ("rtruediv", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv")
_NoWeights = type("_NoWeights", (), {f"__{use}__": _refuse_weights for use in _USES})
_NoWeights.__torch_function__ = classmethod(_refuse_weights)  # type: ignore[attr-defined]


# By word: whether a module is concerned; what is done to the one around those, or to each; and what was expected.
WHAT: Mapping[str, tuple[Callable[[nn.Module], bool], Callable[[nn.Module, list[nn.Module]], None], str]] = (
    MappingProxyType(
        {
            "gelu": (_has_gelu, _without_activations, "a module with a GELU and what follows it, such as an MLP"),
            "layernorm": (_is_norm, _from_outputs, "an nn.LayerNorm with weights, or a module with such"),
            "attention": (_is_eager, _fused, "nn.MultiheadAttention, or eager attention of transformers"),
        }
    )
)
