"""Liveness: one count for the checker, timelines and the planner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import product

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

from stagewright.schedules import (
    FAMILIES,
    Action,
    Costs,
    Edge,
    Message,
    MessageKind,
    Op,
    Schedule,
    build,
    check,
    lower,
    simulate,
)

from .random_schedules import schedules, steady
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
def test_by_hand(text: str, alive: list[dict[int, int]]) -> None:
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
    """Against every action of the programs, with bytes that differ by chunk."""
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


def test_a_message_for_two_stages_is_held_up_to_the_second_and_their_gradients_from_the_first_on() -> None:
    """Stage 0 feeds stages 1 and 3 of rank 1: one message there, and one back behind both."""
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
