"""One forward of a model on fake tensors, recorded, and what cannot be."""

from __future__ import annotations

import torch
from torch import nn

from ..fakes import on_fakes
from ..forms import Arguments
from ..made_up import reads_values
from ..modes import OWN_HOOKS, changing_hook, no_collection, quiet_fakes
from ..source_line import first_line, module_at, users_line
from .calls import Record
from .intercept import listening
from .recorder import ForwardRecorder
from .refusals import RefusedError
from .which import Roles, is_compiled


class RecordingError(ValueError):
    """The model's code between its modules cannot be recorded, so that the model cannot be cut there.

    Arguments:
        module: that was opened and whose code does it, at the path `inside` of the model.
        unit: path of one that it takes something of which was not returned, or that raised the error.
        reason: with the user's source line.
        expected: in its place.
    """

    def __init__(
        self, module: nn.Module, reason: str, *, inside: str, expected: str | None = None, unit: str | None = None
    ) -> None:
        self.expected = expected or _EXPECTED
        super().__init__(f"{type(module).__name__} cannot be recorded: {reason}. Expected {self.expected}")
        self.reason = reason
        self.inside = inside
        self.unit = None if unit is None else unit.partition("#")[0]


_EXPECTED = (
    "code between its modules that reads no values of tensors and changes no attributes; change that line, move it "
    "into a module of its own, which runs as it is, or give the parts yourself: PipelineModule([...])"
)


def record(model: nn.Module, roles: Roles, example: Arguments, *, device: torch.device, training: bool) -> Record:
    """Run the model once, on fake tensors, in the current mode of its modules, in training with a graph; it is left
    unchanged. RecordingError, with the user's source line, for what cannot be recorded."""
    expected: str | None
    for path, module in roles.opened.items():
        if path and is_compiled(module):
            raise RecordingError(
                module, f"{module_at(path)} is compiled as a whole", inside=path, expected="parts that are compiled"
            )
        hooks = next((kind for kind in OWN_HOOKS if vars(module)[kind]), None)
        if hooks is not None:
            reason = f"{module_at(path)} has hooks ({hooks.strip('_').replace('_', ' ')})"
            expected = "hooks on the modules in it, which run as they are; of an exported program the model itself"
            raise RecordingError(module, reason, inside=path, expected=expected)
        if kind := changing_hook(module, ("backward_pre", "backward")):
            reason = f"a hook on all modules ({kind}) changes gradients of {module_at(path)}"
            raise RecordingError(module, reason, inside=path, expected="such a hook on the modules in it")
    with on_fakes(model, example, device=device, training=training) as (given, kinds, left, around):
        recorder = ForwardRecorder(model, roles, given.tensors, around)
        try:
            heard = {id(each): each for each in (*roles.opened.values(), *roles.units.values())}
            with no_collection(), quiet_fakes(), listening(recorder, heard), recorder.watching(kinds):
                found = recorder.finish(given.call(model))
        except Exception as error:
            if isinstance(error, RefusedError):
                reason, expected = f"{error}{users_line(error) or recorder.line}", error.expected
                unit = error.unit
            else:
                reason = f"{first_line(error)}{users_line(error)}"
                expected = f"inputs that it takes (given: {example})"
                if reads_values(error):
                    reason, expected = f"the code between the modules reads a tensor's value{users_line(error)}", None
                elif "TorchScript" in reason or not isinstance(
                    error, RuntimeError | IndexError
                ):  # about shapes and types
                    expected += f", and {_EXPECTED}"
                unit = recorder.unit
            inside = recorder.inside
            raise RecordingError(roles.opened[inside], reason, inside=inside, expected=expected, unit=unit) from error
    found.reads.left += left
    return found
