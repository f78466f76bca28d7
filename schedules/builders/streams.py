"""Programs of batches that follow each other without a flush: what the asynchronous families share.

Every rank runs one forward and one backward in turn, for ever, behind a warm-up; an update (U) stands right behind the
last backward of its group. With R replicas of a stage, replica q takes the microbatches q, q + R, ... of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..families import EqualStages
from ..ir import Action, Op, Schedule


def check_update_every(update_every: int, num_microbatches: int, counts: Sequence[int]) -> None:
    """Raise ValueError unless each replica of each stage adds to every update of so many microbatches."""
    common = math.lcm(*counts)
    if num_microbatches % common:
        raise ValueError(
            f"num_microbatches={num_microbatches} with replicas={tuple(counts)}: expected a multiple of {common}, so "
            f"that each replica adds to each update"
        )
    is_count = isinstance(update_every, int) and not isinstance(update_every, bool)
    if not is_count or update_every < 1 or num_microbatches % update_every:
        raise ValueError(
            f"update_every={update_every!r} for {num_microbatches} microbatches: expected a number that divides "
            f"{num_microbatches}, such as 1 or {num_microbatches}"
        )
    if update_every % common:
        raise ValueError(
            f"update_every={update_every} with replicas={tuple(counts)}: expected a multiple of {common}, so that "
            f"each replica adds to each update"
        )


def build_stream(
    *,
    name: str,
    rule: str,
    counts: Sequence[int],
    num_microbatches: int,
    warmups: Sequence[int],
    update_every: int,
    num_batches: int | None,
    most_ahead: float = math.inf,
) -> Schedule:
    """A stream with stage s on ranks of its own.

    Arguments:
        name, rule: of the family, and of the weights.
        counts: replicas of each stage.
        warmups: forwards of one replica ahead of its backwards, by stage.
        update_every: microbatches of an update group.
        num_batches: that the program spans; None: enough to show the steady state.
        most_ahead: microbatches of all replicas that a forward may be ahead of the backwards.

    Raises ValueError for a number of batches that is none.
    """
    # Batches under way at once.
    deepest = math.ceil(max(warmup * count for warmup, count in zip(warmups, counts, strict=True)) / num_microbatches)
    if num_batches is None:
        num_batches = 2 * deepest + 6
    if not isinstance(num_batches, int) or num_batches < 1:
        raise ValueError(f"num_batches={num_batches!r}: expected a whole number, at least 1")
    placement: list[tuple[int, ...]] = []
    programs = []
    # In microbatches of all replicas. It never grows along the stages: no stage waits for a forward that the one before
    # makes behind a backward that waits for this stage. Under 2BW a forward is at most one batch ahead, see `two_bw`.
    reach = most_ahead
    for stage, count in enumerate(counts):
        reach = min(reach, warmups[stage] * count)
        for replica in range(count):
            own = [
                batch * num_microbatches + k
                for batch in range(num_batches)
                for k in range(replica, num_microbatches, count)
            ]
            groups = num_batches * num_microbatches // update_every
            placement.append((stage,))
            programs.append(_program(stage, own, reach=reach, group_size=update_every, num_groups=groups))
    return Schedule(
        name=name,
        placement=tuple(placement),
        programs=tuple(programs),
        num_microbatches=num_microbatches,
        num_batches=num_batches,
        weight_rule=rule,
        update_every=None if update_every == num_microbatches else update_every,
    )


def _program(stage: int, own: Sequence[int], *, reach: float, group_size: int, num_groups: int) -> tuple[Action, ...]:
    """Before each backward the forwards up to `reach` microbatches later; updates right after their last backward."""
    last_of = {index // group_size: index for index in own}
    program: list[Action] = []
    updates = 0

    def update_behind(index: int) -> None:
        nonlocal updates
        while updates < num_groups and last_of.get(updates, -1) <= index:
            program.append(Action(stage, Op.U, updates))
            updates += 1

    forwards = 0
    for index in own:
        while forwards < len(own) and own[forwards] <= index + reach:
            program.append(Action(stage, Op.F, own[forwards]))
            forwards += 1
        program.append(Action(stage, Op.B, index))
        update_behind(index)
    if not own:
        update_behind(0)
    return tuple(program)


def deepest_first(equal: EqualStages) -> tuple[int, ...]:
    """Stage activations of each rank: a plain warm-up, and one more."""
    return tuple(range(equal.num_ranks, 0, -1))
