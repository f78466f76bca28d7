"""Whether an optimizer may be given parts: of each parameter, or at least some parameters of all.

torch's own are known by name. Any other one is tried: tiny parameters, updated together and apart, must come out the
same. Nothing of the optimizer itself changes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

Separable = Literal["elements", "parameters"]

_BY_ELEMENT = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
_STEPS = 3


def separable(optimizer: torch.optim.Optimizer) -> Separable:
    """ "elements": it treats each element of a parameter by itself; "parameters": each parameter.

    Raises ValueError for one that treats them together, or that cannot be tried.
    """
    if type(optimizer) in _BY_ELEMENT:
        return "elements"
    name = type(optimizer).__name__
    try:
        together = _tried(optimizer, lambda tensors: tensors)
        if all(torch.equal(before, after) for before, after in together):
            raise RuntimeError("its step changed nothing")
        for kind, cuts in _CUTS.items():
            apart = [_tried(optimizer, cut) for cut in cuts]
            if _agree(together, apart, cuts):
                return kind
    except Exception as error:
        raise ValueError(
            f"optimizer {name} could not be tried on parts of its parameters ({type(error).__name__}: {error}): "
            f"expected data_parallel='replicate', or an optimizer that makes its state in step() and keeps it in "
            f"state and param_groups, as torch's do"
        ) from error
    raise ValueError(
        f"optimizer {name} updates a parameter by what it knows of others, or at random, so that ranks that each "
        f"update a part would come to another result: expected data_parallel='replicate', or an optimizer that treats "
        f"each parameter by itself"
    )


_Cut = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def _rows(first: bool) -> _Cut:
    return lambda tensors: [(t[:2] if first else t[2:]) if t.dim() else t for t in tensors]


_CUTS: dict[Separable, tuple[_Cut, _Cut]] = {
    "elements": (_rows(True), _rows(False)),
    "parameters": (lambda tensors: tensors[::2], lambda tensors: tensors[1::2]),
}

_Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # before and after


def _tried(optimizer: torch.optim.Optimizer, cut: _Cut) -> _Pairs:
    """A few steps of an optimizer like this one, over what `cut` leaves of each group's tiny parameters."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler has put one there, which steps the optimizer itself
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[hooks] = OrderedDict()
    twin.state = defaultdict(dict)
    generator = torch.Generator().manual_seed(0)
    groups, pairs, gradients = [], [], []
    for group in optimizer.param_groups:
        shapes = sorted({tensor.dim() for tensor in group["params"]})
        tiny = [_tiny(dim, generator, group["params"][0].device) for dim in shapes for _ in range(2)]
        parameters = [torch.nn.Parameter(x.clone()) for x in cut(tiny)]
        pairs += list(zip((p.detach().clone() for p in parameters), parameters, strict=True))
        drawn = [[_tiny(x.dim(), generator, x.device) for x in tiny] for _ in range(_STEPS)]
        gradients.append([cut(one) for one in drawn])
        groups.append({**group, "params": parameters, **_rate(group)})
    twin.param_groups = groups
    for step in range(_STEPS):
        for group, drawn_for in zip(groups, gradients, strict=True):
            for parameter, gradient in zip(group["params"], drawn_for[step], strict=True):
                parameter.grad = gradient.clone()
        twin.step()
    return [(before, after.detach()) for before, after in pairs]


def _tiny(dim: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """Rows of very different sizes: [4, 3, 3, ...]."""
    drawn = torch.randn((4, *[3] * (dim - 1))[:dim], generator=generator, dtype=torch.float64)
    scales = torch.tensor([1.0, 30.0, 0.2, 7.0], dtype=torch.float64)
    return (drawn * scales.view(-1, *[1] * (dim - 1)) if dim else drawn).to(device)


def _rate(group: dict[str, Any]) -> dict[str, Any]:
    """A rate at which something happens, of the same kind: a warm-up may begin with 0."""
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor):
        rate = copy.copy(rate.detach()).clone().fill_(0.1)
    return {} if rate is None else {"lr": rate if isinstance(rate, torch.Tensor) else 0.1}


def _agree(together: _Pairs, apart: Sequence[_Pairs], cuts: Sequence[_Cut]) -> bool:
    whole = [after for _, after in together]
    return all(
        torch.allclose(part, after, rtol=1e-6, atol=1e-9)
        for parts, cut in zip(apart, cuts, strict=True)
        for part, (_, after) in zip(cut(whole), parts, strict=True)
    )
