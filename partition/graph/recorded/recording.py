"""One forward of a model on fake tensors, recorded, and what cannot be."""

from __future__ import annotations

import torch
from torch import nn

from ..fake_run import on_fakes
from ..forms import Arguments
from ..hooks_on_all import changing_hook
from ..source_line import first_line, module_at, users_line
from .calls import Record
from .carried import CarriedError
from .intercept import listening
from .recorder import Recorder
from .values import RefusedError
from .which import Roles

_OWN_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class RecordingError(ValueError):
    """A forward does what cannot be recorded.

    Arguments:
        inside: path of the module that was opened and whose code does it.
        is_in_graph: whether a traced graph would do it.
    """

    def __init__(self, message: str, *, inside: str, is_in_graph: bool = True) -> None:
        super().__init__(message)
        self.inside = inside
        self.is_in_graph = is_in_graph


def record(model: nn.Module, roles: Roles, example: Arguments, *, device: torch.device, training: bool) -> Record:
    """Run the model once, on fake tensors, in the mode in which its modules stand; it stays as it was.

    Arguments:
        example: arguments, of whose tensors shapes and types count.
        training: whether a graph is built.

    Raises RecordingError, with the user's source line, for what cannot be recorded.
    """
    for path, module in roles.opened.items():
        hooks = next((kind for kind in _OWN_HOOKS if vars(module)[kind]), None)
        if hooks is not None:
            raise RecordingError(f"{module_at(path)} has hooks ({hooks.strip('_').replace('_', ' ')})", inside=path)
        if kind := changing_hook(module, ("backward_pre", "backward")):
            raise RecordingError(f"a hook on all modules ({kind}) changes gradients of {module_at(path)}", inside=path)
    with on_fakes(model, example, device=device, training=training) as fakes:
        recorder = Recorder(model, roles, fakes.given.tensors)
        try:
            heard = {id(each): each for each in (*roles.opened.values(), *roles.units.values())}
            with listening(recorder, heard), recorder.watching(fakes.kinds):
                found = recorder.finish(fakes.given.call(model))
        except Exception as error:
            inside = recorder.inside
            reason = str(error) if isinstance(error, RefusedError) else first_line(error)
            line = recorder.line if isinstance(error, RefusedError) and not users_line(error) else users_line(error)
            is_in_graph = not isinstance(error, CarriedError)
            raise RecordingError(f"{reason}{line}", inside=inside, is_in_graph=is_in_graph) from error
    found.reads.left += fakes.left
    return found
