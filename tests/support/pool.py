"""Long-lived gloo processes that the tests feed with cases: starting one costs seconds, a case little.

    test  -- Pool.run(function, ranks=3, args=...) -->  workers 0, 1, 2: new process group, function(*args)
          <-- results by rank, or CaseError with what every rank left behind

Every case gets a fresh default process group of its own size, so that nothing is left over from the last one.
After a case that failed in any way all workers are ended, and the next case starts new ones.
"""

import multiprocessing
import os
import pickle
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tiers.recorder import current_test

from support.inside import PORTS, free_ports

from .hangs import IDLE, Watch, end_with_stacks
from .pool_worker import Order, Reply, serve

# What the workers' common parent loads, what test files import included, so that each of them need not:
# seven seconds of a core, two of them for transformers' Trainer; what is not installed is left out.
# None of it starts a thread, which a fork would lose.
_PRELOADED = [
    "torch.distributed",
    "torch._dynamo",
    "stagewright.pipe",
    "stagewright.cli.train.loop",
    "pytest",
    "transformers.trainer",
]
_SERVERS: list[forkserver.ForkServer] = []
CASE_LIMIT = 240.0  # [s] guards against cases that compute for ever: those that sleep are found by support.hangs
_START_LIMIT = 240.0  # [s] importing torch on a busy machine takes its time
_MOST_WORKERS = 8  # of pytest, that have ports of their own
_END_GRACE = 5.0  # [s] for a worker to leave by itself
_LOG_TAIL = 20_000  # characters of a worker's output that a failure shows: the stacks of forty threads


class CaseError(AssertionError):
    """A case raised, died or hung on some rank; the message holds what each rank left behind."""


@dataclass
class _Worker:
    process: Any
    connection: Connection
    log: Path


class Pool:
    """Workers for cases of up to `max_ranks` ranks, started when first needed.

    `filters` are warning filters in pytest's notation, set in each worker while it runs a case; `idle` [s] is how long
    all ranks of one may do nothing.
    """

    def __init__(self, *, max_ranks: int = 4, filters: Sequence[str] = (), idle: float = IDLE) -> None:
        self.max_ranks, self.idle = max_ranks, idle
        self.filters = tuple(filters)
        self._workers: list[_Worker] = []
        self._store: Any = None
        self._cases = 0
        self._finalizer = weakref.finalize(self, _end, self._workers)

    def run(
        self,
        function: Callable[..., Any],
        *,
        ranks: int,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = CASE_LIMIT,
        group: bool = True,
    ) -> list[Any]:
        """`function(*args, **kwargs)` on every rank; returns the results by rank.

        `function` stands at the top of any module (of a test file too); arguments and results are pickled.
        With `group=False` there is no process group, only the environment that torchrun would set.
        Raises CaseError when a rank raises, dies, or has not answered after `timeout` [s], or when all do nothing.
        """
        replies = self.replies(function, ranks=ranks, args=args, kwargs=kwargs, timeout=timeout, group=group, grace=3.0)
        if any(reply.kind != "ok" for reply in replies):
            raise CaseError(_story(function, replies))
        return [reply.value for reply in replies]

    def replies(
        self,
        function: Callable[..., Any],
        *,
        ranks: int,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = CASE_LIMIT,
        group: bool = True,
        grace: float | None = None,
    ) -> list[Reply]:
        """As `run`, but answers what became of each rank (`Reply.kind`: ok, error, died, hung).

        Once a rank has failed, the others have `grace` [s] left (None: until `timeout`).
        """
        if not 1 <= ranks <= self.max_ranks:
            raise ValueError(f"ranks={ranks}: expected 1 to {self.max_ranks}; type Pool(max_ranks={ranks})")
        self._start(ranks)
        self._cases += 1
        (port,) = free_ports(1, among=ports_of_this_worker())
        payload = pickle.dumps((tuple(args), dict(kwargs or {})))
        for rank, worker in enumerate(self._workers[:ranks]):
            order = Order(
                case=self._cases,
                module=function.__module__,
                file=sys.modules[function.__module__].__file__ or "",
                function=function.__qualname__,
                payload=payload,
                rank=rank,
                ranks=ranks,
                timeout=timeout,
                group=group,
                master_port=port,
                filters=self.filters,
                test=current_test(),
            )
            worker.connection.send_bytes(pickle.dumps(order))
        replies = self._collect(ranks, timeout=timeout, grace=grace)
        if any(reply.kind != "ok" for reply in replies):
            self.close()
        return replies

    def close(self) -> None:
        _end(self._workers)
        self._store = None

    def _start(self, ranks: int) -> None:
        import torch.distributed as dist

        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = forking()
        started = []
        for index in range(len(self._workers), ranks):
            ours, theirs = context.Pipe()
            descriptor, log = tempfile.mkstemp(prefix=f"stagewright-gloo-{index}-", suffix=".log")
            os.close(descriptor)
            process = context.Process(
                target=serve, args=(theirs, log, self._store.port), daemon=True, name=f"gloo-{index}"
            )
            start_rank(process, index)
            theirs.close()
            self._workers.append(_Worker(process=process, connection=ours, log=Path(log)))
            started.append(index)
        watch = Watch([self._workers[index].process for index in started], limit=_START_LIMIT, idle=self.idle)
        for index in started:  # the clock of a case starts when all its workers stand
            worker = self._workers[index]
            if not watch.wait([worker.connection]):
                end_with_stacks([worker.process])
                text = f"gloo worker {index} did not start: {watch.why}\n{self._tail(index)}"
                self.close()
                raise CaseError(text)
            if worker.connection.recv_bytes() != b"ready":
                raise AssertionError("a worker's first word is not 'ready'")

    def _collect(self, ranks: int, *, timeout: float, grace: float | None) -> list[Reply]:
        watch = Watch([worker.process for worker in self._workers[:ranks]], limit=timeout, idle=self.idle)
        replies: dict[int, Reply] = {}
        while waiting := {self._workers[r].connection: r for r in range(ranks) if r not in replies}:
            for connection in (ready := watch.wait(list(waiting))):
                rank = waiting[connection]
                replies[rank] = reply = self._reply(rank)
                if reply.kind != "ok" and grace is not None:
                    watch.hasten(grace)
            if not ready:
                end_with_stacks([self._workers[rank].process for rank in waiting.values()])
                hung = {r: Reply(kind="hung", text=f"{watch.why}\n{self._tail(r)}") for r in waiting.values()}
                replies |= hung
        return [replies[rank] for rank in range(ranks)]

    def _reply(self, rank: int) -> Reply:
        worker = self._workers[rank]
        try:
            reply: Reply = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            worker.process.join(_END_GRACE)
            return Reply(kind="died", text=f"exit code {worker.process.exitcode}\n{self._tail(rank)}")
        return reply

    def _tail(self, rank: int) -> str:
        return self._workers[rank].log.read_text(errors="replace")[-_LOG_TAIL:]


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.connection.close()  # an idle worker leaves at the end of its connection
    for worker in workers:
        # A busy worker is not asked twice: it may be deep in a collective.
        worker.process.join(_END_GRACE / 10)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.log.unlink(missing_ok=True)
    workers.clear()


def forking() -> Any:
    """The multiprocessing context whose processes `start_rank` forks from ones that have loaded torch."""
    return multiprocessing.get_context("forkserver")


def start_rank(process: Any, rank: int) -> None:
    """Start a process of `forking`, in which strings hash otherwise than on the ranks beside it."""
    if not _SERVERS:
        before = os.environ.get("PYTHONHASHSEED")
        for seed in ("1", "2"):  # each loads torch: one a rank would take its time
            os.environ["PYTHONHASHSEED"] = seed
            _SERVERS.append(forkserver.ForkServer())
            _SERVERS[-1].set_forkserver_preload(_PRELOADED)
            _SERVERS[-1].ensure_running()
        os.environ.pop("PYTHONHASHSEED") if before is None else os.environ.update(PYTHONHASHSEED=before)
    usual = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = _SERVERS[rank % len(_SERVERS)].connect_to_new_process
    try:
        process.start()
    finally:
        forkserver.connect_to_new_process = usual


def ports_of_this_worker() -> range:
    """Ports of one worker of pytest, so that no two tests that begin at the same moment meet at one."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _MOST_WORKERS
    return PORTS[worker::_MOST_WORKERS]


def _story(function: Callable[..., Any], replies: list[Reply]) -> str:
    parts = [f"{function.__module__}.{function.__qualname__} on {len(replies)} ranks (pid {os.getpid()})"]
    parts += [f"--- rank {rank}: {reply.kind}\n{reply.text}" for rank, reply in enumerate(replies)]
    return "\n".join(parts)
