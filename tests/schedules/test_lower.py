"""Lowering: sends, receives posted ahead, and what an arrival proves."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inside import NOTHING_SHARED, Lowered, RankProgram, Sharing, Step, Transfer
from support.sizes import fitting

from stagewright.schedules import (
    FAMILIES,
    Action,
    Message,
    MessageKind,
    Op,
    Schedule,
    ScheduleError,
    build,
    check_lowered,
)
from stagewright.schedules import lower as lower_any

from .random_schedules import schedules, steady
from .reference import data_edges, name_of_message, peak_receives


def lower(schedule: Schedule, sharing: Sharing = NOTHING_SHARED, **given: Any) -> Lowered:
    """As the pictures show it."""
    return lower_any(schedule, sharing=replace(sharing, receives_ahead=2), **given)


lowered_schedules = st.builds(lower, schedules())
# As one call: receives stay where the limit has them (see test_check.py for those that are posted earlier).
lowered_alone = schedules().map(lambda made: lower(made, calls=[[0] * len(program) for program in made.programs]))


def steps(schedule: Schedule, rank: int, *, share_loss: bool = False) -> str:
    return " ".join(map(str, lower(schedule, sharing=Sharing(loss=share_loss)).programs[rank].steps))


def test_inputs_and_proofs_of_1f1b() -> None:
    first, second = lower(build("1f1b", num_ranks=2, num_microbatches=2)).programs
    act = [Message(MessageKind.ACT, 0, 1, k) for k in range(2)]
    grad = [Message(MessageKind.GRAD, 1, 0, k) for k in range(2)]
    assert first.inputs == {Action(0, Op.B, k): (grad[k],) for k in range(2)}
    assert second.inputs == {Action(1, Op.F, k): (act[k],) for k in range(2)}
    assert first.proves == {grad[0]: (act[0],), grad[1]: (act[1],)}  # 1B1 comes behind 1F1
    assert second.proves == {act[1]: ()} or second.proves == {}  # nothing comes back after the last gradients


def test_losses_go_to_every_rank_behind_the_last_forward() -> None:
    schedule = build("1f1b", num_ranks=3, num_microbatches=2)
    assert steps(schedule, 2, share_loss=True) == (
        "2RECV_F0 2RECV_F1 2F0 2B0 2SEND_B0 2F1 SEND_LOSS0 SEND_LOSS0 2B1 2SEND_B1"
    )
    for rank in (0, 1):
        program = lower(schedule, sharing=Sharing(loss=True)).programs[rank]
        assert program.finally_needs == (Message(MessageKind.LOSS, 2, rank, 0),)
        assert sum(1 for step in program.steps if str(step) == "RECV_LOSS0") == 1
    assert check_lowered(lower(schedule, sharing=Sharing(loss=True))).num_messages == 2 * 4 + 2


def test_messages_say_what_they_are() -> None:
    assert str(Message(MessageKind.ACT, 0, 2, 7)) == "activations of microbatch 7 from stage 0 to stage 2"
    assert str(Message(MessageKind.GRAD, 2, 0, 7)) == "gradients of microbatch 7 from stage 2 to stage 0"
    assert str(Message(MessageKind.LOSS, 3, 1, 4)) == "loss of update group 4 from rank 3 to rank 1"


@pytest.mark.thorough
@steady
@given(schedules(), st.booleans())
def test_what_crosses_ranks_is_sent_once(schedule: Schedule, share_loss: bool) -> None:
    """And once for all consumers on the same ranks, of which the first gives the name."""
    if share_loss and len(schedule.owners[-1]) > 1:
        return  # which of the replicas speaks is not settled yet
    lowered = lower(schedule, sharing=Sharing(loss=share_loss))
    expected = {
        (sender, receiver, *name_of_message(schedule, maker, user), maker.index, maker.op is Op.F)
        for (sender, maker), (receiver, user) in data_edges(schedule)
        if sender != receiver
    }
    sent = Counter(
        (program.rank, step.peer, step.message.src, step.message.dst, step.message.index, is_act(step))
        for program in lowered.programs
        for step in program.steps
        if isinstance(step, Transfer) and step.is_send and step.message.kind is not MessageKind.LOSS
    )
    assert sent == Counter(expected)
    assert check_lowered(lowered).num_messages == len(expected) + (schedule.num_ranks - 1) * share_loss


def is_act(step: Transfer) -> bool:
    return step.message.kind is MessageKind.ACT


def posting_order(program: RankProgram) -> dict[int, list[Message]]:
    """By peer, the messages in the order in which their receives are posted."""
    order: dict[int, list[Message]] = {}
    for step in program.steps:
        if isinstance(step, Transfer) and not step.is_send:
            order.setdefault(step.peer, []).append(step.message)
    return order


@steady
@given(lowered_alone)
def test_two_receives_ahead_and_no_more_than_the_order_forces(lowered: Lowered) -> None:
    for program in lowered.programs:
        order = posting_order(program)
        outstanding: dict[int, set[Message]] = {peer: set() for peer in order}
        posted: Counter[int] = Counter()
        for at, step in enumerate(program.steps):
            if isinstance(step, Transfer) and not step.is_send:
                if len(outstanding[step.peer]) >= 2:  # forced: the next action needs this message or one behind it
                    action = next(s for s in program.steps[at:] if isinstance(s, Action))
                    behind = order[step.peer][posted[step.peer] :]
                    assert set(program.inputs[action]) & set(behind)
                outstanding[step.peer].add(step.message)
                posted[step.peer] += 1
            elif isinstance(step, Action):
                for peer, messages in order.items():  # as early as two a link allow
                    assert len(outstanding[peer]) >= 2 or posted[peer] == len(messages)
                for message in program.inputs.get(step, ()):
                    [peer] = [p for p, held in outstanding.items() if message in held]
                    outstanding[peer].remove(message)
        assert not any(outstanding.values())


@pytest.mark.thorough(but=["eager-1f1b-2-None"])
@pytest.mark.parametrize(
    ("name", "P", "chunks"),
    [
        *((name, P, None) for name in FAMILIES if name not in ("interleaved", "looped-bfs") for P in (2, 4, 3)),
        *(("interleaved", P, V) for P, V in [(2, 2), (4, 2), (4, 3), (3, 1)]),
    ],
)  # looped-bfs: see test_check.py
def test_receives_do_not_grow_with_the_microbatches(name: str, P: int, chunks: int | None) -> None:
    P, _ = fitting(name, P, 2 * P)
    peaks = [
        [
            peak_receives(program)
            for program in lower_any(build(name, num_ranks=P, num_microbatches=M, num_chunks=chunks)).programs
        ]
        for M in (2 * P, 4 * P, 16 * P)
    ]
    assert peaks[0] == peaks[1] == peaks[2]
    neighbours = 2 if P > 2 else 1
    assert max(peaks[0]) <= 4 * neighbours


@pytest.mark.thorough
@steady
@given(lowered_schedules)
def test_proofs(lowered: Lowered) -> None:
    """An answer proves a send if, and only if, it is the first that the peer made after consuming the message."""
    for program in lowered.programs:
        first_answer: dict[Message, Message] = {}
        for peer in lowered.programs:
            consumed: list[Message] = []
            proved: set[Message] = set()
            for step in peer.steps:
                if isinstance(step, Action):
                    sent_here = [m for m in peer.inputs.get(step, ()) if sender_of(lowered, m) == program.rank]
                    consumed += sent_here
                elif step.is_send and step.peer == program.rank:
                    for message in consumed:
                        if message not in proved:
                            first_answer[message] = step.message
                    proved |= set(consumed)
        given = {message: answer for answer, messages in program.proves.items() for message in messages}
        assert given == first_answer
        assert sum(map(len, program.proves.values())) == len(given)  # none is proved twice


def sender_of(lowered: Lowered, message: Message) -> int:
    return lowered.schedule.owner(message.src, message.index)


def tampered(lowered: Lowered, rank: int, change: Callable[[list[Step]], object]) -> Lowered:
    program = lowered.programs[rank]
    steps = list(program.steps)
    change(steps)
    programs = list(lowered.programs)
    programs[rank] = replace(program, steps=tuple(steps))
    return replace(lowered, programs=tuple(programs))


def swap(one: str, other: str) -> Callable[[list[Step]], None]:
    def change(steps: list[Step]) -> None:
        i, j = (next(k for k, step in enumerate(steps) if str(step) == text) for text in (one, other))
        steps[i], steps[j] = steps[j], steps[i]

    return change


def drop(text: str) -> Callable[[list[Step]], None]:
    return lambda steps: steps.remove(next(step for step in steps if str(step) == text))


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        pytest.param(
            1,
            swap("1RECV_F0", "1RECV_F1"),
            "link 0 -> 1, message 0: sent is activations of microbatch 0 .*, received is activations of microbatch 1 ",
            id="receives-swapped",
        ),
        pytest.param(1, swap("1SEND_B1", "1SEND_B2"), "rank 1, step .*: 1SEND_B2 comes before 1B2", id="sent-early"),
        pytest.param(1, drop("1SEND_B3"), "1 -> 0, message 3: sent is nothing, received is grad", id="send-lost"),
        pytest.param(0, drop("0SEND_F3"), "0 -> 1, message 3: sent is nothing, received is activ", id="last-send-lost"),
        pytest.param(0, lambda steps: steps.append(steps[-1]), "no longer runs the actions of its", id="action-twice"),
        pytest.param(
            0,
            swap("0RECV_B3", "0B3"),
            "rank 0, step .*: 0B3 needs gradients of microbatch 3 .*; expected the receive before it",
            id="posted-late",
        ),
        pytest.param(1, drop("1RECV_F2"), "1F2 needs activations of microbatch 2", id="receive-lost"),
        pytest.param(0, drop("0B3"), "rank 0 no longer runs the actions of its program", id="action-lost"),
        pytest.param(0, swap("0F2", "0F3"), "comes before 0F2, which makes it", id="actions-swapped"),
    ],
)
def test_tampered_programs_are_refused(rank: int, change: Callable[[list[Step]], object], message: str) -> None:
    lowered = lower(build("1f1b", num_ranks=2, num_microbatches=4))
    assert check_lowered(lowered).num_messages == 8
    with pytest.raises(ScheduleError, match=message):
        check_lowered(tampered(lowered, rank, change))


def test_waiting_for_the_wrong_message_is_refused() -> None:
    lowered = lower(build("1f1b", num_ranks=2, num_microbatches=2))
    program = lowered.programs[1]
    forward = [Action(1, Op.F, k) for k in range(2)]
    wrong = replace(program, inputs={forward[0]: program.inputs[forward[1]], forward[1]: program.inputs[forward[0]]})
    with pytest.raises(ScheduleError, match=r"1F0 needs activations of microbatch 0 .*, but waits for other messages"):
        check_lowered(replace(lowered, programs=(lowered.programs[0], wrong)))
