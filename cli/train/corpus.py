"""The text to train on: the running Python's own standard library, as bytes, or the user's files.

    files, sorted by path -> 5% of them, chosen by a hash of the path -> held out
                          -> the others                               -> training

Whole files are held out, so that validation text was never seen. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

NATS_PER_BIT = math.log(2)
HELD_OUT_PERCENT = 5

# Tests are repetitive and would be a third of the text; a site's own packages differ from machine to machine.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "__pycache__"})


class TokenBatch(NamedTuple):
    """tokens [B, T] int64 and targets [B, T] int64: targets[b, t] is the byte that follows tokens[b, t]."""

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """Training and validation bytes."""

    train: np.ndarray  # one-dimensional uint8
    validation: np.ndarray  # likewise
    sha256: str  # of both, in hex: equal for equal text and equal split
    source: str  # origin of the text, as shown

    def check_length(self, length: int) -> None:
        """Raise ValueError if a part is too short for one window of `length` tokens and its last target."""
        for name, part in (("training", self.train), ("validation", self.validation)):
            if len(part) <= length:
                raise ValueError(
                    f"{self.source}: {len(part)} bytes of {name} text, too short for sequences of length "
                    f"{length}; expected more than {length} bytes: give a longer --text or a smaller --length"
                )

    def batch(self, *, seed: int, step: int, batch_size: int, length: int) -> TokenBatch:
        """Random windows of the training text; the same (seed, step) always gives the same batch."""
        self.check_length(length)
        random = np.random.default_rng([seed, step])
        starts = random.integers(0, len(self.train) - length, size=batch_size)
        return _windows(self.train, starts, length)

    def validation_batches(self, *, num_batches: int, batch_size: int, length: int) -> list[TokenBatch]:
        """Windows spread evenly over the validation text, always the same; in a short text they overlap."""
        self.check_length(length)
        last = len(self.validation) - length - 1
        starts = np.linspace(0, last, num=num_batches * batch_size).astype(np.int64)
        return [_windows(self.validation, part, length) for part in np.split(starts, num_batches)]


def load_corpus(text: Sequence[str | Path] = ()) -> Corpus:
    """The standard library of the Python that runs this, or the files of `text`.

    The last 5% of each of the user's own files are held out: 5% of a few files would be none.

    Raises ValueError that names a file that cannot be read.
    """
    if text:
        contents = [_read(Path(path)) for path in text]
        return _corpus(
            [content[: _head(content)] for content in contents],
            [content[_head(content) :] for content in contents],
            source=", ".join(map(str, text)),
        )
    root = Path(sysconfig.get_path("stdlib"))
    files = [(path.relative_to(root).as_posix(), _read(path)) for path in standard_library_files(root)]
    if not files:
        raise ValueError(f"no *.py files in {root}: this Python has no source with it; give your own text with --text")
    return _corpus(
        [content for name, content in files if not is_held_out(name)],
        [content for name, content in files if is_held_out(name)],
        source=f"the Python {sysconfig.get_python_version()} standard library",
    )


def standard_library_files(root: Path) -> list[Path]:
    """*.py below `root` in order of path, without installed packages, tests and idlelib."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - _LEFT_OUT  # not even walked: site-packages may be large
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(path for path in found if path.is_file())


def is_held_out(name: str) -> bool:
    """Whether the file belongs to the validation text; stable over machines, runs and Python versions."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100 < HELD_OUT_PERCENT


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats: logits [B, T, V], targets [B, T] -> scalar."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def bits_per_byte(nats: float) -> float:
    return nats / NATS_PER_BIT


def _corpus(train: list[bytes], validation: list[bytes], *, source: str) -> Corpus:
    parts = [b"\n".join(train), b"\n".join(validation)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))  # so that the digest depends on the split
        digest.update(part)
    return Corpus(
        train=np.frombuffer(parts[0], dtype=np.uint8),
        validation=np.frombuffer(parts[1], dtype=np.uint8),
        sha256=digest.hexdigest(),
        source=source,
    )


def _head(content: bytes) -> int:
    return len(content) * (100 - HELD_OUT_PERCENT) // 100


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the text file {str(path)!r}: {error.strerror or error}") from error


def _windows(text: np.ndarray, starts: np.ndarray, length: int) -> TokenBatch:
    cut = text[starts[:, None] + np.arange(length + 1)]  # [B, T + 1]
    tokens = torch.from_numpy(cut.astype(np.int64))
    return TokenBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
