"""Sums over the cuts of a profile: what the stage between any two of them computes, holds and sends.

Most figures of the stage between cuts i and j are differences of a column, column[j] - column[i]; of weights that
several of its nodes share (`Cuts.tied`), the difference less all but one of them. The largest of a stage's nodes is in
a table of all pairs, since for any cut k between them largest[i, j] = max(largest[i, k], largest[k, j]).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...schedules.messages import ALONE_BYTES
from ..profile import Node, Profile
from ..stage_cost import Recomputed, Rounds, StageSums
from ..topology import Floats

Cut = Any  # a position or an array of them; they broadcast
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: cached properties
class Cuts:
    """The cuts of a profile, the smaller ones first: cut 0 is empty, cut n-1 holds all nodes.

    Arguments:
        members: [n, nodes] which nodes each cut holds.
        forward, backward, update: [n] seconds of its nodes [s].
        input_grad, weight_grad: likewise, of I and W; half a backward each of nodes without measured ones [s].
        parameters, buffers, stash: [n] of its nodes [bytes].
        crossing: [n] bytes of the tensors that leave it, each counted once [bytes].
        joining: [n] `Node.joining_seconds` of those.
        inside: [n, n] whether cut i lies inside cut j and is not the same.
        nodes, order: of the profile.
        takers: of each node, those that take its output.
        taken, half_taken: [n] bytes of the tensors of which some node that runs again and is in it takes one, and of
            those that nodes outside take, too [bytes].
        notes: what was left out, for people; empty where all cuts are there.
        tied: nodes that share weights, and bytes of these: a stage with several of them has the weights once.
        rounds: of the profile.
    """

    members: Bools
    forward: Floats
    backward: Floats
    update: Floats
    input_grad: Floats
    weight_grad: Floats
    parameters: Floats
    buffers: Floats
    stash: Floats
    crossing: Floats
    joining: Floats
    inside: Bools
    nodes: tuple[Node, ...]
    order: tuple[int, ...]
    takers: tuple[tuple[int, ...], ...]
    taken: Floats
    half_taken: Floats
    notes: tuple[str, ...] = ()
    tied: tuple[tuple[tuple[int, ...], float], ...] = ()
    rounds: Rounds = field(default_factory=Rounds)

    def __len__(self) -> int:
        return len(self.crossing)

    @property
    def seconds(self) -> Floats:
        return self.forward + self.backward

    def stages(self, first: Cut, last: Cut) -> StageSums:
        return StageSums(
            forward=_between(self.forward, first, last) + self.joining[last],
            backward=_between(self.backward, first, last) + self.joining[first],
            input_grad=_between(self.input_grad, first, last) + self.joining[first],
            weight_grad=_between(self.weight_grad, first, last),
            update=self._less_twice(_between(self.update, first, last), first, last, self.shared_update),
            weights=self.weights(first, last),
            buffers=_between(self.buffers, first, last),
            stash=_between(self.stash, first, last),
            before=np.asarray(self.crossing[first]),
            after=np.asarray(self.crossing[last]),
            workspace=np.asarray(self._workspace[first, last]),
            largest=np.asarray(self._parameters[first, last]),
            alone=self._alone(first, last),
            small=self._less_twice(_between(self._small, first, last), first, last, self.shared_small),
            tied=self._shared_with_others(first, last, [shared for _, shared in self.tied]),
            experts=_between(self._experts, first, last),
            forward_exchange=_between(self._exchanges[0], first, last),
            backward_exchange=_between(self._exchanges[1], first, last),
            rounds=self.rounds,
            parts=_between(self._parts, first, last),
            small_tied=self._shared_with_others(first, last, [max(own) for own in self.shared_small]),
            by_node=partial(self._recomputed, first, last),
            by_count=lambda stage, kind: self._counted(int(first[stage]), int(last[stage]), kind),
        )

    def weights(self, first: Cut, last: Cut) -> Floats:
        """Bytes of parameters of the stages between these cuts, elementwise."""
        shared = [[each] * len(nodes) for nodes, each in self.tied]
        return self._less_twice(_between(self.parameters, first, last), first, last, shared)

    def _alone(self, first: Cut, last: Cut) -> Floats:
        """Parameters whose gradients travel alone, at least: of each node as if all were as large as its largest."""
        large = [[float(shared >= ALONE_BYTES)] * len(nodes) for nodes, shared in self.tied]
        own = self._less_twice(_between(self._large, first, last), first, last, large)
        return np.maximum(own - self._shared_with_others(first, last, [max(each) for each in large]), 0.0)

    def _shared_with_others(self, first: Cut, last: Cut, shared: Sequence[float]) -> Floats:
        """Figures that stages share with others; `shared`: by group of `tied`."""
        found = np.zeros(np.broadcast_shapes(np.shape(first), np.shape(last)))
        for (nodes, _), each in zip(self.tied, shared, strict=True):
            inside = [self.members[last, node] & ~self.members[first, node] for node in nodes]
            found = found + each * (np.any(inside, axis=0) & ~np.all(inside, axis=0))
        return found

    def _less_twice(self, figures: Floats, first: Cut, last: Cut, shared: Sequence[Sequence[float]]) -> Floats:
        """The figures less what stages with several nodes of a group count again; `shared`: by group of `tied`, of each
        node, what it has of the figure for the sake of the group."""
        for (nodes, _), own in zip(self.tied, shared, strict=True):
            has_one = np.zeros(figures.shape, dtype=bool)
            for node, each in zip(nodes, own, strict=True):
                inside = self.members[last, node] & ~self.members[first, node]
                figures = np.maximum(figures - each * (inside & has_one), 0.0)
                has_one = has_one | inside
        return figures

    @cached_property
    def shared_update(self) -> list[list[float]]:
        """By group of `tied`, of each node, the part of its update that goes to what it shares [s]."""
        groups = [([self.nodes[at] for at in nodes], shared) for nodes, shared in self.tied]
        return [
            [node.update_seconds * min(1.0, shared / (node.parameter_bytes or 1.0)) for node in nodes]
            for nodes, shared in groups
        ]

    @cached_property
    def shared_small(self) -> list[list[float]]:
        """By group of `tied`, of each node, bytes of what it shares that travel in common buckets; all, where it is
        unknown."""
        groups = [([self.nodes[at].small_parameter_bytes for at in nodes], shared) for nodes, shared in self.tied]
        return [
            [shared if small is None else min(small, shared if shared < ALONE_BYTES else 0.0) for small in own]
            for own, shared in groups
        ]

    def _recomputed(self, first: Cut, last: Cut, recompute: str) -> Recomputed:
        """Stages whose nodes are treated one by one, as one of COUNTED says. Under "layer" a tensor from before
        the stage that nodes before it take, too, and perhaps none of the stage, counts as kept: exact for chains, never
        less."""
        if recompute not in self._rows:
            kept, seconds, made = np.array([node.treated(recompute) for node in self.nodes]).T
            self._rows[recompute] = self._total(kept), self._total(seconds), self._largest(made)
        kept, seconds, made = self._rows[recompute]
        inputs = _between(self.taken, first, last) + self.half_taken[first] if recompute == "layer" else 0.0
        return Recomputed(
            kept=inputs + _between(kept, first, last),
            again=np.asarray(made[first, last]),
            seconds=_between(seconds, first, last),
        )

    @cached_property
    def _rows(self) -> dict[str, tuple[Floats, Floats, Floats]]:
        """By kind, [n] kept besides inputs [bytes], [n] what runs again [s], [n, n] made again at once [bytes]."""
        return {}

    @cached_property
    def _counts(self) -> dict[tuple[int, int, str], Recomputed]:
        return {}

    def _counted(self, first: int, last: int, kind: str) -> Recomputed:
        """[n + 1] of the stage between two cuts, of which the first 0, 1, .. n nodes that run again are treated as one
        of COUNTED says. Under "layer" what a node of them takes counts from the first on that takes it."""
        if (first, last, kind) not in self._counts:
            own = self.members[last] & ~self.members[first]
            again = [at for at in self.order if own[at] and self.nodes[at].runs_again]
            kept, seconds, made = np.array([(0.0, 0.0, 0.0), *(self.nodes[at].treated(kind) for at in again)]).T
            stash = np.array([0.0, *(self.nodes[at].stash_bytes for at in again)])
            if kind == "layer":
                place = {at: k + 1 for k, at in enumerate(again)}
                for at, takers in enumerate(self.takers):
                    firsts = [place[each] for each in takers if each in place]
                    if firsts:
                        kept[min(firsts)] += self.nodes[at].activation_bytes
            self._counts[first, last, kind] = Recomputed(
                kept=np.maximum(float(_between(self.stash, first, last)) + np.cumsum(kept - stash), 0.0),
                again=np.maximum.accumulate(made),
                seconds=np.cumsum(seconds),
            )
        return self._counts[first, last, kind]

    @cached_property
    def _workspace(self) -> Floats:
        return self._largest([node.workspace_bytes for node in self.nodes])

    @cached_property
    def _parameters(self) -> Floats:
        return self._largest([node.largest_parameter_bytes for node in self.nodes])

    @cached_property
    def _small(self) -> Floats:
        """[n] of parameters whose gradients travel in common buckets [bytes]; of all, where it is unknown."""
        small = [(node.small_parameter_bytes, node.parameter_bytes) for node in self.nodes]
        return self._total([every if some is None else some for some, every in small])

    @cached_property
    def large(self) -> list[int]:
        """Parameters of each node that travel alone, at least; none where they are unknown."""
        found = []
        for node in self.nodes:
            small, largest = node.small_parameter_bytes, node.largest_parameter_bytes
            large = node.parameter_bytes - small if small is not None and largest else 0.0
            found.append(math.ceil(large / max(largest, ALONE_BYTES) - 1e-9))
        return found

    @cached_property
    def _large(self) -> Floats:
        return self._total(self.large)

    @cached_property
    def _experts(self) -> Floats:
        """[n] of parameters that fewer replicas sum [bytes]."""
        return self._total([node.expert_bytes for node in self.nodes])

    @cached_property
    def _exchanges(self) -> tuple[Floats, Floats]:
        """[n] each, of F and of B [s]."""
        found = [(node.forward_exchange_seconds, node.backward_exchange_seconds) for node in self.nodes]
        forward, backward = (self._total(each) for each in zip(*found, strict=True))
        return forward, backward

    @cached_property
    def _parts(self) -> Floats:
        """[n] `Node.part_seconds`."""
        return self._total([node.part_seconds for node in self.nodes])

    def _total(self, figures: Sequence[float] | Floats) -> Floats:
        return total(self.members, np.array(figures))

    def _largest(self, figures: Sequence[float] | Floats) -> Floats:
        """[n, n] the largest figure of any node between two cuts. Between two of the cuts inside `last` it is known: of
        each that lies in no other, and of those inside that. O(n^2) for each such cut of an average `last`: one in a
        chain."""
        table, values = np.zeros((len(self), len(self))), np.array(figures)
        if not values.any():
            return table
        for last in range(1, len(self)):
            left = self.inside[:, last].copy()
            while left.any():
                near = len(left) - 1 - int(left[::-1].argmax())
                step = float(values[self.members[last] & ~self.members[near]].max())
                table[near, last] = step
                left[near] = False
                own = self.inside[:, near] & left
                table[own, last] = np.maximum(table[own, near], step)
                left &= ~own
        return table


def node_names(profile: Profile, cuts: Cuts, first: int, last: int) -> tuple[str, ...]:
    """Names of the nodes between two cuts, each after what it needs."""
    own = cuts.members[last] & ~cuts.members[first]
    return tuple(profile.nodes[at].name for at in profile.order() if own[at])


def cuts_of(profile: Profile, members: Bools, *, notes: tuple[str, ...]) -> Cuts:
    """The sums for these cuts, [n, nodes], the smaller ones first."""
    feeds: list[list[int]] = [[] for _ in profile.nodes]
    for src, dst in profile.links:
        feeds[src].append(dst)
    leaves, taken, half_taken = members.copy(), np.zeros_like(members), np.zeros_like(members)
    for at, consumers in enumerate(feeds):
        leaves[:, at] &= ~members[:, consumers].all(axis=1)  # the output of a sink is never taken
        again = members[:, [each for each in consumers if profile.nodes[each].runs_again]]
        taken[:, at] = again.any(axis=1)
        half_taken[:, at] = again.any(axis=1) & ~again.all(axis=1)
    counted = members.astype(np.float32)
    inside = counted @ (1 - counted).T == 0
    np.fill_diagonal(inside, val=False)

    def of(chosen: Bools, figure: str) -> Floats:
        return total(chosen, np.array([getattr(node, figure) for node in profile.nodes]))

    place = {node.name: at for at, node in enumerate(profile.nodes)}
    parts = ((node.input_grad_seconds, node.weight_grad_seconds, node.backward_seconds / 2) for node in profile.nodes)
    input_grad, weight_grad = np.array([(i, w) if i + w else (half, half) for i, w, half in parts]).T
    return Cuts(
        members=members,
        forward=of(members, "forward_seconds"),
        backward=of(members, "backward_seconds"),
        update=of(members, "update_seconds"),
        input_grad=total(members, input_grad),
        weight_grad=total(members, weight_grad),
        parameters=of(members, "parameter_bytes"),
        buffers=of(members, "buffer_bytes"),
        stash=of(members, "stash_bytes"),
        crossing=of(leaves, "activation_bytes"),
        joining=of(leaves, "joining_seconds"),
        inside=inside,
        nodes=profile.nodes,
        order=profile.order(),
        takers=tuple(map(tuple, feeds)),
        taken=of(taken, "activation_bytes"),
        half_taken=of(half_taken, "activation_bytes"),
        notes=notes,
        tied=tuple((tuple(place[name] for name in names), shared) for names, shared in profile.tied),
        rounds=profile.rounds,
    )


def thinned(cuts: Cuts, most: int) -> list[int]:
    """All cuts, or, of more than `most`, one in each stretch of equal work: that with the least bytes across."""
    if len(cuts) <= most:
        return list(range(len(cuts)))
    share = cuts.seconds / max(float(cuts.seconds[-1]), 1e-300)
    stretch = np.minimum((share * (most - 2)).astype(int), most - 3)
    best: dict[int, int] = {}
    for at in range(1, len(cuts) - 1):
        known = best.get(int(stretch[at]))
        if known is None or cuts.crossing[at] < cuts.crossing[known]:
            best[int(stretch[at])] = at
    return [0, *sorted(best.values()), len(cuts) - 1]


def total(chosen: Bools, weights: Floats) -> Floats:
    """[n] of the chosen weights, always in one order (a matrix product may take another with other threads)."""
    return np.asarray(np.where(chosen, weights, 0.0).sum(axis=1), dtype=np.float64)


def _between(column: Floats, first: Cut, last: Cut) -> Floats:
    return np.asarray(np.maximum(column[last] - column[first], 0.0), dtype=np.float64)
