"""Background work in the waits of a step: pieces of it, where the rank would stand still until a message is there.

    0F3 |p4|p5|......|0B3     a rank waits for the message that 0B3 needs: pieces run as long as the next one ends
                              within the gap that the last steps saw here, by what pieces took

Gaps are measured in each step, with pieces or without. Where a message came while a piece ran, the gap counts as what
was filled in front of that one; where nobody sees it come, as half of what was filled.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

import torch

from ...comm import PipelineError
from ...partition.model.forms import counted_changes
from ...partition.model.untouched import untouched
from ...schedules import Action

_SEEN = 6  # steps whose gaps, and pieces whose seconds, are remembered
_ENOUGH = 3  # pieces whose seconds say what the next one takes
_PATIENCE = 1000  # places that were too short
_SAFE = 0.9  # share of a gap that is filled
_MET = 0.02  # of what was filled: with less left to wait, the message was there before
_Place = tuple[int, Action | None]  # rank, and the action that waits there, of any batch; None: the program's end


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
        self.took = deque(took, maxlen=_SEEN)  # [s]

    def __repr__(self) -> str:
        return f"<FillWork {self.name}: {self.num_done} pieces done{'' if self.is_done else ', more to do'}>"

    def finish(self) -> None:
        """Run what is left now."""
        while not self.is_done:
            self.run_piece()

    @property
    def seconds(self) -> float | None:
        """Seconds that a piece takes, by the last ones; None: too few are known."""
        return statistics.median_high(self.took) if len(self.took) >= _ENOUGH else None

    def refused(self) -> None:
        """The next piece does not fit; now and then what the last ones took is forgotten."""
        self._num_refused += 1
        if self._num_refused % _PATIENCE == 0:
            self.took.clear()

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
            self.took.append(self._now() - begun)


class Fills:
    """The background work that is left in this process, in the order in which it was given, and what places leave."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.works: deque[FillWork] = deque()
        self.is_running = False
        self.weights: Sequence[torch.Tensor] = ()  # which no piece may change in the midst of a step
        self._gaps: dict[_Place, deque[float]] = defaultdict(lambda: deque(maxlen=_SEEN))  # [s]
        # By rank, where it is: since when, seconds of pieces there, and when its message was there.
        self._visits: dict[int, tuple[_Place, float, float, float]] = {}

    def add(
        self, work: Iterable[Callable[[], object]], *, name: str | None = None, seconds: float | None = None
    ) -> FillWork:
        """See `PipelineModule.fill`."""
        if not isinstance(work, Iterable):
            hint = "[piece]" if callable(work) else "an iterable of callables without arguments"
            raise ValueError(f"fill({work!r:.60}): expected {hint}, or a generator that yields them")
        wrong = [piece for piece in work if not callable(piece)] if isinstance(work, Sequence) else []
        if wrong:
            raise ValueError(f"fill([..., {wrong[0]!r:.60}, ...]): expected callables without arguments")
        if seconds is not None and not seconds > 0:
            raise ValueError(f"seconds={seconds!r}: expected what a piece takes, above 0, or None")
        name = name or str(getattr(work, "__name__", "work"))
        took = [] if seconds is None else [seconds] * _ENOUGH
        self.works.append(FillWork(work, name=name, took=took, now=self._now))
        return self.works[-1]

    @staticmethod
    def require(device: torch.device) -> None:
        """ValueError for a device whose waits are not known."""
        if device.type != "cpu":
            raise ValueError(f"background work on {device}: waits are measured on the host: expected device='cpu'")

    def pass_place(self, place: _Place, norm: float, is_over: Callable[[], bool]) -> tuple[float, float] | None:
        """A rank stands before a wait: run the pieces that fit; when they began and ended, if there were any.

        Arguments:
            norm: seconds that the global norm of its last step took, behind the program's end [s].
            is_over: whether the wait is seen to be over.
        """
        rank, _ = place
        if rank in self._visits:
            self._leave(*self._visits.pop(rank), norm)
        budget = self._budget(place)
        begun = since = now = self._now()
        worked: tuple[float, float] | None = None
        while (work := self._next()) is not None and budget > 0:
            if is_over():  # since the last look
                self._gaps[place].append(since - begun)
                return worked
            since, needed = now, work.seconds
            if needed is None:
                waited = 0.0 if worked else now - begun
                needed = max(0.0, max(self._budget(where) for where in self._gaps if where[0] == rank) - waited)
            if now - begun + needed > budget:
                work.refused()
                break
            self.is_running, changes = True, counted_changes(self.weights)
            try:
                work.run_piece()
            finally:
                self.is_running = False
            if counted_changes(self.weights) != changes:
                work.is_done = True
                raise ValueError(
                    f"piece {work.num_done - 1} of the background work {work.name!r} changed a weight in the midst "
                    f"of a step: expected pieces that read weights, and changes between two steps"
                )
            worked = (now if worked is None else worked[0]), self._now()
            now = self._now()
        self._visits[rank] = place, begun, now - begun, now
        return worked

    def _budget(self, place: _Place) -> float:
        gaps = self._gaps.get(place, ())
        least = (len(gaps) - 1) // 3  # but for one of four or more: there the rank itself came late
        return _SAFE * sorted(gaps)[least] if len(gaps) > 1 else 0.0

    def met(self, rank: int) -> None:
        """The wait at the place that a rank passed last is over."""
        if rank in self._visits:
            self._visits[rank] = *self._visits[rank][:3], self._now()

    def _leave(self, place: _Place, begun: float, filled: float, met: float, norm: float) -> None:
        gap = met - begun + (norm if place[1] is None else 0.0)
        self._gaps[place].append(filled / 2 if gap - filled < _MET * filled else gap)

    def _next(self) -> FillWork | None:
        while self.works and self.works[0].is_done:
            self.works.popleft()
        return next((work for work in self.works if not work.is_done), None)

    def close(self) -> None:
        """Drop what is left, with a warning."""
        left = [repr(work) for work in self.works if not work.is_done]
        self.works.clear()
        if left:
            warnings.warn(f"close() drops background work: {', '.join(left)}. Expected finish() before", stacklevel=3)
