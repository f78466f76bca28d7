"""Streams: calls and drains put together are the finite program, of any length and from any batch on."""

from dataclasses import replace

import pytest
from support.inside import (
    GroupStep,
    Lowered,
    RankProgram,
    Sharing,
    Step,
    Stream,
    Transfer,
    defer_updates,
    derive_versions,
    make_stream,
)
from support.inside import MessagesSTAGE_KINDS as STAGE_KINDS
from support.inside import ProgramWork as Work

from stagewright.schedules import Action, Message, MessageKind, Op, Schedule, ScheduleError, build, check, check_lowered

from .random_schedules import by_hand
from .test_check import ends

Case = tuple[str, int, int, dict[str, object]]  # name, P, M, options

CASES: list[Case] = [
    ("pipedream", 1, 1, {}),
    ("pipedream", 3, 4, {}),
    ("pipedream", 4, 1, {}),
    ("pipedream", 5, 2, {}),  # four batches under way at once
    ("pipedream", 3, 4, {"update_every": 2}),
    ("pipedream", 3, 4, {"update_every": 4}),
    ("pipedream", 3, 4, {"vertical_sync": True}),
    ("pipedream", 5, 2, {"vertical_sync": True, "update_every": 2}),
    ("pipedream", 3, 4, {"replicas": (2, 1)}),
    ("pipedream", 4, 6, {"replicas": (1, 2, 1), "vertical_sync": True}),
    ("2bw", 1, 1, {}),
    ("2bw", 2, 1, {}),
    ("2bw", 4, 3, {}),
    ("2bw", 4, 4, {}),
    ("2bw", 3, 5, {"warmup": "eager"}),
    ("2bw", 3, 4, {"warmup": (4, 4, 0)}),
    ("2bw", 2, 4, {"warmup": (0, 0)}),
    ("2bw", 3, 4, {"replicas": (2, 1)}),
    ("2bw", 4, 5, {"replicas": (1, 3), "warmup": "eager"}),
    ("2bw", 4, 4, {"replicas": (1, 2, 1)}),
    ("2bw", 4, 3, {"replicas": (3, 1), "warmup": (0, 0)}),
]
NOTHING = Sharing()


def named(case: Case) -> str:
    name, P, M, options = case
    return " ".join([f"{name}-P{P}-M{M}", *(f"{key}={value}" for key, value in options.items())])


def finite(case: Case, *, deferred: bool, num_batches: int | None = None) -> Schedule:
    name, P, M, options = case
    schedule = build(name, num_ranks=P, num_microbatches=M, num_batches=num_batches, **options)
    return defer_updates(schedule) if deferred else schedule


def everything(schedule: Schedule, *, deferred: bool) -> Sharing:
    """All that can travel: losses and gradients of replicas; where updates wait for it, also norms, and gradients of
    weights tied between the first and the last rank."""
    sums = {ranks for ranks in schedule.owners if len(ranks) > 1}
    if deferred and schedule.num_stages > 1:
        sums.add((schedule.owners[0][0], schedule.owners[-1][-1]))
    return Sharing(loss=True, norm=deferred, sums=tuple(sums))


def deferrable(cases: list[Case]) -> list[tuple[Case, bool]]:
    return [(case, deferred) for case in cases for deferred in (False, True) if case[0] == "2bw" or not deferred]


every_case = pytest.mark.parametrize(
    ("case", "deferred"), [pytest.param(c, d, id=named(c) + " deferred" * d) for c, d in deferrable(CASES)]
)


def joined(stream: Stream, first: int, last: int) -> Lowered:
    """The stream from one batch to another, drained, as one program a rank."""
    programs = []
    for rank in range(stream.schedule.num_ranks):
        parts = [stream.call(rank, batch, first_batch=first) for batch in range(first, last + 1)]
        parts.append(stream.drain(rank, last, first_batch=first))
        inputs: dict[Work, tuple[Message, ...]] = {}
        for part in parts:
            assert not set(inputs) & set(part.inputs)
            inputs |= part.inputs
        steps = tuple(step for part in parts for step in part.steps)
        programs.append(replace(parts[0], steps=steps, inputs=inputs))
    return Lowered(schedule=stream.unrolled(last - first + 1), programs=tuple(programs))


def actions(program: RankProgram) -> list[Action]:
    return [step for step in program.steps if isinstance(step, Action)]


@pytest.mark.thorough(but=["False-pipedream-P1-M1", "False-2bw-P2-M1"])
@every_case
@pytest.mark.parametrize("shares", [False, True])
def test_calls_and_drain_make_the_program(case: Case, deferred: bool, shares: bool) -> None:
    schedule = finite(case, deferred=deferred)
    stream = make_stream(schedule, sharing=everything(schedule, deferred=deferred) if shares else NOTHING)
    whole = joined(stream, 0, schedule.num_batches - 1)
    assert tuple(tuple(actions(program)) for program in whole.programs) == schedule.programs
    assert stream.unrolled(schedule.num_batches) == schedule


@pytest.mark.thorough(but=["2bw-P1-M1"])
@every_case
def test_any_number_of_batches(case: Case, deferred: bool) -> None:
    """Each is what the builder makes for so many batches, with versions as the stream says."""
    stream = make_stream(finite(case, deferred=deferred), sharing=NOTHING)
    for batches in range(1, 11):
        unrolled = stream.unrolled(batches)
        check(unrolled)
        assert unrolled == finite(case, deferred=deferred, num_batches=batches)
        used = derive_versions(unrolled).used
        assert used == {(stage, k): stream.version(stage, k, first_batch=0) for stage, k in used}


@pytest.mark.thorough(but=["2bw-P1-M1"])
@every_case
def test_messages_of_any_number_of_batches(case: Case, deferred: bool) -> None:
    """Lowered call by call, no rank hangs, with all that can travel, over links that do not buffer either."""
    schedule = finite(case, deferred=deferred)
    stream = make_stream(schedule, sharing=everything(schedule, deferred=deferred))
    for batches in (1, 2, 3, 7):
        whole = joined(stream, 0, batches - 1)
        check_lowered(whole)
        assert ends(whole.programs)


@pytest.mark.thorough(but=["pipedream-P1-M1"])
@every_case
def test_what_an_arrival_proves_is_true(case: Case, deferred: bool) -> None:
    """The peer has consumed the message before it sent the answer; each message is proved at most once. Once
    the pipeline is full each activation is proved (before that, the answers of batches that never were would do it)."""
    schedule = finite(case, deferred=deferred)
    stream = make_stream(schedule, sharing=everything(schedule, deferred=deferred))
    whole = joined(stream, 0, 9)
    consumed_at, sent_at = (
        {
            (rank, message): at
            for rank, program in enumerate(whole.programs)
            for at, step in enumerate(program.steps)
            for message in messages(program, step)
        }
        for messages in (lambda program, step: program.inputs.get(step, ()), sent_by)
    )
    for rank in range(schedule.num_ranks):
        parts = [stream.call(rank, batch, first_batch=0) for batch in range(10)]
        parts.append(stream.drain(rank, 9, first_batch=0))
        proved: list[Message] = []
        for part in parts:
            for answer, messages in part.proves.items():
                [peer] = [r for r, message in sent_at if message == answer]
                for message in messages:
                    assert (rank, message) in sent_at
                    assert consumed_at[peer, message] < sent_at[peer, answer]
                proved += messages
        assert len(proved) == len(set(proved))
        M = schedule.num_microbatches
        middle = {m for r, m in sent_at if r == rank and m.kind is MessageKind.ACT and 5 * M <= m.index < 6 * M}
        assert middle <= set(proved)


def sent_by(program: RankProgram, step: Step) -> tuple[Message, ...]:
    return (step.message,) if isinstance(step, Transfer) and step.is_send else ()


@pytest.mark.thorough(but=["5-2bw-P1-M1 deferred"])
@every_case
@pytest.mark.parametrize("first", [1, 3, 5])
def test_a_stream_that_begins_later(case: Case, deferred: bool, first: int) -> None:
    """The same, counted on; nothing of the batches before it, and versions from those that a flush has left."""
    schedule = finite(case, deferred=deferred)
    stream = make_stream(schedule, sharing=everything(schedule, deferred=deferred))
    M, groups = schedule.num_microbatches, schedule.groups_per_batch
    later, begun = joined(stream, first, first + 3), joined(stream, 0, 3)
    assert ends(later.programs)
    for moved, original in zip(later.programs, begun.programs, strict=True):
        assert len(moved.steps) == len(original.steps)
        for step, old in zip(moved.steps, original.steps, strict=True):
            assert type(step) is type(old)
            if isinstance(step, Transfer) and isinstance(old, Transfer):
                by = first * (M if step.message.kind in STAGE_KINDS else groups)
                assert step == old._replace(message=old.message._replace(index=old.message.index + by))
            elif isinstance(step, Action) and isinstance(old, Action):
                assert step == old._replace(index=old.index + first * (groups if step.op is Op.U else M))
            elif isinstance(step, GroupStep) and isinstance(old, GroupStep):
                assert step == old._replace(index=old.index + first * groups)
    for stage in range(schedule.num_stages):
        for k in range(4 * M):
            version = stream.version(stage, first * M + k, first_batch=first)
            if schedule.weight_rule == "2bw":  # goes by the batch alone: the first one runs on the version before
                assert version == first + k // M - 1
            else:
                assert version == stream.version(stage, k, first_batch=0) + first * groups


@pytest.mark.thorough
def test_rank_0_needs_no_look_into_the_next_batch() -> None:
    """A call holds forwards of its own batch alone, and each call of the steady state as much as a batch."""
    for case, deferred in deferrable(CASES):
        schedule = finite(case, deferred=deferred)
        M = schedule.num_microbatches
        stream = make_stream(schedule, sharing=NOTHING)
        for rank in range(schedule.num_ranks):
            done = actions(stream.call(rank, 9, first_batch=0))
            stage = schedule.placement[rank][0]
            own = [k for k in range(9 * M, 10 * M) if schedule.owner(stage, k) == rank]
            assert [a.index for a in done if a.op is Op.F] == own
            assert sum(a.op is Op.B for a in done) == len(own)
            assert sum(a.op is Op.U for a in done) == schedule.groups_per_batch
            assert all(a.op is not Op.F for a in actions(stream.drain(rank, 9, first_batch=0)))


# P=2, M=1, stashing; each program is right in itself. Rank 0 is one microbatch ahead.
AHEAD = "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0F3 0B2 0U2 0F4 0B3 0U3 0B4 0U4"
LAST = "1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2 1F3 1B3 1U3 1F4 1B4 1U4"


def stashing(*programs: str) -> Schedule:
    return by_hand(*programs, microbatches=1, batches=5, rule="stashing")


@pytest.mark.parametrize(
    ("programs", "rank"),
    [
        ((AHEAD.replace("0F2 0B1 0U1", "0B1 0U1 0F2"), LAST), 0),  # a beginning that is another one
        ((AHEAD, LAST.replace("1U1 1F2 1B2 1U2", "1F2 1B2 1U1 1U2")), 1),  # an update late, once
    ],
    ids=["forwards", "updates"],
)
def test_a_program_that_does_not_repeat(programs: tuple[str, str], rank: int) -> None:
    schedule = stashing(*programs)
    check(schedule)
    message = (
        rf"rank {rank} of schedule 'by hand' does not repeat from batch to batch: expected the same order for each"
    )
    with pytest.raises(ScheduleError, match=message):
        make_stream(schedule, sharing=NOTHING)


def test_a_program_whose_versions_do_not_repeat() -> None:
    """The last batches as all others, but the updates come in another rhythm at the beginning."""
    program = "0F0 0B0 0F1 0B1 0U0 0U1 0F2 0B2 0U2 0F3 0B3 0U3 0F4 0B4 0U4"
    schedule = stashing(program)
    check(schedule)
    with pytest.raises(ScheduleError, match="does not repeat from batch to batch"):
        make_stream(schedule, sharing=NOTHING)


@pytest.mark.parametrize(
    ("sharing", "message"),
    [
        (
            Sharing(norm=True),
            "1U0 on rank 1 runs in the call of batch 0 and needs the global gradient norm of update group 0 from rank "
            "0 to rank 1, which is sent in that of batch 1: a call must not wait for batches to come; move 1U0 after "
            "the first forward of a later batch",
        ),
        (
            Sharing(sums=((0, 1),)),
            "1U0 on rank 1 runs in the call of batch 0 and needs the shared gradients of update group 0 from rank 0 to "
            "rank 1, which is sent in that of batch 1",
        ),
    ],
    ids=["norm", "tied"],
)
def test_a_call_that_needs_a_later_one(sharing: Sharing, message: str) -> None:
    """The last rank ends batch t in its call, rank 0 in the next one: an update that needs both must wait."""
    schedule = build("2bw", num_ranks=2, num_microbatches=2, num_batches=6)
    assert make_stream(schedule, sharing=NOTHING).unrolled(6) == schedule
    with pytest.raises(ScheduleError, match=message):
        make_stream(schedule, sharing=sharing)
    waiting = defer_updates(schedule)
    assert make_stream(waiting, sharing=sharing).unrolled(6) == waiting


def test_too_few_batches() -> None:
    for name, batches in (("2bw", 1), ("pipedream", 2)):
        schedule = build(name, num_ranks=2, num_microbatches=2, num_batches=batches)
        with pytest.raises(ScheduleError, match=rf"'{name}' spans {batches} batches: expected at least 3, so that a"):
            make_stream(schedule, sharing=NOTHING)
