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
from .asked import Asked, asked
from .contest import Contest
from .problem import Objective, Problem
from .search import Progress, Search, Stopped
from .starts import fits_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A placement that was looked at.

    Arguments:
        placement: "plain", "cyclic", "v", or "given".
        lower_bound: what no schedule on it can beat [s].
        value: of the best schedule that was found on it [s]; None: its bound showed that it cannot win.
    """

    placement: str
    lower_bound: float
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthesis:
    """A schedule that `synthesize` found.

    Arguments:
        problem: what was to be put in order, on the placement of the schedule.
        costs: of its stages [s]: those that were given, or what follows from them for the stages of the placement.
        schedule: the best order, by the name "auto".
        timeline: of that schedule, simulated.
        value: of the objective: the makespan or the span [s].
        lower_bound: what no schedule of the problem can beat [s].
        stopped: why the search ended: "optimal", when the bound was met; "seconds" or "evaluations", when these were
            spent, or "tried", when all was that is worth a try: then it is the best so far.
        history: each improvement, the first to the last.
        seconds: that the search took.
        evaluations: orders that it tried.
        placements: that were looked at, the one with the least bound first.
    """

    problem: Problem
    costs: Costs
    schedule: Schedule
    timeline: Timeline
    value: float
    lower_bound: float
    stopped: Stopped
    history: tuple[Progress, ...]
    seconds: float
    evaluations: int
    placements: tuple[Tried, ...]

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
            "tried": "best of all that was tried",
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
    problems = asked(
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
    if start is not None:
        problems.sort(key=lambda each: each.problem.placement != start.placement)
    bound = min(each.bound for each in problems)
    contest: Contest[_Found] = Contest(bound=bound, seconds=seconds, evaluations=evaluations, on_progress=on_progress)
    tried = []
    for at, each in enumerate(problems):
        value = None
        if at == 0 or not (contest.is_over or contest.promises_nothing(each.bound)):
            value = _search(each, contest, None if at else start, seed=seed, left=len(problems) - at)
        tried.append(Tried(placement=each.placement, lower_bound=each.bound, value=value))
    found = contest.answer
    assert found is not None
    return Synthesis(
        problem=found.asked.problem,
        costs=found.asked.costs,
        schedule=found.schedule,
        timeline=simulate(found.schedule, found.asked.costs, found.asked.links),
        value=contest.value,
        lower_bound=bound,
        stopped=contest.stopped,
        history=tuple(contest.history),
        seconds=contest.elapsed,
        evaluations=contest.evaluations,
        placements=tuple(sorted(tried, key=lambda each: each.lower_bound)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    asked: Asked
    schedule: Schedule


def _search(asked: Asked, contest: Contest[_Found], start: Schedule | None, *, seed: int, left: int) -> float:
    """The best value of one problem [s], of so many that have still to be searched."""
    seconds, evaluations = contest.share(left)
    search = Search(
        asked.problem,
        bound=asked.bound,
        costs=asked.costs,
        seed=seed,
        seconds=seconds,
        evaluations=evaluations,
        on_progress=lambda each: contest.tell(each.value, each.source, spent=each.evaluations),
    )
    starts = []
    if start is not None:
        starts.append(search.evaluator.orders(start))
        peaks = search.evaluator.peaks(starts[0])
        if not fits_memory(asked.problem, peaks):
            raise ValueError(f"start={start!r} holds up to {max(peaks):g} on a rank: expected at most memory_limit")
    schedule = search.evaluator.schedule(search.run(starts))
    contest.evaluations += search.evaluations
    contest.offer(search.value, _Found(asked=asked, schedule=schedule), search.history[-1].source)
    return search.value
