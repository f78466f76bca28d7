"""The experiment on joint choices: its profiles, its figures, and the quartiles that it reports."""

from __future__ import annotations

from random import Random

import pytest
from support.inside import Case
from support.inside import works_joint as joint


def test_figures_of_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "_ORDERS", 16)
    monkeypatch.setattr(joint, "_CUTS", 2)
    case = Case.of({"ranks": 2, "microbatches": 2, "kind": "large head", "number": 1})
    first, together, gain = joint.simulated(case, 1)
    assert gain.value == pytest.approx(first.value / together.value - 1)
    assert gain.value >= 0


def test_gaps_of_one_search_never_rise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "_SECONDS", (0.01, 0.1, 0.2))
    case = Case.of({"placement": "v", "ranks": 4, "microbatches": 8, "limit": 5})
    figures = [*joint.over_time(case, 1)]
    assert [each.case.get("seconds") for each in figures] == [0.01, 0.1, 0.2]
    gaps = [each.value for each in figures]
    assert gaps == sorted(gaps, reverse=True)


def test_kinds_differ_where_they_say() -> None:
    front, sparse, head = (joint.profile(kind, Random(1)) for kind in joint._KINDS[2::-1])
    assert front[0].forward < 0.8 < front[-1].forward
    assert sparse[-1].forward > 1.2
    assert head[-1].forward > 1.2 * max(each.forward for each in head[:-1])
    with pytest.raises(ValueError, match="kind='other'"):
        joint.profile("other", Random(1))
