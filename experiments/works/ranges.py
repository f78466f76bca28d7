"""How many steps lie within the range that was predicted for 90% of them.

Each repetition runs two halves of as many steps in a row. The first tells costs, and how durations vary around them; of
these the range is simulated, and the steps of the second are counted that lie within it. A machine that changes its
pace between the two (PACE) is beyond any range that the first could tell; the steps of the first half themselves, of
whose lengths the range knows nothing but the durations of their actions, say how good it is where the pace is the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

from ...schedules import simulate, simulate_spread
from ..jobs.case import Case
from ..jobs.figure import Figure, How
from .equal_stages import schedule_of

if TYPE_CHECKING:
    from ...pipe import PipelineModule, StepResult

WITHIN = "share of steps within the 90% range"
BEFORE = "share of the steps that told it"
PACE = "median step, second half / first"
OF_MEDIANS = "median step, measured / simulated of medians"
OF_SAMPLES = "median step, measured / predicted"
WIDTH = "90% range / median"
_WARM_UP = 3  # steps


def measured(case: Case, repetitions: int) -> Iterator[Figure]:
    """The example GPT with AdamW, on all of the case's ranks: `layers`, `width`, `length`, `batch`."""
    from ..bench.sides import OurSide
    from ..bench.whole_models import gpt_problem
    from ..training.gpt import GPTConfig

    size = GPTConfig(layers=case.count("layers"), width=case.count("width"), length=case.count("length"))
    problem = gpt_problem(size, batch=case.count("batch"))
    side = OurSide.of_model(problem, schedule=schedule_of(case))

    def step() -> StepResult:
        side.step()
        assert side.result is not None
        return side.result

    try:
        yield from figures_of(case, side.pipe, step, How.MEASURED, repetitions=repetitions)
    finally:
        side.pipe.close()


def emulated(case: Case, repetitions: int) -> Iterator[Figure]:
    """Stages that sleep, on all of the case's ranks."""
    from .sleeping import SleepingPipe

    sleeping = SleepingPipe(schedule_of(case))
    try:
        yield from figures_of(case, sleeping.pipe, sleeping.step, How.EMULATED, repetitions=repetitions)
    finally:
        sleeping.close()


def figures_of(
    case: Case, pipe: PipelineModule, step: Callable[[], StepResult], how: How, *, repetitions: int
) -> Iterator[Figure]:
    """Figures of a pipeline whose batches `step` runs; the case says how many `steps` a half has."""
    half = case.count("steps")

    def seconds(number: int) -> list[float]:
        return [step().timeline().batch_seconds for _ in range(number)]

    seconds(_WARM_UP)
    for repetition in range(repetitions):
        pipe.forget_measurements()
        before = seconds(half)
        costs, spread = pipe.measured_costs(), pipe.measured_spread()
        if spread is None:
            raise ValueError(f"case {case}: steps: expected at least 10, of which a spread is known")
        taken = simulate_spread(pipe.schedule, costs, spread, seed=repetition)
        found = seconds(half)
        low, high = taken.range()
        for name, value, unit in (
            (WITHIN, taken.holds(found), "fraction"),
            (BEFORE, taken.holds(before), "fraction"),
            (PACE, median(found) / median(before), "ratio"),
            (OF_SAMPLES, median(found) / taken.median, "ratio"),
            (OF_MEDIANS, median(found) / simulate(pipe.schedule, costs).batch_seconds, "ratio"),
            (WIDTH, (high - low) / taken.median, "ratio"),
        ):
            yield Figure(case=case, name=name, value=value, unit=unit, how=how, repetition=repetition)


def findings(figures: Sequence[Figure]) -> Iterator[str]:
    """Sentences for the report."""
    shares: dict[str, list[tuple[float, float]]] = defaultdict(list)
    paces = {(f.case, f.how, f.repetition): f.value for f in figures if f.name == PACE}
    for figure in figures:
        if figure.name == WITHIN:
            pace = paces[figure.case, figure.how, figure.repetition]
            shares[figure.how.value].append((figure.value, pace))
    for how, values in sorted(shares.items()):
        alike = [share for share, pace in values if is_alike(pace)]
        every = fmean(share for share, _ in values)
        yield (
            f"{how.capitalize()}: {every:.1%} of all steps lie within the range of 90% that as many steps before them "
            f"told, over {len(values)} pairs of halves (the worst has {min(values)[0]:.1%})."
        )
        if 0 < len(alike) < len(values):
            yield (
                f"{how.capitalize()}: of the {len(alike)} pairs whose medians lie within 10% of each other, "
                f"{fmean(alike):.1%}."
            )


def is_alike(pace: float) -> bool:
    """Whether the machine kept its pace from one half to the other: medians within 10%."""
    return 1 / 1.1 <= pace <= 1.1
