"""Delay correction: treatment of gradients that were computed at older weights.

**Error feedback on updates.** Let d(t) be the update that the optimizer would apply, without rate and decay, from a
gradient that was computed D updates ago. Instead of d the update applies A:

    A(t) = d(t) + lambda (d(t) - d(t-1))          lambda = factor x D;  the first time A = d
    W(t+1) = (1 - lr wd) W(t) - lr A(t)

Why lambda = D: the d(t) that arrives is what step t - D should have applied. If updates stayed the same, each of the D
steps since then would have applied it, too, so that the weights should be at P(t) = sum of d up to t, + D d(t). What is
still to be applied is P(t) - P(t-1) = d(t) + D (d(t) - d(t-1)). Where updates vanish nothing is added, so that minima
stay minima. At a constant rate, without decay, it is the prediction of weights in other coordinates, as published for
momentum (SpecTrain, arXiv 1809.02839; XPipe, 1911.04610) and any optimizer (PipeOptim, 2312.00839): the weights here
are those that they compute with, which are their own + D times their last update.

**What d is.** It is measured, for any torch optimizer: W before the step, W' after it, rate and decay of the group,

    lr d = (1 - lr wd) W - W'                     hence  W(t+1) = W' - lambda lr (d(t) - d(t-1))

wd is the decay of optimizers that are known to decouple it (`decoupled_weight_decay` of AdamW, Adam, NAdam and RAdam;
Muon, Adafactor); any other decay, of unknown optimizers too, is a part of d, as is the rounding of weights of few bits.
What hooks after a step do (`register_step_post_hook`) is not: they run after the correction. A group without "lr" has
the rate 1. Rates that differ between groups or change have no effect: d(t - 1) is without its rate.

**Gradients that are not late**, as in the first batches of a run that each have a flush (`flush_first`): there lambda
is `fresh`, 1 by default, as if gradients were one update late, unless lambda is 0 later. The last d is kept.

**No step.** Without a gradient, with an update that is skipped (float16), or at a rate of 0 there is no d: the weights
and the last d stay the same, and the next d is compared with the last one that there was. So the sum of what was
applied is always the sum of all d + lambda (the last d - the first).

The last d is in the optimizer's own state of the parameter, under `LAST_UPDATE`, in the type of the weights: it is
saved, cut anew, divided and counted with the rest of that state. With lambda = 0 there is none.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

LAST_UPDATE = "delay_correction.last_update"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFeedback:
    """Adds to each update lambda times its difference from the update before; lambda = factor * delay of the stage.

    For late gradients, as `Asynchronous(schedule, correction=ErrorFeedback(...))`.

    Arguments:
        factor: strength relative to the derived one, which is 1.
        delay: by which gradients are late, on every stage [updates]; None: each stage's delay under the schedule.
        fresh: lambda of the first batches under `flush_first`, whose gradients are not late, on all stages that are
            corrected later; 0: their updates are not corrected.

    Raises ValueError for a value that is not a finite number of at least 0.

    Source: derived in this module; at a constant rate equal to PipeOptim (arXiv 2312.00839).

    >>> ErrorFeedback(factor=2.0).factors({"first": [0], "second": [1], "tied": [1, 2]}, delays=(2, 0.5, 1))
    {'first': 4.0, 'second': 1.0, 'tied': 2.0}
    """

    factor: float = 1.0
    delay: float | None = None
    fresh: float = 1.0

    def __post_init__(self) -> None:
        for name in ("factor", "delay", "fresh"):
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf
            if not is_number and (name != "delay" or value is not None):
                optional = ", or None for that of the schedule" if name == "delay" else ""
                raise ValueError(f"ErrorFeedback({name}={value!r}): expected a finite number of at least 0{optional}")
            if value is not None:  # numpy's numbers have another repr, which ranks compare
                object.__setattr__(self, name, float(value))

    def factors(self, stages: Mapping[str, Sequence[int]], delays: Sequence[float]) -> dict[str, float]:
        """Lambda of parameters, by name; one that several stages hold has the largest, so that its copies stay equal.
        `stages`: that hold each parameter. `delays`: [S] of each stage's gradients under the schedule [updates]."""
        late = [float(delay if self.delay is None else self.delay) for delay in delays]
        return {name: self.factor * max(late[stage] for stage in held) for name, held in stages.items()}


def read_correction(option: object) -> ErrorFeedback | None:
    """The option `correction=`. Raises ValueError for anything but None, its name and an ErrorFeedback."""
    if option is None or isinstance(option, ErrorFeedback):
        return option
    if option == "error-feedback":
        return ErrorFeedback()
    if option == "weight-prediction":
        raise ValueError(
            "correction='weight-prediction' does not exist. Expected 'error-feedback': at a constant rate "
            "both are one trajectory, seen at the weights that gradients are computed with"
        )
    raise ValueError(
        f"correction={option!r:.60}: expected None, 'error-feedback', or stagewright.ErrorFeedback(factor=...)"
    )


class Feedback:
    """Error feedback around steps of optimizers, with lambda by name; `fresh` where gradients are not late."""

    def __init__(self, factors: Mapping[str, float], *, fresh: float = 0.0) -> None:
        self.factors = factors
        self._fresh = fresh

    @contextmanager
    def around(
        self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], *, is_fresh: bool = False
    ) -> Iterator[None]:
        """Corrects the step that the optimizer makes within; `names` are by id of a parameter."""
        steady = {key: factor for key, name in names.items() if (factor := self.factors.get(name, 0.0))}
        factors = dict.fromkeys(steady, self._fresh) if is_fresh else steady
        groups = [(group, rate) for group in optimizer.param_groups if (rate := float(group.get("lr", 1.0))) != 0.0]
        before = [_decayed(optimizer, group, rate, factors) for group, rate in groups]
        hooks = getattr(optimizer, "_optimizer_step_post_hooks", OrderedDict())  # none if __init__ was not called
        optimizer._optimizer_step_post_hooks = OrderedDict()
        try:
            yield
        finally:
            optimizer._optimizer_step_post_hooks = hooks
        for (_, rate), decayed in zip(groups, before, strict=True):
            _correct(optimizer, decayed, rate, factors)
        for hook in list(hooks.values()):  # one that clamps weights has the last word, and what it does is not in d
            hook(optimizer, (optimizer,), {})


@torch.no_grad()
def _decayed(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], rate: float, factors: Mapping[int, float]
) -> dict[torch.Tensor, torch.Tensor]:
    """The weights to correct, decayed as the step will do it: in their own type, like torch."""
    found = {p: p.detach().clone() for p in group["params"] if p.grad is not None and factors.get(id(p))}
    decay = float(group.get("weight_decay") or 0.0) if _decouples_decay(optimizer, group) else 0.0
    if decay and found:
        torch._foreach_mul_(list(found.values()), 1.0 - rate * decay)
    return found


@torch.no_grad()
def _correct(
    optimizer: torch.optim.Optimizer,
    decayed: Mapping[torch.Tensor, torch.Tensor],
    rate: float,
    factors: Mapping[int, float],
) -> None:
    if not decayed:
        return
    torch._foreach_sub_(list(decayed.values()), list(decayed))
    torch._foreach_div_(list(decayed.values()), rate)
    changed: dict[float, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}  # by lambda
    for parameter, update in decayed.items():
        last = optimizer.state[parameter].get(LAST_UPDATE)
        optimizer.state[parameter][LAST_UPDATE] = update
        if last is not None:
            changed.setdefault(factors[id(parameter)], []).append((parameter, update, last))
    for factor, found in changed.items():
        parameters, updates, last_ones = zip(*found, strict=True)
        torch._foreach_neg_(last_ones)
        torch._foreach_add_(last_ones, updates)
        torch._foreach_sub_(parameters, last_ones, alpha=factor * rate)


def _decouples_decay(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a step multiplies weights by 1 - lr * weight_decay, independent of their gradients."""
    return bool(group.get("decoupled_weight_decay")) or isinstance(optimizer, torch.optim.Muon | torch.optim.Adafactor)
