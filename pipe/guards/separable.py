"""Whether an optimizer updates each of its parameters independently, as stages with separate optimizers need it.

torch's own are known, and other classes have an attribute `separable`. Any other is tried once, before its first step,
as is one with a hook before its step: twice on small weights and gradients, which are the same for one parameter and
differ for the rest. If the update of that one differs, a norm or another statistic joins them.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch
from torch import nn

from ...partition.model.untouched import untouched

Separable = Literal["elements", "parameters"]

_KNOWN: dict[type, Separable] = {torch.optim.Muon: "parameters", torch.optim.Adafactor: "parameters"}
for _name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "ASGD", "Rprop"):
    _KNOWN[getattr(torch.optim, _name)] = "elements"
_CUT = 4  # of each dimension of a tensor, in the trial
_WATCHED = 4  # groups of which one parameter is watched
_SCALES = (1e4, 1e-3, 1.0)  # of the others' gradients, by step: above any threshold, then with its effect on the state


def separable(optimizer: torch.optim.Optimizer) -> Separable:
    """ValueError unless it is known to update each element of a parameter, or each parameter, independently."""
    kind = known_to_separate(optimizer)
    if kind is None:
        name = type(optimizer).__name__
        raise ValueError(
            f"optimizer {name} is not known to update each parameter independently, and its result might differ where "
            f"each rank updates a part: expected data_parallel='replicate', or {name}.separable = 'elements' (it "
            f"updates each element of a parameter independently) or 'parameters' (each parameter)"
        )
    return kind


def known_to_separate(optimizer: torch.optim.Optimizer) -> Separable | None:
    said: Separable | None = _KNOWN.get(type(optimizer), getattr(optimizer, "separable", None))
    if said not in (None, "elements", "parameters"):
        raise ValueError(
            f"{type(optimizer).__name__}.separable = {said!r}: expected 'elements', 'parameters', or no such attribute"
        )
    return said


def refuse_shared_statistic(
    optimizer: torch.optim.Optimizer, model: Sequence[nn.Parameter], *, own_hook: Callable[..., None] | None = None
) -> bool:
    """ValueError for a step that moves one parameter by the values of others; a warning where it can't be tried.
    Returns whether it is of a kind that has to be tried. `model`: all parameters. They do not change, nor do the
    optimizer and the random generators. `own_hook`: a hook before the step that is not the user's."""
    hooks = [hook for hook in getattr(optimizer, "_optimizer_step_pre_hooks", {}).values() if hook != own_hook]
    name, kind = type(optimizer).__name__, type(optimizer).__module__
    is_known = kind.startswith("torch.optim.") or known_to_separate(optimizer) is not None
    try:
        if is_known and not hooks:
            return False
        if not _joins(optimizer, model, hooks):
            return True
    except Exception as error:
        said = " ".join(str(error).split())
        warnings.warn(
            f"optimizer {name} cannot be tried on small tensors ({type(error).__name__}: {said:.80}). If its step "
            f"computes something over several parameters, such as a norm, the result differs from that of one process. "
            f"If it does not, set {name}.separable = 'parameters'",
            stacklevel=2,
        )
        return True
    what, instead = f"the step of optimizer {name}", "an optimizer that updates each parameter independently (AdamW)"
    out = f", or {name}.separable = 'parameters' if it only joins parameters of one stage"
    if is_known:
        what, instead, out = f"a hook before {what}", "max_grad_norm= or pipe.clip_grad_norm_ to clip", ""
    raise ValueError(
        f"{what} computes something over several parameters, such as a norm. Each stage's optimizer has the parameters "
        f"of its stage alone, so the result would differ from one process. Expected {instead}, or one stage{out}"
    )


def _joins(optimizer: torch.optim.Optimizer, model: Sequence[nn.Parameter], hooks: Sequence[object]) -> bool:
    """Whether the update of a parameter, or of its state, depends on the values of the others. Tried on small tensors
    in place of the optimizer's; everything is restored."""
    own = dict(vars(optimizer))
    held = {id(p): p for group in own["param_groups"] for p in group["params"] if not p.is_meta}
    kept = [(p, p.data, p.grad) for p in ({id(p): p for p in model if not p.is_meta} | held).values()]

    def results(watched: nn.Parameter | None) -> list[list[torch.Tensor]]:  # of `_trained`, from the same beginning
        before.restore()
        vars(optimizer).clear()
        vars(optimizer).update(_small(own, shared=[optimizer, *(p for p, _, _ in kept)]))
        for p, data, _ in kept:
            p.grad = None
            p.data = _cut(data) if id(p) in held else data
        return _trained(optimizer, watched)

    with untouched(*hooks, device=None, buffers=False) as before, torch.no_grad():
        try:
            usual = results(None)
            watched: list[Any] = [result[0] for result in usual][:_WATCHED]
            pairs = [(p, one, other) for p in watched for one, other in zip(usual, results(p), strict=True)]
            return any(one[0] is p and not all(map(_agree, one, other)) for p, one, other in pairs)
        finally:
            vars(optimizer).clear()
            vars(optimizer).update(own)
            for p, data, grad in kept:
                p.data, p.grad = data, grad


def _trained(optimizer: torch.optim.Optimizer, watched: nn.Parameter | None) -> list[list[torch.Tensor]]:
    """By group, its first parameter and its changes after three steps. All but `watched` have other values."""
    optimizer._optimizer_step_post_hooks = OrderedDict()
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if not p.is_meta][:2]  # meta ones are other processes'
    groups = [group for group in optimizer.param_groups if group["params"]]
    some: list[nn.Parameter] = []
    for group in groups:
        if len(group["params"]) == 1:  # another stage's, in its group
            group["params"].append(nn.Parameter(group["params"][0].data.clone()))
        if group.get("lr") == 0:  # of a warm-up
            group["lr"] = 1e-2
        some += group["params"]
    others = set() if watched is None else {id(p) for p in some if p is not watched}
    for number, p in enumerate(some):
        p.data = _random(p, number) * (30.0 if id(p) in others else 1.0)
    begun = [group["params"][0].data.clone() for group in groups]
    for step, scale in enumerate(_SCALES, 1):
        for number, p in enumerate(some):
            p.grad = _random(p, 100 * step + number + 50 * (id(p) in others)) * (scale if id(p) in others else 1.0)
        optimizer.step()
    return [
        [p, p.data - start, *map(_number, [*optimizer.state.get(p, {}).values(), *group.values()])]
        for group, start in zip(groups, begun, strict=True)
        for p in group["params"][:1]
    ]


def _random(like: torch.Tensor, seed: int) -> torch.Tensor:
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(like.device, like.dtype)


def _number(value: object) -> torch.Tensor:
    is_number = isinstance(value, bool | int | float | torch.Tensor)
    return torch.as_tensor(value).detach().clone() if is_number else torch.empty(0)


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other.to(one), rtol=1e-3, atol=0.0, equal_nan=True)


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[tuple(slice(_CUT) for _ in tensor.shape)].detach().clone()


def _small(content: dict[str, Any], *, shared: Collection[object]) -> dict[str, Any]:
    """A copy of an optimizer's attributes with cut tensors, but for objects in `shared` and callables."""
    known = {id(each): (each, each) for each in shared}

    def number(value: Any) -> int | None:
        if isinstance(value, torch.Tensor):
            known.setdefault(id(value), (value, _cut(value)))
        elif isinstance(value, torch.Generator):  # which pickle refuses
            known.setdefault(id(value), (value, value.clone_state()))
        elif callable(value):
            known.setdefault(id(value), (value, value))
        return id(value) if id(value) in known else None

    pickler, unpickler = pickle.Pickler(file := io.BytesIO()), pickle.Unpickler(file)
    pickler.persistent_id = number  # type: ignore[method-assign]
    unpickler.persistent_load = lambda key: known[key][1]  # type: ignore[method-assign]
    pickler.dump(content)
    file.seek(0)
    copied: dict[str, Any] = unpickler.load()
    return copied
