"""Background work in the waits of a step: a transport around a transport, which runs pieces of it while a message is
not there.

    0F3 |p4|p5|......|0B3     a rank waits for the message that 0B3 needs: pieces run as long as the next one ends
                              within the gap that the last steps saw here, by what pieces took

Gaps are measured in each step, with pieces or without. Where a message came while a piece ran, the gap counts as what
was filled before that one; where nobody sees it come, as half of what was filled. In one process, where a rank does not
wait but lets others go on, its gap lasts until its turn comes.
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
_ENOUGH = 3  # pieces whose seconds say what the next one takes
_PATIENCE = 1000  # places that were too short
_SAFE = 0.9  # share of a gap that is filled
_MET = 0.02  # of what was filled: with less left to wait, the message was there before

# When a wait began, seconds of pieces in it, and its gap where the message is seen to be there.
_Stand = tuple[float, float, float | None]


class FillWork:
    """Background work of this process, a piece at a time, as `PipelineModule.fill` returns it.

    Attributes:
        name: for people.
        num_done: pieces that are through.
        is_done: whether all are.
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
        """Run what is left now."""
        while not self.is_done:
            self.run_piece()

    @property
    def seconds(self) -> float | None:
        """Seconds that a piece takes, by the last ones; None: too few are known."""
        return statistics.median_high(self._took) if len(self._took) >= _ENOUGH else None

    def refused(self) -> None:
        """The next piece does not fit; now and then what the last ones took is forgotten."""
        self._num_refused += 1
        if self._num_refused % _PATIENCE == 0:
            self._took.clear()

    def run_piece(self) -> None:
        """The next one, if there is one. RuntimeError where it fails, and the work is over."""
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
        except PipelineError:  # it has a story of its own
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
    """One rank's end, whose waits are filled.

    Arguments:
        works: of this process, in the order in which they were given.
    """

    def __init__(self, inner: Transport, run: Run, works: deque[FillWork], now: Callable[[], float]) -> None:
        super().__init__(inner)
        self._run = run
        self._works = works
        self._now = now
        self._weights = [*run.root.parameters()]  # which no piece may change in the midst of a step
        self._num_indices = run.layout.schedule.batch_indices
        self._gaps: dict[Message, deque[float]] = defaultdict(lambda: deque(maxlen=_SEEN))  # [s]
        self._stands: dict[Message, _Stand] = {}  # while other ranks of this process go on

    def post(self, message: Message, peer: int, specs: Sequence[TensorSpec]) -> None:
        self._stands.pop(message, None)  # of a step that failed
        self.inner.is_watched = len(self._works) > 0
        super().post(message, peer, specs)

    def ready(self, message: Message) -> bool:
        is_ready = super().ready(message)
        if not is_ready and message not in self._stands:
            self._stands[message] = self._fill(message)
        return is_ready

    def wait(self, message: Message, timeout: float) -> tuple[torch.Tensor, ...]:
        begun, filled, gap = self._stands.pop(message) if message in self._stands else self._fill(message)
        tensors = super().wait(message, timeout)
        if gap is None:
            gap = self._now() - begun
            gap = filled / 2 if gap - filled < _MET * filled else gap
        self._gaps[self._place(message)].append(gap)
        return tensors

    def close(self) -> None:
        """Drop the work that is left, with a warning."""
        left = [repr(work) for work in self._works if not work.is_done]
        self._works.clear()
        if left:
            warnings.warn(f"close() drops background work: {', '.join(left)}. Expected finish() before", stacklevel=4)
        super().close()

    def _fill(self, message: Message) -> _Stand:
        """Run the pieces that fit before a message comes."""
        budget = self._budget(self._place(message))
        begun = before = now = self._now()
        while budget > 0 and (work := self._next()) is not None:
            if self.inner.is_here(message):  # since the last look
                return begun, now - begun, before - begun
            needed = work.seconds
            if needed is None:  # it is tried alone, in the longest wait
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
        """In the midst of a step: ValueError for one that changes a weight."""
        changes, self._run.inside = counted_changes(self._weights), "a piece of background work"
        try:
            work.run_piece()
        finally:
            self._run.inside = None
        if counted_changes(self._weights) != changes:
            work.is_done = True
            raise ValueError(
                f"piece {work.num_done - 1} of the background work {work.name!r} changed a weight in the midst "
                f"of a step: expected pieces that read weights, and changes between two steps"
            )

    def _place(self, message: Message) -> Message:
        """The message of any batch."""
        return message._replace(index=message.index % self._num_indices)

    def _budget(self, place: Message) -> float:
        gaps = self._gaps.get(place, ())
        least = (len(gaps) - 1) // 3  # but for one of four or more: there the rank itself came late
        return _SAFE * sorted(gaps)[least] if len(gaps) > 1 else 0.0


def fills(run: Run, engine: Engine, now: Callable[[], float] = time.perf_counter) -> Callable[..., FillWork]:
    """Takes background work, see `PipelineModule.fill`. From the first on, waits of the engine's ranks are filled."""
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
