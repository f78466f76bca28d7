"""Gain of an order of its own for each batch of unequal microbatches, over the best order that is the same for all.

Lengths of microbatches are drawn from a seed, lognormal with a mean of 1 and the case's `sigma`; F, I and W take as
many seconds as a microbatch is long, and its activation as many bytes. A message takes 0.05 s. No rank may hold more
than P of the longest microbatches of the batch: what 1F1B holds at the most.

Fixed orders to beat: each named schedule of one stage a rank that always fits the memory, and what `synthesize` finds
for equal microbatches in the memory of P of them; with microbatches as they come, the longest first, and the shortest
first. The best of them is the one whose batches take least together, seen from behind.

    gain                   seconds of a batch under the best fixed order over those under its own, less 1: the median
                           and the quartiles
    gain, as they come     the same over the best fixed order of microbatches as they come, unsorted
    above the bound        how far a batch's own order is from what no order can beat, at the most: the median
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random
from statistics import median, quantiles

from ...schedules.families.registry import build
from ...schedules.search.batches import BatchOrders, by_size, relabelled
from ...schedules.search.bounds import least_seconds
from ...schedules.search.evaluate import OrderEvaluator, Orders
from ...schedules.search.problem import Problem
from ...schedules.search.request import Request
from ...schedules.search.search import named_orders
from ...schedules.search.synthesize import synthesize
from ...schedules.timing.costs import Costs
from ..jobs.case import Case
from ..jobs.figure import Figure, How

_BATCHES = 24
_ORDERS = 400  # for the fixed order that is synthesised
_PATIENCE = 300.0  # [s] of that: only against hangs
_LATENCY = 0.05
_WAYS = ("as they come", "longest first", "shortest first")


def simulated(case: Case, repetitions: int) -> Iterator[Figure]:
    """Cases have `ranks`, `microbatches` and `sigma`."""
    del repetitions
    ranks, count, sigma = case.count("ranks"), case.count("microbatches"), case.number("sigma")
    random = Random(f"{ranks} {count} {sigma}")
    problems = [problem_of(lengths(count, sigma, random), ranks=ranks) for _ in range(_BATCHES)]
    fixed = fixed_values(problems)
    name, best = min(fixed.items(), key=lambda item: math.fsum(item[1]))
    orders = BatchOrders(build("1f1b", num_ranks=ranks, num_microbatches=count))
    own = [orders.find(problem).value for problem in problems]
    gains = [there / here - 1 for there, here in zip(best, own, strict=True)]
    low, _, high = quantiles(gains, n=4, method="inclusive")
    for what, value in (("gain", median(gains)), ("gain, first quartile", low), ("gain, third quartile", high)):
        yield Figure(case=case, name=what, value=value, unit="fraction", how=How.SIMULATED, note=f"over {name}")
    usual, seconds = min(
        ((name, each) for name, each in fixed.items() if name.endswith(_WAYS[0])), key=lambda item: math.fsum(item[1])
    )
    unsorted = median(there / here - 1 for there, here in zip(seconds, own, strict=True))
    name = "gain, as they come"
    yield Figure(case=case, name=name, value=unsorted, unit="fraction", how=How.SIMULATED, note=f"over {usual}")
    gaps = [here / least_seconds(problem) - 1 for here, problem in zip(own, problems, strict=True)]
    yield Figure(case=case, name="above the bound", value=median(gaps), unit="fraction", how=How.SIMULATED)


def lengths(count: int, sigma: float, random: Random) -> list[float]:
    """Lengths of one batch's microbatches, 1 on average."""
    return [random.lognormvariate(-sigma * sigma / 2, sigma) for _ in range(count)]


def problem_of(sizes: Sequence[float], *, ranks: int) -> Problem:
    """One batch to put in order."""
    return Request(
        num_ranks=ranks,
        num_microbatches=len(sizes),
        costs=Costs(input_grad=1.0, weight_grad=1.0, latency=_LATENCY, index_factors=sizes),
        activations=[list(sizes)] * ranks,
        memory_limit=ranks * max(sizes),
    ).problem()


def fixed_values(problems: Sequence[Problem]) -> dict[str, list[float]]:
    """By name of a fixed order, the seconds of each batch; only those that fit the memory of all of them."""
    ranks, count = problems[0].num_ranks, problems[0].num_microbatches
    equal = OrderEvaluator(problem_of([1.0] * count, ranks=ranks))
    found = synthesize(
        num_ranks=ranks,
        num_microbatches=count,
        costs=Costs(input_grad=1.0, weight_grad=1.0, latency=_LATENCY),
        memory_limit=ranks,
        seconds=_PATIENCE,
        evaluations=_ORDERS,
    )
    known: dict[str, Orders] = {}
    for name, orders in named_orders(equal):  # one with whole backwards comes again with halves
        known[f"{name} in halves" if name in known else name] = orders
    known["synthesised"] = equal.orders(found.schedule)
    values: dict[str, list[float]] = {f"{name}, {way}": [] for name in known for way in _WAYS}
    for problem in problems:
        evaluator = OrderEvaluator(problem)
        longest = by_size(problem)
        for way, sequence in zip(_WAYS, (range(count), longest, longest[::-1]), strict=True):
            for name, orders in known.items():
                here = relabelled(evaluator, orders, dict(enumerate(sequence)))
                if evaluator.fits(here):
                    values[f"{name}, {way}"].append(evaluator.value(here))
    return {name: each for name, each in values.items() if len(each) == len(problems)}
