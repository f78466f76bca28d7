"""Looks at what runs: their end, by the limit or after a grace, on a clock that only sleeping moves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.inside import processes


@pytest.mark.parametrize(
    ("limit", "failures", "looks", "is_late"),
    [
        (3.0, (), 4, True),
        (0.0, (), 1, True),
        (3.0, (2,), 6, False),  # a grace of 4 from the look after 1 s on
        (3.0, (2, 3, 5), 6, False),  # the first failure counts
        (3.0, (4,), 8, False),  # in the look after the limit
        (None, (9,), 13, False),
    ],
)
def test_looks_end_after_the_limit_or_the_grace_of_the_first_failure(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, failures: tuple[int, ...], looks: int, is_late: bool
) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(processes, "time", clock)
    seen = 0
    for _ in (supervision := processes.Supervision(limit, pause=1.0)):
        seen += 1
        if seen in failures:
            supervision.begin_grace(4.0)
    assert (seen, supervision.is_late, supervision.in_grace) == (looks, is_late, bool(failures))


def test_who_breaks_off_is_not_late() -> None:
    for _ in (supervision := processes.Supervision(0.0)):
        break
    assert not supervision.is_late
