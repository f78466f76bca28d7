"""Options (rates, betas, ...) that ranks used for their copies of a weight, compared behind the update.

A rate that is changed while batches are under way meets another update on each rank, so what counts is what an
update used. Each rank tells it with the gradients of a later update group; nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .optimizers import differing_options

_KEPT = 16  # updates; ranks are never so far apart


class SameOptions:
    """Options of one rank's updates of the parameters that it shares.

    Arguments:
        names: of the shared parameters, by position.
        num_stages: of the rank: its updates of a group.
    """

    def __init__(self, rank: int, names: Sequence[str], *, num_stages: int) -> None:
        self._rank = rank
        self._names = names
        self._num_stages = num_stages
        self._newest = -1
        self._used: dict[int, dict[int, int]] = {}  # update group -> position -> option number
        self._stages_done: dict[int, int] = {}
        self._told: list[tuple[int, int, dict[int, int]]] = []  # (peer, update group, position -> number)

    def used(self, index: int, numbers: Mapping[int, int]) -> None:
        """An update of a stage used these option numbers, by position.

        Raises ValueError that names a parameter for which another rank has used other ones.
        """
        self._used.setdefault(index, {}).update(numbers)
        self._stages_done[index] = self._stages_done.get(index, 0) + 1
        if self._stages_done[index] < self._num_stages:
            return
        del self._stages_done[index]
        self._newest = index
        for old in [known for known in self._used if known <= index - _KEPT]:
            del self._used[old]
        self._compare()

    def note(self, positions: Sequence[int]) -> list[float]:
        """Numbers to tell a rank with which these positions are shared: [n + 1]."""
        known = self._used.get(self._newest, {})
        return [float(self._newest), *(float(known.get(position, 0)) for position in positions)]

    def told(self, peer: int, positions: Sequence[int], note: Sequence[float]) -> None:
        """A note of a peer."""
        index, *numbers = map(int, note)
        if index >= 0:
            self._told.append((peer, index, dict(zip(positions, numbers, strict=True))))

    def drop(self) -> None:
        """Forget all."""
        self._newest = -1
        self._used.clear()
        self._stages_done.clear()
        self._told.clear()

    def _compare(self) -> None:
        for peer, index, numbers in self._told:
            own = self._used.get(index, {}) if index <= self._newest else {}
            differing = [self._names[at] for at, number in numbers.items() if own.get(at, number) != number]
            if differing:
                raise ValueError(differing_options(differing, sorted((self._rank, peer))))
        self._told = [one for one in self._told if one[1] > self._newest]
