"""Programs in calls: the program of each rank for one batch after another, of an asynchronous schedule.

    rank 0 of 2bw, P=2, M=2    call t: F(2t) B(2t-1) U(t-1) F(2t+1) B(2t)      drain after call t: B(2t+1) U(t)
    rank 1                     call t: F(2t) B(2t) F(2t+1) B(2t+1) U(t)        (nothing)

A finite program is cut before the first forward of each batch. Its steady call and its drain, shifted to any batch,
make programs of any length: a stream that begins with batch b omits what belongs to batches before b.

A run may begin with batches that are flushed one by one:

    flush_first=2    call of batch 0: F0 .. B0 .. U0    of batch 1: all of it    of batch 2, 3, ...: calls of the stream

The calls of a batch follow from its number, so that a run resumed from any checkpoint continues identically.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ..checks import check, check_lowered
from ..ir import Action, Op, Schedule, ScheduleError
from ..messages import Message, Sharing, Transfer
from ..program import Lowered, RankProgram, Step, Work, check_calls, indices_per_batch, parts_of
from ..versions import derive_versions
from .lower import lower


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A schedule without an end."""

    schedule: Schedule  # the finite program that it was made from
    calls: tuple[RankProgram, ...]  # per rank, one call of the steady state, numbered as if it were batch 0
    drains: tuple[RankProgram, ...]  # per rank, the rest after the call of batch 0
    # by (stage, microbatch of its batch): the version of its forward, less that of the batch's first update
    offsets: dict[tuple[int, int], int]

    def call(self, rank: int, batch: int, *, first_batch: int) -> RankProgram:
        """The program of `rank` for batch `batch`, in a stream that began (empty) with `first_batch`."""
        return _moved(self.schedule, self.calls[rank], batch, first_batch)

    def drain(self, rank: int, last_batch: int, *, first_batch: int) -> RankProgram:
        return _moved(self.schedule, self.drains[rank], last_batch, first_batch)

    def whole(self, rank: int, batch: int) -> RankProgram:
        """The program of `rank` for one batch, from an empty to an empty pipeline."""
        return _joined([self.call(rank, batch, first_batch=batch), self.drain(rank, batch, first_batch=batch)])

    def version(self, stage: int, index: int, *, first_batch: int) -> int:
        """The weight version of the forward (and backward) of microbatch `index` of a stage.

        Under some rules it follows from the batch, also after a flush; under others from the updates so far, which a
        flush completes.
        """
        schedule = self.schedule
        batch, microbatch = divmod(index, schedule.num_microbatches)
        groups = schedule.groups_per_batch
        return schedule.rule.version_in_stream(
            index,
            schedule.num_microbatches,
            oldest=first_batch * groups,
            steady=batch * groups + self.offsets[stage, microbatch],
        )

    def delay(self, stage: int) -> float:
        """Updates by which gradients of a stage are late in the steady state: a mean over the microbatches."""
        size, group = self.schedule.num_microbatches, self.schedule.group_size
        return sum(k // group - self.offsets[stage, k] for k in range(size)) / size

    def unrolled(self, num_batches: int) -> Schedule:
        programs = []
        for rank in range(self.schedule.num_ranks):
            parts = [self.call(rank, batch, first_batch=0) for batch in range(num_batches)]
            parts.append(self.drain(rank, num_batches - 1, first_batch=0))
            programs.append(tuple(step for part in parts for step in part.steps if isinstance(step, Action)))
        return replace(self.schedule, programs=tuple(programs), num_batches=num_batches)


def make_stream(schedule: Schedule, *, sharing: Sharing) -> Stream:
    """Cut an asynchronous schedule into calls, with their communication.

    Where ranks would deadlock over a transport that blocks a send until it is received, twice as many receives are
    posted ahead, and so on. That ends: with all of them posted where their call begins, a rank waits only for ranks in
    the same call or an earlier one, and where its send waits, in an earlier one.

    Raises ScheduleError for a program whose steady state does not repeat batch by batch, or in which a call needs a
    message that another rank sends in a later one.
    """
    last = schedule.num_batches - 1
    if last < 2:
        raise ScheduleError(
            f"schedule {schedule.name!r} spans {schedule.num_batches} batches: expected at least 3, so that a batch of "
            f"its steady state differs from its first and its last one"
        )
    calls = [_calls(schedule, rank) for rank in range(schedule.num_ranks)]
    lowered = lower(schedule, sharing=sharing, calls=calls)
    check_calls(lowered)  # first: its error says why a receive can't be posted in time
    check_lowered(lowered)
    parts = [parts_of(program, count=schedule.num_batches + 1) for program in lowered.programs]
    used = derive_versions(schedule).used
    base, groups = (last - 1) * schedule.num_microbatches, (last - 1) * schedule.groups_per_batch
    stream = Stream(
        schedule=schedule,
        calls=tuple(_moved(schedule, part[last - 1], 1 - last, None) for part in parts),
        drains=tuple(_moved(schedule, part[last + 1], -last, None) for part in parts),
        offsets={(s, k - base): v - groups for (s, k), v in used.items() if 0 <= k - base < schedule.num_microbatches},
    )
    if _check_stream(stream, used):
        return stream
    return make_stream(schedule, sharing=replace(sharing, receives_ahead=2 * sharing.receives_ahead))


def _calls(schedule: Schedule, rank: int) -> list[int]:
    """The call of each action: the newest batch that has begun on the rank. Actions after the steady part of the last
    call belong to the drain (call N). An update of batch t right before the first forward of batch t + 2 belongs to the
    call of that forward, which needs it under 2bw."""
    program = schedule.programs[rank]
    size, N = schedule.num_microbatches, schedule.num_batches
    if not any(action.op is Op.F for action in program):  # a replica without work updates after the others
        return [action.index // schedule.groups_per_batch + 1 for action in program]
    calls: list[int] = []
    call = 0
    updates: list[Action] = []  # right before this position
    for action in program:
        if action.op is Op.U:
            updates.append(action)
        elif action.op is Op.F and action.index // size > call:
            call = action.index // size
            waited = [u for u in updates if u.index // schedule.groups_per_batch <= call - 2]
            calls[len(calls) - len(waited) :] = [call] * len(waited)
        if action.op is not Op.U:
            updates = []
        calls.append(call)
    length = calls.count(N - 2)
    begin = calls.index(N - 1)
    return calls[: begin + length] + [N] * (len(calls) - begin - length)


_Moved = TypeVar("_Moved", bound=Work | Message)


def _moved(schedule: Schedule, program: RankProgram, batches: int, first_batch: int | None) -> RankProgram:
    """The program shifted by so many batches, without the parts of batches before `first_batch`."""

    def shifted(old: _Moved) -> _Moved | None:
        size = indices_per_batch(schedule, old)
        new = old.index + batches * size
        is_before = first_batch is not None and new < first_batch * size
        return None if is_before else old._replace(index=new)  # type: ignore[return-value]

    steps: list[Step] = []
    inputs: dict[Work, tuple[Message, ...]] = {}
    for step in program.steps:
        if isinstance(step, Transfer):
            moved = shifted(step.message)
            if moved is not None:
                steps.append(Transfer(moved, step.peer, step.is_send))
            continue
        done = shifted(step)
        if done is not None:
            steps.append(done)
            if step in program.inputs:
                inputs[done] = _present(program.inputs[step], shifted)
    proves = {
        answer: _present(proved, shifted)
        for old, proved in program.proves.items()
        if (answer := shifted(old)) is not None
    }
    shared = {
        name: tuple(done for each in actions if (done := shifted(each)) is not None)
        for old, actions in program.shared.items()
        if (name := shifted(old)) is not None
    }
    return replace(program, steps=tuple(steps), inputs=inputs, proves=proves, shared=shared)


def _present(messages: Sequence[Message], move: Callable[[Message], Message | None]) -> tuple[Message, ...]:
    return tuple(moved for moved in map(move, messages) if moved is not None)


def _check_stream(stream: Stream, used: dict[tuple[int, int], int]) -> bool:
    """Assemble programs from calls, and prove them: the one that the stream was made from, and short ones. False where
    one would deadlock if its sends waited."""
    schedule, ends = stream.schedule, True
    for length in (schedule.num_batches, 1, 2):
        programs = []
        for rank in range(schedule.num_ranks):
            parts = [stream.call(rank, batch, first_batch=0) for batch in range(length)]
            programs.append(_joined([*parts, stream.drain(rank, length - 1, first_batch=0)]))
        unrolled = stream.unrolled(length)
        if length == schedule.num_batches and unrolled.programs != schedule.programs:
            rank = next(r for r, p in enumerate(unrolled.programs) if p != schedule.programs[r])
            raise ScheduleError(
                f"rank {rank} of schedule {schedule.name!r} does not repeat from batch to batch: expected the same "
                f"order for each batch, microbatches and updates counted on, once the pipeline is full"
            )
        check(unrolled)
        ends &= check_lowered(Lowered(schedule=unrolled, programs=tuple(programs))).held is None
    for (stage, index), version in used.items():
        if stream.version(stage, index, first_batch=0) != version:
            raise ScheduleError(
                f"{stage}F{index} of schedule {schedule.name!r} uses weight version {version}, not "
                f"{stream.version(stage, index, first_batch=0)} as the same microbatch of its other batches does: "
                f"expected versions that grow by {schedule.groups_per_batch} a batch"
            )
    return ends


def _joined(parts: Sequence[RankProgram]) -> RankProgram:
    inputs: dict[Work, tuple[Message, ...]] = {}
    proves: dict[Message, tuple[Message, ...]] = {}
    shared: dict[Message, tuple[Work, ...]] = {}
    for part in parts:
        inputs |= part.inputs
        proves |= part.proves
        shared |= part.shared
    return replace(
        parts[0],
        steps=tuple(step for part in parts for step in part.steps),
        inputs=inputs,
        proves=proves,
        shared=shared,
        finally_needs=tuple(message for part in parts for message in part.finally_needs),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCalls:
    """Programs and weight versions of a run's batches: the first `flush_first` are calls of `alone`, each from an empty
    to an empty pipeline with its updates; the others are calls of `stream`."""

    stream: Stream
    flush_first: int = 0
    alone: Stream | None = None

    @property
    def schedule(self) -> Schedule:
        return self.stream.schedule

    @property
    def programs(self) -> Iterator[RankProgram]:
        """One call and the drain of each stream, for all ranks."""
        for stream in (self.stream, self.alone):
            if stream is not None:
                yield from (*stream.calls, *stream.drains)

    def is_alone(self, batch: int) -> bool:
        return batch < self.flush_first

    def stream_of(self, batch: int) -> Stream:
        return self.alone if self.alone is not None and self.is_alone(batch) else self.stream

    def call(self, rank: int, batch: int, *, first_batch: int) -> RankProgram:
        """The program of `rank` for batch `batch`; one of the first batches runs to its end."""
        if self.alone is not None and self.is_alone(batch):
            return self.alone.whole(rank, batch)
        return self.stream.call(rank, batch, first_batch=first_batch)

    def drain(self, rank: int, last_batch: int, *, first_batch: int) -> RankProgram:
        return self.stream.drain(rank, last_batch, first_batch=first_batch)

    def version(self, stage: int, index: int, *, first_batch: int) -> int:
        """The weight version of microbatch `index` of a stage, in a stream that began with `first_batch`.

        The stream begins with the weights after the flushed batches and no older version, also under 2bw, whose rule
        names versions by the batch.
        """
        schedule = self.stream.schedule
        batch = index // schedule.num_microbatches
        if self.alone is not None and self.is_alone(batch):
            return self.alone.version(stage, index, first_batch=batch)
        steady = self.stream.version(stage, index, first_batch=first_batch)
        return max(steady, self.flush_first * schedule.groups_per_batch)


def make_calls(schedule: Schedule, *, sharing: Sharing, flush_first: int = 0, late: Schedule | None = None) -> RunCalls:
    """Calls of an asynchronous schedule, see `make_stream`; the stream is made from `late`, the same with deferred
    updates."""
    return RunCalls(
        stream=make_stream(schedule if late is None else late, sharing=sharing),
        flush_first=flush_first,
        alone=make_stream(flushed(schedule), sharing=sharing) if flush_first else None,
    )


def flushed(schedule: Schedule) -> Schedule:
    """The same work on the same ranks with only one update group in the pipeline at a time: no gradient is late.

        2bw, P=2, M=2    rank 0 | F0 F1 .  B0 .  B1 U F2 F3 .  B2 ...
                         rank 1 | .  F0 B0 F1 B1 U  . F2 B2 F3 ...

    A group runs in the order that the schedule has for an empty pipeline. A forward uses the newest version of its
    stage, the same on all stages: index // group_size.

    Raises ScheduleError for a flush schedule.

    >>> from stagewright.schedules import Costs, build, check, simulate
    >>> schedule = flushed(build("pipedream", num_ranks=4, num_microbatches=8, update_every=4))
    >>> check(schedule).peak_versions, round(simulate(schedule, Costs()).bubble, 3)
    ((1, 1, 1, 1), 0.429)
    """
    if not schedule.is_asynchronous:
        raise ScheduleError(f"schedule {schedule.name!r} flushes already: expected an asynchronous one such as '2bw'")
    size, per_batch = schedule.group_size, schedule.groups_per_batch

    def group(action: Action) -> int:
        return action.index if action.op is Op.U else action.index // size

    programs = []
    for program in schedule.programs:
        first = sorted((action for action in program if group(action) < per_batch), key=group)  # stable
        programs.append(
            tuple(
                action._replace(index=action.index + batch * (per_batch if action.op is Op.U else per_batch * size))
                for batch in range(schedule.num_batches)
                for action in first
            )
        )
    return replace(schedule, name=f"{schedule.name} with a flush", programs=tuple(programs), weight_rule="stashing")
