"""Everything that an update of some stages changes, kept from before it, to be as it was again to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from .optimizers import StageOptimizers
from .options import Group, copied_option, differences, options_of, set_options


class Kept:
    """Parameters, optimizer state, options and learning-rate schedules before an update.

    What is changed in options between the update and `put_back`, such as a learning rate by the user, is meant for what
    comes behind: `put_back` says it again behind the update that is made instead.

    Raises ValueError, at `updated`, for an optimizer that keeps numbers of its own outside of its state.
    """

    def __init__(self, stages: Sequence[StageOptimizers]) -> None:
        self._optimizers = [optimizer for one in stages for optimizer in one.optimizers]
        self._schedulers = [scheduler for one in stages for scheduler in one.schedulers]
        self._values = [(p, p.detach().clone()) for p in _parameters(self._optimizers)]
        self._states = [
            {p: {key: copied_option(value) for key, value in own.items()} for p, own in optimizer.state.items()}
            for optimizer in self._optimizers
        ]
        self._groups = options_of(self._optimizers)
        self._scheduled = [copy.deepcopy(scheduler.state_dict()) for scheduler in self._schedulers]
        self._others = [_numbers(optimizer) for optimizer in self._optimizers]
        self._versions: list[int] = []
        self._after: list[Group] = []
        self._changed: list[Group] = []

    def updated(self) -> None:
        """The update was made."""
        for optimizer, before in zip(self._optimizers, self._others, strict=True):
            name = next((name for name, value in _numbers(optimizer).items() if before.get(name) != value), None)
            if name is not None:
                raise ValueError(
                    f"optimizer {type(optimizer).__name__} changes its attribute {name!r} in a step, which "
                    f"post_validation=True could not take back: expected an optimizer that keeps what it counts in its "
                    f"state, or post_validation=False"
                )
        self._after = options_of(self._optimizers)
        self._versions = [parameter._version for parameter, _ in self._values]

    def changed_outside(self) -> nn.Parameter | None:
        """A parameter that was changed in place behind the update: `put_back` would lose that."""
        pairs = zip(self._values, self._versions, strict=True)
        return next((parameter for (parameter, _), version in pairs if parameter._version != version), None)

    @torch.no_grad()
    def put_back(self) -> None:
        """All of it is as it was."""
        self._changed = differences(self._after, options_of(self._optimizers))
        for parameter, value in self._values:
            parameter.copy_(value)
        for optimizer, states in zip(self._optimizers, self._states, strict=True):
            optimizer.state.clear()
            optimizer.state.update(states)
        set_options(self._optimizers, self._groups)
        for scheduler, scheduled in zip(self._schedulers, self._scheduled, strict=True):
            scheduler.load_state_dict(scheduled)

    def change_again(self) -> None:
        """Options that were changed behind the update that was put back."""
        set_options(self._optimizers, self._changed)


def _parameters(optimizers: Sequence[torch.optim.Optimizer]) -> list[nn.Parameter]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _numbers(optimizer: torch.optim.Optimizer) -> Mapping[str, object]:
    """Public attributes that a step might count in."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_") and isinstance(value, bool | int | float | str)
    }
