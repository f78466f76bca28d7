"""`synthesize`: the best schedule that can be found for given costs and memory in a given time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral

from ..ir import Schedule
from ..kinds import above_zero, at_least, option
from ..timing.costs import Costs
from ..timing.links import Links
from .incumbent import Budget, Progress
from .portfolio import Synthesis, solve
from .problem import Objective
from .request import Request


def synthesize(
    *,
    num_ranks: int | None = None,
    num_microbatches: int,
    costs: Costs,
    memory_limit: float | Sequence[float] | None = None,
    placement: str | Sequence[Sequence[int]] = "plain",
    num_chunks: int | None = None,
    objective: Objective = "makespan",
    activations: float | Sequence[float | Sequence[float]] = 1.0,
    kept_share: float | Sequence[float] = 1.0,
    links: Links | None = None,
    start: Schedule | None = None,
    seconds: float = 10.0,
    evaluations: int | None = None,
    seed: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
) -> Synthesis:
    """Search for the schedule of one flush batch that takes least.

    It begins with every named family that stands on this placement and fits the memory, so that none of them is better,
    and ends when its lower bound is met or its budget is spent. The same seed and `evaluations` lead to the same
    schedule on every machine, if `seconds` does not end it first.

    Arguments:
        num_ranks: P; may be left out where `placement` lists the stages of each rank.
        num_microbatches: M.
        costs: of one stage action each [s].
        memory_limit: most that a rank may hold, one number or one a rank, in the unit of `activations`; None: no limit.
        placement: "plain" (stage r on rank r), "cyclic" (`num_chunks` stages a rank, stage s on rank s mod P),
            "v" (two stages a rank, down the ranks and back), the stages of each rank, or "any": the best of the first
            three. Then costs and activations are of the model in P equal parts, one a rank, which stand as they are
            under "plain" and are divided into V equal stages each under the others, messages apart; or, where they have
            more numbers, of so many pieces, neighbours of which make a stage. A placement of whose stages these make no
            equal number is left out. The limit keeps their unit: one activation of a P-th of the model, or bytes.
        num_chunks: V, for "cyclic" (2 by default).
        objective: "makespan", when the optimizer step synchronises all ranks; "span", when steps may overlap.
        activations: what a forward of a stage takes until the end of its W (or B), one number or one a stage: 1, so
            that limits count stage activations, or bytes. A stage may have a row in place of its number, one number a
            microbatch.
        kept_share: part of that which stays between I and W (0 to 1), one number or one a stage.
        links: ways between ranks. The search takes each message for alone on its way; where messages have sizes, or
            sums share the ways, its best orders and all named ones are then compared as they queue.
        start: a schedule to begin with, besides the named ones.
        seconds: at most so long it searches (wall clock).
        evaluations: at most so many orders it tries, each that differs by one action included, and as many again
            where less is kept, so that this never makes it worse; None: as many as there is time for.
        seed: of its random choices.
        on_progress: is told each improvement.

    Raises ValueError for whatever does not fit, MemoryLimitError (a ValueError) for a limit that no schedule can meet,
    with the smallest that can.

    >>> found = synthesize(num_ranks=4, num_microbatches=8, costs=Costs(), memory_limit=4)
    >>> found.value, found.is_optimal, found.timeline.peak_activations
    (27.0, True, (4, 4, 4, 4))
    """
    option("seconds", seconds, above_zero("a time budget above 0"))
    if evaluations is not None:
        option("evaluations", evaluations, at_least(1, "a whole number above 0, or None"))
    if not isinstance(seed, Integral):  # Random(None) would be another search each time
        raise ValueError(f"seed={seed!r}: expected a whole number")
    if not isinstance(costs, Costs):
        raise ValueError(f"costs={costs!r}: expected Costs(forward=..., input_grad=..., weight_grad=...)")
    request = Request(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        costs=costs,
        memory_limit=memory_limit,
        placement=placement,
        num_chunks=num_chunks,
        objective=objective,
        activations=activations,
        kept_share=kept_share,
        links=links,
    )
    budget = Budget(seconds=seconds, evaluations=evaluations, seed=int(seed))
    return solve(request, budget, start=start, on_progress=on_progress)
