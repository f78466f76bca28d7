"""What is alive: one count for the checker, timelines and the planner; and memory over time, at every moment."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from support.inside import (
    InFlightCounts,
    RankProgram,
    Sharing,
    Step,
    Transfer,
    activations,
    count_in_flight,
    in_flight_of_chunk_order,
    message_changes,
    peak_activations,
)
from support.sizes import fitting

from stagewright.schedules import (
    FAMILIES,
    Action,
    Costs,
    Edge,
    MemoryCurve,
    MemoryPart,
    Message,
    MessageKind,
    Op,
    Schedule,
    StageBytes,
    Timeline,
    build,
    check,
    lower,
    memory_curves,
    simulate,
)

from .random_schedules import by_hand, schedules, schedules_with_costs, steady, window_of
from .reference import peak_receives


def counts(text: str) -> list[dict[int, int]]:
    return [dict(alive) for _, alive in activations([Action.parse(word) for word in text.split()])]


@pytest.mark.parametrize(
    ("text", "alive"),
    [
        ("0F0 0F1 0B0 0F2 0I1 0W1 0B2", [{0: n} for n in (1, 2, 2, 2, 2, 2, 1)]),
        ("0F0 1F0 1B0 0B0", [{0: 1, 1: 0}, {0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 0}]),
        ("0F0 0F1", [{0: 1}, {0: 1}]),  # no backward: for the forward alone
        ("0B0 0F2 0B1 0U0", [{0: 2}, {0: 2}, {0: 2}, {0: 1}]),  # a window: F0 and F1 stand before it
        ("0W0 0F1", [{0: 1}, {0: 1}]),
    ],
)
def test_alive_by_hand(text: str, alive: list[dict[int, int]]) -> None:
    assert counts(text) == alive
    assert peak_activations([Action.parse(word) for word in text.split()]) == max(sum(at.values()) for at in alive)


@steady
@given(schedules())
def test_checker_timeline_and_planner_agree(schedule: Schedule) -> None:
    """Whether a backward is split differs by microbatch in these; the planner decided it by rank once."""
    peaks = check(schedule).peak_activations
    assert simulate(schedule, Costs()).peak_activations == peaks
    planned = count_in_flight(schedule)
    if schedule.has_backward:
        assert tuple(int(np.max(rank.microbatches.sum(axis=1))) for rank in planned) == peaks


def test_an_order_in_figures_holds_what_its_programs_hold() -> None:
    """Every moment that may be the fullest, with fewer microbatches than ranks and groups of unequal sizes, too."""
    in_turns = [each for each in FAMILIES.values() if each.chunk_order is not None]
    assert {each.name for each in in_turns} >= {"1f1b", "interleaved"}
    for each, P, V, M in product(in_turns, (1, 2, 5), (1, 2, 3), (1, 3, 5, 7, 16)):
        if V > 1 and not each.takes_chunks:
            continue
        schedule = build(each.name, num_ranks=P, num_microbatches=M, num_chunks=V if each.takes_chunks else None)
        quick = in_flight_of_chunk_order(each.chunk_order(P, M, V), num_chunks=V)
        for ours, counted in zip(quick, count_in_flight(schedule), strict=True):
            for figure in (field.name for field in fields(InFlightCounts)):
                assert np.array_equal(getattr(ours, figure), getattr(counted, figure)), (each.name, P, V, M, figure)


def test_the_corners_among_the_moments_are_the_fullest_whatever_a_microbatch_takes() -> None:
    draw = np.random.default_rng(0)
    for P, V, M in ((3, 2, 7), (2, 3, 6), (4, 3, 12)):
        schedule = build("interleaved", num_ranks=P, num_microbatches=M, num_chunks=V)
        for rank, (program, stages) in enumerate(zip(schedule.programs, schedule.placement, strict=True)):
            for _ in range(5):
                kept, again, weights, summing = figures = draw.uniform(0, 9, (4, V))
                bytes_of, done, most = dict(zip(stages, figures.T.tolist(), strict=True)), dict.fromkeys(stages, 0), 0.0
                for action, alive in activations(program):
                    here = sum(n * bytes_of[stage][0] for stage, n in alive.items())
                    here += bytes_of[action.stage][1] if action.op is Op.B else 0.0
                    here += sum(bytes_of[stage][2] for stage, count in done.items() if count)
                    here += sum(bytes_of[stage][3] for stage, count in done.items() if count == M)
                    most = max(most, here)
                    done[action.stage] += action.op is Op.B
                moments = count_in_flight(schedule)[rank].counts @ np.concatenate([kept, weights, summing, again])
                assert moments.max() == pytest.approx(most, rel=1e-12)


def messages_held(program: RankProgram) -> Iterator[tuple[Step, set[Message]]]:
    """Each step of a rank with the messages that it holds then."""
    held: set[Message] = set()
    for step, added, removed in message_changes(program):
        held |= set(added)
        yield step, set(held)
        held -= set(removed)


def test_messages_are_held_from_posting_to_use_and_from_sending_to_proof() -> None:
    first, second = lower(build("1f1b", num_ranks=2, num_microbatches=2), sharing=Sharing(receives_ahead=1)).programs
    held = {str(step): sorted(map(str, messages)) for step, messages in messages_held(first)}
    act = "activations of microbatch {} from stage 0 to stage 1"
    grad = "gradients of microbatch {} from stage 1 to stage 0"
    assert held["0F0"] == [grad.format(0)]
    assert held["0B0"] == [act.format(0), act.format(1), grad.format(0)]
    assert held["0B1"] == [act.format(1), grad.format(1)]  # the first gradient proves the first activations received
    for program in (first, second):
        received = {s.message for s in program.steps if isinstance(s, Transfer) and not s.is_send}
        most = max(sum(message in received for message in held) for _, held in messages_held(program))
        assert most == peak_receives(program)
    # Stage 0 feeds stages 1 and 3 of rank 1: one message there, and one back behind both.
    chain = build("interleaved", num_ranks=2, num_microbatches=2, num_chunks=2)
    programs = lower(chain.with_edges([*chain.stage_edges, Edge(0, 3)])).programs
    act, grad = Message(MessageKind.ACT, 0, 1, 0), Message(MessageKind.GRAD, 1, 0, 0)
    held = {str(step): set(messages) for step, messages in messages_held(programs[1])}
    assert [name for name in ("1F0", "3F0", "3B0") if act in held[name]] == ["1F0", "3F0"]
    assert [name for name in ("3F0", "3B0", "1B0") if grad in held[name]] == ["3B0", "1B0"]
    between = {
        s.message
        for p in programs
        for s in p.steps
        if isinstance(s, Transfer) and {s.message.src, s.message.dst} == {0, 3}
    }
    assert between == set()


def at(curve: MemoryCurve, part: MemoryPart, time: float) -> float:
    before = [n for n, when in enumerate(curve.times) if when <= time]
    return curve.parts[part][before[-1]] if part in curve.parts else 0.0


def middles(timeline: Timeline) -> list[float]:
    """Moments at which nothing changes."""
    times = sorted({t for rank in timeline.ranks for _, s, e in (*rank.compute, *rank.comm) for t in (s, e)})
    return [(a + b) / 2 for a, b in pairwise(times)]


def slow_activations(timeline: Timeline, rank: int, time: float, stages: Sequence[StageBytes]) -> float:
    """Look at every microbatch of every stage."""
    spans = {span.what: span for span in timeline.ranks[rank].compute}
    found = 0.0
    forward_only = all(action.op is Op.F for action in spans)
    for (stage, op, k), start, end in spans.values():
        if op is Op.F:
            lasts = [spans[a].end for a in spans if a.stage == stage and a.index == k and a.op in (Op.B, Op.W)]
            over = end if forward_only else lasts[0]
            found += stages[stage].activations * (start <= time < over)
        if op in (Op.B, Op.I):
            found += stages[stage].again * (start <= time < end)
    return found


def slow_workspace(timeline: Timeline, rank: int, time: float, stages: Sequence[StageBytes]) -> float:
    running = [what for what, start, end in timeline.ranks[rank].compute if start <= time < end]
    return sum(getattr(stages[what.stage], "update" if what.op is Op.U else "workspace") for what in running)


def slow_gradients(timeline: Timeline, rank: int, time: float, stages: Sequence[StageBytes]) -> float:
    found = 0.0
    for stage in timeline.schedule.placement[rank]:
        spans = [s for s in timeline.ranks[rank].compute if s.what.stage == stage]
        first = min((end for what, _, end in spans if what.op in (Op.B, Op.W)), default=None)
        last = min((end for what, _, end in spans if what.op is Op.U), default=timeline.end + 1)
        found += stages[stage].gradients * (first is not None and first <= time < last)
    return found


@pytest.mark.thorough
@steady
@given(schedules_with_costs())
def test_every_moment_is_as_counted_one_by_one(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    timeline = simulate(schedule, costs)
    stages = [
        StageBytes(
            weights=1,
            gradients=2.0**s,
            optimizer=3,
            activations=3.0**s,
            again=5,
            workspace=7 + s,
            output=11,
            update=13 + s,
        )
        for s in range(schedule.num_stages)
    ]
    curves = memory_curves(timeline, stages)
    slow = {
        MemoryPart.ACTIVATIONS: slow_activations,
        MemoryPart.WORKSPACE: slow_workspace,
        MemoryPart.GRADIENTS: slow_gradients,
    }
    for rank, curve in enumerate(curves):
        assert list(curve.times) == sorted(curve.times)
        assert curve.times[0] == timeline.start
        own = len(schedule.placement[rank])
        for time in middles(timeline):
            assert at(curve, MemoryPart.WEIGHTS, time) == own
            assert at(curve, MemoryPart.OPTIMIZER, time) == 3 * own
            for part, count in slow.items():
                assert at(curve, part, time) == count(timeline, rank, time, stages), (rank, part, time)


def test_messages_over_time() -> None:
    """
    rank 0 | 0F0 | 0F1 |     | 0B0 |     | 0B1 | 0U
    rank 1 |     | 1F0 | 1B0 | 1F1 | 1B1 | 1U
    """
    schedule = by_hand("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", microbatches=2)
    timeline = simulate(schedule, Costs(forward=1.0, backward=1.0, update=1.0))
    stage = StageBytes(weights=100, gradients=10, optimizer=200, activations=5, workspace=1, output=2)
    first, _ = memory_curves(timeline, [stage, stage])
    # Outputs that were sent, until a gradient back tells that they were received, and gradients posted ahead.
    moments = [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5]
    assert [at(first, MemoryPart.MESSAGES, t) for t in moments] == [4, 6, 8, 8, 4, 4, 0]
    assert first.peak == max(first.total)


@pytest.mark.thorough(but=["eager-1f1b", "2bw"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_hold_versions_and_let_go(name: str) -> None:
    P, M = fitting(name, 3, 6)
    schedule = build(name, num_ranks=P, num_microbatches=M)
    timeline = simulate(schedule, Costs(forward=1.0, latency=0.25, update=0.5))
    stage = StageBytes(weights=100, gradients=10, activations=5, workspace=1, output=2)
    for rank, curve in enumerate(memory_curves(timeline, [stage] * schedule.num_stages)):
        own = len(schedule.placement[rank])
        versions = timeline.peak_versions[rank] if schedule.is_asynchronous else 1
        assert set(curve.parts[MemoryPart.WEIGHTS]) == {100 * own * versions}
        assert max(curve.parts[MemoryPart.ACTIVATIONS]) == 5 * timeline.peak_activations[rank]
        assert curve.parts[MemoryPart.ACTIVATIONS][-1] == 0
        assert curve.parts[MemoryPart.MESSAGES][-1] <= max(curve.parts[MemoryPart.MESSAGES])
        assert curve.parts[MemoryPart.GRADIENTS][-1] == (10 * own if schedule.is_asynchronous else 0)


def test_a_window_begins_with_what_was_there() -> None:
    schedule = build("2bw", num_ranks=3, num_microbatches=4, num_batches=6)
    whole = simulate(schedule, Costs(forward=1.0, latency=0.25, update=0.5))
    window = window_of(whole, 2, 5)
    stages = [StageBytes(weights=100, gradients=10, activations=5, workspace=1, output=2)] * 3
    for seen, every, trace in zip(
        memory_curves(window, stages), memory_curves(whole, stages), window.ranks, strict=True
    ):
        for _, start, end in trace.compute:
            middle = (start + end) / 2
            if start < window.ranks[0].compute[-1].start - 12:  # later the window lacks the last uses
                for part in (MemoryPart.WORKSPACE, MemoryPart.MESSAGES, MemoryPart.GRADIENTS, MemoryPart.WEIGHTS):
                    assert at(seen, part, middle) == at(every, part, middle)


def test_zero_cost_actions_still_count_at_the_peak() -> None:
    schedule = build("gpipe", num_ranks=2, num_microbatches=3)
    stage = StageBytes(activations=5, workspace=9)
    for curve in memory_curves(simulate(schedule, Costs(forward=0.0, backward=0.0)), [stage, stage]):
        assert curve.peak == 3 * 5 + 9


def test_bad_figures_are_named() -> None:
    with pytest.raises(ValueError, match="activations=-1"):
        StageBytes(activations=-1)
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=2), Costs())
    with pytest.raises(ValueError, match="1 stages for a schedule of 2"):
        memory_curves(timeline, [StageBytes()])
