"""The pool: what is left of a case that raises, dies or hangs."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch
import torch.distributed as dist

from support.pool import Pool

pytestmark = pytest.mark.gloo


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


def test_ranks_hang_when_all_wait_and_not_while_one_computes(request: pytest.FixtureRequest) -> None:
    pool = Pool(filters=request.config.getini("filterwarnings"), idle=1.0)
    pool.run(wait_for_each_other, ranks=2, args=(1.5,))
    for reply in pool.replies(wait_for_each_other, ranks=2, args=(0.0,)):
        assert reply.kind == "hung"
        assert reply.text.startswith("no rank has computed for 1 s\n")
        assert reply.text.count("most recent call first") == 2  # the other thread's, too
        assert re.search(r"test_pool.py\", line \d+ in wait_for_each_other", reply.text)
    pool.close()
