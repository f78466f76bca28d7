"""Lines for people, on rank 0: what a long decision does, and what it is that they wait for.

To the handlers of the logger "stagewright" where there are any, else to stderr; silenced by
logging.getLogger("stagewright").setLevel(logging.WARNING).
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..schedules.wording import duration

SILENT_SECONDS = 4.0  # people wait for so long without a word
_log = logging.getLogger("stagewright")


def tell(text: str, *, rank: int) -> None:
    if rank != 0:
        return
    if _log.hasHandlers():
        _log.info("%s", text)
    elif _log.level <= logging.INFO:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def told_if_slow(what: str, *, rank: int, silent: float = SILENT_SECONDS) -> Iterator[None]:
    """Around what may take long: from so many seconds on it is told, each time after twice as long."""
    if rank != 0:
        yield
        return
    ended, begun = threading.Event(), time.perf_counter()

    def watch() -> None:
        pause = silent
        while not ended.wait(pause):
            pause = time.perf_counter() - begun
            tell(f"{what}: {duration(pause)} so far", rank=rank)

    watcher = threading.Thread(target=watch, name="stagewright-waits", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
