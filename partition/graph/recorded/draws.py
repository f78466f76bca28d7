"""Random numbers in a forward that is being recorded: under which number each call is seeded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..generators import python_and_numpy
from .calls import DRAWS
from .values import RefusedError


class Draws:
    """Numbers of what may draw, in the order of the calls.

    Arguments:
        join: called with two calls that draw numbers of one unit.

    Attributes:
        drew: whether torch's generators were drawn from since it was last set to False.
    """

    def __init__(self, join: Callable[[int, int, str], None]) -> None:
        self.drew = False
        self._join = join
        self._count = 0
        self._whole: int | None = None  # number of the unit that was opened and is under way
        self._drawing: list[int] = []  # calls in it that have drawn
        self._generators = python_and_numpy()

    @contextmanager
    def whole_unit(self) -> Iterator[None]:
        """Within, a unit that was opened runs: the calls in it draw its numbers."""
        if self._whole is not None:
            yield
            return
        self._whole, self._count, self._drawing = self._count, self._count + 1, []
        yield
        self._whole = None

    def number(self, call: int) -> int:
        """The number of a call that may draw; `drew` says whether it did."""
        if self._whole is None:
            self._count += 1
            return self._count - 1
        number = self._whole + (len(self._drawing) << DRAWS)
        if self.drew:
            for before in self._drawing[-1:]:
                self._join(before, call, "both draw random numbers of one unit")
            self._drawing.append(call)
        return number

    def settle(self) -> None:
        """A call is through, which may have drawn from Python's and numpy's generators."""
        self._generators = python_and_numpy()

    def check(self) -> None:
        """RefusedError where the code between the calls has drawn from them."""
        if python_and_numpy() != self._generators:
            raise RefusedError("the code between the modules draws from Python's or numpy's random generator")
