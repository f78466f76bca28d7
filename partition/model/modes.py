"""Ways in which modules run: in evaluation mode, as they were written where torch.compile made something of them, and
with hooks on all modules (`register_module_forward_hook` and its like), which modules that stages do not call miss.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from unittest.mock import patch

import torch
from torch import nn

from .untouched import untouched


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    flags = [(part, part.training) for module in modules for part in module.modules()]
    for part, _ in flags:
        part.training = False
    try:
        yield
    finally:
        for part, training in flags:
            part.training = training


def uncompiled() -> AbstractContextManager[None]:
    """Within: what torch.compile made runs uncompiled, since nothing is gained by compiling it for fakes."""
    stance: AbstractContextManager[None] = nullcontext()
    if "torch._dynamo" in sys.modules:
        stance = torch.compiler.set_stance("force_eager")
    return stance


OWN_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_X = torch.zeros(1)
_GIVEN = {"forward_pre": ((_X,),), "forward": ((_X,), _X), "backward_pre": ((_X,),), "backward": ((_X,), (_X,))}


def hook_tables(module: nn.Module) -> Iterator[Mapping[int, object]]:
    """Hooks around a module's forward and backward: one table per kind of hook."""
    for kind in OWN_HOOKS:
        yield vars(module)[kind]


def changing_hook(module: nn.Module, kinds: Collection[str] = tuple(_GIVEN)) -> str | None:
    """The kind of such a hook that gives something for this module, and so changes what flows; None: all only look."""
    for kind in kinds:
        for hook in vars(torch.nn.modules.module)[f"_global_{kind}_hooks"].values():
            with suppress(Exception), untouched(hook, device=_X.device):  # one that needs more cannot be asked
                if hook(module, *_GIVEN[kind]) is not None:
                    return f"{kind.replace('_', ' ')} hook"
    return None


def quiet_fakes() -> AbstractContextManager[object]:
    """Fake tensors log a traceback before they raise: the error says it better."""
    return patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


@contextmanager
def no_collection() -> Iterator[None]:
    """Within, Python looks for no cycles: what finalizers and callbacks then run would be taken for the user's code."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
            gc.collect(1)  # what is left is kept, and not looked through once more
