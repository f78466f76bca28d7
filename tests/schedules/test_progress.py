"""Lowered programs over a transport that holds a rank at a send until its receive is posted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inside import RankProgram, Sharing, Transfer, make_stream, where_sends_wait

from stagewright.schedules import FAMILIES, Action, Message, Op, Schedule, ScheduleError, build, check_lowered, lower

from .builders import ASYNC, FLUSH
from .random_schedules import schedules, steady


def ends(programs: Sequence[RankProgram], *, seed: int = 0) -> bool:
    """Whether all ranks get to their end, a step of a rank drawn at random at a time."""
    pick, at = random.Random(seed), [0] * len(programs)
    sent: set[Message] = set()
    posted: set[Message] = set()

    def can_go_on(rank: int) -> bool:
        if at[rank] == len(programs[rank].steps):
            return False
        step = programs[rank].steps[at[rank]]
        if isinstance(step, Transfer):
            return not step.is_send or step.message in posted
        return sent.issuperset(programs[rank].inputs.get(step, ()))

    while ready := [rank for rank in range(len(at)) if can_go_on(rank)]:
        step = programs[rank := pick.choice(ready)].steps[at[rank]]
        if isinstance(step, Transfer):
            (sent if step.is_send else posted).add(step.message)
        at[rank] += 1
    return all(position == len(program.steps) for position, program in zip(at, programs, strict=True))


def without_help(schedule: Schedule) -> Sequence[RankProgram]:
    """Lowered as one call: receives stand where the four ahead have them."""
    return lower(schedule, calls=[[0] * len(program) for program in schedule.programs]).programs


@pytest.mark.parametrize("seed", range(4))
def test_receives_are_posted_in_time(seed: int) -> None:
    """looped-bfs sticks from M = 4P on where four receives are posted ahead, whoever goes on first."""
    for M, sticks in ((7, False), (8, True), (13, True)):
        schedule = build("looped-bfs", num_ranks=2, num_microbatches=M, num_chunks=2)
        assert ends(without_help(schedule), seed=seed) is not sticks
        assert (where_sends_wait(without_help(schedule)) is not None) is sticks
        lowered = lower(schedule)
        assert ends(lowered.programs, seed=seed)
        assert check_lowered(lowered).held is None


def test_the_answer_names_the_circle() -> None:
    schedule = build("looped-bfs", num_ranks=2, num_microbatches=8, num_chunks=2)
    assert check_lowered(replace(lower(schedule), programs=without_help(schedule))).held == (
        "rank 0 at 2SEND_F0 for the activations of microbatch 0 from stage 2 to stage 3; "
        "rank 1 at 1SEND_F4 for the activations of microbatch 4 from stage 1 to stage 2"
    )


@pytest.mark.parametrize(
    ("name", "sizes", "most"),
    [("interleaved-zb", (6, 3, 16), 7), ("gis", (6, 4, 16), 7), ("gis", (8, 3, 32), 5), ("looped-bfs", (4, 2, 32), 20)],
)
def test_no_more_receives_than_that_takes(name: str, sizes: tuple[int, int, int], most: int) -> None:
    """Messages under way on one link. looped-bfs takes M - 4P + 4."""
    P, V, M = sizes
    programs = lower(build(name, num_ranks=P, num_microbatches=M, num_chunks=V)).programs
    assert max(receives_of_a_link(program) for program in programs) == most


def receives_of_a_link(program: RankProgram) -> int:
    peers = {step.message: step.peer for step in program.steps if isinstance(step, Transfer) and not step.is_send}
    counts, most = dict.fromkeys(peers.values(), 0), 0
    for step in program.steps:
        if isinstance(step, Transfer) and not step.is_send:
            counts[step.peer] += 1
            most = max(most, counts[step.peer])
        for message in () if isinstance(step, Transfer) else program.inputs.get(step, ()):
            counts[peers[message]] -= 1
    return most


@pytest.mark.thorough
@steady
@given(schedules(), st.booleans(), st.integers(1, 4))
def test_any_order_ends(schedule: Schedule, share_loss: bool, ahead: int) -> None:
    sharing = Sharing(loss=share_loss and len(schedule.owners[-1]) == 1, receives_ahead=ahead)
    lowered = lower(schedule, sharing=sharing)
    assert check_lowered(lowered).held is None
    assert ends(lowered.programs)


def prove(name: str, P: int, V: int, M: int) -> None:
    """A family at one size: one batch, or as a stream."""
    try:
        schedule = build(name, num_ranks=P, num_microbatches=M, num_chunks=V if FAMILIES[name].takes_chunks else None)
    except ValueError:
        return  # not of these sizes
    sharing = Sharing(loss=True)
    if name not in ASYNC:
        assert check_lowered(lower(schedule, sharing=sharing)).held is None
        return
    try:
        stream = make_stream(schedule, sharing=Sharing(loss=True, norm=True))
    except ScheduleError:
        return  # too few batches to repeat
    assert where_sends_wait([stream.whole(rank, 3) for rank in range(P)]) is None


@pytest.mark.thorough(but=["chimera"])
@pytest.mark.parametrize("name", [*FLUSH, *ASYNC])
def test_all_families_end(name: str) -> None:
    for sizes in [(2, 2, 8), (5, 3, 10), (6, 3, 16)]:
        prove(name, *sizes)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*FLUSH, *ASYNC])
def test_all_families_end_at_many_sizes(name: str) -> None:
    for P in (2, 3, 4, 5, 6, 8, 11):
        for M in (1, 2, 5, 8, 13, 16, 24, 36):
            for V in (1, 2, 3, 5) if FAMILIES[name].takes_chunks else (1,):
                prove(name, P, V, M)


def test_programs_that_wait_for_each_other_in_any_case_are_no_schedule() -> None:
    """Each rank would first wait for what the other makes behind that: whatever its sends do."""
    first, second = lower(build("1f1b", num_ranks=2, num_microbatches=1)).programs
    early = replace(first, inputs={Action(0, Op.F, 0): first.inputs[Action(0, Op.B, 0)]})
    with pytest.raises(ScheduleError, match="deadlock: rank 0 waits before 0F0 for the gradients of microbatch 0"):
        where_sends_wait([early, second])
