"""Costs of actions and the latency of messages: the input of the simulator."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from operator import add, mul
from statistics import fmean
from typing import Any, TypeVar, cast

from ..ir import Action, Op, Schedule
from ..program import run_as_one
from ..wording import duration

PerStage = float | Sequence[float]
PerAction = float | Sequence[float | Sequence[float]]
Ties = Sequence[tuple[tuple[int, ...], float]]
Row = tuple[float, ...]
Rows = tuple[Row, ...]
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of ONE stage action (of a chunk, if there are several per rank).

    Each is one number for all stages or a sequence with one per stage; for F, B, I and W a stage may have a row instead
    of
    its number, with one number per action index: microbatches of unequal size. If only one of `backward` and
    (`input_grad`, `weight_grad`) is given, the other follows from `backward = input_grad + weight_grad` (halves, if
    only `backward` is known).

    Arguments:
        forward: F [s].
        backward: B [s]; 2 * forward by default.
        input_grad, weight_grad: I and W [s].
        index_factors: by action index, factors of F, B, I and W at every stage. A row, and these, have a number for
            each index of a batch (repeated for each batch) or of the whole program.
        forward_exchange, backward_exchange: of the seconds of F, and of B or I, those of collectives within the stage:
            of a group of experts, or of one that divides sequences [s]. They are paid in full, except by a forward and
            a backward that run together (`schedules.overlap`). Scaled by `index_factors`, too.
        overhead: added to each F, B, I and W of the stage: the runtime between two actions [s]. Messages leave after
            it. Of an I and its W that run as one (`run_as_one`) only W has it.
        message_overhead: added to each F, B and I, for the messages that it receives and sends [s].
        latency: of a message that leaves the stage [s]; it delays, and occupies no lane.
        reduce_grad: all-reduce of the stage's gradients over its replicas, if any [s]. It begins when the last of them
            begins it (see `collectives`), and overlaps with compute; the update waits for it.
        sum_busy: share of the processor that a stage's all-reduces and gathers of weights take on their ranks (0 to 1):
            an action that overlaps with one is slower (`links`). For weights of several stages the largest of theirs.
            It also applies to sums of links.
        tied: all-reduces of the gradients of weights that several stages share, as (stages, seconds [s]) pairs; under
            flush schedules, if the stages are on several ranks.
        update: optimizer step of the stage, the epilogue of a flush schedule [s].
        offload, reload: activations of one microbatch of the stage over its rank's link to the host, and back [s]. They
            occupy that direction of the link, and no compute lane.
        norm: global gradient norm and clipping, for which all ranks wait before they update [s]; None: each rank
            updates independently.
        around: time of a step outside of its actions, sums and updates: reading the batch before, and the results after
            them [s]. Nothing overlaps with it.

    Raises ValueError for anything but finite seconds of at least 0, shares from 0 to 1, and for half of a split; their
    table also for more seconds of exchange than the action has.

    >>> Costs(forward=1.0, backward=3.0).table(num_stages=2).column(Op.W)
    (1.5, 1.5)
    >>> longer = Costs(forward=1.0, backward=[1.0, [1.0, 4.0]], index_factors=[1, 2])
    >>> table = longer.table(num_stages=2)
    >>> table.of(Op.F, 0, 1), table.of(Op.B, 1, 1), table.varies
    (2.0, 8.0, True)
    >>> Costs(forward=1.0, backward=3.0, overhead=0.25).table(num_stages=1).of(Op.W, 0, 0)
    1.75
    """

    forward: PerAction = 1.0
    backward: PerAction | None = None
    input_grad: PerAction | None = None
    weight_grad: PerAction | None = None
    forward_exchange: PerStage = 0.0
    backward_exchange: PerStage = 0.0
    overhead: PerStage = 0.0
    message_overhead: PerStage = 0.0
    latency: PerStage = 0.0
    reduce_grad: PerStage = 0.0
    sum_busy: PerStage = 0.0
    tied: Ties = ()
    update: PerStage = 0.0
    norm: float | None = None
    around: float = 0.0
    offload: PerStage = 0.0
    reload: PerStage = 0.0
    index_factors: Sequence[float] | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not each.default:
                convert = _CONVERT.get(each.name, _one_or_several(_seconds))
                object.__setattr__(self, each.name, convert(each.name, value))
        if (self.input_grad is None) != (self.weight_grad is None):
            raise ValueError(
                f"input_grad={self.input_grad}, weight_grad={self.weight_grad}: expected both or neither; "
                f"give backward= for a backward that is not split"
            )

    def to_json(self) -> str:
        """One JSON object with the given costs, in seconds."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps({name: value for name, value in given.items() if value is not None})

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Read `to_json`'s form; ValueError says what is unknown or unreadable."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not costs: {error}") from None
        known = [each.name for each in fields(cls)]
        if not isinstance(data, dict) or not set(data) <= set(known):
            found = sorted(data) if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"costs with {found}: expected an object with some of {', '.join(known)}")
        return cls(**data)

    @property
    def free_of_overhead(self) -> Costs:
        """The same without overhead around actions."""
        return replace(self, overhead=0.0, message_overhead=0.0)

    def table_for(self, schedule: Schedule) -> CostTable:
        """The costs of the stages and action indices of a schedule."""
        return self.table(
            num_stages=schedule.num_stages,
            num_indices=schedule.batch_indices,
            num_batches=schedule.num_batches,
            as_one=run_as_one(schedule) if self.overhead else None,
        )

    def table(
        self,
        *,
        num_stages: int,
        num_indices: int | None = None,
        num_batches: int = 1,
        as_one: Mapping[int, Collection[int]] | None = None,
    ) -> CostTable:
        """The costs as a table: one number per stage each, or a row by action index. `num_indices`: of a batch; if
        given, a row must have as many numbers, or num_batches times as many. `as_one`: by stage, the indices of I that
        run with their W as one backward. Raises ValueError for costs of another number of stages, or of indices."""
        missing = [stages for stages, _ in self.tied if stages[-1] >= num_stages]
        if missing:
            raise ValueError(f"tied={missing[0]}: expected stages below {num_stages}")
        factors = (1.0,) if self.index_factors is None else tuple(self.index_factors)
        allowed = {len(factors)} if num_indices is None else {num_indices, num_indices * num_batches}
        if self.index_factors is not None:
            _check_length("index_factors", factors, allowed)

        def column(name: str) -> tuple[float, ...]:
            return _spread(name, getattr(self, name), num_stages)

        def rows(name: str) -> Rows:
            found: list[Row] = []
            for stage, each in enumerate(_spread(name, getattr(self, name), num_stages)):
                found.append((each,) if isinstance(each, float) else tuple(each))
                if num_indices is not None and not isinstance(each, float):
                    _check_length(f"{name} of stage {stage}", each, allowed)
            return tuple(found)

        forward = rows("forward")
        if self.input_grad is not None:
            input_grad, weight_grad = rows("input_grad"), rows("weight_grad")
            whole = tuple(together(i, w, add) for i, w in zip(input_grad, weight_grad, strict=True))
            backward = whole if self.backward is None else rows("backward")
        else:
            doubled = tuple(tuple(2 * f for f in row) for row in forward)
            backward = doubled if self.backward is None else rows("backward")
            input_grad = weight_grad = tuple(tuple(b / 2 for b in row) for row in backward)
        exchanges = {Op.F: rows("forward_exchange"), Op.B: rows("backward_exchange")}
        _check_exchanges("forward", exchanges[Op.F], forward)
        _check_exchanges("backward", exchanges[Op.B], backward)
        by_op = {Op.F: forward, Op.B: backward, Op.I: input_grad, Op.W: weight_grad}
        if self.index_factors is not None:
            by_op, exchanges = _scaled(by_op, factors), _scaled(exchanges, factors)
        size = (num_indices or 1) * num_batches
        overhead = _overhead_rows(column("overhead"), column("message_overhead"), as_one or {}, size)
        by_op = {
            op: tuple(together(row, own, add) for row, own in zip(rows, overhead[op], strict=True))
            for op, rows in by_op.items()
        }
        return CostTable(
            rows=by_op | {Op.U: tuple((s,) for s in column("update"))},
            latency=column("latency"),
            reduce_grad=column("reduce_grad"),
            sum_busy=column("sum_busy"),
            tied=dict(self.tied),
            norm=self.norm,
            around=self.around,
            offload=column("offload"),
            reload=column("reload"),
            exchanges=exchanges,
        )


def _scaled(by_op: Mapping[Op, Rows], factors: Row) -> dict[Op, Rows]:
    return {op: tuple(together(row, factors, mul) for row in rows) for op, rows in by_op.items()}


def _overhead_rows(
    overhead: Sequence[float], of_messages: Sequence[float], as_one: Mapping[int, Collection[int]], number: int
) -> dict[Op, list[Row]]:
    """Overhead of actions by op and stage; for an I whose W runs with it, by index."""
    both: list[Row] = [(own + more,) for own, more in zip(overhead, of_messages, strict=True)]
    by_op: dict[Op, list[Row]] = {Op.F: both, Op.B: both, Op.I: [*both], Op.W: [(own,) for own in overhead]}
    for stage, indices in as_one.items():
        by_op[Op.I][stage] = tuple(of_messages[stage] if k in indices else both[stage][0] for k in range(number))
    return by_op


def columns(rows: Iterable[Sequence[float]]) -> list[float | Sequence[float]]:
    """[S] for `Costs`: one number if a row is constant."""
    return [row[0] if len(set(row)) == 1 else row for row in rows]


def by_stage(value: float | Sequence[float], num_stages: int) -> tuple[float, ...]:
    return (value,) * num_stages if isinstance(value, float | int) else tuple(value)


def _spread(name: str, value: float | Sequence[Value], num_stages: int) -> tuple[Value | float, ...]:
    each = (value,) * num_stages if isinstance(value, float) else tuple(value)
    if len(each) != num_stages:
        raise ValueError(
            f"{name} has {len(each)} numbers for {num_stages} stages: expected one number, or one per stage"
        )
    return each


def _check_length(name: str, row: Sequence[float], allowed: set[int]) -> None:
    if len(row) not in allowed:
        raise ValueError(
            f"{name} has {len(row)} numbers: expected one for each of the {min(allowed)} action indices of a batch"
        )


def together(one: Row, other: Row, how: Callable[[float, float], float]) -> Row:
    """Two rows combined number by number, the shorter one repeated."""
    length = max(len(one), len(other))
    return tuple(how(one[k % len(one)], other[k % len(other)]) for k in range(length))


def _check_exchanges(name: str, exchanges: Rows, rows: Rows) -> None:
    for stage, ((own,), row) in enumerate(zip(exchanges, rows, strict=True)):
        if own > min(row) * (1 + 1e-9):
            raise ValueError(
                f"{name}_exchange of stage {stage} is {own} of the {min(row)} seconds of {name}: expected a part of "
                f"these"
            )


def _several(value: object) -> Iterable[object] | None:
    return value if isinstance(value, Iterable) and not isinstance(value, str) else None


def _one_or_several(read: Callable[[str, object], object]) -> Callable[[str, object], object]:
    def convert(name: str, value: object) -> object:
        several = _several(value)
        return read(name, value) if several is None else tuple(read(name, each) for each in several)

    return convert


def _row(name: str, value: object) -> Row:
    several = _several(value)
    row = () if several is None else tuple(_seconds(name, number) for number in several)
    if not row:
        raise ValueError(f"{name}={value!r:.60}: expected numbers of at least 0, one for each action index")
    return row


def _seconds_or_row(name: str, value: object) -> float | Row:
    return _seconds(name, value) if _several(value) is None else _row(name, value)


def _ties(name: str, value: object) -> tuple[tuple[tuple[int, ...], float], ...]:
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
            f"{name}={number!r}: expected a finite number of seconds, at least 0 (one number, or one per stage)"
        )
    return float(number)


def _share(name: str, number: object) -> float:
    if not isinstance(number, Real) or not 0 <= float(number) <= 1:
        raise ValueError(f"{name}={number!r}: expected a share from 0 to 1 (one number, or one per stage)")
    return float(number)


COST_OF_OP = {Op.F: "forward", Op.B: "backward", Op.I: "input_grad", Op.W: "weight_grad"}
# Of measured actions: of those that ran together what was saved is in their seconds.
NOT_APART: Mapping[str, Any] = {"forward_exchange": 0.0, "backward_exchange": 0.0}
_CONVERT: Mapping[str, Callable[[str, object], object]] = {
    **dict.fromkeys(COST_OF_OP.values(), _one_or_several(_seconds_or_row)),
    "sum_busy": _one_or_several(_share),
    "tied": _ties,
    "norm": _seconds,
    "around": _seconds,
    "index_factors": _row,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """`Costs` of S stages: S seconds or shares each, and by op and stage a row of seconds by action index, of length 1
    if constant, repeated beyond its end."""

    rows: Mapping[Op, Rows]
    latency: tuple[float, ...]
    reduce_grad: tuple[float, ...]
    sum_busy: tuple[float, ...]
    tied: Mapping[tuple[int, ...], float]
    norm: float | None
    around: float
    offload: tuple[float, ...]
    reload: tuple[float, ...]
    exchanges: Mapping[Op, Rows]  # of F, and of B or I: part of their seconds

    @property
    def update(self) -> tuple[float, ...]:
        return tuple(row[0] for row in self.rows[Op.U])

    @property
    def varies(self) -> bool:
        """Whether an action takes longer at one index than at another."""
        return any(len(set(row)) > 1 for rows in self.rows.values() for row in rows)

    def of(self, op: Op, stage: int, index: int) -> float:
        row = self.row(op, stage)
        return row[index % len(row)]

    def exchange(self, action: Action) -> float:
        """Seconds of an action that are collectives within its stage."""
        stage, op, index = action
        rows = self.exchanges.get(Op.B if op is Op.I else op)
        if rows is None or not any(rows[stage]):
            return 0.0
        return min(rows[stage][index % len(rows[stage])], self.of(op, stage, index))

    def hidden(self, forward: Action, backward: Action) -> float:
        """Seconds that both save when they run together: the exchanges of one while the other computes."""
        exchanges = self.exchange(forward), self.exchange(backward)
        if not any(exchanges):
            return 0.0
        computes = [self.of(a.op, a.stage, a.index) - x for a, x in zip((forward, backward), exchanges, strict=True)]
        return min(computes[0], exchanges[1]) + min(computes[1], exchanges[0])

    @property
    def without_exchanges(self) -> CostTable:
        """The seconds of compute alone."""
        rows = {
            op: tuple(
                tuple(x - self.exchange(op(stage, k)) for k, x in enumerate(row)) for stage, row in enumerate(rows)
            )
            for op, rows in self.rows.items()
        }
        return replace(self, rows=rows, exchanges={})

    def row(self, op: Op, stage: int) -> Row:
        """Seconds of the actions of one op and stage, by index; one number if constant."""
        if op not in self.rows:
            raise ValueError(f"{op.value} has no cost of its own: expected one of F B I W U")
        return self.rows[op][stage]

    def column(self, op: Op) -> tuple[float, ...]:
        """Seconds of `op`, by stage; ValueError if they differ by action index."""
        rows = [self.row(op, stage) for stage in range(len(self.latency))]
        for stage, row in enumerate(rows):
            if len(set(row)) > 1:
                raise ValueError(
                    f"{op.value} of stage {stage} takes {duration(min(row))} to {duration(max(row))}, by action index: "
                    f"expected costs that are the same for all microbatches here"
                )
        return tuple(row[0] for row in rows)

    def means(self, op: Op) -> tuple[float, ...]:
        return tuple(fmean(self.row(op, stage)) for stage in range(len(self.latency)))


# One unit of time per action, as in grids and tables.
UNIT_COSTS = Costs(forward=1.0, backward=1.0, input_grad=1.0, weight_grad=1.0)
