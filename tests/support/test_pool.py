"""The pool: what is left of a case that raises, dies or hangs."""

from __future__ import annotations

import os
import re
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from support.pool import CaseError, Pool

pytestmark = pytest.mark.gloo


def add_up() -> float:
    total = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(total)
    return total.item()


def fail_on(rank: int, how: str) -> None:
    if dist.get_rank() != rank:
        time.sleep(0.0 if how == "warn" else 200.0)
    elif how == "raise":
        raise RuntimeError("on purpose")
    elif how == "exit":
        os._exit(3)
    elif how == "warn":
        warnings.warn("a warning", stacklevel=1)


@pytest.mark.thorough
def test_failures_are_told_and_the_next_case_runs(request: pytest.FixtureRequest) -> None:
    pool = Pool(filters=request.config.getini("filterwarnings"))
    with pytest.raises(CaseError, match=r"(?s)rank 1: error\n.*on purpose"):
        pool.run(fail_on, ranks=2, args=(1, "raise"))
    with pytest.raises(CaseError, match=r"(?s)rank 0: ok.*rank 1: error.*UserWarning: a warning"):
        pool.run(fail_on, ranks=2, args=(1, "warn"))
    (_, died) = pool.replies(fail_on, ranks=2, args=(1, "exit"), grace=0.0)
    assert died.kind == "died"
    assert "exit code 3" in died.text
    assert pool.run(add_up, ranks=3) == [6.0, 6.0, 6.0]
    pool.close()


def wait_for_each_other(seconds: float) -> None:
    """Rank 0 computes before that."""
    until = time.process_time() + (seconds if dist.get_rank() == 0 else 0.0)
    while time.process_time() < until:
        pass
    if seconds:
        dist.barrier()
    else:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        dist.recv(torch.zeros(1), src=1 - dist.get_rank())


@pytest.mark.thorough
def test_ranks_hang_when_all_wait_and_not_while_one_computes(request: pytest.FixtureRequest) -> None:
    pool = Pool(filters=request.config.getini("filterwarnings"), idle=1.0)
    pool.run(wait_for_each_other, ranks=2, args=(1.5,))
    for reply in pool.replies(wait_for_each_other, ranks=2, args=(0.0,)):
        assert reply.kind == "hung"
        assert reply.text.startswith("no rank has computed for 1 s\n")
        assert reply.text.count("most recent call first") == 2  # the other thread's, too
        assert re.search(r"test_pool.py\", line \d+ in wait_for_each_other", reply.text)
    pool.close()
