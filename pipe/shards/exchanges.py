"""Exchanges of a stage's members within its actions: when, and what runs meanwhile.

    F   compute ──> begin ── give way ── wait ──> compute ──> ...        F on the engine's thread
    B            compute ──> begin ── give way ── wait ──> ...           B on a second one, one of the two at a time

A forward and a backward that run together (`schedules.overlap`) take turns: whoever has begun an exchange gives way to
the other, and waits for it when it is on again. Turns change there and nowhere else, so the order of all collectives is
that of the two programs merged, exchange by exchange. Both have as many on each member, however its tokens are routed:
the order is the same on all members, and no two wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from threading import Semaphore, Thread
from typing import TYPE_CHECKING, Any

from torch import overrides
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

if TYPE_CHECKING:
    from ...partition.profiler.clock import Stamp
    from ..guards.randomness import Seeder
    from ..trace.recorder import RankRecorder

_PATIENCE = 5.0  # [s] for a backward to stop whose forward has failed


class _Abandoned(BaseException):
    """The forward that a backward runs together with has failed."""


class Exchanges:
    """Exchanges within the actions of one process."""

    def __init__(self, seeder: Seeder) -> None:
        # Of its rank, which notes them for the action that runs; None: not noted.
        self.recorder: RankRecorder | None = None
        self._seeder = seeder
        self._turns: _Turns | None = None

    def through(self, begin: Callable[[], Any]) -> None:
        """Begin a collective and wait for what `begin` returns; meanwhile the other action of a pair runs."""
        with self.noted():
            begun = begin()
            if self._turns is not None:
                self._turns.give_way()
            begun.wait()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context of an exchange."""
        recorder, turns = self.recorder, self._turns
        if recorder is None:
            yield
            return
        start, note = recorder.clock.stamp(), recorder.exchange
        if turns is not None and turns.is_backward:
            note = turns.note
        yield
        note(start, recorder.clock.stamp())

    def rows(self, by_member: Sequence[int], index: int) -> None:
        """Note what experts compute, see `RankRecorder.rows`. A backward of a pair only computes it again."""
        if self.recorder is not None and not (self._turns is not None and self._turns.is_backward):
            self.recorder.rows(by_member, index)

    def forward(self, run: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run a forward; whenever it exchanges something, as much of a backward as the next exchange of that."""
        self._turns = _Turns(backward, self._seeder)
        try:
            run()
        except BaseException:
            self._turns.abandon()
            self._turns = None
            raise
        self._turns.forward_is_done()

    def rest_of_backward(self) -> None:
        """Run what is left of the backward. Raises its error."""
        assert self._turns is not None
        turns = self._turns
        try:
            turns.finish()
        finally:
            self._turns = None
        if self.recorder is not None:
            for start, end in turns.noted:
                self.recorder.exchange(start, end)

    def drop(self) -> None:
        if self._turns is not None:
            self._turns.abandon()
            self._turns = None


class _Turns:
    """A forward on the calling thread and a backward on one of its own, of which one runs at a time."""

    def __init__(self, backward: Callable[[], None], seeder: Seeder) -> None:
        self.is_backward = False  # whether the backward is on
        self.noted: list[tuple[Stamp, Stamp]] = []  # the backward's exchanges
        self._may_go = {False: Semaphore(0), True: Semaphore(0)}  # by is_backward
        self._done = {False: False, True: False}
        self._is_abandoned = False
        self._error: BaseException | None = None
        self._seeder = seeder
        self._modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]  # type: ignore[no-untyped-call]
        self._thread = Thread(target=copy_context().run, args=(self._run, backward), daemon=True)
        self._thread.start()

    def note(self, start: Stamp, end: Stamp) -> None:
        self.noted.append((start, end))

    def give_way(self) -> None:
        """Let the other one run until it gives way, or ends."""
        mine = self.is_backward
        if mine and self._is_abandoned:  # the forward was interrupted while it waited for its turn
            raise _Abandoned
        if self._done[not mine]:
            return
        with self._seeder.interrupted():
            self._switch(not mine)
            self._may_go[mine].acquire()
        if mine and self._is_abandoned:
            raise _Abandoned
        if not mine:
            self._raise_error()

    def forward_is_done(self) -> None:
        self._done[False] = True

    def finish(self) -> None:
        if not self._done[True]:
            self._switch(True)
            self._may_go[False].acquire()
        self._thread.join()
        self._raise_error()

    def abandon(self) -> None:
        """End the backward where it gave way, without its error."""
        self._is_abandoned = self._done[False] = True
        self._may_go[True].release()
        self._thread.join(_PATIENCE)

    def _switch(self, to_backward: bool) -> None:
        self.is_backward = to_backward
        self._may_go[to_backward].release()

    def _raise_error(self) -> None:
        if self._error is not None:  # again in `finish`, where code of the forward has caught it
            raise self._error

    def _run(self, backward: Callable[[], None]) -> None:
        self._may_go[True].acquire()
        try:
            if not self._is_abandoned:
                for mode in self._modes:  # of the user's, such as a count of operations: a thread has its own
                    (overrides if isinstance(mode, TorchFunctionMode) else python_dispatch)._push_mode(mode)
                with suppress(_Abandoned):
                    backward()
        except BaseException as error:
            self._error = error
        self._done[True] = True
        self._switch(False)
