"""The checker: it accepts what the graph of actions lets end, and says where and why not; lowered programs end, too."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from textwrap import dedent

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from support.grids import nightly
from support.inside import MOVE_OPS, RankProgram, Sharing, Transfer, make_stream, receives_ahead, where_sends_wait
from support.sizes import fitting

from stagewright.schedules import (
    FAMILIES,
    Action,
    Costs,
    MemoryPart,
    Message,
    Op,
    Schedule,
    ScheduleError,
    StageBytes,
    build,
    check,
    check_lowered,
    lower,
    memory_curves,
    simulate,
)

from .random_schedules import ASYNC, FLUSH, by_hand, disordered, parsed, schedules, steady
from .reference import has_deadlock


def with_program(schedule: Schedule, rank: int, program: Sequence[Action]) -> Schedule:
    programs = [*schedule.programs[:rank], tuple(program), *schedule.programs[rank + 1 :]]
    return replace(schedule, programs=tuple(programs))


@pytest.mark.thorough
@steady
@given(disordered())
def test_any_order_is_judged_as_the_graph_judges_it(schedule: Schedule) -> None:
    if has_deadlock(schedule):
        event("deadlock")
        with pytest.raises(ScheduleError, match="deadlock: a cycle of"):
            check(schedule)
    else:
        event("fine")
        check(schedule)


def test_only_the_cycle_is_told() -> None:
    with pytest.raises(ScheduleError) as error:
        check(by_hand("0F0 0B1 0F1 0B0", microbatches=2))
    assert str(error.value) == dedent(
        """\
        deadlock: a cycle of 1 rank, which needs what it runs later:
          rank 0 at position 1 (0F0 [0B1] 0F1 0B0) waits for 0F1, at position 2 of rank 0
        move 0F1 before 0B1"""
    )
    # Ranks 0 and 1 wait for rank 2, which waits for rank 3 and rank 3 for it.
    good = build("1f1b", num_ranks=4, num_microbatches=3)
    bad = with_program(good, 2, parsed("2F0 2B0 2F1 2B1 2F2 2B2"))
    bad = with_program(bad, 3, parsed("3F0 3F1 3F2 3B0 3B1 3B2"))
    with pytest.raises(ScheduleError) as error:
        check(bad)
    assert str(error.value) == dedent(
        """\
        deadlock: a cycle of 2 ranks, each waiting for the next:
          rank 2 at position 1 (2F0 [2B0] 2F1 2B1) waits for 3B0, at position 3 of rank 3
          rank 3 at position 1 (3F0 [3F1] 3F2 3B0) waits for 2F1, at position 2 of rank 2
        move 3B0 before what waits for it, or 2B0 later"""
    )


GOOD = build("1f1b", num_ranks=2, num_microbatches=3)
ONE = build("1f1b", num_ranks=1, num_microbatches=1)


@pytest.mark.parametrize(
    ("rank", "program", "message"),
    [
        (0, "0F0 0F1 0B0 0B1 0B2", r"missing: 0F2\. Each of the 2 stages needs F and B \(or I and W\) of each of the"),
        (1, "1F0 1B0 1W0 1F1 1B1 1F2 1B2", "1B0 occurs alongside 1I0 or 1W0: expected B, or I and W"),
        (1, "1F0 1B0 1F0 1F1 1B1 1F2 1B2 1B2", "1F0, 1B2 occur more than once"),
        (1, "1F0 1B0 1F1 1B1 1F2 1B2 0F2", r"0F2 on rank 1, position 6: this rank holds the stages \[1\]"),
        (1, "1F0 1B0 1F1 1B1 1F3 1B2", r"1F3 on rank 1, position 4: microbatches are numbered 0\.\.2"),
    ],
)
def test_incomplete(rank: int, program: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(with_program(GOOD, rank, parsed(program)))


def test_a_replica_runs_its_own_microbatches() -> None:
    placement = [[0], [1], [1]]
    good = by_hand("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F2 1B2", "1F1 1B1", microbatches=3, placement=placement)
    assert check(good).peak_activations == (3, 1, 1)
    wrong = by_hand("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1", "1F2 1B2", microbatches=3, placement=placement)
    with pytest.raises(ScheduleError, match="1F1 on rank 1, position 2: microbatch 1 of stage 1 belongs to rank 2"):
        check(wrong)


@pytest.mark.thorough
@steady
@given(schedules(), st.data())
def test_one_action_less_is_missed(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from([r for r, program in enumerate(schedule.programs) if program]))
    program = list(schedule.programs[rank])
    gone = program.pop(data.draw(st.integers(0, len(program) - 1)))
    lacking = with_program(schedule, rank, program)
    if not lacking.has_backward and schedule.has_backward:
        return  # what is left is an evaluation
    # Without an I, a W alone is left: the I is missing. Without a W, likewise.
    with pytest.raises(ScheduleError, match=rf"missing: .*\b{gone}\b"):
        check(lacking)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        # All 10^12 missing actions were listed first.
        (Schedule.from_csv("0F0,0F1,0B0,0B1,0F999999999999\n"), r"missing: 0F2, 0B2, .* and more"),
        (
            with_program(ONE, 0, [Action(0, Op.REDUCE_GRAD, 0), *ONE.programs[0]]),
            "0REDUCE_GRAD0 on rank 0, position 0: a compute order holds F B I W U",
        ),
        # It was accepted alongside all others, and simulated at another one's times.
        (
            with_program(ONE, 0, [*ONE.programs[0], Action(0, Op.F, -1), Action(0, Op.B, -1)]),
            r"0F-1 on rank 0, position 2: microbatches are numbered 0\.\.0",
        ),
        # Nothing else made a gradient, so it passed for an evaluation, and the cycle could not be found.
        (by_hand("0F0 0W0", microbatches=1), "missing: 0I0"),
        (by_hand("0F0 0U0", microbatches=1), r"0U0 on rank 0: .* holds no U, since it has no gradient"),
    ],
    ids=["mistyped", "no compute order", "negative", "W without I", "evaluation with update"],
)
def test_what_is_no_order(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(schedule)


RANKS = (1, 2, 3, 4, 6, nightly(8))
MICROBATCHES = (1, 2, 3, 5, 8, 13)


def out_of_order(programs: Iterable[Sequence[object]], num_slices: int = 1) -> list[str]:
    """Actions that come behind one of their stage and kind with the same or a higher microbatch, by rank; or, of slices
    of one microbatch, with the same or a higher one in forwards, the same or a lower one in the others."""
    found = []
    for rank, program in enumerate(programs):
        last: dict[tuple[int, Op], tuple[int, int]] = {}
        for action in program:
            if isinstance(action, Action):
                microbatch, part = divmod(action.index, num_slices)
                at = microbatch, part if action.op is Op.F else num_slices - 1 - part
                if at <= last.get((action.stage, action.op), (-1, 0)):
                    found.append(f"rank {rank}: {action}")
                last[action.stage, action.op] = at
    return found


@pytest.mark.thorough(but=["eager-1f1b-1"])
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", FAMILIES)
def test_under_every_schedule(name: str, num_ranks: int) -> None:
    chunks = (1, 2, 3) if FAMILIES[name].takes_chunks else (None,)
    for P, M in dict.fromkeys(fitting(name, num_ranks, number) for number in MICROBATCHES):
        for num_chunks in chunks:
            schedule = build(name, num_ranks=P, num_microbatches=M, num_chunks=num_chunks)
            case = f"M={M}, V={num_chunks}"
            assert not out_of_order(schedule.compute_programs, schedule.num_slices), case
            # What is executed: sends and receives stand between the actions, in their order.
            steps = ([s for s in p.steps if getattr(s, "op", None) not in MOVE_OPS] for p in lower(schedule).programs)
            assert not out_of_order(steps, schedule.num_slices), case


# --- lowered, over a transport that holds a rank at a send until its receive is posted ---


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
        return (sent & posted).issuperset(programs[rank].inputs.get(step, ()))

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


@pytest.mark.parametrize("warmup", [(8, 0), (7, 0, 0), (12, 10, 5, 0), (2, 1, 0)], ids=str)
def test_a_stream_posts_no_more_receives_than_memory_counts(warmup: tuple[int, ...]) -> None:
    """More after a warm-up that is deeper by four or more than the next rank's, also where I and W make B."""
    schedule = build("2bw", num_ranks=len(warmup), num_microbatches=12, warmup=warmup)
    stream = make_stream(schedule, sharing=Sharing(receives_ahead=receives_ahead(1e9, schedule)))
    most = max(receives_of_a_link(stream.whole(rank, 3)) for rank in range(len(warmup)))
    assert most == max(4, *(1 + own - after for own, after in pairwise(warmup)))
    curve = memory_curves(simulate(schedule, Costs()), [StageBytes(output=1e9)] * len(warmup))[1]
    assert max(curve.parts[MemoryPart.MESSAGES]) >= 2e9 * most  # as many gradients are under way
    halves = {Op.B: [Op.I, Op.W]}
    split = [
        tuple(a._replace(op=op) for a in program for op in halves.get(a.op, [a.op])) for program in schedule.programs
    ]
    assert receives_ahead(1e9, replace(schedule, programs=tuple(split))) == most


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


@pytest.mark.thorough(but=["few-chimera"])
@pytest.mark.parametrize("name", [*FLUSH, *ASYNC])
@pytest.mark.parametrize("sizes", ["few", nightly("many")])
def test_all_families_end(name: str, sizes: str) -> None:
    chunks = (1, 2, 3, 5) if FAMILIES[name].takes_chunks else (1,)
    many = product((2, 3, 4, 5, 6, 8, 11), chunks, (1, 2, 5, 8, 13, 16, 24, 36))
    for P, V, M in many if sizes == "many" else [(2, 2, 8), (5, 3, 10), (6, 3, 16)]:
        prove(name, P, V, M)


def test_programs_that_wait_for_each_other_in_any_case_are_no_schedule() -> None:
    """Each rank would first wait for what the other makes behind that: whatever its sends do."""
    first, second = lower(build("1f1b", num_ranks=2, num_microbatches=1)).programs
    early = replace(first, inputs={Action(0, Op.F, 0): first.inputs[Action(0, Op.B, 0)]})
    with pytest.raises(ScheduleError, match="deadlock: rank 0 waits before 0F0 for the gradients of microbatch 0"):
        where_sends_wait([early, second])
