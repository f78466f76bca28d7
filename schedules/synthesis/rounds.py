"""The searches behind one `synthesize`: each placement by itself, then with what else may make its orders fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from ..ir import Schedule
from ..timing.costs import Costs
from ..timing.links import Links
from ..timing.simulate import simulate
from .asked import Asked
from .contest import Contest
from .evaluate import Evaluator, Orders
from .judge import Judge, Judged
from .problem import Problem
from .recomputed import recomputed
from .relaxed import relaxed
from .search import Search
from .starts import fits_memory, made_orders, named_orders


class Rounds:
    """Searches of one contest.

    Arguments:
        contest: that they are for.
        seed: of random choices.
    """

    def __init__(self, contest: Contest[Judged], *, seed: int) -> None:
        self.contest, self.seed = contest, seed
        self.least = math.inf  # that the fullest rank held in an order that did not fit

    def plain(self, asked: Asked, start: Schedule | None, *, left: int) -> float | None:
        """Search for orders that fit as they are; returns the best value [s], None where none of them can win.

        Arguments:
            start: one to begin with.
            left: searches that have to share what there is, this one among them.
        """
        queues = _queues(asked.links, asked.problem)
        search = self._search(asked.problem, asked, left, bound=asked.bound_whole, tells=not queues)
        starts = []
        if start is not None:
            starts.append(search.evaluator.orders(start))
            peaks = search.evaluator.peaks(starts[0])
            if not fits_memory(asked.problem, peaks):
                raise ValueError(f"start={start!r} holds up to {max(peaks):g} on a rank: expected at most memory_limit")
        orders = search.run(starts)
        self.contest.evaluations += search.evaluations
        source = search.history[-1].source
        if not queues:
            schedule = search.evaluator.schedule(orders)
            timeline = simulate(schedule, asked.costs, asked.links)
            found = Judged(asked=asked, costs=asked.costs, schedule=schedule, timeline=timeline, num_recomputed=0)
            self.contest.offer(search.value, found, source)
            return search.value
        judge = Judge(asked, self.contest)
        for each in starts:
            judge.offer(each, "given")
        for each in (orders, *search.elites):
            judge.offer(each, source)
        for name, each in _named(search.evaluator, asked.costs):
            judge.offer(each, name)
        return judge.value if judge.value < math.inf else None

    def beyond(
        self,
        problems: Sequence[Asked],
        *,
        offloads: bool,
        recompute: float | Sequence[float] | None,
    ) -> None:
        """Search each problem once more with activations that leave, and with stages that recompute."""
        kinds = ["moves"] * offloads + ["recompute"] * (recompute is not None)
        tasks = [(each, kind) for each in problems for kind in kinds]
        for at, (each, kind) in enumerate(tasks):
            if self.contest.promises_nothing(each.bound):
                continue
            if kind == "moves":
                self.moved(each, left=len(tasks) - at)
            elif recompute is not None:
                self.recomputed(each, _shares(recompute, each.problem.num_stages), left=len(tasks) - at)

    def moved(self, asked: Asked, *, left: int) -> None:
        """Search for orders that fit once some activations leave their rank."""
        judge = Judge(asked, self.contest, offloads=True)
        for name, each in _named(Evaluator(_without_limit(asked.problem)), asked.costs):
            judge.offer(each, f"{name}, moves")
        self._each(asked, [(problem, judge) for problem in relaxed(asked.problem)], "moves", left)

    def recomputed(self, asked: Asked, shares: Sequence[float], *, left: int) -> None:
        """Search for orders that fit where some stages recompute."""
        variants = [
            (each.problem, Judge(asked, self.contest, recomputed=each))
            for each in recomputed(asked.problem, asked.costs, shares)
        ]
        self._each(asked, variants, "recompute", left)

    def _each(self, asked: Asked, variants: Sequence[tuple[Problem, Judge]], source: str, left: int) -> None:
        """Search each of some problems beside the one that was asked, and judge what is best there."""
        for at, (problem, judge) in enumerate(variants):
            if not self.contest.is_over:
                search = self._search(problem, asked, left * (len(variants) - at), bound=asked.bound, costs=judge.costs)
                orders = search.run()
                self.contest.evaluations += search.evaluations
                for each in (orders, *search.elites):
                    judge.offer(each, source)
            self.least = min(self.least, judge.least)

    def _search(
        self,
        problem: Problem,
        asked: Asked,
        left: int,
        *,
        bound: float,
        costs: Costs | None = None,
        tells: bool = False,
    ) -> Search:
        seconds, evaluations = self.contest.share(left)
        contest = self.contest
        return Search(
            problem,
            bound=bound,
            costs=asked.costs if costs is None else costs,
            seed=self.seed,
            seconds=seconds,
            evaluations=evaluations,
            on_progress=(lambda each: contest.tell(each.value, each.source, spent=each.evaluations)) if tells else None,
        )


def _shares(recompute: float | Sequence[float], num_stages: int) -> tuple[float, ...]:
    shares = (recompute,) * num_stages if isinstance(recompute, int | float) else tuple(recompute)
    if len(shares) != num_stages or not all(isinstance(each, int | float) and 0 <= each <= 1 for each in shares):
        raise ValueError(f"recompute={recompute!r:.60}: expected a part from 0 to 1, or {num_stages}, one a stage")
    return shares


def _named(evaluator: Evaluator, costs: Costs) -> Iterator[tuple[str, Orders]]:
    yield from named_orders(evaluator)
    yield from made_orders(evaluator, costs)


def _without_limit(problem: Problem) -> Problem:
    return replace(problem, memory_limit=None)


def _queues(links: Links | None, problem: Problem) -> bool:
    """Whether links may take longer than each message alone: these, or sums of gradients, may share them."""
    if links is None:
        return False
    if links.sums:
        return True
    ranks = problem.rank_of
    ways = [links.way(*pair) for a, b in pairwise(ranks) if a != b for pair in ((a, b), (b, a))]
    return any(way.seconds_per_byte > 0 for way in ways)
