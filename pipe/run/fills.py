"""Background work in the waits of a step: a transport around a transport, which runs pieces of it until a message
arrives.

    0F3 |p4|p5|......|0B3     a rank waits for the message that 0B3 needs: a piece runs if, by its last durations, it
                              ends within the gap that the last steps had here

Gaps are measured in each step, with pieces or without. If a message arrives while a piece runs, the gap is what was
filled before that piece; if its arrival is not seen, half of what was filled. In one process, where a rank does not
wait but lets others run, its gap lasts until it runs again.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from ...comm import PipelineError, TensorSpec, Transport, TransportAround
from ...partition.model.forms import counted_changes
from ...partition.model.untouched import untouched
from ...schedules import Message
from ..context import Run
from .engine import Engine

_SEEN = 6  # steps whose gaps, and pieces whose seconds, are remembered
_ENOUGH = 3  # pieces whose seconds predict the next one's
_PATIENCE = 1000  # gaps that were too short
_SAFE = 0.9  # share of a gap that is filled
_ARRIVED = 0.02  # of what was filled: with less left to wait, the message had arrived before

# When a wait began, seconds of pieces in it, and its gap where the message is known to have arrived.
_Filled = tuple[float, float, float | None]


class FillWork:
    """Background work of this process, a piece at a time, as `PipelineModule.fill` returns it.

    Attributes:
        name: shown in messages.
        num_done: pieces that have run.
        is_done: whether all have.
    """

    def __init__(
        self, pieces: Iterable[Callable[[], object]], *, name: str, took: Iterable[float], now: Callable[[], float]
    ) -> None:
        self._now = now
        self.name = name
        self.num_done = 0
        self.is_done = False
        self._pieces = iter(pieces)
        self._num_refused = 0
        self._took = deque(took, maxlen=_SEEN)  # [s]

    def __repr__(self) -> str:
        return f"<FillWork {self.name}: {self.num_done} pieces done{'' if self.is_done else ', more to do'}>"

    def finish(self) -> None:
        while not self.is_done:
            self.run_piece()

    @property
    def seconds(self) -> float | None:
        """Seconds of a piece, by the last ones; None: too few are known."""
        return statistics.median_high(self._took) if len(self._took) >= _ENOUGH else None

    def refused(self) -> None:
        """Note that the next piece does not fit; every _PATIENCE times the last durations are dropped."""
        self._num_refused += 1
        if self._num_refused % _PATIENCE == 0:
            self._took.clear()

    def run_piece(self) -> None:
        """Run the next piece, if there is one. RuntimeError where it fails, which ends the work."""
        begun = self._now()
        try:
            with untouched(device=torch.device("cpu")), torch.autocast("cpu", enabled=False):
                piece = next(self._pieces, None)
                self.is_done = piece is None
                if piece is None:
                    return
                if not callable(piece):
                    raise TypeError(f"expected a callable without arguments, found {piece!r:.60}")
                piece()
        except PipelineError:  # which needs no other message
            self.is_done = True
            raise
        except Exception as error:
            self.is_done = True
            raise RuntimeError(
                f"piece {self.num_done} of the background work {self.name!r} failed: {type(error).__name__}: {error}"
            ) from error
        self.num_done += 1
        if self.num_done > 1:  # the first one loads and allocates
            self._took.append(self._now() - begun)


class FillingTransport(TransportAround):
    """One rank's end, whose waits are filled. `works`: of this process, in the order in which they were given."""

    def __init__(self, inner: Transport, run: Run, works: deque[FillWork], now: Callable[[], float]) -> None:
        super().__init__(inner)
        self._run = run
        self._works = works
        self._now = now
        self._weights = [*run.root.parameters()]  # which no piece may change within a step
        self._num_indices = run.layout.schedule.batch_indices
        self._gaps: dict[Message, deque[float]] = defaultdict(lambda: deque(maxlen=_SEEN))  # [s]
        self._waiting: dict[Message, _Filled] = {}  # while other ranks of this process run

    def post(self, message: Message, peer: int, specs: Sequence[TensorSpec]) -> None:
        self._waiting.pop(message, None)  # of a step that failed
        self.inner.is_watched = len(self._works) > 0
        super().post(message, peer, specs)

    def ready(self, message: Message) -> bool:
        is_ready = super().ready(message)
        if not is_ready and message not in self._waiting:
            self._waiting[message] = self._fill(message)
        return is_ready

    def wait(self, message: Message, timeout: float) -> tuple[torch.Tensor, ...]:
        begun, filled, gap = self._waiting.pop(message) if message in self._waiting else self._fill(message)
        tensors = super().wait(message, timeout)
        if gap is None:
            gap = self._now() - begun
            gap = filled / 2 if gap - filled < _ARRIVED * filled else gap
        self._gaps[self._in_any_batch(message)].append(gap)
        return tensors

    def close(self) -> None:
        """Drop the remaining work, with a warning."""
        left = [repr(work) for work in self._works if not work.is_done]
        self._works.clear()
        if left:
            warnings.warn(f"close() drops background work: {', '.join(left)}. Expected finish() before", stacklevel=4)
        super().close()

    def _fill(self, message: Message) -> _Filled:
        budget = self._budget(self._in_any_batch(message))
        begun = before = now = self._now()
        while budget > 0 and (work := self._next()) is not None:
            if self.inner.is_here(message):  # arrived during the last piece
                return begun, now - begun, before - begun
            needed = work.seconds
            if needed is None:  # a first piece runs alone, in the longest wait
                needed = max(map(self._budget, self._gaps))
            if now - begun + needed > budget:
                work.refused()
                break
            before = now
            self._run_piece(work)
            now = self._now()
        return begun, now - begun, None

    def _next(self) -> FillWork | None:
        while self._works and self._works[0].is_done:
            self._works.popleft()
        return self._works[0] if self._works else None

    def _run_piece(self, work: FillWork) -> None:
        changes, self._run.inside = counted_changes(self._weights), "a piece of background work"
        try:
            work.run_piece()
        finally:
            self._run.inside = None
        if counted_changes(self._weights) != changes:
            work.is_done = True
            raise ValueError(
                f"piece {work.num_done - 1} of the background work {work.name!r} changed a weight within a step: "
                f"expected pieces that read weights, and changes between two steps"
            )

    def _in_any_batch(self, message: Message) -> Message:
        return message._replace(index=message.index % self._num_indices)

    def _budget(self, message: Message) -> float:
        """Seconds that pieces may take while the rank waits for this message."""
        gaps = self._gaps.get(message, ())
        least = (len(gaps) - 1) // 3  # of four or more leaves the shortest out: there the rank itself may be late
        return _SAFE * sorted(gaps)[least] if len(gaps) > 1 else 0.0


def fills(run: Run, engine: Engine, now: Callable[[], float] = time.perf_counter) -> Callable[..., FillWork]:
    """Function that takes background work, see `PipelineModule.fill`, and then fills waits of the engine's ranks."""
    works = deque[FillWork]()

    def fill(
        work: Iterable[Callable[[], object]], *, name: str | None = None, seconds: float | None = None
    ) -> FillWork:
        device = run.options.device
        if device.type != "cpu":
            raise ValueError(f"background work on {device}: waits are measured on the host: expected device='cpu'")
        if not isinstance(work, Iterable):
            hint = "[piece]" if callable(work) else "an iterable of callables without arguments"
            raise ValueError(f"fill({work!r:.60}): expected {hint}, or a generator that yields them")
        wrong = [piece for piece in work if not callable(piece)] if isinstance(work, Sequence) else []
        if wrong:
            raise ValueError(f"fill([..., {wrong[0]!r:.60}, ...]): expected callables without arguments")
        if seconds is not None and not seconds > 0:
            raise ValueError(f"seconds={seconds!r}: expected what a piece takes, above 0, or None")
        if not isinstance(engine.ranks[0].transport, FillingTransport):
            engine.ranks = [
                replace(local, transport=FillingTransport(local.transport, run, works, now)) for local in engine.ranks
            ]
        took = [] if seconds is None else [seconds] * _ENOUGH
        works.append(FillWork(work, name=name or str(getattr(work, "__name__", "work")), took=took, now=now))
        return works[-1]

    return fill
