"""Programs lowered call by call, taken apart: what a rank does in each call, and the messages that it needs for it."""

from __future__ import annotations

from dataclasses import replace

from ..ir import ScheduleError
from ..messages import Message, Transfer
from ..program import Lowered, RankProgram, Step


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
                        f"move {step} behind the first forward of a later batch"
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
    """The program of each of `count` calls. What the whole waits for at its end, the last one does."""
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
        parts.append(
            replace(
                program,
                steps=tuple(own),
                inputs=inputs,
                proves=proves,
                shared=shared,
                finally_needs=(),
                cuts=(),
            )
        )
    parts[-1] = replace(parts[-1], finally_needs=program.finally_needs)
    return parts
