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

from .recipes import device_where_built, filled, value_of

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
        others = {id(x): name for name, x in absent.items() if value_of(x) is None and x.is_meta}
        for path, module in [*root.named_modules()][::-1] if others else ():  # the parts of a module before it
            own = {id(x): x for x in _own(module) if id(x) in others}
            if own:
                names = [others.pop(key) for key in own]
                for x in own.values():
                    done.callback(put(rnns, x, _unset(x, device)))
                with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
                    torch.manual_seed(zlib.crc32(path.encode(), seed % 2**32))
                    _way(root, path, module, names[0])()
                if unset := [name for name, x in zip(names, own.values(), strict=True) if _is_unset(x)]:
                    raise _nothing_fills(unset[0], module)
        kept = done.pop_all()
        if undo is not None:
            undo.push(kept)


@contextmanager
def lent(*roots: nn.Module, alike: bool = False, device: torch.device | None = None) -> Iterator[None]:
    """Within, modules that were built without values have some, to be tried and timed; afterwards as before.

    Arguments:
        alike: tensors of one name but for numbers in it, as of equal layers, share the values of the first of them.
        device: where the values are; where plain construction would have put them, by default.
    """
    first: dict[object, torch.Tensor] = {}
    with ExitStack() as undo:
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
    """Put values into a tensor without any, which stays the object that it is; returns what undoes it.

    Arguments:
        rnns: of the model, which know their parameters by weak references.
    """
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


def _own(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from (x for table in (module._parameters, module._buffers) for x in table.values() if x is not None)


def _way(root: nn.Module, path: str, module: nn.Module, name: str) -> Callable[[], object]:
    parts = path.split(".") if path else []
    for depth in range(len(parts), -1, -1):
        whole: Any = root.get_submodule(".".join(parts[:depth]))
        if callable(getattr(whole, "_init_weights", None)):
            return partial(whole._init_weights, module)
    ways: list[Callable[[], object]] = [way for each in _WAYS if callable(way := getattr(module, each, None))]
    if not ways:
        raise _nothing_fills(name, module)
    return ways[0]


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


def _nothing_fills(name: str, module: nn.Module) -> ValueError:
    return ValueError(
        f"{name!r} is on the meta device, and nothing fills it: {type(module).__name__} has no reset_parameters() that "
        f"does, nor a model around it _init_weights(module). Expected `with stagewright.deferred():` around the "
        f"model's constructor, or weights= with files that have it"
    )
