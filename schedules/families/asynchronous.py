"""Batches that follow each other without a flush: PipeDream, PipeDream-2BW and PACI.

After a warm-up, every rank alternates forwards and backwards without end; an update (U) comes right after the last
backward of its group. With R replicas of a stage, replica q takes the microbatches q, q + R, ... of a batch. The
families differ in when a stage updates and which version of its weights a forward uses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import Action, Op, Schedule
from ..kinds import at_least
from .family import Family
from .warmup import plain_warmup, replica_counts


def check_update_every(update_every: int, num_microbatches: int, counts: Sequence[int]) -> None:
    """Raise ValueError unless each replica of each stage contributes to every update of so many microbatches."""
    common = math.lcm(*counts)
    if num_microbatches % common:
        raise ValueError(
            f"num_microbatches={num_microbatches} with replicas={tuple(counts)}: expected a multiple of {common}, so "
            f"that each replica adds to each update"
        )
    if at_least(1).read(update_every) is None or num_microbatches % update_every:
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
    update_every: int,
    num_batches: int | None,
    warmups: Sequence[int] | None = None,
    most_ahead: float = math.inf,
) -> Schedule:
    """A stream with stage s on ranks of its own.

    Arguments:
        rule: of the weights.
        counts: replicas of each stage.
        warmups: forwards of one replica ahead of its backwards, by stage; None: the plain ones.
        most_ahead: microbatches of all replicas that a forward may be ahead of the backwards.
    """
    if warmups is None:
        warmups = [plain_warmup(counts, stage) for stage in range(len(counts))]
    # Batches in flight at once.
    deepest = math.ceil(max(warmup * count for warmup, count in zip(warmups, counts, strict=True)) / num_microbatches)
    if num_batches is None:
        num_batches = 2 * deepest + 6
    if at_least(1).read(num_batches) is None:
        raise ValueError(f"num_batches={num_batches!r}: expected a whole number, at least 1")
    placement: list[tuple[int, ...]] = []
    programs = []
    # In microbatches of all replicas. It never grows along the stages, or a stage would wait for a forward that the
    # stage before runs after a backward that waits for this stage. Under 2BW it is at most one batch, see `two_bw`.
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

    def update_after(index: int) -> None:
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
        update_after(index)
    if not own:
        update_after(0)
    return tuple(program)


Warmup = str | Sequence[int]


def pipedream(
    *,
    num_ranks: int,
    num_microbatches: int,
    update_every: int = 1,
    vertical_sync: bool = False,
    replicas: Sequence[int] | None = None,
    num_batches: int | None = None,
) -> Schedule:
    """1F1B without a flush, with weight stashing (Narayanan et al., SOSP 2019).

        rank 0 | F0 F1 F2 .  .  B0 U F3 B1 U F4 B2 U ...      P=3, unit time: F3 uses version 1, F4 version 2
        rank 1 | .  F0 F1 .  B0 U F2 B1 U F3 B2 U ...         the same F3 uses version 2 here
        rank 2 | .  .  F0 B0 U F1 B1 U F2 B2 U ...            and version 3 here

    A forward uses the newest weights of its stage, and its backward the same: a rank keeps one version more than its
    warm-up is deep. With vertical sync all stages use the version that the input stage used; then every rank keeps P.

    Arguments:
        update_every: microbatches between two updates; it divides M. Replicas sum their gradients at each update, so it
            is a multiple of the replica counts (by default their least common multiple), and they wait for each other
            even if sums take no time.
        vertical_sync: see above.
        replicas: of each stage, `sum(replicas) == num_ranks`; one each by default.
        num_batches: in the program; by default enough to show the steady state.

    Raises ValueError for options that do not fit.
    """
    counts = replica_counts(replicas, num_ranks)
    if math.lcm(*counts) > 1 and update_every == 1:
        update_every = math.lcm(*counts)
    check_update_every(update_every, num_microbatches, counts)
    if not isinstance(vertical_sync, bool):
        raise ValueError(f"vertical_sync={vertical_sync!r}: expected True or False")
    return build_stream(
        name="pipedream",
        rule="vertical-sync" if vertical_sync else "stashing",
        counts=counts,
        num_microbatches=num_microbatches,
        update_every=update_every,
        num_batches=num_batches,
    )


def two_bw(
    *,
    num_ranks: int,
    num_microbatches: int,
    warmup: Warmup = "plain",
    replicas: Sequence[int] | None = None,
    num_batches: int | None = None,
) -> Schedule:
    """PipeDream-2BW: double-buffered weights (Narayanan et al., ICML 2021).

        rank 0 | F0 F1 .  B0 F2 B1 U F3 B2 F4 B3 U F5 ...     P=2, M=2: F2 and F3 (batch 1) use version 0,
        rank 1 | .  F0 B0 F1 B1 U F2 B2 F3 B3 U F4 B4 ...     F4 and F5 (batch 2) version 1

    All microbatches of batch t use version max(t - 1, 0) on every stage, in forward and backward, and one update per
    batch makes version t + 1 from version t: W(t+1) = W(t) - update(gradient at W(t-1)). Two versions suffice.

    M must be at least the warm-up of rank 0: batch t + 2 begins on version t + 1, which needs the last backward of
    batch t; rank 0 runs that backward `warm-up` forwards later, and those must belong to batch t + 1.

    Arguments:
        warmup: forwards ahead of the backwards, by stage. "plain": P - 1 - s, as 1F1B, without a bubble when messages
            take no time. "eager": twice that (where M allows), which hides messages of up to half of F + B each way,
            for as many more activations. Or S numbers.
        replicas, num_batches: as in `pipedream`; M need not be a multiple of the replicas.

    Raises ValueError for options that do not fit, and for M below the warm-up.
    """
    counts = replica_counts(replicas, num_ranks)
    return build_stream(
        name="2bw",
        rule="2bw",
        counts=counts,
        num_microbatches=num_microbatches,
        warmups=_warmups(warmup, counts, num_microbatches),
        most_ahead=num_microbatches,
        update_every=num_microbatches,
        num_batches=num_batches,
    )


def _warmups(warmup: Warmup, counts: Sequence[int], num_microbatches: int) -> list[int]:
    num_stages = len(counts)
    plain = [plain_warmup(counts, stage) for stage in range(num_stages)]
    if not isinstance(warmup, list | tuple):
        if warmup not in ("plain", "eager"):
            raise ValueError(f"warmup={warmup!r}: expected 'plain', 'eager', or one number per stage")
        # Replicas start with fewer where they have fewer; a stage of one rank has all M.
        least = max([depth for depth, count in zip(plain, counts, strict=True) if count == 1] + [max(counts)])
        if num_microbatches < least:
            raise ValueError(
                f"num_microbatches={num_microbatches} under 2bw: expected at least {least}, the warm-up of its first "
                f"stage (and one for each replica), since batch t + 2 begins on the weights that the last backward of "
                f"batch t makes; give more microbatches, or fewer ranks"
            )
        if warmup == "plain":
            return plain
        # Each stage at least one deeper than the next: else it would wait for the next one's backward each time.
        return [min(2 * depth, num_microbatches - stage) for stage, depth in enumerate(plain)]
    if num_microbatches < max(counts):
        raise ValueError(
            f"num_microbatches={num_microbatches} with replicas={tuple(counts)}: expected at least {max(counts)}, one "
            f"for each replica of a stage"
        )
    depths = list(warmup)
    if len(depths) != num_stages or None in map(at_least(0).read, depths) or max(depths) > num_microbatches:
        raise ValueError(
            f"warmup={depths} for {num_stages} stages: expected {num_stages} whole numbers from 0 to "
            f"num_microbatches={num_microbatches}"
        )
    if depths != sorted(depths, reverse=True):
        raise ValueError(f"warmup={depths}: expected no stage deeper than the one before it, whose outputs it takes")
    return depths


def paci(
    *,
    num_ranks: int,
    num_microbatches: int,
    update_every: int | None = None,
    replicas: Sequence[int] | None = None,
    num_batches: int | None = None,
) -> Schedule:
    """1F1B without a flush or a stash, where few updates bound the drift of the weights (Elam et al., 2026).

        rank 0 | F0 F1 F2 .  .  B0 F3 B1 U F4 B2 ...      P=3, M=2: one update between F2 and B2, none between F1 and B1
        rank 1 | .  F0 F1 .  B0 F2 B1 U F3 B2 F4 ...      one between F2 and B2, too
        rank 2 | .  .  F0 B0 F1 B1 U F2 B2 F3 B3 ...      never one

    A stage has one set of weights, updated in place after the backward of each `update_every`-th (K-th) microbatch.
    Forward and backward read the current weights: a microbatch with an update between its forward and backward uses the
    activations of its forward, and the new weights.

    Of n microbatches in flight at a stage, n - 1 backwards run between the forward and the backward of the last, so at
    most ceil((n - 1)/K) updates: with K >= P - 1 none or one. The checker proves it.

    Arguments:
        update_every: microbatches between two updates, K; it divides M, and is M by default. A multiple of the replica
            counts, since replicas sum their gradients at each update.
        replicas: of each stage, `sum(replicas) == num_ranks`; one each by default.
        num_batches: in the program; by default enough to show the steady state.

    Raises ValueError for options that do not fit.
    """
    counts = replica_counts(replicas, num_ranks)
    every = num_microbatches if update_every is None else update_every
    check_update_every(every, num_microbatches, counts)
    return build_stream(
        name="paci",
        rule="one-version",
        counts=counts,
        num_microbatches=num_microbatches,
        update_every=every,
        num_batches=num_batches,
    )


PIPEDREAM, TWO_BW, PACI = (
    Family(name=name, build=build, aliases=aliases, weight_rules=rules, full_after=1)
    for name, build, aliases, rules in (
        ("pipedream", pipedream, (), ("stashing", "vertical-sync")),
        ("2bw", two_bw, ("pipedream-2bw",), ("2bw",)),
        ("paci", paci, (), ("one-version",)),
    )
)
