"""Costs: what follows from what, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.inside import run_as_one
from support.sizes import fitting

from stagewright.schedules import FAMILIES, Action, Costs, Op, build, lower


def test_backward_is_twice_the_forward_unless_given() -> None:
    table = Costs(forward=[1.0, 3.0]).table(num_stages=2)
    assert table.column(Op.F) == (1.0, 3.0)
    assert table.column(Op.B) == (2.0, 6.0)
    assert table.column(Op.I) == table.column(Op.W) == (1.0, 3.0)
    assert table.latency == table.update == (0.0, 0.0)


def test_a_split_backward_adds_up_to_the_whole_unless_that_is_given() -> None:
    assert Costs(input_grad=1.0, weight_grad=[0.25, 0.5]).table(num_stages=2).column(Op.B) == (1.25, 1.5)
    table = Costs(backward=2.0, input_grad=1.5, weight_grad=1.0).table(num_stages=1)
    assert (table.column(Op.B), table.column(Op.I), table.column(Op.W)) == ((2.0,), (1.5,), (1.0,))


def test_table_knows_each_op() -> None:
    table = Costs(forward=1, backward=2, input_grad=3, weight_grad=4, update=5).table(num_stages=1)
    assert [table.of(op, 0, 7) for op in (Op.F, Op.B, Op.I, Op.W, Op.U)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    with pytest.raises(ValueError, match="REDUCE_GRAD has no cost of its own: expected one of F B I W U"):
        table.of(Op.REDUCE_GRAD, 0, 0)


def test_any_numbers_do() -> None:
    costs = Costs(forward=np.float32(0.5), backward=np.array([1, 2]), latency=(x for x in (0, 1)))  # type: ignore[arg-type]
    assert (costs.forward, costs.backward, costs.latency) == (0.5, (1.0, 2.0), (0.0, 1.0))
    assert hash(costs) == hash(Costs(forward=0.5, backward=[1, 2], latency=[0, 1]))


SECONDS = "expected a finite number of seconds"
EACH = ("forward", "backward", "latency", "update")
NO_SHARES = (-0.1, 1.1, math.nan, "x", None, [0.5, -1.0])
NO_DURATIONS = [-1.0, math.nan, math.inf, "12", [1.0, -0.5], [1.0, math.inf], ["1"]]


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        *((name, x, f"{name}=.* {SECONDS}, at least 0") for name in EACH for x in NO_DURATIONS),
        *((name, None, f"{name}=None") for name in ("forward", "latency", "update")),
        *(("sum_busy", x, "sum_busy=.*: expected a share from 0 to 1") for x in NO_SHARES),
        *(("norm", x, f"norm=.* {SECONDS}") for x in (-1.0, math.nan, "1", [1.0])),
        *((name, 1.0, "expected both or neither; give backward=") for name in ("input_grad", "weight_grad")),
        ("overhead", -1, "overhead=-1"),
        ("index_factors", [1.0, -1.0], f"index_factors=-1.0: {SECONDS}"),
        ("index_factors", 2.0, "index_factors=2.0: expected numbers of at least 0, one for each action index"),
        ("forward", [[]], r"forward=\[\]: expected numbers of at least 0, one for each action index"),
        ("latency", [[1.0, 2.0]], rf"latency=\[1.0, 2.0\]: {SECONDS}"),
    ],
)  # fmt: skip
def test_wrong_figures_are_refused_when_made(name: str, wrong: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Costs(**{name: wrong})  # type: ignore[arg-type]


def test_the_norm_is_one_number() -> None:
    assert Costs(norm=1).table(num_stages=3).norm == 1.0
    assert Costs().table(num_stages=3).norm is None


FOR_INDICES = "expected one for each of the 2 action ind"
FOR_TWO = "has 3 numbers for 2 stages: expected one number, or one per stage"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({name: [1.0, 1.0, 1.0]}, f"{name} {FOR_TWO}") for name in EACH),
        ({"input_grad": [1.0, 1.0, 1.0], "weight_grad": 1.0}, f"input_grad {FOR_TWO}"),
        ({"input_grad": 1.0, "weight_grad": [1.0, 1.0, 1.0]}, f"weight_grad {FOR_TWO}"),
        ({"backward": 2.0, "input_grad": 1.0}, "expected both or neither; give backward="),
        ({"forward": [[1.0, 2.0, 3.0], 1.0]}, f"forward of stage 0 has 3 numbers: {FOR_INDICES}"),
        ({"index_factors": [1.0]}, f"index_factors has 1 numbers: {FOR_INDICES}ices"),
    ],
)  # fmt: skip
def test_a_number_for_each_stage_or_action_index(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Costs(**given).table(num_stages=2, num_indices=2)  # type: ignore[arg-type]


def test_rows_and_factors_by_action_index() -> None:
    """One stage with a row: its other half follows index by index, factors multiply all, batches take them again."""
    costs = Costs(forward=[1.0, [2.0, 3.0]], index_factors=[1.0, 0.5])
    table = costs.table(num_stages=2, num_indices=2, num_batches=3)
    assert [table.of(Op.F, 1, k) for k in range(4)] == [2.0, 1.5, 2.0, 1.5]
    assert [table.of(Op.B, 1, k) for k in range(2)] == [4.0, 3.0]
    assert [table.of(Op.W, 0, k) for k in range(2)] == [1.0, 0.5]
    assert table.varies
    with pytest.raises(
        ValueError, match=r"F of stage 0 takes 500 ms to 1.00 s, by action index: expected costs that are the"
    ):
        _ = table.column(Op.F)
    assert Costs.from_json(costs.to_json()) == costs
    assert hash(costs) == hash(Costs(forward=(1, np.array([2, 3])), index_factors=(1, 0.5)))  # type: ignore[arg-type]
    alike = Costs(forward=[[2.0, 2.0]], index_factors=[1, 1]).table(num_stages=1, num_indices=2)
    assert not alike.varies
    assert alike.column(Op.B) == (4.0,)


def test_the_overhead_of_an_action_comes_on_top_of_each() -> None:
    costs = Costs(forward=[1.0, 2.0], input_grad=1.0, weight_grad=0.5, overhead=[0.25, 0.5], index_factors=[1, 2])
    table = costs.table(num_stages=2)
    assert [table.of(op, 1, 1) for op in (Op.F, Op.I, Op.W, Op.B)] == [4.5, 2.5, 1.5, 3.5]
    assert table.row(Op.F, 0) == (1.25, 2.25)
    assert Costs.from_json(costs.to_json()) == costs


@pytest.mark.parametrize("name", FAMILIES)
def test_what_runs_as_one_backward_is_known_before_it_is_lowered(name: str) -> None:
    """The pairs are those of the ranks' programs; each has the runtime's overhead once, and I that of messages."""
    P, M = fitting(name, 3, 6)
    schedule = build(name, num_ranks=P, num_microbatches=M)
    if schedule.is_asynchronous:
        assert run_as_one(schedule) == {}
        return
    fused = {action for program in lower(schedule).programs for action in program.fused}
    joined = run_as_one(schedule)
    assert {Action(stage, Op.I, k) for stage, found in joined.items() for k in found} == fused
    table = Costs(overhead=0.5, message_overhead=0.25).table_for(schedule)
    for stage, op, k in {action for program in schedule.compute_programs for action in program}:
        own = {Op.F: 1.75, Op.B: 2.75, Op.I: 1.25 if Action(stage, Op.I, k) in fused else 1.75, Op.W: 1.5}
        assert table.of(op, stage, k) == own[op], (stage, op, k)
