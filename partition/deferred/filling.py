"""Values for the tensors of this process's stages, of a model that was built without them.

    built within deferred()       by its recipe, bit-equal to plain construction
    built on the meta device      by its module: `reset_parameters()`, or `_init_weights(module)` of the model around it

Each tensor stays the object that it was, so that whoever holds it sees the values.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .recipes import Value, device_where_built, filled, value_of

_WAYS = ("reset_parameters", "_reset_parameters")


def fill(
    root: nn.Module,
    named: Mapping[str, torch.Tensor],
    *,
    device: torch.device,
    seed: int,
    undo: ExitStack | None = None,
) -> None:
    """Give values to those of these parameters and buffers that have none.

    Arguments:
        named: by the name in `root`, tensors that this process holds; one with several names, under each of them.
        device: where they go.
        seed: of what modules draw themselves.
        undo: takes what puts everything back.

    Raises ValueError that names what cannot be filled; then nothing is.
    """
    absent = {name: x for name, x in named.items() if x.is_meta}
    first = {id(x): name for name, x in reversed(absent.items())}
    recipes = {name: x for name, x in absent.items() if first[id(x)] == name and value_of(x) is not None}
    for name, x in recipes.items():
        if (value := value_of(x)) is not None and not value.is_drawn():
            raise ValueError(
                f"{name!r} is drawn at random in the constructor, which stagewright.deferred(draw=False) leaves out: "
                f"expected weights= with files that have it, or deferred()"
            )
    rnns = rnns_of(root)
    with ExitStack() as done:
        for x, values in zip(recipes.values(), filled([*recipes.values()]), strict=True):
            done.callback(put(rnns, x, values.to(device)))
        others = {id(x): (name, x) for name, x in absent.items() if x.is_meta}
        for _, x in others.values():
            done.callback(put(rnns, x, _unset(x, device)))
        for path, module in [*root.named_modules()][::-1] if others else ():  # the parts of a module before it
            tensors = {id(x): x for x in (*module.parameters(), *module.buffers())}
            if (way := _way(root, path, module)) is None or tensors.keys().isdisjoint(others):
                continue
            given = [(x, x.detach().clone()) for key, x in tensors.items() if key not in others and not x.is_meta]
            with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
                torch.manual_seed(zlib.crc32(path.encode(), seed % 2**32))
                way()
                for x, values in given:
                    x.copy_(values)
        if unset := [name for name, x in others.values() if _is_unset(x)]:
            kind = type(root.get_submodule(unset[0].rpartition(".")[0])).__name__
            raise ValueError(
                f"{unset[0]!r} is on the meta device, and nothing fills it: {kind} has no reset_parameters() that "
                f"does, nor a model around it _init_weights(module). Expected `with stagewright.deferred():` around "
                f"the model's constructor, or weights= with files that have it"
            )
        kept = done.pop_all()
        if undo is not None:
            undo.push(kept)


def fill_attributes(*roots: object, undo: ExitStack) -> None:
    """Give values to deferred tensors that are attributes of modules, neither parameters nor buffers nor made of them:
    no state names them, so that every process has them."""
    if not Value.were_given:
        return
    modules = [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]
    registered = {x.untyped_storage()._cdata for module in modules for x in _own(module) if x.is_meta}
    leaves = {id(x): x for module in modules for x in pytree.tree_leaves(vars(module)) if isinstance(x, torch.Tensor)}
    absent = [x for x in leaves.values() if value_of(x) is not None and not x.requires_grad]
    beside = [x for x in absent if x.untyped_storage()._cdata not in registered]
    for x, values in zip(beside, filled(beside), strict=True):
        undo.callback(put((), x, values))


@contextmanager
def lent(*roots: nn.Module, alike: bool = False, device: torch.device | None = None) -> Iterator[None]:
    """Within, modules that were built without values have some, to be tried and timed; afterwards as before. `alike`:
    tensors of one name but for numbers in it, as of equal layers, share the values of the first of them. `device`:
    where the values are; where plain construction would have put them, by default."""
    first: dict[object, torch.Tensor] = {}
    with ExitStack() as undo:
        fill_attributes(*roots, undo=undo)
        for root in roots:
            rnns = rnns_of(root)
            for path, module in root.named_modules():
                layer = re.sub(r"\b\d+\b", "*", path)
                for name, x in [*module._parameters.items(), *module._buffers.items()]:
                    if x is None or not x.is_meta:
                        continue
                    key = (layer, name, x.shape, x.dtype) if alike else id(x)
                    if key not in first:
                        whole = {f"{path}.{name}" if path else name: x}
                        fill(root, whole, device=device or device_where_built(x), seed=0, undo=undo)
                        first[key] = x
                    else:
                        undo.callback(put(rnns, x, first[key].detach()))
        yield


def rnns_of(root: nn.Module) -> list[nn.RNNBase]:
    return [module for module in root.modules() if isinstance(module, nn.RNNBase)]


def put(rnns: Sequence[nn.RNNBase], x: torch.Tensor, values: torch.Tensor) -> Callable[[], None]:
    """Put values into a tensor without any, which stays the object that it is; returns what undoes it. `rnns`: of the
    model, which know their parameters by weak references."""
    made = nn.Parameter(values, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else values
    made.__dict__.update(x.__dict__)
    if isinstance(x, nn.Parameter):
        made._backward_hooks = x._backward_hooks
        made._post_accumulate_grad_hooks = x._post_accumulate_grad_hooks

    def swap() -> None:
        holders = [rnn for rnn in rnns if any(p is x for p in rnn._flat_weights)]
        for rnn in holders:
            rnn._flat_weight_refs = []
        # As torch.utils.swap_tensors, which would refuse where a graph of a trial, soon gone, still has it.
        x.__class__, made.__class__ = made.__class__, x.__class__
        x.__dict__, made.__dict__ = made.__dict__, x.__dict__
        torch._C._swap_tensor_impl(x, made)
        for rnn in holders:
            rnn._init_flat_weights()

    swap()
    return swap


def _own(module: nn.Module) -> list[torch.Tensor]:
    return [x for table in (module._parameters, module._buffers) for x in table.values() if x is not None]


def _way(root: nn.Module, path: str, module: nn.Module) -> Callable[[], object] | None:
    parts = path.split(".") if path else []
    for depth in range(len(parts), -1, -1):
        whole: Any = root.get_submodule(".".join(parts[:depth]))
        if callable(getattr(whole, "_init_weights", None)):
            return partial(whole._init_weights, module)
    return next((way for each in _WAYS if callable(way := getattr(module, each, None))), None)


def _unset(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)
    return made.fill_(_mark(made))


def _mark(x: torch.Tensor) -> float | bool:
    return (
        float("nan")
        if x.is_floating_point() or x.is_complex()
        else False
        if x.dtype == torch.bool
        else torch.iinfo(x.dtype).max
    )


def _is_unset(x: torch.Tensor) -> bool:
    values = x.detach()
    return bool(
        (values.isnan() if values.is_floating_point() or values.is_complex() else values == _mark(values)).any()
    )
