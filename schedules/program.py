"""Programs of ranks, communication included: produced by lowering, run by the engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from .dependencies import Dependencies
from .ir import Action, Collective, Op, Schedule, ScheduleError
from .messages import STAGE_KINDS, Message, Transfer


class GroupStep(NamedTuple):
    """A step of a rank for an update group.

    REDUCE_GRAD: the losses of the group have arrived; the gradients that are summed with those of other ranks leave.
    GRAD_NORM: those gradients have arrived and are summed; the squared norm of this rank's share is computed.
    UNSHARD: updated shards of weights have arrived, before the first use of that version.
    """

    op: Op
    index: int  # type: ignore[assignment]  # hides tuple.index

    def __str__(self) -> str:
        return f"{self.op.value}{self.index}"


Work = Action | GroupStep | Collective
Step = Work | Transfer


class Wait(NamedTuple):
    """The program waits before `before` (None: at its end) until `messages` have arrived."""

    messages: tuple[Message, ...]
    before: Work | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """Program of one rank, communication included.

    Attributes:
        waits: what each step, and then the end, waits for, if anything.
        fused: each I directly followed by its W, with nothing in between that another rank waits for; the pair runs as
            one backward.
    """

    rank: int
    steps: tuple[Step, ...]  # actions, collectives, sends and postings in order
    # by action (or group step), the messages that must have arrived before it starts
    inputs: dict[Work, tuple[Message, ...]]
    # by received message, the sends of this rank that its arrival proves received
    proves: dict[Message, tuple[Message, ...]]
    # by message that several actions of the rank make or use: these, in its order. A sent one is held from the first of
    # them, a received one up to the last.
    shared: dict[Message, tuple[Work, ...]] = field(default_factory=dict)
    finally_needs: tuple[Message, ...] = ()  # messages consumed at the very end (losses)
    # index in `steps` at which each call begins, for a program that was lowered call by call
    cuts: tuple[int, ...] = ()
    waits: tuple[Wait | None, ...] = field(init=False)
    fused: frozenset[Action] = field(init=False)

    def __post_init__(self) -> None:
        waits = (None if isinstance(step, Transfer) else _wait(self.inputs.get(step, ()), step) for step in self.steps)
        object.__setattr__(self, "waits", (*waits, _wait(self.finally_needs, None)))
        object.__setattr__(self, "fused", frozenset(_fused(self.steps)))

    def last_backwards(self) -> dict[Action, Collective]:
        """By backward, the all-reduce of its own stage's gradients that begins directly after it (or after its fused
        W).

        Its first tensors may leave during the backward, since no other collective begins in between.
        """
        found: dict[Action, Collective] = {}
        before: Work | None = None
        for step in self.steps:
            if isinstance(step, Transfer):
                continue
            if isinstance(step, Collective) and step.op is Op.REDUCE_GRAD and isinstance(before, Action):
                backward = before._replace(op=Op.I) if before.op is Op.W else before
                if step.stages == (before.stage,) and (backward.op is Op.B or backward in self.fused):
                    found[backward] = step
            before = step
        return found


def _wait(messages: tuple[Message, ...], before: Work | None) -> Wait | None:
    return Wait(messages, before) if messages else None


def _fused(steps: Sequence[Step]) -> Iterator[Action]:
    """Each I with its W after it, and nothing but posted receives in between:

    1I3 1SEND_B3 1W3    the gradient leaves, and W overlaps with the send: two actions
    0I3 0W3             no rank waits for a gradient: one backward
    """
    before: Action | None = None
    for step in steps:
        if isinstance(step, Transfer) and not step.is_send:
            continue
        if isinstance(step, Action):
            if step.op is Op.W and before == step._replace(op=Op.I):
                yield before
            before = step
        else:
            before = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A schedule with its communication, a program per rank."""

    schedule: Schedule
    programs: tuple[RankProgram, ...]


def run_as_one(schedule: Schedule) -> Mapping[int, frozenset[int]]:
    """By stage, the indices of I that run with the following W as one backward, as in `RankProgram.fused`.

    W directly follows an I for whose gradient no other rank waits. O(actions).

    >>> from .families.registry import build
    >>> {stage: sorted(found) for stage, found in run_as_one(build("zb-h1", num_ranks=2, num_microbatches=4)).items()}
    {0: [0, 1, 2, 3]}
    """
    pairs = [
        before
        for program in schedule.programs
        for before, action in pairwise(program)
        if action.op is Op.W and before == action._replace(op=Op.I)
    ]
    if not pairs:
        return {}
    needs = Dependencies(schedule)
    found: defaultdict[int, set[int]] = defaultdict(set)
    for action in pairs:
        if next(needs.departures(action), None) is None:
            found[action.stage].add(action.index)
    return {stage: frozenset(own) for stage, own in found.items()}


def indices_per_batch(schedule: Schedule, what: Work | Message) -> int:
    """Indices of such a step or message in a batch: the number of microbatches, or of update groups."""
    of_groups = what.kind not in STAGE_KINDS if isinstance(what, Message) else not isinstance(what, Action)
    of_groups = of_groups and what[1] is not Op.EXCHANGE
    return schedule.groups_per_batch if of_groups or what[1] is Op.U else schedule.num_microbatches


def check_calls(lowered: Lowered) -> None:
    """Raise ScheduleError when a call needs a message that is sent in a later one."""
    sent: dict[Message, int] = {}
    for program in lowered.programs:
        for call, step in by_call(program):
            if isinstance(step, Transfer) and step.is_send:
                sent[step.message] = call
    for program in lowered.programs:
        for call, step in by_call(program):
            if isinstance(step, Transfer):
                continue
            for message in program.inputs.get(step, ()):
                if sent[message] > call:
                    raise ScheduleError(
                        f"{step} on rank {program.rank} runs in the call of batch {call} and needs the {message}, "
                        f"which is sent in that of batch {sent[message]}: a call must not wait for batches to come; "
                        f"move {step} after the first forward of a later batch"
                    )


def by_call(program: RankProgram) -> list[tuple[int, Step]]:
    """Each step with its call; those of a rank without actions are in call 0."""
    if not program.cuts:
        return [(0, step) for step in program.steps]
    ends = [*program.cuts[1:], len(program.steps)]
    return [
        (call, step)
        for call, (begin, end) in enumerate(zip(program.cuts, ends, strict=True))
        for step in program.steps[begin:end]
    ]


def parts_of(program: RankProgram, *, count: int) -> list[RankProgram]:
    """The program of each of `count` calls; the last one takes what the whole program waits for at its end."""
    steps: list[list[Step]] = [[] for _ in range(count)]
    for call, step in by_call(program):
        steps[call].append(step)
    parts = []
    for own in steps:
        inputs = {
            step: program.inputs[step] for step in own if not isinstance(step, Transfer) and step in program.inputs
        }
        arriving = [message for messages in inputs.values() for message in messages]
        proves = {message: program.proves[message] for message in arriving if message in program.proves}
        here = set(own)
        shared = {message: actions for message, actions in program.shared.items() if not here.isdisjoint(actions)}
        part = replace(
            program, steps=tuple(own), inputs=inputs, proves=proves, shared=shared, finally_needs=(), cuts=()
        )
        parts.append(part)
    parts[-1] = replace(parts[-1], finally_needs=program.finally_needs)
    return parts
