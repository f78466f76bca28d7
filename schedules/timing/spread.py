"""Variation of durations: the last measured steps, kept whole, or a profile's figures for single actions.

    seconds of an action  =  its cost  *  its ratio in the step that is drawn  *  a ratio of its own (a profile's)
                             (Costs)

Ranks of one host share its load, which may slow all of them or favour the others; so a step is drawn with all of its
ratios. Messages, sums and the norm have ratios of their own: for messages, of those whose receiver waited from before
they were made, since of others only the late ones are seen.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from statistics import NormalDist, fmean

from ..ir import Action, Op
from .costs import CostTable
from .measured_inputs import durations_of_transfers
from .timeline import Timeline
from .wiring import LANE_OPS

Ratios = tuple[float, ...]
OpRatios = Mapping[Op, Sequence[Sequence[float]]]  # by op, for each stage
LEAST_STEPS = 10  # of a measurement: fewer do not show the variation between steps
_LEAST_DRAWN = 4  # Student's distribution has a variance from three degrees of freedom
_TRANSFERS = ("messages", "sums", "norm")
_LEAST_RATIO = 1e-3  # of messages, sums and norms
_NUM_ALIKE = 64  # ratios that represent a distribution
_MOST_RATIOS = 256  # of messages, sums or norms; more of them are averaged in groups
_MOST_ACTIONS = 100_000  # of all steps that are kept, if these are more than LEAST_STEPS


# An action of a measured step, and its seconds with the overhead after it.
TimedAction = tuple[Action, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Ratios of durations to the costs that represent them.

    Arguments:
        actions: by op, for each stage, equally likely ratios of single actions; none varies for a missing op or empty
            list.
        steps: measured steps, each equally likely: by op, for each stage, the ratios of its actions in the order of
            their numbers in the batch; 1 for a missing op. None or one: steps are equal. The fewer there are, the wider
            they are drawn (Student's distribution); two or three would have no variance.
        messages, sums, norm: ratios of each message, of a sum (or gather) in one step, of the global norm; empty: they
            do not vary.
        step_messages: by measured step, the ratios of its own messages, which are slow together; empty: `messages`.

    Raises ValueError for anything but finite ratios above 0, ops with different numbers of stages, two or three steps,
    and messages of another number of steps.

    >>> noise = Spread(actions={Op.F: [[0.9, 1.0, 1.3]]}, steps=[{Op.F: [[1.0, 1.1 + n]]} for n in range(4)])
    >>> Spread.from_json(noise.to_json()) == noise
    True
    """

    actions: OpRatios
    steps: Sequence[OpRatios] = ()
    messages: Sequence[float] = ()
    sums: Sequence[float] = ()
    norm: Sequence[float] = ()
    step_messages: Sequence[Sequence[float]] = ()

    def __post_init__(self) -> None:
        actions = _by_stage(self.actions, "")
        steps = tuple(_by_stage(step, f" in step {number}") for number, step in enumerate(self.steps))
        numbers = {str(op): len(stages) for each in (actions, *steps) for op, stages in each.items()}
        if len({len(stages) for each in (actions, *steps) for stages in each.values()}) > 1:
            raise ValueError(f"ratios of {numbers} stages: expected as many for each op")
        if 1 < len(steps) < _LEAST_DRAWN:
            raise ValueError(
                f"a spread of {len(steps)} measured steps: expected at least {_LEAST_DRAWN}, which show how far steps "
                f"vary, or steps=() for equal steps"
            )
        own = tuple(_ratios(f"messages in step {number}", each) for number, each in enumerate(self.step_messages))
        if own and len(own) != len(steps):
            raise ValueError(f"step_messages of {len(own)} steps: expected one list for each of {len(steps)} steps")
        object.__setattr__(self, "step_messages", own)
        for name in _TRANSFERS:
            object.__setattr__(self, name, _ratios(name, getattr(self, name)))
        object.__setattr__(self, "actions", actions)
        object.__setattr__(self, "steps", steps)

    @classmethod
    def of_half_ranges(cls, stages: Sequence[float]) -> Spread:
        """A spread of single actions, equal for all of a stage; steps do not vary: all that a profile measures.
        `stages`: [S] half the interquartile range of an action's seconds over their median.

        >>> spread = Spread.of_half_ranges([0.1])
        >>> quarter = len(spread.actions[Op.F][0]) // 4
        >>> [round(spread.actions[Op.F][0][at * quarter], 2) for at in (1, 3)]
        [0.91, 1.1]
        """
        if any(not (isinstance(each, Real) and 0 <= float(each) < math.inf) for each in stages):
            raise ValueError(f"half ranges {list(stages)!r:.60}: expected finite numbers of at least 0, one per stage")
        own = [_alike(float(each)) for each in stages]
        return cls(actions=dict.fromkeys((Op.F, Op.B, Op.I, Op.W), own))

    def to_json(self) -> str:
        actions, *steps = ({op.value: stages for op, stages in each.items()} for each in (self.actions, *self.steps))
        others = {name: getattr(self, name) for name in (*_TRANSFERS, "step_messages")}
        return json.dumps({"actions": actions, "steps": steps, **others})

    @classmethod
    def from_json(cls, text: str) -> Spread:
        """Read `to_json`'s form; ValueError says what is missing or unreadable."""
        try:
            data = json.loads(text)
            actions, *steps = (
                {Op(name): stages for name, stages in each.items()}
                for each in (data.pop("actions"), *data.pop("steps", ()))
            )
            return cls(actions=actions, steps=steps, **data)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a spread: {error}; expected the JSON that Spread.to_json writes") from None


def estimate_spread(
    ranks: Sequence[Sequence[Sequence[TimedAction]]], table: CostTable, timelines: Sequence[Timeline] = ()
) -> Spread | None:
    """The spread of measured steps around these costs; None for fewer than LEAST_STEPS.

    Arguments:
        ranks: [P][N] the actions of each rank in each step, in its order; the newest steps of all ranks correspond.
        timelines: of these steps, or some of them; with fewer than LEAST_STEPS, messages, sums and norm do not vary.
    """
    number = min((len(steps) for steps in ranks if steps), default=0)
    newest = [steps[len(steps) - number :] for steps in ranks if steps]
    ran = list(zip(*newest, strict=True))
    steps = [_ratios_of_step(together, table) for together in ran]
    actions = {key for step in steps for key in step}
    whole = [number for number, step in enumerate(steps) if step.keys() == actions]
    if len(whole) < LEAST_STEPS:
        return None
    most = max(LEAST_STEPS, _MOST_ACTIONS // sum(map(len, steps[whole[-1]].values())))
    stages, ops = range(len(table.latency)), [op for op in LANE_OPS if any(op is each for each, _ in actions)]
    by_stage = [{op: [steps[n].get((op, stage), ()) for stage in stages] for op in ops} for n in whole[-most:]]
    transfers, by_step = _transfers(timelines, ran, table)
    own = [_put_together(by_step.get(n, ())) for n in whole[-most:]]
    return Spread(actions={}, steps=by_stage, step_messages=own if any(own) else (), **transfers)


def _ratios_of_step(ranks: Sequence[Sequence[TimedAction]], table: CostTable) -> dict[tuple[Op, int], Ratios]:
    """Ratios of one step by op and stage. Those of a stream, whose actions are of two batches, are ordered as in
    one."""
    ratios: dict[tuple[Op, int], dict[int, float]] = defaultdict(dict)
    for (stage, op, index), seconds in (ran for rank in ranks for ran in rank):
        cost = table.of(op, stage, index)
        if seconds > 0 and cost > 0:
            ratios[op, stage].setdefault(index, float(f"{seconds / cost:.4g}"))  # of an update the first replica's
    return {
        key: tuple(by_index[index] for index in sorted(by_index, key=lambda index: index % len(by_index)))
        for key, by_index in ratios.items()
    }


def _transfers(
    timelines: Sequence[Timeline], ran: Sequence[Sequence[Sequence[TimedAction]]], table: CostTable
) -> tuple[dict[str, Ratios], dict[int, list[float]]]:
    """Ratios of messages, sums and the norm, by the field of a `Spread`; of messages also by the step that ran them.

    A message that arrives before its rank is free takes almost no time: it counts, or the others would be too long.
    """
    found: dict[str, list[float]] = {name: [] for name in _TRANSFERS}
    own: dict[int, list[float]] = defaultdict(list)
    if len(timelines) >= LEAST_STEPS:
        busy: list[dict[Action, float]] = [{} for _ in timelines]
        if len(timelines) <= len(ran) and not timelines[0].schedule.is_asynchronous:  # of a stream each is of several
            busy = [{key: took for rank in step for key, took in rank} for step in ran[len(ran) - len(timelines) :]]
        for number, kind, stages, seconds in durations_of_transfers(timelines, busy):
            cost = _cost(kind, stages, table)
            if cost and (seconds > 0 or kind == "messages"):
                found[kind].append(max(seconds / cost, _LEAST_RATIO))
                if kind == "messages" and busy[number]:
                    own[len(ran) - len(timelines) + number].append(found[kind][-1])
    return {kind: _put_together(ratios) for kind, ratios in found.items()}, own


def _cost(kind: str, stages: tuple[int, ...], table: CostTable) -> float | None:
    if kind == "norm":
        return table.norm
    if kind == "messages":
        return table.latency[stages[0]]
    return table.reduce_grad[stages[0]] if len(stages) == 1 else table.tied.get(stages)


def _put_together(ratios: Sequence[float]) -> Ratios:
    """Ascending ratios to four digits; of very many, means of neighbours, which have the same mean."""
    ordered = sorted(ratios)
    number = min(len(ordered), _MOST_RATIOS)
    cuts = [n * len(ordered) // number for n in range(number + 1)] if number else [0]
    return tuple(float(f"{fmean(ordered[a:b]):.4g}") for a, b in pairwise(cuts))


def _alike(half_range: float) -> Ratios:
    """Equally likely ratios, lognormal around 1."""
    if not half_range:
        return ()
    normal = NormalDist(0.0, math.log1p(half_range) / NormalDist().inv_cdf(0.75))
    return tuple(math.exp(normal.inv_cdf((n + 0.5) / _NUM_ALIKE)) for n in range(_NUM_ALIKE))


def _by_stage(ratios: OpRatios, where: str) -> dict[Op, tuple[Ratios, ...]]:
    wrong = [op for op in ratios if op not in LANE_OPS]
    if wrong:
        raise ValueError(f"a spread of {wrong[0]!s}: expected one of {', '.join(map(str, LANE_OPS))}")
    return {
        op: tuple(_ratios(f"{op} of stage {stage}{where}", each) for stage, each in enumerate(stages))
        for op, stages in ratios.items()
    }


def _ratios(name: str, values: Iterable[float]) -> Ratios:
    if not isinstance(values, Iterable):
        raise ValueError(f"ratios of {name} are {values!r:.60}: expected a list of finite numbers above 0")
    found = tuple(values)
    for each in found:
        if not isinstance(each, Real) or not (float(each) > 0 and math.isfinite(each)):
            raise ValueError(f"a ratio of {name} is {each!r}: expected finite numbers above 0")
    return tuple(map(float, found))
