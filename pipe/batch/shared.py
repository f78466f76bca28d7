"""Batches that the processes of a host read and prepare once, and samples that it keeps: files in shared memory.

    process 0    its DataLoader -> batch 3 --links--> 2.3.1    2.3.2      (iteration, number, process)
    process 1                                         mapped, and unlinked
    process 2                                                  mapped, and unlinked

The reader of a replica's batches is the first process of that pipeline on the host. Each process holds a lock on its
own file, which the kernel releases when it ends: after the reader has ended, the others read the data themselves.
Only this user may enter the folder; the last process removes it, or, where that was killed, the next run.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from torch.utils.data import Dataset

from ...comm import MeshPlace, machine
from ...comm.forked import keep_from_children
from ...comm.sealed import load_sealed, own_folder, save_sealed
from ...comm.store_exchange import exchanges
from .loader import Draw, ReplicaBatches, ReplicaLoader, Seeded, count_samples

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "stagewright-data-"
_AHEAD = 2  # batches at most that a process has not taken yet
_POLL = 0.0005  # [s]
_YOUNG = 60.0  # [s] for which a folder without locks may still be set up
_GOLDEN = 0.6180339887498949  # multiples of it fill [0, 1) evenly

_log = logging.getLogger("stagewright")


class HostShare:
    """One replica's batches on one host, for this process. `processes`: of the replica on this host, in order; the
    first one reads. `timeout`: for which this one waits for another [s]."""

    def __init__(self, folder: Path, process: int, processes: tuple[int, ...], *, timeout: float) -> None:
        self.folder = own_folder(folder)
        self._process, self._reader, self._others = process, processes[0], processes[1:]
        self._timeout = timeout
        self._iteration = self._number = 0
        lock = self._lock_of(process).open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        keep_from_children(lock.fileno())
        weakref.finalize(self, _leave, folder, lock, os.getpid())

    @property
    def reads(self) -> bool:
        return self._process == self._reader

    def begin(self) -> None:
        self._iteration, self._number = self._iteration + 1, 0

    def put(self, batch: Any, position: tuple[int, int]) -> None:
        """Give the next batch to all others; waits for a process that still takes much earlier ones."""
        new = self.folder / f"new.{self._process}"
        save_sealed((position, batch), new)
        for process in self._others:
            self._wait(process, partial(self._may_have, process), "takes the batches of")
            if not self._rest_of(process).exists():
                os.link(new, self._path(process))
        new.unlink()
        self._number += 1

    def take(self, position: tuple[int, int]) -> list[Any]:
        """[the next batch]; [] where the reader has ended; RuntimeError where it failed or is at another position."""
        path, failed = self._path(self._process), self._failure
        self._wait(self._reader, lambda: path.exists() or failed.exists(), "reads the data for")
        if failed.exists() and not path.exists():
            raise RuntimeError(f"process {self._reader} reads the data for this one and failed: {failed.read_text()}")
        if not path.exists():
            _log.warning(
                "process %s, which read the data for process %s, has ended: the latter reads it itself, from %s",
                *(self._reader, self._process, position),
            )
            return []
        its, batch = load_sealed(path)
        path.unlink()
        self._number += 1
        if its != position:
            raise RuntimeError(
                f"process {self._reader} reads the data for process {self._process} and is at (epoch, sample) {its}, "
                f"not {position}: expected the same loops over the loader, and the same state loaded, on both"
            )
        return [batch]

    def rest(self) -> None:
        self._rest_of(self._process).touch()

    def fail(self, error: BaseException) -> None:
        new = self._failure.with_name(f"{self._failure.name}.partial")
        new.write_text(f"{type(error).__name__}: {error}")
        new.rename(self._failure)  # a file that exists is complete

    def _may_have(self, process: int) -> bool:
        waiting = sum(name.endswith(f".for{process}") for name in os.listdir(self.folder))
        return waiting < _AHEAD or self._rest_of(process).exists()

    def _wait(self, process: int, until: Callable[[], bool], what: str) -> None:
        """Wait until `until()` or the end of `process`. RuntimeError after the time-out; `what`: its verb there."""
        begun, pause = time.monotonic(), _POLL
        while not until() and not self._has_ended(process):
            if time.monotonic() - begun > self._timeout:
                raise RuntimeError(
                    f"waited {self._timeout:g} s for process {process}, which {what} process {self._process} on this "
                    f"host: expected equal loops over a shared loader on all processes, or a longer timeout="
                )
            time.sleep(pause)
            pause = min(1.5 * pause, 0.01)

    def _has_ended(self, process: int) -> bool:
        try:
            return not _is_held(self._lock_of(process))
        except FileNotFoundError:
            return True

    @property
    def _failure(self) -> Path:
        return self.folder / f"failed.{self._reader}"

    def _path(self, process: int) -> Path:
        return self.folder / f"{self._iteration}.{self._number}.for{process}"

    def _rest_of(self, process: int) -> Path:
        return self.folder / f"rests.{process}"

    def _lock_of(self, process: int) -> Path:
        return self.folder / f"{process}.lock"


class SharedLoader(ReplicaLoader):
    """Batches from the process that reads for this one, while it runs. `cache`: bytes of samples that the host keeps
    for later epochs. `options`: of ReplicaLoader."""

    def __init__(
        self, dataset: Dataset[Any], batches: ReplicaBatches, *, share: HostShare, cache: int, **options: Any
    ) -> None:
        kept = partial(_CachedSamples, folder=share.folder, share_of=cache / count_samples(dataset)) if cache else None
        super().__init__(dataset, batches, seeded=kept, **options)
        self._share = share

    def loaded(self) -> Iterator[Any]:
        share = self._share
        share.begin()
        if share.reads:
            yield from self._read_for_others()
            return
        for _ in range(self.batches.left):
            with self._waiting():
                taken = share.take((self.batches.epoch, self.batches.position))
            if not taken:
                yield from super().loaded()
                return
            yield from taken

    def _read_for_others(self) -> Iterator[Any]:
        loaded = super().loaded()
        while True:
            try:
                batch = next(loaded)
                with self._waiting():
                    self._share.put(batch, (self.batches.epoch, self.batches.position))
            except StopIteration:
                return
            except Exception as error:
                self._share.fail(error)
                raise
            yield batch

    def may_rest(self) -> bool:
        return not self._share.reads and super().may_rest()

    def rest(self) -> None:
        self._share.rest()


def share_on_host(place: MeshPlace, *, timeout: float) -> HostShare:
    """This process's share of its host. Collective over the processes of the run."""
    world, root = place.world, _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    if not world.distributed:
        return HostShare(_new_folder(root), 0, (0,), timeout=timeout)
    over = time.monotonic() + timeout
    rounds = exchanges(world, what="loaders of a host")(0, lambda: time.monotonic() > over)
    what = "sharing the batches of a host"
    everybody = rounds.gather([f"{machine()} {root.stat().st_dev}", place.data[0]], what=what)
    host, replica = everybody[world.rank]
    first = next(process for process, (own, _) in enumerate(everybody) if own == host)
    mine = _new_folder(root).name.removeprefix(_PREFIX) if first == world.rank else None
    name = os.path.basename(str(rounds.gather(mine, what=what)[first]))  # no other process decides on the path
    sharing = tuple(process for process, own in enumerate(everybody) if own == [host, replica])
    share = HostShare(root / f"{_PREFIX}{name}", world.rank, sharing, timeout=timeout)
    rounds.gather(None, what=what)  # all locks are held
    return share


def _new_folder(root: Path) -> Path:
    for left in root.glob(f"{_PREFIX}*"):  # left by killed processes
        with suppress(OSError):
            is_old = left.stat().st_uid == os.getuid() and time.time() - left.stat().st_mtime > _YOUNG
            if is_old and not any(map(_is_held, left.glob("*.lock"))):
                shutil.rmtree(left)
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))


def _is_held(lock: Path) -> bool:
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _leave(folder: Path, lock: BinaryIO, process: int) -> None:
    lock.close()
    if os.getpid() != process:  # a worker that was forked
        return
    with suppress(OSError):
        Path(lock.name).unlink()
        if not any(folder.glob("*.lock")):
            shutil.rmtree(folder)


def kept_sample(folder: Path, number: int) -> list[Any]:
    with suppress(FileNotFoundError):
        return [load_sealed(folder / f"sample.{number}")]
    return []


def keep_sample(folder: Path, number: int, sample: Any, *, share_of: float) -> None:
    """Keep a sample if its number is among those that fit: `share_of` bytes for each sample of the dataset."""
    new = folder / f"new.{os.getpid()}.{number}"
    save_sealed(sample, new)
    if number * _GOLDEN % 1 < share_of / new.stat().st_size:
        new.rename(folder / f"sample.{number}")
    else:
        new.unlink()


class _CachedSamples(Seeded):
    def __init__(self, dataset: Dataset[Any], batches: ReplicaBatches, *, folder: Path, share_of: float) -> None:
        super().__init__(dataset, batches)
        self._folder: Path | None = folder
        self._share_of = share_of

    def __getitems__(self, draws: Sequence[Draw]) -> Any:
        folder = self._folder
        if folder is None:
            return super().__getitems__(draws)
        known = {draw: kept_sample(folder, draw.number) for draw in draws}
        missing = [draw for draw, kept in known.items() if not kept]
        for draw, sample in zip(missing, super().__getitems__(missing) if missing else (), strict=True):
            known[draw].append(sample)
            try:
                if self._folder is not None:
                    keep_sample(folder, draw.number, sample, share_of=self._share_of)
            except (OSError, RuntimeError) as error:  # torch's error of a full disk
                self._folder = None
                for left in folder.glob(f"new.{os.getpid()}.*"):
                    left.unlink(missing_ok=True)
                _log.warning("the loader's cache= keeps no more samples in %s: %s", folder, error)
        return [known[draw][0] for draw in draws]
