"""How much durations vary.

    seconds of an action  =  its cost  *  ratio of its rank in this step  *  a ratio of its own
                             (Costs)      the ranks' drawn together

    seconds of a message, of a sum, of the norm  =  its cost  *  a ratio of its own

Ranks of one host share its load: what slows one may slow all of them, or give the others more. So the ratios of a step
are kept as a row, and rows in the order of steps: neighbours are alike where the machine's pace wanders (`pace`).
`simulate_spread` draws from both; `estimate_spread` finds them in measured steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from statistics import NormalDist

from ..ir import Op
from .wiring import OPS

Ratios = tuple[float, ...]
LEAST_ROWS = 4  # Student's distribution has a variance from three degrees of freedom on
_BESIDE = ("messages", "sums", "norm")
_NUM_ALIKE = 64  # ratios that stand for a distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Ratios of durations to the costs that stand for them, each of a list equally likely.

    Arguments:
        actions: by op, for each stage, of an action by itself; of an op without them, and of an empty one: none varies.
        steps: [N][P] of all actions of each rank in one step, a row a measured step; none or one: steps are alike.
            The fewer rows, the wider they are drawn, as Student's distribution is wider than the normal one: two or
            three would be drawn from one without a variance. In the order in which they ran: of that it is told how
            far the pace may be in steps that follow (`pace`).
        chance: part of the variance of measured rows that was chance of a rank's few actions. `steps` are free of it:
            their logarithms are as many times less than those that were measured as sqrt(1 - chance) says.
        messages, sums, norm: of each message, of a sum (or gather) in one step, of the global norm; empty: they do not
            vary.

    Raises ValueError for ratios that are no finite numbers above 0, stages that are as many for one op as not for
    another, rows of unequal length, two or three rows, and a `chance` that is no part.

    >>> noise = Spread(actions={Op.F: [[0.9, 1.0, 1.3]], Op.B: [[1.0, 1.1]]}, steps=[[0.95], [0.98], [1.02], [1.05]])
    >>> Spread.from_json(noise.to_json()) == noise
    True
    """

    actions: Mapping[Op, Sequence[Sequence[float]]]
    steps: Sequence[Sequence[float]] = ()
    chance: float = 0.0
    messages: Sequence[float] = ()
    sums: Sequence[float] = ()
    norm: Sequence[float] = ()

    def __post_init__(self) -> None:
        wrong = [op for op in self.actions if op not in OPS]
        if wrong:
            raise ValueError(f"a spread of {wrong[0]!s}: expected one of {', '.join(map(str, OPS))}")
        actions = {
            op: tuple(_ratios(f"{op} of stage {stage}", each) for stage, each in enumerate(stages))
            for op, stages in self.actions.items()
        }
        if len({len(stages) for stages in actions.values()}) > 1:
            numbers = {str(op): len(stages) for op, stages in actions.items()}
            raise ValueError(f"ratios of {numbers} stages: expected as many for each op")
        steps = tuple(_ratios(f"step {number}", each) for number, each in enumerate(self.steps))
        if len({len(row) for row in steps}) > 1:
            raise ValueError(f"rows of {sorted({len(row) for row in steps})} ranks: expected as many in each step")
        if 1 < len(steps) < LEAST_ROWS:
            raise ValueError(
                f"a spread of {len(steps)} measured steps: expected at least {LEAST_ROWS}, which tell how far steps "
                f"vary, or steps=() for steps that are alike"
            )
        if not isinstance(self.chance, Real) or not 0 <= float(self.chance) < 1:
            raise ValueError(f"chance={self.chance!r}: expected a number of at least 0 and below 1")
        for name in _BESIDE:
            object.__setattr__(self, name, _ratios(name, getattr(self, name)))
        object.__setattr__(self, "actions", actions)
        object.__setattr__(self, "steps", steps)

    @classmethod
    def of_half_ranges(cls, stages: Sequence[float]) -> Spread:
        """Actions alone vary, all of a stage alike, and steps do not: all that a profile knows.

        Arguments:
            stages: [S] half the interquartile range of an action's seconds over their median.

        >>> spread = Spread.of_half_ranges([0.1])
        >>> quarter = len(spread.actions[Op.F][0]) // 4
        >>> [round(spread.actions[Op.F][0][at * quarter], 2) for at in (1, 3)]
        [0.91, 1.1]
        """
        if any(not (isinstance(each, Real) and 0 <= float(each) < math.inf) for each in stages):
            raise ValueError(f"half ranges {list(stages)!r:.60}: expected finite numbers of at least 0, one a stage")
        own = [_alike(float(each)) for each in stages]
        return cls(actions=dict.fromkeys((Op.F, Op.B, Op.I, Op.W), own))

    def to_json(self) -> str:
        """One JSON object."""
        actions = {op.value: stages for op, stages in self.actions.items()}
        beside = {name: getattr(self, name) for name in _BESIDE}
        return json.dumps({"actions": actions, "steps": self.steps, "chance": self.chance, **beside})

    @classmethod
    def from_json(cls, text: str) -> Spread:
        """Read `to_json`'s form; ValueError says what is missing or unreadable."""
        try:
            data = json.loads(text)
            actions = {Op(name): stages for name, stages in data.pop("actions").items()}
            return cls(actions=actions, **data)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a spread: {error}; expected the JSON that Spread.to_json writes") from None


def _alike(half_range: float) -> Ratios:
    """Equally likely ratios, lognormal around 1."""
    if not half_range:
        return ()
    normal = NormalDist(0.0, math.log1p(half_range) / NormalDist().inv_cdf(0.75))
    return tuple(math.exp(normal.inv_cdf((n + 0.5) / _NUM_ALIKE)) for n in range(_NUM_ALIKE))


def _ratios(name: str, values: Iterable[float]) -> Ratios:
    if not isinstance(values, Iterable):
        raise ValueError(f"ratios of {name} are {values!r:.60}: expected a list of finite numbers above 0")
    found = tuple(values)
    for each in found:
        if not isinstance(each, Real) or not (float(each) > 0 and math.isfinite(each)):
            raise ValueError(f"a ratio of {name} is {each!r}: expected finite numbers above 0")
    return tuple(map(float, found))
