"""The cut units of any model."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from .chain import ChainUnits, is_sequential
from .forms import Arguments
from .recorded.recorded_units import RecordedUnits
from .units import Agree, EnterUnit, ModelUnits, Step


def model_units(
    model: nn.Module,
    example: Arguments,
    *,
    enter_unit: EnterUnit | None,
    agree: Agree | None = None,
    device: torch.device | None = None,
) -> ModelUnits:
    """The children of an nn.Sequential; of any other module, its own modules with the code between them recorded.

    Arguments:
        example: arguments of one microbatch, batch in dimension 0.
        enter_unit: told of each unit right before it runs; None: nobody is.
        agree: compares them with those of other processes; None: there are none.
        device: of the run; None: that of the inputs.

    Raises ValueError, with the user's source line, for a model that cannot be recorded, for arguments that it does not
    take, and for an empty nn.Sequential.
    """
    run_on = device if device is not None else example.tensors[0].device
    if is_sequential(model):
        assert isinstance(model, nn.Sequential)
        chain = ChainUnits(model, example, device=run_on, enter_unit=enter_unit)
        if agree is not None:
            agree(lambda: [Step(f"{unit.name} ({unit.description})") for unit in chain.units])
        return chain
    _check_signature(model, example)
    return RecordedUnits(model, example, device=run_on, enter_unit=enter_unit, agree=agree)


def _check_signature(model: nn.Module, example: Arguments) -> None:
    signature = inspect.signature(model.forward)
    try:
        example.call(signature.bind)
    except TypeError as error:
        raise ValueError(
            f"{type(model).__name__}.forward{signature} does not take {example} ({error}): expected all that it needs, "
            f"in its order or by name; example_inputs=(...) or train_step(*inputs, target)"
        ) from None
