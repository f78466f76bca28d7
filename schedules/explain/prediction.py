"""A predicted step compared with measured ones, by cause.

    predicted -> compute -> between actions -> messages -> sums -> update -> spread -> not explained -> around the step
                 \\_________ one input after the other as measured ___________/                      -> measured

The step is simulated repeatedly, each time with the measured inputs of one more cause in this order; the change of the
step is attributed to that cause. Then follow the durations of each step's own actions instead of their medians (ranks
wait for the longest), the remainder that no input explains, and the time around the actions, of the runtime and the
training loop. So the causes add up to the difference of the steps; in another order each might be slightly different.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from ..dependencies import Dependencies
from ..ir import COMPUTE_OPS, Action, Op, Schedule
from ..timing.costs import Costs
from ..timing.inputs import Cause, Input, Values, calibrate, predicted_inputs
from ..timing.links import Links
from ..timing.measured_inputs import measured_inputs, own_durations, seconds_around
from ..timing.simulate import simulate
from ..timing.timeline import Timeline
from ..timing.waits import attribute_idle
from ..traces.clocks import clock_note
from ..wording import count
from .difference import Change, num_batches

_MOST_STEPS = 15  # of a run's traced ones, the newest
_MOST_REPLAYED = 5  # median steps that are simulated with the durations of their own actions
_MOST_ALONE = 12  # inputs whose effect is simulated one by one
_OFF = 0.05  # relative error of a wrong input
_MATTERS = 0.01  # share of the step that is worth measuring again
_ROUNDING = 1e-6  # relative, of seconds that are differences of a clock
_OUTSIDE = Cause.OUTSIDE.value
_FROM_INPUTS = (Cause.COMPUTE, Cause.OVERHEAD, Cause.MESSAGES, Cause.SUMS, Cause.UPDATE)


class InputCheck(NamedTuple):
    """One input as predicted and measured [s]."""

    what: Input
    predicted: float
    measured: float
    times: float  # occurrences per step on the rank that has most
    # change of the step if only this input were as measured [s]; None if it was not simulated
    alone: float | None = None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing was predicted."""
        return self.measured / self.predicted if self.predicted > 0 else None

    @property
    def seconds(self) -> float:
        """Measured less predicted seconds per step, of all occurrences on that rank."""
        return (self.measured - self.predicted) * self.times


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionCheck:
    """A predicted step and measured ones.

    Arguments:
        predicted: seconds per step, as simulated.
        measured: seconds per step, median over the traced steps, including the runtime around its actions if recorded.
        causes: [C] in the order of `Cause`, each with the step before and after it: the first begins at `predicted`,
            the last ends at the measured step, and each begins where the one before ends.
        inputs: each that was measured.
        ranks: [P] seconds per step of each rank, predicted and in the median measured step: "compute", "between
            actions", "messages" (waits for transfers), "update" (including the rest of sums and the norm), "waits" and
            "around the step" add up to the step; () for a rank without a record.
        num_steps: traced steps that were evaluated.
        notes: what is not known, a sentence each.
    """

    predicted: float
    measured: float
    causes: tuple[Change, ...]
    inputs: tuple[InputCheck, ...]
    ranks: tuple[tuple[Change, ...], ...]
    num_steps: int
    notes: tuple[str, ...] = ()

    @property
    def step_seconds(self) -> float:
        """Seconds of the measured step, with the overhead of the training loop if known."""
        return self.causes[-1].after

    def cause(self, name: Cause) -> Change:
        return next(each for each in self.causes if each.name == name.value)

    def matters_alone(self, each: InputCheck) -> bool:
        """Whether an input alone changes the step by 1% or more."""
        return abs(each.alone or 0.0) >= _MATTERS * self.predicted

    @property
    def wrong(self) -> tuple[InputCheck, ...]:
        """Inputs to measure again, those that change the step most first.

        Of the inputs that are off by 5% or more: each that alone changes the step by 1%; and for a cause that changes
        it by 1% though none of its inputs does alone, the input with the largest `seconds`.
        """
        off = [each for each in self.inputs if abs(each.measured - each.predicted) >= _OFF * each.predicted]
        found = [each for each in off if self.matters_alone(each)]
        for cause in {each.what.cause for each in off} - {each.what.cause for each in found}:
            if abs(self.cause(cause).seconds) >= _MATTERS * self.predicted:
                found.append(max((e for e in off if e.what.cause is cause), key=lambda each: abs(each.seconds)))
        return tuple(sorted(found, key=lambda each: (-abs(each.alone or 0.0), -abs(each.seconds))))


def check_prediction(
    predicted: Timeline,
    measured: Sequence[Timeline],
    *,
    costs: Costs,
    links: Links | None = None,
    known: Costs | None = None,
    step_seconds: float | None = None,
) -> PredictionCheck:
    """Causes for which measured steps took longer, or less, than a predicted one.

    Arguments:
        predicted: simulated from `costs` and `links`.
        measured: steps of the same schedule, in the order in which they ran; the newest 15 count.
        known: costs that the run measured itself; see `measured_inputs`.
        step_seconds: of a step in the training loop; the difference to the timelines is a cause of its own.

    At most about 25 simulations. Raises ValueError without measured steps, or for steps of another schedule.
    """
    schedule = predicted.schedule
    _refuse_others(schedule, measured)
    steps = [each for each in measured if not schedule.is_asynchronous or _has_period(each)][-_MOST_STEPS:]
    if not steps:
        raise ValueError(
            f"{count(len(measured), 'measured step')}: expected at least one"
            f"{' that shows two batches of a stream' if measured else ''}"
        )

    def step_of(values: Values) -> float:
        return simulate(schedule, *calibrate(schedule, costs, links, values, queueing=False)).batch_seconds

    before = predicted_inputs(schedule, costs, links)
    seen = measured_inputs(steps, known, planned=costs)
    # Sums that no plan contains, of tied weights, are new to the simulation.
    seen = {each: seconds for each, seconds in seen.items() if each in before or each.kind in ("sum", "held")}
    # Others keep their exact values: rounding could let another message go first, and measured ones do not queue.
    new = {each: s for each, s in seen.items() if not math.isclose(s, before.get(each, 0.0), rel_tol=_ROUNDING)}
    totals = [predicted.batch_seconds]
    values: dict[Input, float] = {}
    for cause in _FROM_INPUTS:
        own = {each: seconds for each, seconds in new.items() if each.cause is cause}
        values |= own
        totals.append(step_of(values) if own else totals[-1])
    with_medians = calibrate(schedule, costs, links, values, queueing=False)
    middle = _middle(steps)
    spread = [
        simulate(schedule, own_durations(schedule, step, with_medians[0]), with_medians[1]).batch_seconds
        for step in middle
    ]
    whole = median(each.batch_seconds for each in steps)
    outside = [seconds_around(each, known) for each in steps]
    of_actions = median(each.batch_seconds - around for each, around in zip(steps, outside, strict=True))
    totals += [median(spread), of_actions + (costs.around if any(outside) else 0.0)]
    names = [*_FROM_INPUTS, Cause.SPREAD, Cause.UNEXPLAINED]
    if step_seconds is not None or any(outside):
        totals.append(whole if step_seconds is None else step_seconds)
        names.append(Cause.OUTSIDE)
    return PredictionCheck(
        predicted=predicted.batch_seconds,
        measured=whole,
        causes=tuple(Change(name.value, a, b) for name, a, b in zip(names, totals[:-1], totals[1:], strict=True)),
        inputs=_inputs(schedule, before, seen, step_of, predicted.batch_seconds),
        ranks=_ranks(predicted, middle[(len(middle) - 1) // 2], costs),
        num_steps=len(steps),
        notes=tuple(_notes(steps, before, seen)),
    )


def _middle(steps: Sequence[Timeline]) -> list[Timeline]:
    """At most _MOST_REPLAYED steps, ascending by seconds: as many are dropped at either end, so the median stays."""
    ordered = sorted(steps, key=lambda each: each.batch_seconds)
    aside = max(0, (len(ordered) - _MOST_REPLAYED + 1) // 2)
    return ordered[aside : len(ordered) - aside]


def _refuse_others(schedule: Schedule, measured: Sequence[Timeline]) -> None:
    for each in measured:
        other = each.schedule
        alike = ("placement", "owners", "num_microbatches", "num_slices", "weight_rule")
        if any(getattr(other, name) != getattr(schedule, name) for name in alike):
            raise ValueError(
                f"measured under {other!r}, predicted for {schedule!r}: expected steps of the schedule that "
                f"was predicted"
            )


def _has_period(timeline: Timeline) -> bool:
    """Whether it shows two batches of a stream, so that there are seconds from one to the next."""
    size = timeline.schedule.batch_indices
    batches = [
        {span.what.index // size for span in trace.compute if span.what.op is Op.F}
        for trace in timeline.ranks
        if trace.compute
    ]
    return len(set.intersection(*batches) if batches else ()) > 1


def _inputs(
    schedule: Schedule, before: Values, seen: Values, step_of: Callable[[Values], float], step: float
) -> tuple[InputCheck, ...]:
    times = _times(schedule)
    found = [
        InputCheck(each, before.get(each, 0.0), seconds, times(each))
        for each, seconds in sorted(seen.items(), key=lambda pair: (list(Cause).index(pair[0].cause), pair[0].at))
    ]
    matters = [each for each in found if abs(each.seconds) >= _MATTERS * step]
    asked_for = sorted(matters, key=lambda each: -abs(each.seconds))[:_MOST_ALONE]
    alone = {each.what: step_of({each.what: each.measured}) - step for each in asked_for}
    return tuple(each._replace(alone=alone.get(each.what)) for each in found)


def _times(schedule: Schedule) -> Callable[[Input], float]:
    """Occurrences of an input per step on the rank that has most; of a message between its two ranks."""
    batches, groups = schedule.num_batches, max(1, schedule.groups_per_batch)
    needs = Dependencies(schedule)
    sent = Counter(
        (one.sender, one.receiver)
        for program in schedule.compute_programs
        for action in program
        for one in needs.departures(action)
    )
    by_op: Counter[tuple[int, Op]] = Counter()
    by_stage: Counter[int] = Counter()
    for program in schedule.compute_programs:
        own = Counter((stage, op) for stage, op, _ in program if op in COMPUTE_OPS)
        by_op |= own
        of_stages: Counter[int] = Counter()
        for (stage, _), number in own.items():
            of_stages[stage] += number
        by_stage |= of_stages

    def times(each: Input) -> float:
        match each.kind:
            case "overhead":
                return by_stage[each.at[0]] / batches
            case "message":
                return sent[each.at[0], each.at[1]] / batches
            case "sum" | "held" | "gather" | "update" | "norm" | "around":
                return groups
        return by_op[each.at[0], Op(each.kind)] / batches

    return times


def _ranks(predicted: Timeline, measured: Timeline, costs: Costs) -> tuple[tuple[Change, ...], ...]:
    schedule = predicted.schedule
    whole, own = costs.table_for(schedule), costs.free_of_overhead.table_for(schedule)
    overhead = {
        action: whole.of(action.op, action.stage, action.index) - own.of(action.op, action.stage, action.index)
        for trace in predicted.ranks
        for action in trace.actions
        if action.op in COMPUTE_OPS
    }
    sides = [_by_rank(predicted, overhead), _by_rank(measured, {})]
    lacking = {*predicted.missing, *measured.missing}
    return tuple(
        () if rank in lacking else tuple(Change(name, old[name], new[name]) for name in old)
        for rank, (old, new) in enumerate(zip(*sides, strict=True))
    )


def _by_rank(timeline: Timeline, overhead: Mapping[Action, float]) -> list[dict[str, float]]:
    """[P] seconds per batch by name; `overhead`: of each action, seconds to count as between actions, not compute."""
    batches, found = max(1, num_batches(timeline)), []
    for trace, idle in zip(timeline.ranks, attribute_idle(timeline), strict=True):
        between = sum(overhead.get(span.what, 0.0) for span in trace.compute)
        parts = {
            "compute": trace.busy - between,
            "between actions": idle.unexplained + between,
            "messages": idle.transfer,
            "update": idle.update,
            "waits": idle.data + idle.warm_up + idle.drain + idle.late_peer + idle.imbalance,
        }
        found.append({name: seconds / batches for name, seconds in parts.items()} | {_OUTSIDE: timeline.around})
    return found


def _notes(steps: Sequence[Timeline], before: dict[Input, float], seen: dict[Input, float]) -> list[str]:
    notes = []
    lacking = [each for each in before if each not in seen and each.cause is Cause.COMPUTE]
    if lacking:
        notes.append(f"nothing was recorded of {', '.join(map(str, lacking))}: taken as predicted")
    unseen = [each for each in before if each not in seen and each.kind == "message"]
    if unseen:
        links = ", ".join(f"{each.at[0]}-{each.at[1]}" for each in unseen[:8])
        more = f" and {len(unseen) - 8} more" if len(unseen) > 8 else ""
        notes.append(f"no rank waited for a message of link {links}{more}: taken as predicted")
    if note := clock_note(steps[-1]):
        notes.append(f"messages between hosts are as accurate as their clocks: {note}")
    return notes
