"""Names that a user typed and nobody knows: an error with near matches."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def check_known(what: str, name: str, known: Collection[str], *, listed: str) -> None:
    """Raise ValueError unless `name` is in `known`.

    Arguments:
        what: comes in front of the name, such as "unknown back end".
        listed: what the known ones are, such as "back ends".

    >>> check_known("unknown back end", "netsn", ["local", "netns"], listed="back ends")
    Traceback (most recent call last):
    ValueError: unknown back end 'netsn'; did you mean netns?
    back ends: local, netns
    """
    if name not in known:
        near = difflib.get_close_matches(name, known, n=2, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"{what} {name!r}{hint}\n{listed}: {', '.join(known)}")
