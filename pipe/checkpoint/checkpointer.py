"""Checkpoints during training, in two phases: a copy in host memory, then the disk.

    step s         forwards, backwards | U
    step()             \\ copy ........|                            `host_copy`: U waits for it
    step s + 1          forwards, back.|. U
    a thread                           \\ write, fsync, agree, rename ......        `persist`
    step(), later                                                          due again: waits for that, if need be

At most one checkpoint is being written. Its threads in all processes communicate through the store (`exchanges`), so
that no step waits for a disk. If the write fails in any process, nothing on the disk changes; the failure is reported,
and the next interval tries again.
Source: CheckFreq (Mohan et al., FAST 2021).
"""

from __future__ import annotations

import math
import statistics
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from ...comm import PipelineTimeout
from ...comm.store_exchange import exchanges
from ..update.optimizers import parameters_of
from .host_copy import HostCopy
from .lock import FolderLock
from .persist import SaveResult
from .snapshot import HasState, Snapshot
from .state import State

FIRST = 10  # steps before the first checkpoint, and from there to the second
_KEPT = 3  # costs that are taken into account
_GROWTH = 4  # the largest factor from one interval to the next: a single slow save may not end saving
_STEPS = 50  # undisturbed ones that are kept
_POLL = 0.05  # [s]

Every = int | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """Outcome of one checkpoint, as this process saw it.

    Arguments:
        step: number of the step after which it was taken.
        path: of the whole checkpoint; None: there is none, and `problem` says why.
        problem: the reason as text; empty if the checkpoint was written.
        num_bytes: that this process wrote [bytes].
        copy_seconds, persist_seconds: of the two phases, during which training continued [s].
    """

    step: int
    path: Path | None
    problem: str
    num_bytes: int
    copy_seconds: float
    persist_seconds: float


@dataclass(slots=True)
class _UnderWay:
    step: int
    number: int
    num_bytes: int
    thread: threading.Thread | None = None
    is_given_up: bool = False
    checked: threading.Event = field(default_factory=threading.Event)  # whether weights changed meanwhile
    result: SaveResult | None = None
    copy_seconds: float = 0.0
    persist_seconds: float = 0.0
    missing: Callable[[], list[int]] = list


class Checkpointer:
    """Saves a run at intervals while it trains: call `step()` after each `train_step`.

    Made by `PipelineModule.checkpointer`. Its calls are collective over the processes.

    Attributes:
        every: steps from one checkpoint to the next, as of now.
        records: of the finished checkpoints, oldest first.
    """

    def __init__(
        self,
        folder: Path,
        state: State,
        *,
        every: Every,
        overhead: float,
        loader: HasState | None,
        on_saved: Callable[[CheckpointRecord], object] | None,
    ) -> None:
        run = state.run
        self.records: list[CheckpointRecord] = []
        self._folder = folder
        self._state = state
        self._exchange = exchanges(run.layout.place.world, what="checkpoints")
        self._loader = loader
        self._on_saved = on_saved
        self._interval = Interval(overhead) if every == "auto" else None
        self._copies = HostCopy(run.options.device)
        self._under_way: _UnderWay | None = None
        self._number = 0
        self._clock = _StepClock()
        self._lock: FolderLock | None = None
        problem = ""
        try:
            if run.collectives.rank == 0:
                self._lock = FolderLock(folder)
                weakref.finalize(self, self._lock.release)
                if not self._lock.is_first:
                    raise ValueError(f"{folder} has a checkpointer: expected its close() first, or another folder")
        except (OSError, ValueError) as error:
            problem = f"{folder}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        with run.guard.together():
            run.collectives.alike((every, overhead), _differing, what="opening a checkpointer", problem=problem)
        self.every: int = self._interval.every if self._interval is not None else int(every)
        self._last = state.training.num_steps
        self._due = self._last + self.every

    @property
    def overhead(self) -> float | None:
        """Share of the training time that checkpoints have taken in this process; None: not known yet."""
        return self._clock.overhead

    @property
    def is_due(self) -> bool:
        """Whether `step`, called now, would consider a checkpoint."""
        return self._state.training.num_steps >= self._due

    def step(self) -> None:
        """Begins a checkpoint if one is due, and reports one that has finished. Waits only for an unfinished
        checkpoint.

        Raises ValueError if no checkpoint can be written into the folder; PipelineTimeout if a process has not written
        its part within the time-out.
        """
        step = self._state.training.num_steps
        self._clock.entered(step)
        one = self._under_way
        if one is not None and one.thread is not None and not one.thread.is_alive():
            self._end(one, stacklevel=3)
        if self.is_due:
            self._wait()
            self._clock.stalled()  # by the one before
            self._decide()
            if self.is_due:
                self._begin()
        self._clock.left(is_busy=self._under_way is not None)

    def save(self) -> CheckpointRecord:
        """Saves now, waits until it is on the disk, and returns its record. Raises as `step` does."""
        self._wait()
        self._begin()
        self._wait()
        return self.records[-1]

    def wait(self) -> None:
        """Waits until an unfinished checkpoint is on the disk and reported. Raises as `step` does."""
        self._wait()

    def close(self) -> None:
        """Waits as `wait` does, and unlocks the folder. A `with` block calls it; after an error it does not wait."""
        try:
            self._wait()
        finally:
            self._let_go()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self._let_go()

    # One checkpoint

    def _begin(self) -> None:
        step = self._state.training.num_steps
        snapshot = self._state.snapshot(self._loader)
        self._copies.begin(self._at_rest())
        copied = snapshot.to_host(self._copies.copy)
        self._copies.start()
        one = _UnderWay(step=step, number=self._number, num_bytes=snapshot.num_bytes)
        self._number += 1

        def before_update() -> None:
            self._copies.wait()
            one.checked.set()

        self._state.update.gate.hold(before_update)
        one.thread = threading.Thread(target=self._run, args=(one, copied), daemon=True, name="stagewright-checkpoint")
        self._under_way = one
        one.thread.start()
        self._last, self._due = step, step + self.every

    def _at_rest(self) -> Iterator[torch.Tensor]:
        """Tensors that only updates change: parameters, optimizer state, and older weights."""
        for one in self._state.update.stages:
            for optimizer in one.optimizers:
                yield from parameters_of(optimizer)
            yield from one.tensors()
            yield from one.versions.tensors() if one.versions is not None else ()

    def _run(self, one: _UnderWay, copied: Snapshot) -> None:
        exchange = self._exchange(one.number, lambda: one.is_given_up)
        one.missing = exchange.missing
        try:
            begun = time.perf_counter()
            self._copies.finish()
            one.copy_seconds = time.perf_counter() - begun
            if one.number == 0 or self._copies.is_checked_late:
                while not one.checked.wait(_POLL):  # changes by a forward are found before the next update
                    if one.is_given_up:
                        return
            problems = exchange.gather(self._copies.problem, what="copying the state")
            begun = time.perf_counter()
            if any(problems):
                told = next(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
                one.result = SaveResult(path=None, problem=f"no checkpoint was saved in {self._folder}: {told}")
            else:
                one.result = self._state.persist(self._folder, copied, processes=exchange)
            one.persist_seconds = time.perf_counter() - begun
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            exchange.give_up(text)
            one.result = SaveResult(path=None, problem=f"no checkpoint was saved in {self._folder}: {text}")

    def _wait(self) -> None:
        one, timeout = self._under_way, self._state.run.options.timeout
        if one is None:
            return
        assert one.thread is not None
        with self._state.run.guard.together():
            self._state.update.gate.enter()  # without an update, nothing else would look
            one.thread.join(timeout)
            if one.thread.is_alive():
                one.is_given_up = True
                peers = tuple(one.missing())
                raise PipelineTimeout(
                    f"the checkpoint after step {one.step} is not written after {timeout:g} s: rank "
                    f"{', '.join(map(str, peers)) or self._state.run.collectives.rank} has not written its part",
                    peers=peers,
                )
        self._end(one)

    def _end(self, one: _UnderWay, *, stacklevel: int = 4) -> None:
        assert one.result is not None
        self._under_way = None
        result = one.result
        record = CheckpointRecord(
            step=one.step,
            path=result.path,
            problem=result.problem,
            num_bytes=one.num_bytes,
            copy_seconds=one.copy_seconds,
            persist_seconds=one.persist_seconds,
        )
        is_first = not any(known.path for known in self.records)
        self.records.append(record)
        if self._on_saved is not None:
            self._on_saved(record)
        if result.problem and result.is_mistake and is_first:
            raise ValueError(result.problem)
        text = result.caution or (f"{result.problem}; the next interval tries again" if result.problem else "")
        if text and self._state.run.collectives.rank == 0:
            warnings.warn(text, stacklevel=stacklevel)

    def _decide(self) -> None:
        if self._interval is None or not self.records:
            return
        with self._state.run.guard.together():
            costs = self._state.run.collectives.gather(self._clock.cost(), what="agreeing on when to save next")
        self.every = self._interval.learn(costs)
        self._due = self._last + self.every

    def _let_go(self) -> None:
        if self._under_way is not None:
            self._under_way.is_given_up = True
        if self._lock is not None:
            self._lock.release()


class Cost(NamedTuple):
    """Extra seconds of training, steps while it was written, seconds of an undisturbed step if there was one."""

    seconds: float
    busy_steps: int
    step_seconds: float | None


class Interval:
    """Steps from one checkpoint to the next, from what saving costs.

        overhead = cost of a checkpoint / (steps from one to the next * seconds of an undisturbed step)

    All its inputs are gathered from all processes, so that all save after the same steps. Costs are taken from every
    checkpoint, not only from a profiling phase as in CheckFreq (section 4.2), so that the interval follows a disk or a
    machine that slows down.

    Arguments:
        overhead: share of undisturbed training that checkpoints may take.

    >>> interval = Interval(0.05)
    >>> interval.learn([Cost(1.0, 2, 0.5)]), interval.learn([Cost(0.25, 1, 0.5)])
    (40, 10)
    """

    def __init__(self, overhead: float) -> None:
        self.every = FIRST
        self._overhead = overhead
        self._costs: deque[float] = deque(maxlen=_KEPT)
        self._num_learnt = 0

    def learn(self, costs: list[Cost]) -> int:
        """Interval from now on, given the last checkpoint's cost in each process."""
        steps = [cost.step_seconds for cost in costs if cost.step_seconds is not None]
        busy = max(cost.busy_steps for cost in costs)
        if not steps:  # it never ended before the next was due
            self.every = max(self.every, busy) * 2
            return self.every
        self._num_learnt += 1
        if self._num_learnt == 2:  # the first one also paid for memory that later ones use again
            self._costs.clear()
        self._costs.append(max(cost.seconds for cost in costs))
        needed = math.ceil(statistics.median(self._costs) / (self._overhead * statistics.median(steps)))
        # leaves an undisturbed step or two, without which the next cost could not be measured
        self.every = max(min(needed, _GROWTH * self.every), busy + 2)
        return self.every


class _StepClock:
    """Seconds of steps with and without a checkpoint being written, in this process.

    left()  ... train_step ...  entered()  ... begin a checkpoint ...  left()
           | a step's seconds             | a stall                   |
    """

    def __init__(self) -> None:
        self._quiet: deque[float] = deque(maxlen=_STEPS)
        self._busy_steps, self._busy_seconds = 0, 0.0  # while the newest checkpoint was written
        self._stall = 0.0  # of the newest checkpoint
        self._entered: float = 0.0
        self._left: float | None = None
        self._step: int | None = None
        self._is_busy = False
        self._num_steps = 0
        self._spent = 0.0  # by checkpoints before the newest
        self._total = 0.0

    @property
    def overhead(self) -> float | None:
        cost = self._spent + self._newest()
        return None if not self._quiet or self._total <= cost else max(0.0, cost) / (self._total - cost)

    def entered(self, step: int) -> None:
        """Notes that a step has returned; nothing is measured if several have."""
        self._entered = time.perf_counter()
        if self._left is not None and self._step is not None and step == self._step + 1:
            seconds = self._entered - self._left
            self._num_steps += 1
            self._total += seconds
            if self._is_busy:
                self._busy_steps += 1
                self._busy_seconds += seconds
            elif self._num_steps > 2:  # the first ones warm up
                self._quiet.append(seconds)
        self._step = step

    def left(self, *, is_busy: bool) -> None:
        """Notes that work on checkpoints is done; is_busy: one is written during the next step."""
        self.stalled()
        self._left = self._entered
        self._is_busy = is_busy

    def stalled(self) -> None:
        """Counts the time since `entered` as a stall of the newest checkpoint."""
        now = time.perf_counter()
        self._stall += now - self._entered
        self._total += now - self._entered
        self._entered = now

    def cost(self) -> Cost:
        """Cost of the newest checkpoint; later times count for the next."""
        found = Cost(
            seconds=max(self._newest(), self._stall),
            busy_steps=self._busy_steps,
            step_seconds=statistics.median(self._quiet) if self._quiet else None,
        )
        self._spent += self._newest()
        self._busy_steps, self._busy_seconds, self._stall = 0, 0.0, 0.0
        return found

    def _newest(self) -> float:
        usual = statistics.median(self._quiet) if self._quiet else 0.0
        return self._stall + self._busy_seconds - self._busy_steps * usual


def _differing(first: int, one: tuple[Every, float], rank: int, its: tuple[Every, float]) -> str:
    return (
        f"rank {first} saves every={one[0]} with overhead={one[1]}, and rank {rank} every={its[0]} with "
        f"overhead={its[1]}: expected the same on all ranks"
    )


def check_options(every: Every, overhead: float) -> None:
    is_number = isinstance(every, int) and not isinstance(every, bool) and every >= 1
    if not is_number and every != "auto":
        raise ValueError(f"every={every!r}: expected a number of steps, at least 1, or 'auto'")
    if isinstance(overhead, bool) or not isinstance(overhead, int | float) or not 0 < overhead < 1:
        raise ValueError(f"overhead={overhead!r}: expected a share of the time above 0 and below 1, such as 0.035")
