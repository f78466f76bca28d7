"""Data dependencies: the actions that an action needs, over the graph of the stages.

F(s, k)   the output of every producer of s            (and the weights, see versions)
B(s, k)   the gradient from every consumer of s, and its own F(s, k)
I(s, k)   the same as B
W(s, k)   its own I(s, k)

A slice attends to earlier slices of its microbatch: its F needs their keys and values, and its B needs the gradients
that later slices contribute to its own keys and values. Within a microbatch therefore also

F(s, q)         F(s, q - 1)
B or I(s, q)    B or I(s, q + 1)

Activations that are offloaded to the host while they wait: B or I also needs the reload.

F3 . . OFFLOAD3 . . . . . RELOAD3 . B3

A forward that runs together with the backward after it (`overlap`) needs all that the backward does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from .actions import BACKWARD_OPS, MOVE_OPS, Action, Op, ScheduleError


class Edge(NamedTuple):
    """The outputs of stage `src` feed stage `dst`; `grad`: a gradient travels back."""

    src: int
    dst: int
    grad: bool = True


def chain(num_stages: int) -> tuple[Edge, ...]:
    """The stage graph of a plain chain: 0 -> 1 -> ... -> S-1."""
    return tuple(Edge(stage, stage + 1) for stage in range(num_stages - 1))


def read_edges(edges: Sequence[Any]) -> tuple[Edge, ...]:
    """Edges, also where they are given as pairs (src, dst)."""
    if isinstance(edges, tuple) and all(type(edge) is Edge for edge in edges):
        return edges
    try:
        return tuple(edge if type(edge) is Edge else Edge(*edge) for edge in edges)
    except TypeError:
        raise ScheduleError(f"edges={edges!r:.60}: expected pairs of stages, such as [(0, 1), (0, 2)]") from None


def check_edges(edges: Sequence[Edge], num_stages: int) -> None:
    """Raise ScheduleError unless each edge leads to a later stage and occurs once."""
    seen: set[tuple[int, int]] = set()
    for src, dst, _ in edges:
        if not 0 <= src < dst < num_stages:
            raise ScheduleError(f"edge {src} -> {dst}: expected stages in ascending order below {num_stages}")
        if (src, dst) in seen:
            raise ScheduleError(f"edge {src} -> {dst} occurs twice: expected each edge once")
        seen.add((src, dst))


class Needs:
    """The needs of each action of some programs; an answer takes O(in-degree).

    A stage may split the backward of some microbatches only, so the action that computes a gradient (B or I) is looked
    up per microbatch. `moves`: (stage, microbatch) pairs that are offloaded. `together`: the backward that begins
    together with a forward.
    """

    def __init__(
        self,
        programs: Sequence[Sequence[Action]],
        edges: Sequence[Edge],
        *,
        num_slices: int,
        moves: Collection[tuple[int, int]] = (),
        together: Mapping[Action, Action] = MappingProxyType({}),
    ) -> None:
        self.moves = moves
        self.together = together
        self._num_slices = num_slices
        self._split = {(a.stage, a.index) for program in programs for a in program if a.op is Op.I}
        self._producers: defaultdict[int, list[int]] = defaultdict(list)
        self._consumers: defaultdict[int, list[int]] = defaultdict(list)  # those that send a gradient back
        for src, dst, grad in edges:
            self._producers[dst].append(src)
            if grad:
                self._consumers[src].append(dst)

    def backward(self, stage: int, index: int) -> Action:
        """The action that computes the gradient which `stage` sends."""
        return Action(stage, Op.I if (stage, index) in self._split else Op.B, index)

    def of(self, action: Action) -> list[Action]:
        """The actions whose results `action` needs, in a fixed order."""
        stage, op, index = action
        if op is Op.F:
            makes = [Action(producer, Op.F, index) for producer in self._producers[stage]]
            if self.together and action in self.together:
                makes += self.of(self.together[action])
            return makes if index % self._num_slices == 0 else [*makes, Action(stage, Op.F, index - 1)]
        if op in BACKWARD_OPS:
            own = [Action(stage, Op.RELOAD, index)] if (stage, index) in self.moves else []
            own.append(Action(stage, Op.F, index))
            if (index + 1) % self._num_slices:
                own.append(self.backward(stage, index + 1))
            return [self.backward(maker, index) for maker in sorted(self._consumers[stage])] + own
        if op is Op.W:
            return [Action(stage, Op.I, index)]
        if op in MOVE_OPS and (stage, index) in self.moves:
            forward = Action(stage, Op.F, index)
            return [forward] if op is Op.OFFLOAD else [forward, Action(stage, Op.OFFLOAD, index)]
        return []
