"""The question put to `synthesize`: one problem, or one for each placement that it may choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..placement import PLACEMENTS, place
from ..timing.costs import Costs
from ..timing.links import Links
from .bounds import least_seconds
from .pieces import Pieces, pieces_of
from .problem import MemoryLimitError, Objective, Problem, fits, pose

ANY = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A problem, with what its schedules are simulated with.

    Arguments:
        placement: its name, or "given".
        costs, links: of the stages of this placement.
        bound: what none of its schedules can beat [s]; where activations may leave, whatever the memory.
        bound_whole: the same of those in which nothing leaves its rank; infinite where none meets the limit.
    """

    placement: str
    problem: Problem
    costs: Costs
    links: Links | None
    bound: float
    bound_whole: float


def asked(
    *,
    num_ranks: int | None,
    num_microbatches: int,
    costs: Costs,
    memory_limit: float | Sequence[float] | None,
    placement: str | Sequence[Sequence[int]],
    num_chunks: int | None,
    objective: Objective,
    activations: float | Sequence[float | Sequence[float]],
    kept_share: float | Sequence[float],
    links: Links | None,
    may_leave: bool = False,
) -> list[Asked]:
    """The problems behind the arguments of `synthesize`, in the order of PLACEMENTS.

    Arguments:
        may_leave: whether activations may leave their rank, so that a limit binds less.

    Raises ValueError for whatever does not fit, MemoryLimitError where none of them can meet the limit.
    """

    def posed(name: str, made_of: Pieces | None, chunks: int | None) -> Asked:
        own_costs = costs if made_of is None else made_of.costs
        problem = pose(
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            costs=own_costs,
            memory_limit=memory_limit,
            placement=placement if made_of is None else name,
            num_chunks=chunks,
            objective=objective,
            activations=activations if made_of is None else made_of.activations,
            kept_share=kept_share if made_of is None else made_of.kept_share,
            links=links,
            needs_room=not may_leave,
        )
        if may_leave:
            _check_one_stage(problem)
        limits = problem.memory_limit or (math.inf,) * problem.num_ranks
        whole = least_seconds(problem) if all(map(fits, problem.smallest_memory, limits)) else math.inf
        bound = least_seconds(replace(problem, memory_limit=None)) if may_leave else whole
        return Asked(placement=name, problem=problem, costs=own_costs, links=links, bound=bound, bound_whole=whole)

    if placement != ANY:
        return [posed(placement if isinstance(placement, str) else "given", None, num_chunks)]
    if not isinstance(num_ranks, int) or isinstance(num_ranks, bool) or num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks!r}: expected a whole number, at least 1")
    if links is not None:
        _check_links(links)
    pieces = pieces_of(costs, activations=activations, kept_share=kept_share, num_ranks=num_ranks)
    found, refused = [], []
    for name in PLACEMENTS:
        chunks = num_chunks if name == "cyclic" else None
        stages = pieces.stages(sum(map(len, place(name, num_ranks=num_ranks, num_chunks=chunks))))
        if stages is None:
            continue
        try:
            found.append(posed(name, stages, chunks))
        except MemoryLimitError as error:
            refused.append(error)
    if not found:
        if refused:
            raise refused[0]
        raise ValueError(
            f"numbers of {len(pieces.activations)} pieces for {num_ranks} ranks: expected {num_ranks}, "
            f"or a multiple of that"
        )
    return found


def _check_one_stage(problem: Problem) -> None:
    """Raises MemoryLimitError where a rank cannot hold what a backward needs."""
    limits = problem.memory_limit or (math.inf,) * problem.num_ranks
    for rank, (limit, own) in enumerate(zip(limits, problem.placement, strict=True)):
        if not fits(needed := max(max(problem.held[s]) for s in own), limit):
            least = max(map(max, problem.held))
            raise MemoryLimitError(
                f"memory_limit={limit:g} on rank {rank}: no schedule can meet it, since one stage's activations of one "
                f"microbatch take {needed:g} there; expected at least {least:g}"
            )


def _check_links(links: Links) -> None:
    """Raises ValueError for what is one number a stage, whatever the stages."""
    for name in ("activation_bytes", "gradient_bytes"):
        if isinstance(getattr(links, name), Sequence):
            raise ValueError(f"{name} with several numbers beside placement='any': expected one for all messages")
    if links.sums:
        raise ValueError("links with sums beside placement='any': expected a placement, whose stages they are of")
