"""The first tier: when its budget fails a run."""

import pytest

from tiers import budget


@pytest.mark.parametrize(("slower", "core_seconds", "holds"), [(1, 590, True), (1, 610, False), (3, 3 * 590, True)])
def test_the_budget_counts_on_the_scale_of_the_work_beside_it(slower: int, core_seconds: float, holds: bool) -> None:
    first_tier = budget.Budget()
    first_tier._workers = [(core_seconds / 3, slower * budget.REFERENCE)] * 3
    assert first_tier.verdict()[1] is holds
