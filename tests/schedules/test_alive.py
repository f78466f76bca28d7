"""Liveness: one count for the checker, timelines and the planner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from stagewright.partition.in_flight import count_in_flight
from stagewright.schedules import Action, Costs, Edge, Message, MessageKind, Op, Schedule, build, check, lower, simulate
from stagewright.schedules.alive import activations, messages_held, peak_activations
from stagewright.schedules.messages import Transfer

from .random_schedules import by_hand, schedules, steady


def counts(text: str) -> list[dict[int, int]]:
    return [dict(alive) for _, alive in activations([Action.parse(word) for word in text.split()])]


def test_the_picture() -> None:
    assert counts("0F0 0F1 0B0 0F2 0I1 0W1 0B2") == [{0: n} for n in (1, 2, 2, 2, 2, 2, 1)]


@pytest.mark.parametrize(
    ("text", "alive"),
    [
        ("0F0 1F0 1B0 0B0", [{0: 1, 1: 0}, {0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 0}]),
        ("0F0 0F1", [{0: 1}, {0: 1}]),  # no backward: for the forward alone
        ("0B0 0F2 0B1 0U0", [{0: 2}, {0: 2}, {0: 2}, {0: 1}]),  # a window: F0 and F1 stand before it
        ("0W0 0F1", [{0: 1}, {0: 1}]),
    ],
)
def test_by_hand(text: str, alive: list[dict[int, int]]) -> None:
    assert counts(text) == alive
    assert peak_activations([Action.parse(word) for word in text.split()]) == max(sum(at.values()) for at in alive)


def test_a_rank_with_nothing_to_do() -> None:
    assert peak_activations(()) == 0


@steady
@given(schedules())
def test_checker_timeline_and_planner_agree(schedule: Schedule) -> None:
    """Whether a backward is split differs by microbatch in these; the planner decided it by rank once."""
    peaks = check(schedule).peak_activations
    assert simulate(schedule, Costs()).peak_activations == peaks
    planned = count_in_flight(schedule)
    if schedule.has_backward:
        assert tuple(int(np.max(rank.held.sum(axis=1))) for rank in planned) == peaks


def test_messages_are_held_from_posting_to_use_and_from_sending_to_proof() -> None:
    first, second = lower(build("1f1b", num_ranks=2, num_microbatches=2), receives_ahead=1).programs
    held = {str(step): sorted(map(str, messages)) for step, messages in messages_held(first)}
    act = "activations of microbatch {} from stage 0 to stage 1"
    grad = "gradients of microbatch {} from stage 1 to stage 0"
    assert held["0F0"] == [grad.format(0)]
    assert held["0B0"] == [act.format(0), act.format(1), grad.format(0)]
    assert held["0B1"] == [act.format(1), grad.format(1)]  # the first gradient proves the first activations received
    for program in (first, second):
        received = {s.message for s in program.steps if isinstance(s, Transfer) and not s.is_send}
        most = max(sum(message in received for message in held) for _, held in messages_held(program))
        assert most == program.peak_receives


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


def test_a_split_backward_beside_a_whole_one() -> None:
    schedule = by_hand("0F0 0F1 0B0 0F2 0I1 0W1 0I2 0W2", microbatches=3)
    assert {action.op for action in schedule.programs[0]} == {Op.F, Op.B, Op.I, Op.W}
    assert check(schedule).peak_activations == (2,)
    assert count_in_flight(schedule)[0].held.max() == 2
