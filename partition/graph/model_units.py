"""The cut units of any model."""

from __future__ import annotations

import re
import warnings

import torch
from torch import nn

from .chain import ChainUnits, is_sequential
from .forms import Arguments
from .recorded.recorded_units import RecordedUnits
from .recorded.recording import RecordingError
from .trace import TracedUnits
from .units import Agree, EnterUnit, ModelUnits, Step


class TracedModelWarning(UserWarning):
    """A model runs as a traced graph, which drops what its Python does beside computing tensors."""


def model_units(
    model: nn.Module,
    example: Arguments,
    *,
    enter_unit: EnterUnit | None,
    agree: Agree | None = None,
    device: torch.device | None = None,
) -> ModelUnits:
    """The children of an nn.Sequential; of any other module, its own modules with the code between them recorded.

    Where that code cannot be recorded, runs of operations of the model's graph, with a TracedModelWarning.

    Arguments:
        example: arguments of one microbatch, batch in dimension 0.
        enter_unit: told of each unit right before it runs; None: nobody is.
        agree: compares them with those of other processes; None: there are none.
        device: of the run; None: that of the inputs.

    Raises ValueError for a model that can be neither recorded nor traced whole, and for an empty nn.Sequential.
    """
    run_on = device if device is not None else example.tensors[0].device
    if is_sequential(model):
        assert isinstance(model, nn.Sequential)
        chain = ChainUnits(model, example, device=run_on, enter_unit=enter_unit)
        if agree is not None:
            agree(lambda: [Step(f"{unit.name} ({unit.description})") for unit in chain.units])
        return chain
    try:
        return RecordedUnits(model, example, device=run_on, enter_unit=enter_unit, agree=agree)
    except RecordingError as error:
        if not error.is_in_graph:
            raise
        reason = str(error)
    name = type(model).__name__
    try:
        traced = TracedUnits(model, example, enter_unit=enter_unit)
    except ValueError as error:
        raise ValueError(f"the modules of {name} cannot run as they are: {reason}. And {error}") from error
    if agree is not None:
        agree(lambda: [Step(re.sub(r"index=\d+", "", str(node.format_node()))) for node in traced.graph.nodes])
    warnings.warn(
        f"{name} runs as a traced graph, since the code between its modules cannot be recorded: {reason}. A graph "
        f"drops hooks, custom autograd functions, checkpointing, torch.compile, Python's random numbers and counters. "
        f"Expected code that reads no values of tensors; change that line, or move it into a module of its own",
        TracedModelWarning,
        stacklevel=2,
    )
    return traced
