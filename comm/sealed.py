"""Seals of one run: a secret that the launcher gives each process in its environment decides which entries of the
store, whose port others may reach, are trusted, and which pickles in shared memory are read.

Without a secret, as under torchrun unless STAGEWRIGHT_SECRET is set, the store is trusted, and folders are checked.
"""

from __future__ import annotations

import hmac
import io
import os
import pickle
import stat
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.distributed.distributed_c10d import Store

SECRET = "STAGEWRIGHT_SECRET"  # in the environment of a run's processes, and nowhere else
_SEAL = 64  # characters of a seal: SHA-256 in hex


def sealed(store: Store) -> Store:
    """The store with seals; the store itself where the run has no secret."""
    secret = os.environ.get(SECRET)
    return cast(Store, SealedStore(store, secret)) if secret else store


class SealedStore:
    """A store that ignores entries of processes without the same secret; other attributes are the store's."""

    def __init__(self, store: Store, secret: str) -> None:
        self._store, self._secret = store, secret

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._own(key, value))

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._store.check([key]) and self._is_sealed(key, self._store.get(key)) for key in keys)

    def get(self, key: str) -> bytes:
        return self._opened(key, self._store.get(key))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        assert not expected  # the key has not been written
        return self._opened(key, self._store.compare_set(key, "", self._own(key, value)))

    def _own(self, key: str, value: str) -> str:
        return _seal(self._secret, key, value.encode()).decode() + value

    def _is_sealed(self, key: str, found: bytes) -> bool:
        return hmac.compare_digest(found[:_SEAL], _seal(self._secret, key, found[_SEAL:]))

    def _opened(self, key: str, found: bytes) -> bytes:
        if self._is_sealed(key, found):
            return found[_SEAL:]
        raise RuntimeError(
            f"{key!r} in the rendezvous store was written by a process that is not part of this run: expected a port "
            f"that no other process reaches"
        )


def _seal(secret: str, what: str, value: bytes) -> bytes:
    text = f"{len(what)} {what} ".encode() + value
    return hmac.new(secret.encode(), text, "sha256").hexdigest().encode()


def own_folder(folder: Path) -> Path:
    """The folder. Raises ValueError unless it is this user's, no link, and closed to other users; OSError for none."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(
            f"{folder} ({stat.filemode(status.st_mode)}, of user {status.st_uid}): expected a folder of user "
            f"{os.geteuid()} that no other user may enter (drwx------), and no link"
        )
    return folder


def save_sealed(value: Any, path: Path) -> None:
    torch.save(value, path, pickle_module=_PICKLES)


def load_sealed(path: Path) -> Any:
    """The object that a process of this run has saved. RuntimeError, without unpickling, for another process's."""
    try:
        return torch.load(path, mmap=True, weights_only=False, pickle_module=_PICKLES)
    except pickle.UnpicklingError as error:
        raise RuntimeError(f"{path}: {error}") from None


class CompactPickler(pickle.Pickler):
    """A pickler that writes only the elements of a view: torch writes its whole storage, such as a data set."""

    def reducer_override(self, value: Any) -> Any:
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided
        if is_plain and value.nbytes < value.untyped_storage().nbytes():
            return value.detach().clone().requires_grad_(value.requires_grad).__reduce_ex__(2)
        return NotImplemented


def compact(value: object) -> bytes:
    CompactPickler(file := io.BytesIO()).dump(value)
    return file.getvalue()


class _Pickler(CompactPickler):
    def __init__(self, file: io.BytesIO, **options: Any) -> None:
        super().__init__(file, **options)
        self._file = file

    def dump(self, value: Any) -> None:
        super().dump(value)
        self._file.write(_seal(os.environ.get(SECRET, ""), "pickle", self._file.getvalue()))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, **options: Any) -> None:
        text = file.read()
        if not hmac.compare_digest(text[-_SEAL:], _seal(os.environ.get(SECRET, ""), "pickle", text[:-_SEAL])):
            raise pickle.UnpicklingError("a process that is not part of this run has written it")
        super().__init__(io.BytesIO(text), **options)


_PICKLES: Any = SimpleNamespace(__name__=__name__, Pickler=_Pickler, Unpickler=_Unpickler)
