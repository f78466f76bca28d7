"""Modules by patterns of their names, as options speak of them."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase

from torch import nn


def match(pattern: str, root: nn.Module, *, option: str) -> dict[str, nn.Module]:
    """Modules by name that a pattern matches.

    Arguments:
        pattern: it has as many parts between dots as the names that it matches, each as in fnmatch.
        option: what the user wrote, for the error.

    Raises ValueError with near matches where there is none.
    """
    named = {name: module for name, module in root.named_modules(remove_duplicate=False) if name}
    found = {name: module for name, module in named.items() if matches(pattern, name)}
    if not found:
        usual = dict.fromkeys(".".join("*" if part.isdecimal() else part for part in name.split(".")) for name in named)
        near = difflib.get_close_matches(pattern, usual, n=3, cutoff=0.3) or list(usual)[:3]
        raise ValueError(
            f"{option} matches no module: expected names of the model, where '*' stands for one "
            f"part between dots, such as {', '.join(map(repr, near))}"
        )
    return found


def matches(pattern: str, name: str) -> bool:
    """Whether a name fits, part by part.

    >>> matches("blocks.*.up", "blocks.3.up"), matches("blocks.*", "blocks.3.up")
    (True, False)
    """
    parts, split = pattern.split("."), name.split(".")
    return len(split) == len(parts) and all(map(fnmatchcase, split, parts))
