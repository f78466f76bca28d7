"""`synthesize`: the best schedule that can be found for given costs and memory in a given time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..ir import Schedule
from ..timing.costs import Costs
from ..timing.links import Links
from ..timing.simulate import simulate
from ..timing.timeline import Timeline
from ..wording import duration
from .bounds import least_seconds
from .problem import Objective, Problem, pose
from .search import Progress, Search, Stopped
from .starts import fits_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthesis:
    """A schedule that `synthesize` found.

    Arguments:
        problem: what was to be put in order.
        schedule: the best order, by the name "auto".
        timeline: of that schedule, simulated.
        value: of the objective: the makespan or the span [s].
        lower_bound: what no schedule of the problem can beat [s].
        stopped: why the search ended: "optimal", when the bound was met; "seconds" or "evaluations", when these were
            spent: then it is the best so far.
        history: each improvement, the first to the last.
        seconds: that the search took.
        evaluations: orders that it tried.
    """

    problem: Problem
    schedule: Schedule
    timeline: Timeline
    value: float
    lower_bound: float
    stopped: Stopped
    history: tuple[Progress, ...]
    seconds: float
    evaluations: int

    @property
    def gap(self) -> float:
        """(value - lower bound) / lower bound: the best possible value is at most this part below.

        At most as many points of the bubble could be gained.
        """
        return max(0.0, self.value - self.lower_bound) / self.lower_bound

    @property
    def is_optimal(self) -> bool:
        """Whether the bound was met, so that nothing better exists."""
        return self.stopped == "optimal"

    @property
    def source(self) -> str:
        """The finder: the name of a family, "given", "policy", "weights", "slides"."""
        return self.history[-1].source

    def __repr__(self) -> str:
        return f"<Synthesis {self.summary()}>"

    def summary(self) -> str:
        """One line: value, gap, and why it ended."""
        why = {
            "optimal": "optimal: the lower bound is met",
            "seconds": "best so far, the time was over",
            "evaluations": "best so far, the evaluations were spent",
        }[self.stopped]
        return (
            f"{self.problem.objective} {duration(self.value)}, at most {self.gap:.2%} above the best possible; {why} "
            f"({self.evaluations:,} orders in {duration(self.seconds)})"
        )


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
            "v" (two stages a rank, down the ranks and back), or the stages of each rank.
        num_chunks: V, for "cyclic" (2 by default).
        objective: "makespan", when the optimizer step synchronises all ranks; "span", when steps may overlap.
        activations: what a forward of a stage takes until the end of its W (or B), one number or one a stage: 1, so
            that limits count stage activations, or bytes. A stage may have a row in place of its number, one number a
            microbatch.
        kept_share: part of that which stays between I and W (0 to 1), one number or one a stage.
        links: ways between ranks; messages that queue are in the timeline, but the search does not see them.
        start: a schedule to begin with, besides the named ones.
        seconds: at most so long it searches (wall clock).
        evaluations: at most so many orders it tries; None: as many as there is time for.
        seed: of its random choices.
        on_progress: is told each improvement.

    Raises ValueError for whatever does not fit, MemoryLimitError (a ValueError) for a limit that no schedule can meet,
    with the smallest that can.

    >>> found = synthesize(num_ranks=4, num_microbatches=8, costs=Costs(), memory_limit=4)
    >>> found.value, found.is_optimal, found.timeline.peak_activations
    (27.0, True, (4, 4, 4, 4))
    """
    if not (isinstance(seconds, int | float) and seconds > 0):
        raise ValueError(f"seconds={seconds!r}: expected a time budget above 0")
    if evaluations is not None and not (isinstance(evaluations, int) and evaluations > 0):
        raise ValueError(f"evaluations={evaluations!r}: expected a whole number above 0, or None")
    if not isinstance(seed, int):  # Random(None) would be another search each time
        raise ValueError(f"seed={seed!r}: expected a whole number")
    if not isinstance(costs, Costs):
        raise ValueError(f"costs={costs!r}: expected Costs(forward=..., input_grad=..., weight_grad=...)")
    problem = pose(
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
    bound = least_seconds(problem)
    search = Search(
        problem,
        bound=bound,
        costs=costs,
        seed=seed,
        seconds=seconds,
        evaluations=evaluations,
        on_progress=on_progress,
    )
    starts = []
    if start is not None:
        starts.append(search.evaluator.orders(start))
        peaks = search.evaluator.peaks(starts[0])
        if not fits_memory(problem, peaks):
            raise ValueError(f"start={start!r} holds up to {max(peaks):g} on a rank: expected at most memory_limit")
    orders = search.run(starts)
    schedule = search.evaluator.schedule(orders)
    return Synthesis(
        problem=problem,
        schedule=schedule,
        timeline=simulate(schedule, costs, links),
        value=search.value,
        lower_bound=bound,
        stopped=search.stopped,
        history=tuple(search.history),
        seconds=search.elapsed,
        evaluations=search.evaluations,
    )
