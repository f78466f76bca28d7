"""DualPipe (DeepSeek-AI, 2024): two pipelines in opposite directions, forwards paired with backwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..families import EqualStages, Family
from ..ir import Action, Op, Schedule
from .two_way import two_way


class Direction(NamedTuple):
    """One of the two ways that microbatches take through a rank.

    Arguments:
        stage: that the rank has of it.
        microbatch: index of the n-th microbatch that takes it.
    """

    stage: int
    microbatch: Callable[[int], int]


def dualpipe(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """Even microbatches go down the ranks, odd ones up; a rank pairs forwards of one way with backwards of the other.

        rank 0 | 0F0 0F2 0F4 3F1 3I1 3W1 3F3 0F6 3B3 3F5 0B0 3B5 3F7 0B2 3B7 0I4 0W4 0I6 0W6       P=4, M=8
        rank 1 | .   1F0 2F1 1F2 2F3 1F4 2B1 2F5 1B0 1F6 2B3 2F7 1B2 2B5 1B4 2I7 1I6 2W7 1W6
        rank 2 | .   1F1 2F0 1F3 2F2 1F5 2B0 2F4 1B1 1F7 2B2 2F6 1B3 2B4 1B5 2I6 1I7 2W6 1W7
        rank 3 | 0F1 0F3 0F5 3F0 3I0 3W0 3F2 0F7 3B2 3F4 0B1 3B4 3F6 0B3 3B6 0I5 0W5 0I7 0W7

    The paper runs such a pair at once, so that messages hide behind compute. Here a rank has one lane of compute: the
    forward comes first, and its output leaves when it is through, before the backward. Messages hide there as well.

    With equal stages, free links and W at most F and I the bubble of every rank does not depend on M. It is the largest
    of n (F+I-W), 2n (F-W) and n (2I-W) - F, with n = P/2 - 1. The published n (F&B + B - 3W), with F&B of a pair and B
    whole, is that of pairs that begin when both inputs are there and give both outputs at their end; it holds for
    F = I. Each rank holds P + 1 activations, from F to the end of B or W, and the weights of two stages, whose
    gradients are summed over the ranks r and P-1-r.

    Raises ValueError for an odd number of ranks or of microbatches, and for fewer than 2P microbatches.
    """
    placement, owners = two_way(num_ranks, "dualpipe")
    if num_microbatches % 2 or num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"num_microbatches={num_microbatches} for schedule 'dualpipe' on {num_ranks} ranks: half of them take each "
            f"way; expected an even number, at least {2 * num_ranks} (2P)"
        )
    programs = []
    for rank in range(num_ranks):
        down, up = Direction(rank, lambda n: 2 * n), Direction(num_ranks - 1 - rank, lambda n: 2 * n + 1)
        from_near_end = rank < num_ranks // 2
        programs.append(
            eight_steps(
                (down, up) if from_near_end else (up, down),
                position=rank if from_near_end else num_ranks - 1 - rank,
                length=num_ranks // 2,
                each_way=num_microbatches // 2,
            )
        )
    return Schedule(
        name="dualpipe",
        placement=placement,
        owners=owners,
        programs=tuple(programs),
        num_microbatches=num_microbatches,
    )


def eight_steps(ways: tuple[Direction, Direction], *, position: int, length: int, each_way: int) -> tuple[Action, ...]:
    """Program of a rank at `position` (h) between the end where way 0 begins and the middle, `length` (H) ranks away.

    1   2(H-1-h) x  F0                   warm-up of the nearer end's way
    2   (h+1)    x  F0 F1
    3   (H-1-h)  x  I1 W1 F1             the first gradients go on at once
    4   the rest x  F0 B1 F1 B0          in pairs of forward and backward
    5   (H-1-h)  x  B1 F1 B0
    6   (h+1)    x  B1 B0                the second half of these split,
    7   (H-1-h)  x  W I0                 so that gradients go on, and W are left
    8   (h+1)    x  W                    for the end

    Arguments:
        each_way: microbatches that take each way, at least 2H.
    """
    order = _Order(ways)
    inner, outer = position + 1, length - 1 - position
    for _ in range(2 * outer):
        order.forward(0)
    for _ in range(inner):
        order.forward(0)
        order.forward(1)
    for _ in range(outer):
        order.input_grad(1)
        order.weight_grad()
        order.forward(1)
    for _ in range(each_way - 2 * length + inner):
        order.forward(0)
        order.backward(1)
        order.forward(1)
        order.backward(0)
    for _ in range(outer):
        order.backward(1)
        order.forward(1)
        order.backward(0)
    for number in range(2 * inner):
        (order.backward if number < inner else order.input_grad)(1 - number % 2)
    for _ in range(outer):
        order.weight_grad()
        order.input_grad(0)
    for _ in range(inner):
        order.weight_grad()
    return tuple(order.actions)


class _Order:
    """A program being written: each way's microbatches in turn, and weight gradients as they were put off."""

    def __init__(self, ways: Sequence[Direction]) -> None:
        self.actions: list[Action] = []
        self._ways = ways
        self._forwards = [0, 0]
        self._backwards = [0, 0]
        self._put_off: deque[Action] = deque()

    def forward(self, way: int) -> None:
        self.actions.append(self._next(Op.F, way, self._forwards))

    def backward(self, way: int) -> None:
        self.actions.append(self._next(Op.B, way, self._backwards))

    def input_grad(self, way: int) -> None:
        self.actions.append(self._next(Op.I, way, self._backwards))
        self._put_off.append(self.actions[-1]._replace(op=Op.W))

    def weight_grad(self) -> None:
        self.actions.append(self._put_off.popleft())

    def _next(self, op: Op, way: int, counts: list[int]) -> Action:
        stage, microbatch = self._ways[way]
        counts[way] += 1
        return Action(stage, op, microbatch(counts[way] - 1))


def bubble_of_pairs(equal: EqualStages, ranks_behind: int) -> float | None:
    """Bubble of each rank [s], where `ranks_behind` lie between an end and the rank where its way turns, or meets the
    other; None where the form does not hold."""
    forward, input_grad, weight_grad = equal.forward, equal.input_grad, equal.weight_grad
    if weight_grad > min(forward, input_grad) or equal.latency:
        return None
    waits = (
        ranks_behind * (forward + input_grad - weight_grad),
        ranks_behind * 2 * (forward - weight_grad),
        ranks_behind * (2 * input_grad - weight_grad) - forward,
    )
    return max(waits) if ranks_behind else 0.0


def _batch_seconds(equal: EqualStages) -> float | None:
    bubble = bubble_of_pairs(equal, equal.num_ranks // 2 - 1)
    return None if bubble is None else equal.num_microbatches * equal.both + bubble


DUALPIPE = Family(
    name="dualpipe",
    build=dualpipe,
    placement="two-way",
    weight_copies=2,
    splits_backward=True,
    full_after=2,
    batch_seconds=_batch_seconds,
    peak_activations=lambda equal: (equal.num_ranks + 1,) * equal.num_ranks,
)
