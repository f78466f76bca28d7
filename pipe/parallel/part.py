"""A rank's part of a parameter: what its optimizer holds where other ranks hold the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .division import Division
from .share import Share


class Part:
    """This rank's part of a parameter.

    Attributes:
        whole: the model's own Parameter.
        parameter: what the optimizer holds in its place: a view of it while `whole` is there.
    """

    def __init__(self, name: str, whole: nn.Parameter, division: Division, rank: int) -> None:
        self.name = name
        self.whole = whole
        self.division = division
        self._rank = rank
        self.parameter = nn.Parameter(division.view(whole.data, rank), requires_grad=whole.requires_grad)

    def follow(self) -> None:
        """Be a view of the whole parameter, wherever that is now."""
        self.parameter.data = self.of(self.whole.data)

    def settle(self) -> None:
        """Behind a step: the whole parameter has the part, also of an optimizer that put it into other memory."""
        own = self.of(self.whole.data)
        if own.data_ptr() != self.parameter.data_ptr() and not self.is_empty:
            own.copy_(self.parameter.data)
            self.follow()

    @property
    def is_empty(self) -> bool:
        """Whether other ranks have all of it."""
        return self.parameter.numel() == 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a tensor like the parameter, as a view."""
        return self.division.view(tensor, self._rank)

    def share(self, of: Share) -> Share:
        """The part, of what this rank would hold alone."""
        return self.division.share(self._rank, of)

    def state_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """An optimizer's state of the whole parameter, for this part."""
        return {
            key: self.of(value).clone()
            if isinstance(value, torch.Tensor) and value.shape == self.whole.shape
            else value
            for key, value in state.items()
        }
