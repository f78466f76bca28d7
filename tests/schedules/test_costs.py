"""Costs, and what the event simulator makes of them; what both refuse. Against a slow simulator: test_links.py.

The lower bound: never above what any order reaches, and reached by the best order of small cases.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from support.inside import MOVE_OPS, Processor, ScheduleWiring, Taken, own_durations, replicate, run_as_one
from support.replay_cases import cases
from support.sizes import fitting

from stagewright.schedules import (
    FAMILIES,
    Action,
    AllReduce,
    Costs,
    Link,
    Links,
    Op,
    Schedule,
    ScheduleError,
    Span,
    build,
    lower,
    lower_bound,
    simulate,
)

from .random_schedules import by_hand


def test_backwards_and_halves_that_are_not_given() -> None:
    table = Costs(forward=[1.0, 3.0]).table(num_stages=2)
    assert table.column(Op.F) == (1.0, 3.0)
    assert table.column(Op.B) == (2.0, 6.0)
    assert table.column(Op.I) == table.column(Op.W) == (1.0, 3.0)
    assert table.latency == table.update == (0.0, 0.0)
    assert Costs(input_grad=1.0, weight_grad=[0.25, 0.5]).table(num_stages=2).column(Op.B) == (1.25, 1.5)
    table = Costs(backward=2.0, input_grad=1.5, weight_grad=1.0).table(num_stages=1)
    assert (table.column(Op.B), table.column(Op.I), table.column(Op.W)) == ((2.0,), (1.5,), (1.0,))
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


def test_rows_factors_and_overhead_by_action_index() -> None:
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
    costs = Costs(forward=[1.0, 2.0], input_grad=1.0, weight_grad=0.5, overhead=[0.25, 0.5], index_factors=[1, 2])
    table = costs.table(num_stages=2)
    assert [table.of(op, 1, 1) for op in (Op.F, Op.I, Op.W, Op.B)] == [4.5, 2.5, 1.5, 3.5]
    assert table.row(Op.F, 0) == (1.25, 2.25)
    assert Costs.from_json(costs.to_json()) == costs


@pytest.mark.thorough(but=["interleaved"])
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


FB_U = Costs(forward=1.0, backward=2.0, update=[0.5, 1.0, 0.25, 2.0])


def test_a_norm_counts_behind_no_update() -> None:
    """It was left out where updates cost nothing, while the lower bound counted it."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=2)
    costs = Costs(forward=1.0, backward=2.0, norm=0.5)
    timeline = simulate(schedule, costs)
    assert timeline.makespan == lower_bound(schedule, costs) == 9.5
    assert [trace.compute[-1] for trace in timeline.ranks] == [Span(Action(s, Op.U, 0), 9.5, 9.5) for s in (0, 1)]


@pytest.mark.parametrize("costs", [FB_U, Costs(update=1.0, norm=1.0)])
def test_an_evaluation_has_no_epilogue(costs: Costs) -> None:
    schedule = build("1f1b", num_ranks=4, num_microbatches=3).forward_only()
    assert all(s.what.op is Op.F for trace in simulate(schedule, costs).ranks for s in trace.compute)  # type: ignore[union-attr]


def test_orders_that_cannot_be_simulated() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 never gets what 0B0 needs: the schedule deadlocks; check\(sched"):
        simulate(by_hand("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", microbatches=2), Costs())
    program = (Action(0, Op.REDUCE_GRAD, 0),)
    with pytest.raises(ScheduleError, match="runs REDUCE_GRAD of stage 0, which has no cost: expected F B I W U"):
        simulate(replace(by_hand("0F0 0B0", microbatches=1), programs=(program,)), Costs())


CASES = [each for each in cases(150, seed=1) if each.costs.sum_busy != 0.0]


@pytest.mark.parametrize(
    ("taken", "end"),
    [
        ([], 13.0),
        ([(0.0, 10.0, 0.5)], 13.0),  # before it
        ([(12.0, 20.0, 0.5)], 14.0),  # of its 3 seconds one is left, at half the rate
        ([(11.0, 12.0, 0.5)], 13.5),
        ([(11.0, 15.0, 1.0)], 17.0),  # stands still meanwhile
        ([(8.0, 12.0, 0.5), (11.0, 13.0, 0.75)], 15.0),  # 1/2 + 1/4 + 1/4 by 13, then 2 at the whole rate
        ([(13.0, 20.0, 1.0)], 13.0),  # behind it
    ],
)
def test_seconds_beside(taken: list[tuple[float, float, float]], end: float) -> None:
    """Three seconds of work from 10 on."""
    processor = Processor()
    for each in taken:
        processor.take(Taken(*each))
    assert processor.end(10.0, 3.0) == pytest.approx(end)
    assert processor.end(11.5, 0.0) == 11.5  # nothing to do takes no time


def test_updates_share_the_processor_with_sums_and_gathers() -> None:
    """Two chunks, each updated in parts: U0 at 8, beside it the all-reduce of stage 1 (from 4 to 12), then gathers.

    Stage 0's sum queues to 14. U0 runs from 14 to 16, its gather from 16 to 20, beside U1.
    """
    schedule = replicate(build("interleaved", num_ranks=1, num_microbatches=1, num_chunks=2), 2)
    around = ((0, 1), (1, 0))
    links = Links(
        network=Link(),
        sums=(
            AllReduce(stage=0, seconds=2.0, gather=4.0, ways=around),
            AllReduce(stage=1, seconds=8.0, gather=4.0, ways=around),
        ),
    )
    costs = Costs(forward=1.0, backward=[2.0, 2.0], update=[2.0, 3.0], sum_busy=0.5)
    found = simulate(schedule, costs, links)
    updates = [(s.what.stage, s.start, s.end) for s in found.ranks[0].compute if s.what.op is Op.U]
    # B0 runs beside the first sum from 4 to 8; U1 gets on by 2 of its 3 seconds beside the gather, which ends at 20.
    assert updates == [(0, 14.0, 16.0), (1, 16.0, 21.0)]
    assert found.makespan == 25.0


@pytest.mark.thorough(but=["2", "112", "117"])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_actions_get_what_is_left_of_the_processor(number: int) -> None:
    """Each as many seconds as it costs; and it starts as early as it can, given how long all of them took."""
    schedule, costs, links = CASES[number].schedule, CASES[number].costs, CASES[number].links
    timeline = simulate(schedule, costs, links)
    table = costs.table_for(schedule)
    steps = ScheduleWiring(schedule, table, links).joint_steps
    seconds = {(each.stages, each.op): each.seconds for each in steps if each.op not in MOVE_OPS}
    for trace in timeline.ranks:
        taken = [
            (span.end - seconds[what.stages, what.op], span.end, max(table.sum_busy[s] for s in what.stages))
            for span in trace.collectives
            if (what := span.what)
        ]
        for (stage, op, k), start, end in trace.compute:
            cost = table.update[stage] if op is Op.U else table.of(op, stage, k)
            assert rate_of(taken, start, end) == pytest.approx(cost, abs=1e-9)
    assert lower_bound(schedule, costs, links) <= timeline.makespan * (1 + 1e-9)
    if links is None and not any(op is Op.U for program in schedule.compute_programs for _, op, _ in program):
        again = simulate(schedule, own_durations(schedule, timeline, replace(costs, sum_busy=0.0)))
        for one, other in zip(timeline.ranks, again.ranks, strict=True):
            for a, b in zip(one.compute, other.compute, strict=True):
                if a.what.op is not Op.U:
                    assert a == (b.what, pytest.approx(b.start), pytest.approx(b.end))


def rate_of(taken: list[tuple[float, float, float]], start: float, end: float) -> float:
    """Seconds of a whole processor that are left between two moments."""
    moments = sorted({start, end, *(at for each in taken for at in each[:2] if start < at < end)})
    left = 0.0
    for a, b in pairwise(moments):
        left += (b - a) * (1 - max((share for x, y, share in taken if x < (a + b) / 2 < y), default=0.0))
    return left


def orders(stages: Sequence[int], num_microbatches: int, ops: str) -> Iterator[tuple[Action, ...]]:
    """All orders of the actions of one rank in which each (stage, microbatch) has its ops in this order."""
    chains = [[Action(s, Op(op), k) for op in ops] for s in stages for k in range(num_microbatches)]

    def continued(done: tuple[Action, ...], at: tuple[int, ...]) -> Iterator[tuple[Action, ...]]:
        if all(i == len(ops) for i in at):
            yield done
        for j, i in enumerate(at):
            if i < len(ops):
                yield from continued((*done, chains[j][i]), (*at[:j], i + 1, *at[j + 1 :]))

    return continued((), (0,) * len(chains))


def best_makespan(P: int, V: int, M: int, ops: str, costs: Costs) -> float:
    placement = tuple(tuple(range(rank, P * V, P)) for rank in range(P))
    best = float("inf")
    for programs in product(*(list(orders(stages, M, ops)) for stages in placement)):
        schedule = Schedule(name="any", placement=placement, programs=programs, num_microbatches=M)
        try:
            best = min(best, simulate(schedule, costs).makespan)
        except ScheduleError:  # a deadlock
            continue
    return best


@pytest.mark.thorough(but=["3-1-1-FB"])
@pytest.mark.parametrize(
    ("P", "V", "M", "ops"),
    [(2, 1, 2, "FB"), (2, 2, 1, "FB"), (3, 1, 1, "FB"), (1, 2, 2, "FB"), (2, 1, 2, "F"), (2, 1, 2, "FIW")],
)
def test_the_best_of_all_orders_reaches_it(P: int, V: int, M: int, ops: str) -> None:
    """Not so in general: these are small enough, for any costs, latencies and updates."""
    numbers = random.Random(P * 100 + V * 10 + M)
    program = " ".join(f"{s}{op}{k}" for s in range(P * V) for k in range(M) for op in ops)
    words = [[word for word in program.split() if int(word[0]) % P == rank] for rank in range(P)]
    some_order = by_hand(
        *map(" ".join, words), microbatches=M, placement=[list(range(rank, P * V, P)) for rank in range(P)]
    )
    for _ in range(3 if ops == "FIW" or P == 1 else 12):  # thousands of orders; one rank waits for nobody
        costs = Costs(
            forward=[numbers.randint(1, 5) for _ in range(P * V)],
            input_grad=[numbers.randint(1, 9) for _ in range(P * V)],
            weight_grad=[numbers.randint(1, 5) for _ in range(P * V)],
            latency=numbers.choice([0, 1, 2]),
            update=numbers.choice([0, 3]),
        )
        assert lower_bound(some_order, costs) == best_makespan(P, V, M, ops, costs)


@pytest.mark.parametrize("norm", [None, 0.25])
def test_updates_behind_the_program(norm: float | None) -> None:
    """The last rank to end is the first one; with a norm all update together, and the slowest update counts."""
    schedule = build("1f1b", num_ranks=3, num_microbatches=4)
    costs = Costs(forward=1.0, backward=2.0, update=[0.5, 4.0, 1.0], norm=norm)
    expected = 18 + (0.5 + 3.0 - 1.5 if norm is None else 0.25 + 4.0)  # rank 1 ends 2 before rank 0
    assert lower_bound(schedule, costs) == simulate(schedule, costs).makespan == expected


def test_a_bound_knows_updates_of_replicas_and_in_the_program() -> None:
    """Stage 0 on ranks 0 and 1, stage 1 on rank 1: the one microbatch runs stage 0 on rank 0, which updates at once."""
    schedule = by_hand("0F0 0B0", "1F0 1B0", microbatches=1, placement=[[0], [0, 1]])
    costs = Costs(forward=1.0, backward=2.0, update=[0.0, 10.0])
    assert lower_bound(schedule, costs) == simulate(schedule, costs).makespan == 1 + 1 + 2 + 10
    # Each U after its batch; the last update of stage 0 comes behind all else.
    schedule = by_hand("0F0 0B0 0U0 0F1 0B1 0U1", "1F0 1B0 1U0 1F1 1B1 1U1", microbatches=1, batches=2)
    costs = Costs(forward=1.0, backward=2.0, update=0.5)
    # Rank 1: 1 before its first, work 2 * 3, then B on stage 0 and its update. Its own first update might come late.
    assert lower_bound(schedule, costs) == 1 + 6 + 2 + 0.5
    assert simulate(schedule, costs).makespan == 2 * 6.5
