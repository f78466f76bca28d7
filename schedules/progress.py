"""Untimed runs of programs: how far each rank gets, and receives posted earlier so that all ranks reach their end.

A transport may block a send until its receive is posted on the other side, as NCCL does for a message too large for its
buffers. Then ranks may deadlock that do not where sends never block:

    rank 0   0F5 >0SEND_F5 .. 2RECV_F1 2F1        waits for rank 1 to post the receive of F5
    rank 1   1F1 >1SEND_F1 .. 1RECV_F5 1F5        waits for rank 0 to post the receive of F1

A step that is possible stays possible after any steps of other ranks, so one run decides. Where ranks are stuck, a
receive that is posted at the place where its rank is stuck lets the sender continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from .ir import ScheduleError
from .messages import Message, Transfer
from .program import RankProgram, Step


class UntimedRun:
    """A run that can be continued; `lacks`: by rank, the message at which it was last stuck."""

    def __init__(self, programs: Sequence[RankProgram], *, sends_wait: bool) -> None:
        self.steps: list[list[Step]] = [list(program.steps) for program in programs]
        self.at = [0] * len(programs)
        self.lacks: dict[int, Message] = {}
        self._inputs = [program.inputs for program in programs]
        self.sends_wait = sends_wait
        self._sent: set[Message] = set()
        self._posted: set[Message] = set()
        self._held: dict[Message, tuple[int, ...]] = {}  # the rank that waits for it

    def run(self) -> list[int]:
        """Continue as far as possible; returns the ranks that do not reach their ends."""
        ends = [len(steps) for steps in self.steps]
        runnable = list(range(len(ends)))
        while runnable:
            rank = runnable.pop()
            at, steps, inputs = self.at[rank], self.steps[rank], self._inputs[rank]
            while at < ends[rank]:
                step = steps[at]
                if not isinstance(step, Transfer):
                    lacking = next((each for each in inputs.get(step, ()) if each not in self._sent), None)
                else:
                    waits = step.is_send and self.sends_wait and step.message not in self._posted
                    lacking = step.message if waits else None
                    if not waits:
                        (self._sent if step.is_send else self._posted).add(step.message)
                        runnable += self._held.pop(step.message, ())
                if lacking is not None:
                    self._held[lacking], self.lacks[rank] = (rank,), lacking
                    break
                at += 1
            self.at[rank] = at
        return [rank for rank, end in enumerate(ends) if self.at[rank] < end]

    @cached_property
    def _peers(self) -> list[dict[Message, int]]:
        return [{step.message: step.peer for step in own if isinstance(step, Transfer)} for own in self.steps]

    def circle(self, stuck: Sequence[int]) -> list[int]:
        """Some of the stuck ranks, each of which waits for the next."""
        path = [stuck[0]]
        while (peer := self._peers[path[-1]][self.lacks[path[-1]]]) in stuck:
            if peer in path:
                return path[path.index(peer) :]
            path.append(peer)
        return path[-1:]


def post_in_time(programs: Sequence[RankProgram]) -> tuple[RankProgram, ...]:
    """The programs with receives posted early enough that sends which block until then complete.

    Unchanged if no posting of receives helps.
    """
    run = UntimedRun(programs, sends_wait=True)
    while stuck := run.run():
        waiting = ((rank, run.steps[rank][run.at[rank]]) for rank in run.circle(stuck))
        sends = [(rank, step) for rank, step in waiting if isinstance(step, Transfer)]
        if not sends:
            return tuple(programs)
        (rank, (message, peer, _)), *_ = sends
        old = run.steps[peer].index(Transfer(message, rank, False), run.at[peer])
        run.steps[peer].insert(run.at[peer], run.steps[peer].pop(old))
    return tuple(replace(program, steps=tuple(steps)) for program, steps in zip(programs, run.steps, strict=True))


def where_sends_wait(programs: Sequence[RankProgram]) -> str | None:
    """The circle in which ranks would wait for each other if a send blocked until its receive is posted; None without
    one.

    Raises ScheduleError for a deadlock in any case.
    """
    run = UntimedRun(programs, sends_wait=True)
    stuck = run.run()
    circle = run.circle(stuck) if stuck else []
    steps = [f"rank {rank} at {run.steps[rank][run.at[rank]]} for the {run.lacks[rank]}" for rank in circle]
    run.sends_wait = False
    for rank in run.run():
        raise ScheduleError(
            f"deadlock: rank {rank} waits before {run.steps[rank][run.at[rank]]} for the {run.lacks[rank]}, whose "
            f"sender waits as well: expected each update before every use of the version that it makes"
        )
    return "; ".join(steps) or None
