"""What processes of one run believe, and from whom: a secret that whoever starts them hands to each in its environment.

    store     whoever reaches its port may write there: what is acted on carries a seal, made with the secret, of its
              key and value. Without one it does not count
    pickle    of batches and samples in shared memory: it carries a seal, too, and without one is not read
    folder    this user's, whom nobody else lets in, and no link

Without a secret, as under torchrun unless STAGEWRIGHT_SECRET is set, the store is believed, and folders are checked.
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
    """The store, for what is acted on; itself where the run has no secret."""
    secret = os.environ.get(SECRET)
    return cast(Store, SealedStore(store, secret)) if secret else store


class SealedStore:
    """A store in which only what processes with the same secret wrote counts; what is not named here is the store's."""

    def __init__(self, store: Store, secret: str) -> None:
        self._store, self._secret = store, secret

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._seal(key, value.encode()) + value)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether each of them was written by one of them."""
        return all(self._store.check([key]) and self._opened(key, self._store.get(key)) is not None for key in keys)

    def get(self, key: str) -> bytes:
        """Raises RuntimeError for what somebody else wrote."""
        return self._own(key, self._store.get(key))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """`expected`: "", for a key that nobody has written."""
        assert not expected
        return self._own(key, self._store.compare_set(key, "", self._seal(key, value.encode()) + value))

    def _own(self, key: str, found: bytes) -> bytes:
        value = self._opened(key, found)
        if value is None:
            raise RuntimeError(
                f"{key!r} in the store at which the ranks meet was written by a process that is none of this run: "
                f"expected a port that nobody else reaches"
            )
        return value

    def _opened(self, key: str, found: bytes) -> bytes | None:
        seal, value = found[:_SEAL], found[_SEAL:]
        return value if hmac.compare_digest(seal, self._seal(key, value).encode()) else None

    def _seal(self, key: str, value: bytes) -> str:
        return _seal(self._secret, repr(key).encode(), value)


def _seal(secret: str, what: bytes, value: bytes) -> str:
    return hmac.new(secret.encode(), b"%d %s %s" % (len(what), what, value), "sha256").hexdigest()


def own_folder(folder: Path) -> Path:
    """The folder. Raises ValueError unless this user has made it, nobody else may enter it, and it is no link."""
    try:
        status = folder.lstat()
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}: expected a folder of this run") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(
            f"{folder} (mode {stat.filemode(status.st_mode)}, of user {status.st_uid}): expected a folder of this user "
            f"({os.geteuid()}) that nobody else may enter (mode drwx------), and no link"
        )
    return folder


def save_sealed(value: Any, path: Path) -> None:
    torch.save(value, path, pickle_module=_PICKLES)


def load_sealed(path: Path) -> Any:
    """What a process of this run has saved there, mapped into memory. Raises RuntimeError for what another one has
    written, of which nothing is run."""
    try:
        return torch.load(path, mmap=True, weights_only=False, pickle_module=_PICKLES)
    except pickle.UnpicklingError as error:
        raise RuntimeError(f"{path}: {error}") from None


class _Pickler(pickle.Pickler):
    """Writes a seal behind the pickle."""

    def __init__(self, file: io.BytesIO, **options: Any) -> None:
        super().__init__(file, **options)
        self._file = file

    def dump(self, value: Any) -> None:
        super().dump(value)
        self._file.write(_pickles_seal(self._file.getvalue()))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, **options: Any) -> None:
        text = file.read()
        if not hmac.compare_digest(text[-_SEAL:], _pickles_seal(text[:-_SEAL])):
            raise pickle.UnpicklingError("a process that is none of this run has written it")
        super().__init__(io.BytesIO(text), **options)


def _pickles_seal(text: bytes) -> bytes:
    return _seal(os.environ.get(SECRET, ""), b"pickle", text).encode()


_PICKLES: Any = SimpleNamespace(__name__=__name__, Pickler=_Pickler, Unpickler=_Unpickler)
