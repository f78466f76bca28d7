"""Cases over gloo processes that stay for the next case; strings hash otherwise on the ranks beside."""

import tempfile
import warnings
from functools import cache
from typing import Any

from ..pool import Pool
from .cases import Case, Outcome
from .piped import run
from .verdict import Verdict, judge, last_line

LIMIT = 240.0  # [s] for a case


class FailedError(Exception):
    """A rank ended in an error; the message is its story."""


def on_rank(case: Case, folder: str) -> Outcome:
    """One rank. What is no clear refusal ends the processes, too: who knows what they hold."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = run(case, folder=folder)
    if outcome.error and not outcome.is_clear:
        raise FailedError(f"at call {outcome.at}: {outcome.error}")
    return outcome


@cache
def _pool() -> Pool:
    return Pool()


def check_gloo(case: Case) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        replies = _pool().replies(on_rank, ranks=case.num_processes, args=(case, folder), timeout=LIMIT, grace=15.0)
    if all(reply.kind == "ok" for reply in replies):
        outcomes: list[Any] = [reply.value for reply in replies]
        if len({outcome.error == "" for outcome in outcomes}) > 1:
            _pool().close()
        return judge(case, outcomes)
    hung = [rank for rank, reply in enumerate(replies) if reply.kind == "hung"]
    failed = [reply.text for reply in replies if reply.kind == "error"]
    if hung and not failed:
        return Verdict(kind="hang", what=f"ranks {hung} after {LIMIT} s", text=replies[hung[0]].text)
    died = [reply.text for reply in replies if reply.kind == "died"]
    stories = sorted(failed, key=lambda text: "PeerLost" in last_line(text)) + died
    judged = judge(case, [])
    if judged.kind in ("no case", "diverged"):
        return judged
    what = last_line(stories[0]) + (f" (ranks {hung} hung)" if hung else "")
    return Verdict(kind="error", what=what, text="\n".join(stories))
