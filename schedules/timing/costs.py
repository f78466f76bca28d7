"""Costs of actions and the latency of messages: what the simulator takes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import cast

from ..ir import Op

PerStage = float | Sequence[float]
Ties = Sequence[tuple[tuple[int, ...], float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of ONE stage action (of a chunk, where a rank has several).

    Each is one number for all stages or a sequence with one per stage. Where only one of
    `backward` and (`input_grad`, `weight_grad`) is given, the other follows from
    `backward = input_grad + weight_grad` (halves, when `backward` alone is known).

    Arguments:
        forward: F [s].
        backward: B [s]; 2 * forward when no backward cost is given.
        input_grad, weight_grad: I and W [s].
        latency: of a message that leaves the stage [s]; it delays, and occupies no lane.
        reduce_grad: sum of the stage's gradients over its replicas, if it has any [s]. It begins when the last of them
            begins it (see `collectives`), on a lane of its own beside compute; the update waits for it.
        tied: sums of the gradients of weights that several stages share, as (stages, seconds [s]) pairs; likewise,
            under flush schedules, where the stages stand on several ranks.
        update: optimizer step of the stage, the epilogue of a flush schedule [s].
        norm: global gradient norm and clipping, for which all ranks wait before they update [s]; None: each
            rank updates by itself.

    Raises ValueError for what is no finite number of seconds of at least 0, or for a half-given split.

    >>> Costs(forward=1.0, backward=3.0).table(num_stages=2).weight_grad
    (1.5, 1.5)
    """

    forward: PerStage = 1.0
    backward: PerStage | None = None
    input_grad: PerStage | None = None
    weight_grad: PerStage | None = None
    latency: PerStage = 0.0
    reduce_grad: PerStage = 0.0
    tied: Ties = ()
    update: PerStage = 0.0
    norm: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not each.default:
                convert = {"norm": _seconds, "tied": _ties}.get(each.name, _per_stage)
                object.__setattr__(self, each.name, convert(each.name, value))
        if (self.input_grad is None) != (self.weight_grad is None):
            raise ValueError(
                f"input_grad={self.input_grad}, weight_grad={self.weight_grad}: expected both or neither; "
                f"give backward= for a backward that is not split"
            )

    def to_json(self) -> str:
        """One JSON object: what was given, in seconds."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps({name: value for name, value in given.items() if value is not None})

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Read `to_json`'s form; ValueError says what is unknown or unreadable."""
        try:
            data = json.loads(text)
        except RecursionError as error:
            raise ValueError(f"not costs: {error}") from None
        known = [each.name for each in fields(cls)]
        if not isinstance(data, dict) or not set(data) <= set(known):
            found = sorted(data) if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"costs with {found}: expected an object with some of {', '.join(known)}")
        return cls(**data)

    def table(self, *, num_stages: int) -> CostTable:
        """The same costs, one number per stage each."""

        def spread(name: str, value: PerStage) -> tuple[float, ...]:
            numbers = (value,) * num_stages if isinstance(value, float) else tuple(value)
            if len(numbers) != num_stages:
                raise ValueError(
                    f"{name} has {len(numbers)} numbers for {num_stages} stages: expected one number, or one a stage"
                )
            return numbers

        missing = [stages for stages, _ in self.tied if stages[-1] >= num_stages]
        if missing:
            raise ValueError(f"tied={missing[0]}: expected stages below {num_stages}")
        forward = spread("forward", self.forward)
        if self.input_grad is not None and self.weight_grad is not None:
            input_grad = spread("input_grad", self.input_grad)
            weight_grad = spread("weight_grad", self.weight_grad)
            whole = tuple(i + w for i, w in zip(input_grad, weight_grad, strict=True))
            backward = whole if self.backward is None else spread("backward", self.backward)
        else:
            backward = tuple(2 * f for f in forward) if self.backward is None else spread("backward", self.backward)
            input_grad = weight_grad = tuple(b / 2 for b in backward)
        return CostTable(
            forward=forward,
            backward=backward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            latency=spread("latency", self.latency),
            reduce_grad=spread("reduce_grad", self.reduce_grad),
            tied=dict(self.tied),
            update=spread("update", self.update),
            norm=self.norm,
        )


def _per_stage(name: str, value: object) -> float | tuple[float, ...]:
    """A number as a float, a sequence as a tuple of floats."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        return tuple(_seconds(name, number) for number in value)
    return _seconds(name, value)


def _ties(name: str, value: object) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Pairs of (stages, seconds)."""
    found: dict[tuple[int, ...], float] = {}
    for pair in value if isinstance(value, Iterable) else (value,):
        match pair:
            case [[int(first), int(), *_] as stages, seconds] if first >= 0 and list(stages) == sorted({*stages}):
                found[tuple(cast(Sequence[int], stages))] = _seconds(name, seconds)
            case _:
                raise ValueError(f"{name}={pair!r:.60}: expected pairs of ascending stages and seconds, ((0, 3), 0.1)")
    return tuple(found.items())


def _seconds(name: str, number: object) -> float:
    if not isinstance(number, Real) or not (float(number) >= 0 and math.isfinite(number)):
        raise ValueError(
            f"{name}={number!r}: expected a finite number of seconds, at least 0 (one number, or one a stage)"
        )
    return float(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """`Costs` spread over the stages: tuples of S seconds; tied by the stages that share weights."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    latency: tuple[float, ...]
    reduce_grad: tuple[float, ...]
    tied: Mapping[tuple[int, ...], float]
    update: tuple[float, ...]
    norm: float | None

    def of(self, op: Op, stage: int) -> float:
        """Seconds of one action of `stage`."""
        return self.column(op)[stage]

    def column(self, op: Op) -> tuple[float, ...]:
        """Seconds of `op`, by stage."""
        match op:
            case Op.F:
                return self.forward
            case Op.B:
                return self.backward
            case Op.I:
                return self.input_grad
            case Op.W:
                return self.weight_grad
            case Op.U:
                return self.update
            case _:
                raise ValueError(f"{op.value} has no cost of its own: expected one of F B I W U")


# The time of grids and tables.
UNIT_COSTS = Costs(forward=1.0, backward=1.0, input_grad=1.0, weight_grad=1.0)
