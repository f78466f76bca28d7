"""How much durations vary.

    seconds of an action  =  its cost  *  step        *  rank                 *  action
                             (Costs)      common to      common to all of a      its own
                                          all ranks      rank in this step

`simulate_spread` draws them; `estimate_spread` finds them in measured steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from ..ir import Op
from .wiring import OPS

Ratios = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Ratios of durations to the costs that stand for them, each of a list equally likely.

    Arguments:
        actions: by op, for each stage, of an action by itself; of an op without them, and of an empty one: none varies.
        ranks: of all actions of one rank in one step.
        steps: of all actions of all ranks in one step.
        num_steps: measured steps behind `ranks` and `steps`; the fewer, the wider they are drawn (as Student's
            distribution is wider than the normal one). 0: they are taken for exact.

    Raises ValueError for ratios that are no finite numbers above 0, and stages that are as many for one op as not for
    another.

    >>> noise = Spread(actions={Op.F: [[0.9, 1.0, 1.3]], Op.B: [[1.0, 1.1]]}, steps=[0.95, 1.05])
    >>> Spread.from_json(noise.to_json()) == noise
    True
    """

    actions: Mapping[Op, Sequence[Sequence[float]]]
    ranks: Sequence[float] = ()
    steps: Sequence[float] = ()
    num_steps: int = 0

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
        if not isinstance(self.num_steps, int) or self.num_steps < 0 or self.num_steps == 1:
            raise ValueError(f"num_steps={self.num_steps!r}: expected at least 2, or 0 for ratios that are exact")
        object.__setattr__(self, "actions", actions)
        for name in ("ranks", "steps"):
            object.__setattr__(self, name, _ratios(name, getattr(self, name)))

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(
            {
                "actions": {op.value: stages for op, stages in self.actions.items()},
                "ranks": self.ranks,
                "steps": self.steps,
                "num_steps": self.num_steps,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Spread:
        """Read `to_json`'s form; ValueError says what is missing or unreadable."""
        try:
            data = json.loads(text)
            actions = {Op(name): stages for name, stages in data.pop("actions").items()}
            return cls(actions=actions, **data)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a spread: {error}; expected the JSON that Spread.to_json writes") from None


def _ratios(name: str, values: Iterable[float]) -> Ratios:
    found = tuple(values)
    for each in found:
        if not isinstance(each, Real) or not (float(each) > 0 and math.isfinite(each)):
            raise ValueError(f"a ratio of {name} is {each!r}: expected finite numbers above 0")
    return tuple(map(float, found))
