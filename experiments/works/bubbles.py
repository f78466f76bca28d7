"""Bubbles of all schedules: closed form, simulated, and emulated on stages that sleep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean, median

from ...schedules import simulate
from ..jobs.case import Case
from ..jobs.figure import Figure, How, repeated
from ..measure.equal_stages import BACKWARD, FORWARD, costs_of, schedule_of

_BATCHES = 4  # of a stream in a row, after one that fills it


def simulated(case: Case, repetitions: int) -> Iterator[Figure]:
    """The bubble of a case, simulated and, if there is one, by its closed form."""
    del repetitions
    case = sized(case)
    schedule = schedule_of(case)
    timeline = simulate(schedule, costs_of(schedule))
    yield Figure(case=case, name="bubble", value=timeline.bubble, unit="fraction", how=How.SIMULATED)
    peak = max(timeline.peak_activations) * schedule.num_ranks / schedule.num_stages
    yield Figure(case=case, name="peak activations", value=peak, unit="microbatches", how=How.SIMULATED)
    closed = closed_form(case)
    if closed is not None:
        yield Figure(case=case, name="bubble", value=closed, unit="fraction", how=How.CLOSED_FORM)


def sized(case: Case) -> Case:
    """The case with its number of microbatches, M = P times `rounds`."""
    return case.also(microbatches=case.count("ranks") * case.count("rounds"))


def closed_form(case: Case) -> float | None:
    """The bubble by the schedule's formula; None without one for this case."""
    schedule = schedule_of(case)
    both = (FORWARD + BACKWARD) * schedule.num_ranks / schedule.num_stages
    waits = {"gpipe": both, "1f1b": both, "interleaved": both, "looped-bfs": both, "zb-h1": FORWARD}
    each = (waits | dict.fromkeys(("2bw", "pipedream"), 0.0)).get(schedule.name)  # of all ranks but one
    if each is None:
        return None
    work = schedule.num_microbatches * (FORWARD + BACKWARD)
    return 1 - work / (work + (schedule.num_ranks - 1) * each)


def emulated(case: Case, repetitions: int) -> Iterator[Figure]:
    """The bubble of a case on real processes; runs on all of its ranks.

    A repetition is a step of a flush schedule with a common start, or some batches of a stream in a row. A disturbance
    makes both actions and waits longer: the bubble is that of the measured actions.
    """
    import torch.distributed as dist

    from ..measure.sleeping import sleeping_side

    case = sized(case)
    schedule = schedule_of(case)
    side = sleeping_side(schedule)
    ideal = simulate(schedule, costs_of(schedule)).batch_seconds
    bubbles, slower = [], []
    with side.pipe:
        side.step()  # connects groups, finds shapes
        for _ in range(repetitions):
            side.pipe.forget_measurements()
            if not schedule.is_asynchronous:
                dist.barrier()
            for _ in range(_BATCHES if schedule.is_asynchronous else 1):
                side.step()
            bubbles.append(side.timeline.bubble)
            slower.append(side.timeline.batch_seconds / ideal)
    yield from repeated(bubbles, case=case, name="bubble", unit="fraction", how=How.EMULATED)
    yield from repeated(slower, case=case, name="batch, emulated / simulated", unit="ratio", how=How.EMULATED)


def findings(figures: Sequence[Figure]) -> list[str]:
    """Differences between the three kinds of bubbles."""
    by_way: dict[How, dict[Case, list[float]]] = defaultdict(lambda: defaultdict(list))
    for figure in figures:
        if figure.name == "bubble":
            by_way[figure.how][figure.case].append(figure.value)
    said = []
    both = by_way[How.CLOSED_FORM].keys() & by_way[How.SIMULATED].keys()
    if both:
        off = max(abs(by_way[How.CLOSED_FORM][case][0] - by_way[How.SIMULATED][case][0]) for case in both)
        said.append(
            f"Closed form and simulation agree in all {len(both)} cases that have both"
            + (f", within {100 * off:.2g} points." if off > 1e-9 else ", to rounding.")
        )
    emulated_too = by_way[How.EMULATED].keys() & by_way[How.SIMULATED].keys()
    if emulated_too:
        apart = {
            case: abs(median(by_way[How.EMULATED][case]) - by_way[How.SIMULATED][case][0]) for case in emulated_too
        }
        worst = max(sorted(apart, key=str), key=apart.__getitem__)
        said.append(
            f"Emulated bubbles lie {100 * fmean(apart.values()):.1f} points from simulated ones on average over "
            f"{len(apart)} cases, {100 * apart[worst]:.1f} at most ({worst})."
        )
    slower = [figure.value for figure in figures if figure.name == "batch, emulated / simulated"]
    if slower:
        said.append(
            f"A batch takes {median(slower):.3f} of its simulated time (median of {len(slower)} repetitions, "
            f"{min(slower):.3f} to {max(slower):.3f})."
        )
    return said
