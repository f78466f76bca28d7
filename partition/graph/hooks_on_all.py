"""Hooks on all modules (`register_module_forward_hook` and its like): modules that stages do not call miss them."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

import torch
from torch import nn

from .untouched import untouched

_X = torch.zeros(1)
_GIVEN = {"forward_pre": ((_X,),), "forward": ((_X,), _X), "backward_pre": ((_X,),), "backward": ((_X,), (_X,))}


def changing_hook(module: nn.Module, kinds: Collection[str] = tuple(_GIVEN)) -> str | None:
    """The kind of such a hook that gives something for this module, and so changes what flows; None: all only look."""
    for kind in kinds:
        for hook in vars(torch.nn.modules.module)[f"_global_{kind}_hooks"].values():
            with suppress(Exception), untouched(hook, device=_X.device):  # one that needs more cannot be asked
                if hook(module, *_GIVEN[kind]) is not None:
                    return f"{kind.replace('_', ' ')} hook"
    return None
