"""The pool: what is left of a case that raises, dies or hangs."""

from __future__ import annotations

import os
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


@pytest.mark.slow
def test_failures_are_told_and_the_next_case_runs(request: pytest.FixtureRequest) -> None:
    pool = Pool(filters=request.config.getini("filterwarnings"))
    with pytest.raises(CaseError, match=r"(?s)rank 1: error\n.*on purpose"):
        pool.run(fail_on, ranks=2, args=(1, "raise"))
    with pytest.raises(CaseError, match=r"(?s)rank 0: ok.*rank 1: error.*UserWarning: a warning"):
        pool.run(fail_on, ranks=2, args=(1, "warn"))
    hung, died = pool.replies(fail_on, ranks=2, args=(1, "exit"), timeout=10.0)
    assert (hung.kind, died.kind) == ("hung", "died")
    assert "in fail_on" in hung.text
    assert "exit code 3" in died.text
    assert pool.run(add_up, ranks=3) == [6.0, 6.0, 6.0]
    pool.close()
