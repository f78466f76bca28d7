"""Grids thinned out: what `make test` runs of them, and what they leave to `make nightly`."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

Axis = Sequence[Any] | Mapping[str, Any]


def one_in(count: int, *axes: Axis) -> list[Any]:
    """pytest parameters, the product of some axes: one in `count` of them for every day, the rest marked nightly.

    Every day each value of an axis meets one in `count` of the next one's, other ones than the value beside it.

    Arguments:
        axes: values, or values by the name that stands in the test's id.
    """
    named = [axis if isinstance(axis, Mapping) else {str(value): value for value in axis} for axis in axes]
    found = []
    for places in itertools.product(*(enumerate(axis) for axis in named)):
        is_daily = sum(place for place, _ in places) % count == 0
        names = [name for _, name in places]
        values = [axis[name] for axis, name in zip(named, names, strict=True)]
        found.append(pytest.param(*values, id="-".join(names), marks=() if is_daily else pytest.mark.nightly))
    return found


def nightly(*values: Any) -> Any:
    """The pytest parameters of a case that `make test` leaves out, since one beside it shows the same."""
    return pytest.param(*values, marks=pytest.mark.nightly)
