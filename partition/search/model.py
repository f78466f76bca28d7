"""A profile as sums over its cuts: what any stage of it computes, holds and sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, combinations, pairwise

import numpy as np

from ...schedules.slice_lengths import equal_work_lengths, shortest_lengths, slice_seconds
from ..profile import Profile
from ..recompute import MemoryRules
from ..solve.antichains import MAX_CUTS, all_cuts
from ..solve.cut_sums import Cuts, node_names, thinned
from ..stage_cost import StageSums
from .space import Configuration

MAX_COARSE = 256  # cuts that the dynamic program looks at
_LEAST = ("forward_seconds", "backward_seconds", "update_seconds", "parameter_bytes", "joining_seconds")
ALL_SLICINGS = 64  # ways to cut a sequence up to which each is looked at
MAX_UNITS = 32  # of a sequence, of which slices are multiples
_SCALED = 0.005  # of the profile's seconds: less is not worth a word


class Model:
    """One profile for the planner, with the seconds that a run will see (`Profile.typical`).

    `rules`: what may be done about its memory."""

    def __init__(self, profile: Profile, rules: MemoryRules, *, max_cuts: int = MAX_CUTS) -> None:
        self.profile, self.rules = profile.typical(), rules
        times = self.profile.parts_seconds / (profile.parts_seconds or 1.0)
        scaled = f"all parts of the profile count {times:.3g} times, as long as the whole took"
        self.cuts: Cuts = all_cuts(self.profile, limit=max_cuts)
        self.notes = (scaled,) * (abs(times - 1) > _SCALED and times > 0) + self.cuts.notes
        self.seconds = float(self.cuts.seconds[-1])
        self._beyond: dict[int, float] = {}
        self._in_slices: dict[int, Model] = {}
        self.max_stages = min(len(set(self.cuts.members.sum(axis=1).tolist())), MAX_COARSE) - 1

    def in_slices(self, number: int) -> Model:
        """The same where a microbatch runs in so many slices, if any: nothing of it runs again or leaves for the host,
        since keys and values stay."""
        if number == 0:
            return self
        if number not in self._in_slices:
            times, found = 1 + (number - 1) * self.profile.slice_share, copy(self)
            found.rules = replace(self.rules, recompute=("none",), offloads=False)
            found.cuts = replace(self.cuts, forward=self.cuts.forward * times, backward=self.cuts.backward * times)
            found.seconds, found._beyond = self.seconds * times, {}
            self._in_slices[number] = found
        return self._in_slices[number]

    def slicings(self, whole: Configuration) -> Iterator[Configuration]:
        """A configuration with each cut of its sequences that is worth a simulation.

        Lengths are multiples of a unit, of which a sequence has MAX_UNITS at most. Of up to ALL_SLICINGS ways to cut it
        each is among them. Of more, for 2, 4, 8, .. slices, those whose longest takes least, and equal ones: those next
        to the best are looked at later (`next_slicings`), and others may be faster; under "terapipe" also those that
        pass P equal stages over free links soonest: no others are faster there.
        """
        cost, tokens = self.profile.slice_cost, self.profile.sequence_tokens or 1
        unit, sizes = self._unit(tokens), {"num_ranks": whole.pipeline, "num_microbatches": whole.batch // whole.data}
        units = tokens // unit
        if 2 ** (units - 1) <= ALL_SLICINGS:
            inner = (each for n in range(1, units) for each in combinations(range(unit, tokens, unit), n))
            found = [tuple(b - a for a, b in pairwise((0, *each, tokens))) for each in inner]
        else:
            numbers = [2**n for n in range(1, units.bit_length())]
            found = [equal_work_lengths(tokens, n, cost, multiple=unit) for n in numbers]
            found += [(tokens // n,) * n for n in numbers if units % n == 0]
            if whole.schedule == "terapipe":
                found.append(shortest_lengths(tokens, cost, multiple=unit, **sizes))
        for lengths in dict.fromkeys(each for each in found if len(each) > 1):
            yield self._sliced(whole, lengths)

    def _sliced(self, whole: Configuration, lengths: tuple[int, ...]) -> Configuration:
        seconds = slice_seconds(lengths, self.profile.slice_cost)
        return replace(whole, lengths=lengths, shares=tuple(each / (sum(seconds) or 1.0) for each in seconds))

    def next_slicings(self, c: Configuration) -> Iterator[Configuration]:
        """The same configuration with other lengths of slices, one step away: a boundary between two slices is moved,
        removed (two slices become one) or added (one becomes two)."""
        tokens, ends = sum(c.lengths), [*accumulate(c.lengths, initial=0)]
        unit = self._unit(tokens)
        found = {tuple(sorted({*ends} ^ {at})) for at in range(unit, tokens, unit)}
        found |= {tuple(sorted({*ends} ^ {at, at + by})) for at in ends[1:-1] for by in (-unit, unit)}
        for each in sorted(found):
            if len(each) > 2 and (each[0], each[-1]) == (0, tokens):
                yield self._sliced(c, tuple(b - a for a, b in pairwise(each)))

    @staticmethod
    def _unit(tokens: int) -> int:
        return tokens // max(each for each in range(1, min(tokens, MAX_UNITS) + 1) if not tokens % each)

    def at_least(self, others: Sequence[Model]) -> Model:
        """The same model with the least of each figure of a node; the same cuts."""
        if not others:
            return self
        nodes = []
        for same in zip(self.profile.nodes, *(each.profile.nodes for each in others), strict=True):
            least = {name: min(getattr(node, name) for node in same) for name in _LEAST}
            nodes.append(replace(same[0], **least, largest_parameter_bytes=0.0, small_parameter_bytes=None))
        tied = zip(self.profile.tied, *(each.profile.tied for each in others), strict=True)
        shared = tuple((same[0][0], min(num_bytes for _, num_bytes in same)) for same in tied)
        return Model(replace(self.profile, nodes=tuple(nodes), tied=shared, step_seconds=None), self.rules)

    @cached_property
    def coarse(self) -> list[int]:
        """Cuts for the dynamic program over stages with one place each."""
        return thinned(self.cuts, MAX_COARSE)

    def least_work_beyond(self, reach: int) -> float:
        """F + B of any stage that spans more of the coarse cuts, at least [s]; infinite where there is none."""
        if reach not in self._beyond:
            at = np.asarray(self.coarse)
            longer = self.cuts.inside[np.ix_(at, at)] & np.tri(len(at), k=-reach - 1, dtype=bool).T
            work = self.cuts.seconds[at] - self.cuts.seconds[at][:, None]
            self._beyond[reach] = float(work[longer].min(initial=np.inf))
        return self._beyond[reach]

    def stages(self, ends: Sequence[int], positions: Sequence[int] | None = None) -> StageSums:
        """[S] between neighbours among these cuts, S + 1 of them from 0 to the last.

        Arguments:
            positions: [S] place of each stage, alike for those on the same ranks: the first of these has the weights
                that they share, the others have none. None: all places differ.
        """
        at = np.asarray(ends)
        sums = self.cuts.stages(at[:-1], at[1:])
        if positions is None or not self.cuts.tied or len(set(positions)) == len(positions):
            return sums
        weights, update, small = sums.weights.copy(), sums.update.copy(), sums.small.copy()
        tied, small_tied = sums.tied.copy(), sums.small_tied.copy()
        parts = zip(self._holders(ends), self.cuts.shared_update, self.cuts.shared_small, strict=True)
        for (stages, shared), updates, smalls in parts:
            firsts = {positions[s]: s for s in sorted(stages, reverse=True)}
            for s in set(stages) - set(firsts.values()):
                weights[s] -= shared
                update[s] -= updates[stages.index(s)]
                small[s] -= smalls[stages.index(s)]
            is_shared = len(set(stages)) > 1
            for s in set(stages) if is_shared else ():
                if len(firsts) == 1 or s not in firsts.values():  # nothing of it leaves the stage for another rank's
                    tied[s] -= shared
                    small_tied[s] -= max(smalls)
        weights, update, small, tied, small_tied = (
            np.maximum(each, 0.0) for each in (weights, update, small, tied, small_tied)
        )
        return replace(sums, weights=weights, update=update, small=small, tied=tied, small_tied=small_tied)

    def tied_stages(self, ends: Sequence[int]) -> list[tuple[tuple[int, ...], float]]:
        """Stages between these cuts that share weights, ascending, and bytes of these: `Profile.tied`."""
        return [(tuple(sorted(set(stages))), shared) for stages, shared in self._holders(ends)]

    def _holders(self, ends: Sequence[int]) -> list[tuple[list[int], float]]:
        """By group of `Profile.tied`, the stage of each node, and bytes."""
        inside = self.cuts.members[list(ends[1:])]
        return [([int(np.argmax(inside[:, at])) for at in nodes], shared) for nodes, shared in self.cuts.tied]

    def names(self, first: int, last: int) -> tuple[str, ...]:
        """Names of the nodes between two cuts, each after what it needs."""
        return node_names(self.profile, self.cuts, first, last)

    def parameter_bytes(self, first: int, last: int) -> float:
        """Bytes of parameters between two cuts, as the profile adds them up."""
        own = self.cuts.members[last] & ~self.cuts.members[first]
        nodes = [node for at, node in enumerate(self.profile.nodes) if own[at]]
        return sum(node.parameter_bytes for node in nodes) - self.profile.counted_again([node.name for node in nodes])


def alike(models: Sequence[Model]) -> bool:
    """Whether the stages of these models between any two cuts are of the same nodes."""
    first, *others = models
    names = [node.name for node in first.profile.nodes]
    return all(
        [node.name for node in each.profile.nodes] == names
        and len(each.profile.tied) == len(first.profile.tied)
        and np.array_equal(each.cuts.members, first.cuts.members)
        for each in others
    )
