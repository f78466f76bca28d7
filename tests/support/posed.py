"""Problems of the search, of one placement each."""

from __future__ import annotations

from typing import Any

from support.inside import Problem, Request


def pose(**request: Any) -> Problem:
    """The problem of a `Request`."""
    return Request(**request).problem()
