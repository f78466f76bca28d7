"""The engine's core: one rank's program as a state machine without I/O, clock, thread or torch.

The driver pulls with `next()` and tells the machine what arrived:

    next() -> Transfer (send)   hand this message to the transport
           -> Transfer (post)   post a receive for this message
           -> Wait              nothing can go on before these messages have arrived
           -> Action, GroupStep carry it out now; all its inputs are here
           -> Collective        begin it now, and go on
           -> None              the program is done

Compute runs in program order. Whether a driver blocks in `Wait` (gloo), lets another rank's machine go on (in
one process) or orders a stream behind it (CUDA) is the driver's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...schedules import Message
from ...schedules.messages import Transfer
from ...schedules.program import RankProgram, Work


class Wait(NamedTuple):
    """The program stands before `before` (None: at its end) until `messages` have arrived."""

    messages: tuple[Message, ...]
    before: Work | None


Instruction = Transfer | Wait | Work


class RankMachine:
    """Runs one RankProgram. Invariant: work is handed out once, in program order, with all its inputs there."""

    def __init__(self, program: RankProgram) -> None:
        self._program = program
        self._position = 0
        self._arrived: set[Message] = set()

    @property
    def proves(self) -> Mapping[Message, tuple[Message, ...]]:
        """By message: the sends of this rank that its arrival proves received."""
        return self._program.proves

    def next(self) -> Instruction | None:
        """Next instruction; the same Wait again until all its messages are told by `arrived`."""
        steps = self._program.steps
        if self._position == len(steps):
            return self._wait_for(self._program.finally_needs, None)
        step = steps[self._position]
        if not isinstance(step, Transfer):
            needed = self._program.inputs.get(step)
            if needed is not None and not self._arrived.issuperset(needed):
                return self._wait_for(needed, step)
        self._position += 1
        return step

    def arrived(self, messages: Iterable[Message]) -> None:
        """These messages are here."""
        self._arrived.update(messages)

    def _wait_for(self, messages: tuple[Message, ...], before: Work | None) -> Wait | None:
        missing = tuple(m for m in messages if m not in self._arrived)
        return Wait(missing, before) if missing else None
