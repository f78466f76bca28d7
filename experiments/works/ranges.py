"""Share of steps within the range predicted for 90% of them.

Blocks of equally many steps run one after the other. Each measures costs and the spread of durations, from which two
ranges are simulated. The range of following steps is tested on the next block. The range of steps like those of the
block is tested on the block itself, since only durations of actions are known and no length of a step, and on the next
block, too: there it holds 90% if the machine keeps its pace (PACE).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

from ...cli.pace import steps_that_follow
from ...schedules import simulate, simulate_spread
from ..jobs.case import Case
from ..jobs.figure import Figure, How
from ..measure.equal_stages import schedule_of

if TYPE_CHECKING:
    from ...pipe import PipelineModule, StepResult
    from ...schedules import StepSamples

WITHIN = "share of steps within the 90% range"
ALIKE = "share within the range of steps like those before"
BEFORE = "share of the steps that told it"
PACE = "median step, block / block before"
OF_MEDIANS = "median step, measured / simulated of medians"
OF_SAMPLES = "median step, measured / predicted"
WIDTH = "90% range / median"
WIDTH_ALIKE = "90% range / median, steps like those before"
_WARM_UP = 3  # steps


def measured(case: Case, repetitions: int) -> Iterator[Figure]:
    """The example GPT with AdamW, on all of the case's ranks: `layers`, `width`, `length`, `batch`."""
    from ...cli.train.gpt import GPTConfig
    from ..measure.models import gpt_problem
    from ..measure.sides import OurSide

    size = GPTConfig(layers=case.count("layers"), width=case.count("width"), length=case.count("length"))
    problem = gpt_problem(size, batch=case.count("batch"))
    side = OurSide.of_model(problem, schedule=schedule_of(case))
    with side.pipe:
        yield from figures_of(case, side.pipe, side.step, How.MEASURED, repetitions=repetitions)


def emulated(case: Case, repetitions: int) -> Iterator[Figure]:
    """Stages that sleep, on all of the case's ranks."""
    from ..measure.sleeping import sleeping_side

    side = sleeping_side(schedule_of(case))
    with side.pipe:
        yield from figures_of(case, side.pipe, side.step, How.EMULATED, repetitions=repetitions)


def figures_of(
    case: Case, pipe: PipelineModule, step: Callable[[], StepResult], how: How, *, repetitions: int
) -> Iterator[Figure]:
    """Figures of a pipeline; `step` runs a batch, and the case has the number of `steps` of a block."""
    size = case.count("steps")

    def run() -> list[float]:
        step()  # ranks that simulated ranges begin it one after the other
        pipe.forget_measurements()
        return [step().timeline().batch_seconds for _ in range(size)]

    for _ in range(_WARM_UP):
        step()
    before = run()
    for repetition in range(repetitions):
        costs, spread = pipe.measured_costs(), pipe.measured_spread()
        if spread is None:
            raise ValueError(f"case {case}: steps: expected at least 10, of which a spread is known")
        alike = simulate_spread(pipe.schedule, costs, spread, seed=repetition)
        ahead = steps_that_follow(spread, pipe.schedule, size, seed=repetition)
        taken = simulate_spread(pipe.schedule, costs, ahead, seed=repetition)
        found = run()
        for name, value, unit in (
            (WITHIN, taken.holds(found), "fraction"),
            (ALIKE, alike.holds(found), "fraction"),
            (BEFORE, alike.holds(before), "fraction"),
            (PACE, median(found) / median(before), "ratio"),
            (OF_SAMPLES, median(found) / taken.median, "ratio"),
            (OF_MEDIANS, median(found) / simulate(pipe.schedule, costs).batch_seconds, "ratio"),
            (WIDTH, _width(taken), "ratio"),
            (WIDTH_ALIKE, _width(alike), "ratio"),
        ):
            yield Figure(case=case, name=name, value=value, unit=unit, how=how, repetition=repetition)
        before = found


def _width(taken: StepSamples) -> float:
    low, high = taken.range()
    return (high - low) / taken.median


def findings(figures: Sequence[Figure]) -> Iterator[str]:
    shares: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for figure in figures:
        shares[figure.how.value][figure.name].append(figure.value)
    for how, values in sorted(shares.items()):
        within = values[WITHIN]
        yield (
            f"{how.capitalize()}: {fmean(within):.1%} of all steps lie within the range of 90% that as many steps "
            f"before them told for those that follow, over {len(within)} pairs of blocks (the worst has "
            f"{min(within):.1%}); within the range of steps like those before {fmean(values[ALIKE]):.1%} (the worst "
            f"{min(values[ALIKE]):.1%}), and {fmean(values[BEFORE]):.1%} of those before themselves."
        )
