"""All back ends, by name; each is loaded when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from ..names import check_known
from .records import Backend

Say = Callable[[str], None]

# name -> module beside this one, and what in it makes the back end: called with `say=`
BACKENDS = {
    "local": ("local", "LocalBackend"),
    "netns": ("netns", "NetnsBackend"),
    "ssh": ("ssh", "SshBackend"),
    "slurm": ("slurm", "SlurmBackend"),
}


def backend(name: str, *, say: Say) -> Backend:
    """The back end of this name; ValueError, with near matches, where there is none.

    Arguments:
        say: takes its lines for people.
    """
    check_known("unknown back end", name, BACKENDS, listed="back ends")
    module, maker = BACKENDS[name]
    try:
        made = getattr(importlib.import_module(f".{module}", __package__), maker)(say=say)
    except ModuleNotFoundError as error:
        if error.name != f"{__package__}.{module}":
            raise
        raise ValueError(f"back end {name!r} is not part of this version of stagewright") from None
    return cast(Backend, made)
