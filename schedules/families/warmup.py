"""The 1F1B rule: how many forwards a rank runs ahead of its backwards, and the resulting order, also over chunks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import NamedTuple

from ..ir import Action, Op, Schedule
from ..placement import StagePlacement


class ChunkOrder(NamedTuple):
    """An order of chunks that is the same on all ranks, from which `pair_up` makes the programs."""

    forwards: Sequence[tuple[int, int]]  # chunk and microbatch of each, in order
    backwards: Sequence[tuple[int, int]]  # likewise
    warmups: Sequence[int]  # [P] forwards of a rank ahead of its backwards

    def program(self, rank: int) -> tuple[Action, ...]:
        """Program of a rank, whose chunk v is stage v P + rank."""
        num_ranks = len(self.warmups)
        forwards, backwards = (
            [Action(chunk * num_ranks + rank, op, k) for chunk, k in turns]
            for op, turns in ((Op.F, self.forwards), (Op.B, self.backwards))
        )
        return pair_up(forwards, backwards, warmup=self.warmups[rank])


def replica_counts(replicas: Sequence[int] | None, num_ranks: int) -> list[int]:
    """The ranks of each stage, one by default; ValueError unless they add up to `num_ranks`."""
    if replicas is None:
        return [1] * num_ranks
    counts = list(replicas)
    if not all(isinstance(count, Integral) and count >= 1 for count in counts) or sum(counts) != num_ranks:
        raise ValueError(
            f"replicas={tuple(counts)} on {num_ranks} ranks: expected a count of at least 1 for each stage, "
            f"{num_ranks} in all"
        )
    return counts


def plain_warmup(counts: Sequence[int], stage: int) -> int:
    """Forwards that one replica of `stage` runs ahead of its backwards, so that all ranks after it have work.

    P - 1 - s without replicas; one more microbatch is in flight at once. `counts`: [S] replicas of each stage.
    PipeDream's rule (Narayanan et al., SOSP 2019).

    >>> [plain_warmup([1, 1, 1], stage) for stage in range(3)], plain_warmup([2, 1, 1], 0)
    ([2, 1, 0], 1)
    """
    return math.ceil(sum(counts[stage:]) / counts[stage]) - 1


def pair_up(forwards: Sequence[Action], backwards: Sequence[Action], *, warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards, then forwards and backwards alternating, then the remaining backwards.

    forwards   F0 F1 F2 F3     warmup=2:  F0 F1 | F2 B0 F3 B1 | B2 B3
    backwards  B0 B1 B2 B3
    """
    warmup = min(warmup, len(forwards))
    program = list(forwards[:warmup])
    steady = len(forwards) - warmup
    for forward, backward in zip(forwards[warmup:], backwards[:steady], strict=True):
        program += (forward, backward)
    program += backwards[steady:]
    return tuple(program)


def one_by_one(
    stage: int, indices: Sequence[int], *, warmup: int, backwards: Sequence[int] | None = None, op: Op = Op.B
) -> tuple[Action, ...]:
    """`pair_up` for one stage. `indices`, `backwards`: in the order of the forwards, and of the backwards if that
    differs. `op`: of the backwards."""
    last = indices if backwards is None else backwards
    return pair_up([Action(stage, Op.F, k) for k in indices], [Action(stage, op, k) for k in last], warmup=warmup)


def on_cyclic_ranks(
    name: str,
    programs: Iterable[tuple[Action, ...]],
    *,
    num_microbatches: int,
    num_chunks: int = 1,
    num_slices: int = 1,
) -> Schedule:
    """The schedule of these programs, with stage s on rank s mod P."""
    of_ranks = tuple(programs)
    return Schedule(
        name=name,
        placement=StagePlacement.cyclic(num_ranks=len(of_ranks), num_chunks=num_chunks),
        programs=of_ranks,
        num_microbatches=num_microbatches,
        num_slices=num_slices,
    )


def microbatch_groups(*, at_least: int, num_microbatches: int) -> tuple[int, ...]:
    """Sizes of the groups that pass through one chunk before the next chunk.

    A group smaller than P leaves ranks idle at each change of chunk, and a larger one holds more activations. So: as
    many groups as fit with at least that many in each, as even as possible, larger ones first (no later group may be
    larger than the first, for which the warm-up is made).

    >>> microbatch_groups(at_least=4, num_microbatches=11)
    (6, 5)
    >>> microbatch_groups(at_least=4, num_microbatches=3)
    (3,)
    """
    num_groups = max(1, num_microbatches // at_least)
    size, larger = divmod(num_microbatches, num_groups)
    return (size + 1,) * larger + (size,) * (num_groups - larger)


def put_off_weights(program: Sequence[Action], *, delay: int) -> tuple[Action, ...]:
    """Each backward split: the input gradient at once, the weight gradient `delay` backwards later.

    program    F0 F1 B0 F2 B1 B2      delay=1:  F0 F1 I0 F2 I1 W0 I2 W1 | W2
    """
    waiting: list[Action] = []
    split = []
    for action in program:
        if action.op is not Op.B:
            split.append(action)
            continue
        split.append(action._replace(op=Op.I))
        waiting.append(action._replace(op=Op.W))
        if len(waiting) > delay:
            split.append(waiting.pop(0))
    return (*split, *waiting)
