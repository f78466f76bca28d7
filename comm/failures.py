"""Errors between ranks. A rank that fails reports why, breaks its links, and finds the rank that failed first.

A lost connection or a wait that timed out is often only the consequence of a failure elsewhere:

    rank 0 waits for 1, rank 1 waits for 2, rank 3 waits for 2, rank 2 reports nothing  ->  rank 2 is the cause

So a rank that fails writes into the rendezvous store which ranks it waited for, breaks its links (so that the ranks
that wait for it fail at once, too), and follows the reports to their end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from traceback import StackSummary, TracebackException
from types import TracebackType
from typing import NamedTuple, TypeVar

from torch.distributed.distributed_c10d import Store, _get_default_store

from .mesh import MeshPlace, World
from .sealed import sealed

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

_SOON = 0.6  # [s] for the reports of ranks that lose a connection, and for the others to read rank 0's store
_LATER = 1.5  # [s] for those of ranks whose own wait began a little later
_STORE_LIMIT = 1.0  # [s] for one answer of the store, whose host may be stopped
_POLL = 0.05  # [s]
_LIBRARY = [f"{Path(__file__).parents[1] / folder}{os.sep}" for folder in ("comm", "partition", "pipe", "schedules")]
_NOT_THE_USERS = (*_LIBRARY, str(Path(os.__file__).parent))  # files of frames
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # which torchrun names to each process
_GLANCE = 0.25  # [s] at most that count between two polls: if it was more, this process did not run


class PipelineError(RuntimeError):
    """A run that cannot continue, such as PipelineTimeout and PeerLost. The message names the ranks and actions.

    peers: the ranks that were waited for.
    is_explained: whether the message names the cause.
    """

    def __init__(self, message: str, *, peers: Sequence[int] = (), is_explained: bool = False) -> None:
        super().__init__(message)
        self.peers = tuple(peers)
        self.is_explained = is_explained


class PipelineTimeout(PipelineError):  # noqa: N818 - the name of a time-out is clear
    """A message did not arrive in time. The message names the waiting rank, the action waited for, and how long."""


class PeerLost(PipelineError):  # noqa: N818 - likewise
    """The connection to a rank broke: it died, or stopped after its own error."""


def short_reason(error: BaseException) -> str:
    """A backend's error message without source paths and addresses.

    >>> short_reason(RuntimeError("[/a/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3. x"))
    'Connection closed by peer'
    """
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if line.startswith("[/"):
        line = line.partition("] ")[2]
    return line.partition(" [")[0].partition(". ")[0][:160]


class Account(NamedTuple):
    """Report of a rank that failed."""

    peers: tuple[int, ...]  # the ranks that it waited for; none: the error was its own
    gave_up: bool  # its wait timed out (else it lost a connection)
    text: str
    refusal: str = ""  # message of a ValueError of this package's own; empty: it is something else

    @classmethod
    def of(cls, error: BaseException, call: str = "") -> Account:
        if isinstance(error, PipelineError):
            return cls(error.peers, isinstance(error, PipelineTimeout), f"{error}{call}")
        refusal = str(error) if _is_mistake(TracebackException.from_exception(error)) else ""
        return cls((), False, f"{type(error).__name__}: {error}", refusal)


class FailureBoard:
    """Reports of one run's ranks, in a store that all of them reach. All ranks make the same number of boards, in the
    same order, so that an old report is not mistaken for a new one."""

    def __init__(self, store: Store, *, rank: int, size: int) -> None:
        self._store = sealed(store)
        self._rank = rank
        self._size = size
        self._name = f"failure/{store.add(f'failure/boards of rank {rank}', 1)}"
        self.place = MeshPlace.line(World(rank=rank, size=size))  # until the mesh is known; only for names
        self.call = ""  # text of this rank's newest call with a batch; only for messages

    def write(self, error: BaseException) -> None:
        text = json.dumps(Account.of(error, self.call))
        _within(_STORE_LIMIT, lambda: self._store.set(f"{self._name}/{self._rank}", text))

    def explain(self, error: BaseException) -> BaseException:
        """The error to raise: this rank's own, with the cause at the end of the chain of reports. A refusal of this
        package's, such as of an argument, is the same ValueError on each rank that waited for the one that found it."""
        if not isinstance(error, PipelineError) or not error.peers or error.is_explained:
            return error
        patience = _Patience(_LATER if isinstance(error, PipelineTimeout) else _SOON)
        reports: dict[int, Account] = {self._rank: Account.of(error)}
        while True:
            found = _within(_STORE_LIMIT, partial(self._read, frozenset(reports)))
            if found is None:
                cause = (
                    "the rendezvous store does not answer either: its host "
                    "(rank 0, unless a launcher hosts it) died or is stalled"
                )
                break
            reports |= found
            cause, settled = find_cause(self._rank, reports, self.place)
            if settled or patience.is_over():
                break
            time.sleep(_POLL)
        for rank, report in reports.items():
            if report.refusal and cause == _own_failure(rank, report, self.place):
                return ValueError(f"{report.refusal}\n(found on {self.place.name_of(rank)}; {error})")
        return type(error)(f"{error}{self.call}\ncause: {cause}", peers=error.peers, is_explained=True)

    def others_failed(self) -> bool:
        return any(self._store.check([f"{self._name}/{one}"]) for one in range(self._size) if one != self._rank)

    def linger(self) -> None:
        """Rank 0 may host the store: let the others read before it leaves."""
        if self._rank == 0:
            time.sleep(_SOON)

    def _read(self, known: Collection[int]) -> dict[int, Account]:
        found = {}
        for rank in range(self._size):
            key = f"{self._name}/{rank}"
            if rank not in known and self._store.check([key]):
                peers, gave_up, text, refusal = json.loads(self._store.get(key))
                waited = tuple(one for one in range(self._size) if one in peers)
                found[rank] = Account(waited, bool(gave_up), str(text), str(refusal or ""))
        return found


class Guard:
    """Ends the run on all ranks at once when one of them fails in a collective part of it. Without a board there are no
    other processes, and nothing ends."""

    def __init__(self, board: FailureBoard | None) -> None:
        self._board = board
        self._let_go: list[Callable[[], None]] = []
        self._end: str | None = None
        self._spared: BaseException | None = None
        self.closed = False
        self.survives_losses = False  # whether the run may continue without a lost peer; the caller decides
        self.someone_died: Callable[[], bool] = lambda: False

    def set_place(self, place: MeshPlace) -> None:
        """Name processes in reports by their positions on the mesh."""
        if self._board is not None:
            self._board.place = place

    def set_call(self, call: str) -> None:
        """Name this rank's newest call with a batch in reports."""
        if self._board is not None:
            self._board.call = f"; newest call: {call}"

    def on_failure(self, let_go: Callable[[], None]) -> None:
        """Register a function that breaks the links of this rank."""
        self._let_go.append(let_go)

    def spared(self, error: E) -> E:
        """The error, marked not to end the run within `together`, since all ranks raise it at this point."""
        self._spared = error
        return error

    def spares(self, error: BaseException) -> bool:
        return error is self._spared

    def others_failed(self) -> bool:
        return self._board is not None and (self.someone_died() or self._board.others_failed())

    @property
    def ended(self) -> bool:
        return self._end is not None

    def close(self) -> None:
        if self._board is not None:
            self.closed = True
            self._end = self._end or "close()"
            self._let_go.clear()

    def fail(self, error: BaseException) -> None:
        """Report an error between collective calls, such as in a data loader, and end the run on all ranks."""
        if self._board is not None and self._end is None:
            self._end = f"{type(error).__name__}: {error}"
            self._board.write(error)
            self._release()
            self._board.linger()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context whose errors are reported to the other ranks, and raised with their cause."""
        if self._end is not None:
            raise PipelineError(f"this pipeline has ended: expected a new PipelineModule after {self._end}")
        try:
            yield
        except BaseException as error:
            if error is self._spared:
                self._spared = None
                raise
            if self._board is None:
                self._release()
                raise
            self._end = f"{type(error).__name__}: {error}"
            if self.survives_losses and isinstance(error, PeerLost | PipelineTimeout):
                self._release()
                raise
            self._board.write(error)
            self._release()
            explained = self._board.explain(error)
            self._board.linger()
            if explained is error:
                raise
            raise explained from error

    def _release(self) -> None:
        for let_go in self._let_go:
            let_go()


def make_guard(world: World) -> Guard:
    """Guard of a run, which reports uncaught exceptions to the other ranks, too. All processes must make their guards
    in the same order."""
    if not world.distributed:
        return Guard(None)
    guard = Guard(FailureBoard(_get_default_store(), rank=world.rank, size=world.size))
    sys.excepthook = partial(_tell_uncaught, weakref.ref(guard), sys.excepthook)
    return guard


def _tell_uncaught(
    known: weakref.ref[Guard],
    before: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    is_plain = before is sys.__excepthook__ or getattr(before, "__module__", "") == _get_default_store.__module__
    whole = TracebackException.from_exception(error)
    if is_plain and (isinstance(error, PipelineError) or _is_mistake(whole)):
        print(text := _own_lines(whole), file=sys.stderr, flush=True)
    else:
        before(kind, error, traceback)
        text = "".join(whole.format())
    _leave_to_torchrun(error, text)
    guard = known()
    if guard is not None:
        guard.fail(error)


def _is_mistake(whole: TracebackException) -> bool:
    kind, frames = whole.exc_type, whole.stack
    is_ours = bool(frames) and frames[-1].filename.startswith(tuple(_LIBRARY))
    return is_ours and kind is not None and issubclass(kind, ValueError)


def _own_lines(whole: TracebackException) -> str:
    """The error and its position in the user's code; the full traceback goes to a file, which is named. The cause is
    often another rank's error: the traceback here, chained from gloo up, does not show it."""
    folder = os.path.dirname(os.environ.get(_ERROR_FILE, ""))  # it may be gone in a process that outlives torchrun
    where = folder if os.access(folder, os.W_OK) else None
    with NamedTemporaryFile(
        "w", prefix="stagewright-", suffix=".log", delete=False, encoding="utf-8", dir=where
    ) as log:
        log.writelines(whole.format())
    own = [frame for frame in whole.stack if not frame.filename.startswith(_NOT_THE_USERS)]
    lines = StackSummary.from_list(own).format()
    message = "".join(whole.format_exception_only())
    return f"Traceback (your own lines; all of it: {log.name}):\n{''.join(lines)}{message}".rstrip()


_ECHO = 30  # [s] added to the time of a consequence: a slow machine may report its cause later


def _leave_to_torchrun(error: BaseException, text: str) -> None:
    """Write the text that torchrun shows at its end. Causes are listed before their consequences."""
    path, when = os.environ.get(_ERROR_FILE), int(time.time()) + _ECHO * isinstance(error, PipelineError)
    if path is None or os.path.exists(path):  # torch's own decorator was quicker
        return
    message = {"message": str(error), "extraInfo": {"py_callstack": text, "timestamp": str(when)}}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def find_cause(rank: int, reports: Mapping[int, Account], place: MeshPlace | None = None) -> tuple[str, bool]:
    """Follow who waited for whom, beginning at process `rank`: (the cause, whether no later report can change it).
    `place`: names the processes; None: ranks.

    >>> find_cause(0, {0: Account((1,), False, ""), 1: Account((2,), True, "rank 1: waited 3.0 s")})[0]
    'rank 2, which rank 1 waited for, reports nothing: it is stalled, or still busy (rank 1: waited 3.0 s)'
    """
    if place is None:
        place = MeshPlace.line(World(rank=rank, size=max((rank, *reports)) + 1))
    came_from: dict[int, int] = {rank: rank}
    order = [rank]
    silent: list[int] = []
    for one in order:
        report = reports.get(one)
        if report is None:
            silent.append(one)
        elif not report.peers:
            return _own_failure(one, report, place), True
        else:
            fresh = [peer for peer in report.peers if peer not in came_from]
            came_from.update(dict.fromkeys(fresh, one))
            order += fresh
    if silent:
        return "; ".join(_silence(one, came_from[one], rank, reports, place) for one in silent), False
    others = [one for one in order if one != rank]
    impatient = [one for one in others if reports[one].gave_up]
    if impatient and not reports[rank].gave_up:
        return f"{place.name_of(impatient[0])} gave up: {reports[impatient[0]].text}", True
    stories = "; ".join(reports[one].text for one in others)
    broken = [(a, b) for a in order for b in reports[a].peers if a < b and a in reports[b].peers]
    if broken and not any(reports[one].gave_up for one in order):
        ranks = ", ".join(f"{a}-{b}" for a, b in broken)
        links = f"the ranks {ranks}" if place.mesh.is_line else "; ".join(map(place.names_of, broken))
        cause = (
            f"the connection between {links} broke while both ends were alive: look at the network between their "
            f"hosts (interface, firewall, address)"
        )
    else:
        cause = (
            f"{place.names_of(order)} waited for each other: did all of them make the same calls, with batches of the "
            f"same size, and does the network between them let all messages through?"
        )
    return f"{cause} ({stories})", True


def _own_failure(rank: int, report: Account, place: MeshPlace) -> str:
    return f"{place.name_of(rank)} failed: {report.text}"


def _silence(silent: int, waiting: int, rank: int, reports: Mapping[int, Account], place: MeshPlace) -> str:
    fate = "it is stalled, or still busy"
    if not reports[waiting].gave_up:
        fate = "it died, or ended without making this call"
    story = f" ({reports[waiting].text})" if waiting != rank else ""
    return f"{place.name_of(silent)}, which {place.name_of(waiting)} waited for, reports nothing: {fate}{story}"


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """Result of `ask`; None when it raises, or takes too long (then its thread keeps running)."""
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception:
            return

    thread = threading.Thread(target=run, daemon=True, name="stagewright-failure-board")
    thread.start()
    patience = _Patience(seconds)
    while thread.is_alive() and not patience.is_over():
        thread.join(min(_POLL, seconds))
    return answers[0] if answers else None


class _Patience:
    """Seconds to wait, without those in which the machine ran no process: others could not answer either."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._looked = time.monotonic()

    def is_over(self) -> bool:
        now = time.monotonic()
        self._left -= min(now - self._looked, _GLANCE)
        self._looked = now
        return self._left <= 0
