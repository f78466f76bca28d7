"""The cut units of any model."""

from __future__ import annotations

from torch import nn

from .chain import ChainUnits, is_sequential
from .forms import Arguments
from .trace import TracedUnits
from .units import EnterUnit, ModelUnits


def model_units(model: nn.Module, example: Arguments, *, enter_unit: EnterUnit | None) -> ModelUnits:
    """The children of an nn.Sequential; of any other module, runs of operations of its graph.

    Arguments:
        example: arguments of one microbatch, batch in dimension 0.
        enter_unit: told of each unit right before it runs; None: nobody is.

    Raises ValueError for a model that cannot be traced whole, and for an empty nn.Sequential.
    """
    if is_sequential(model):
        assert isinstance(model, nn.Sequential)
        return ChainUnits(model, enter_unit=enter_unit)
    return TracedUnits(model, example, enter_unit=enter_unit)
