"""The experiment on orders of batches: what it compares, and what it reports."""

from __future__ import annotations

from random import Random

import pytest
from support.inside import Case, replan


@pytest.mark.thorough
def test_a_batch_gains_over_the_best_order_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replan, "_BATCHES", 3)
    monkeypatch.setattr(replan, "_ORDERS", 20)
    case = Case.of({"ranks": 3, "microbatches": 6, "sigma": 0.5})
    figures = {each.name: each.value for each in replan.simulated(case, 1)}
    assert figures["gain, first quartile"] <= figures["gain"] <= figures["gain, third quartile"]
    assert figures["gain, as they come"] > 0
    assert figures["above the bound"] >= 0


def test_fixed_orders_that_fit_every_batch() -> None:
    random = Random(1)
    problems = [replan.problem_of(replan.lengths(6, 0.5, random), ranks=3) for _ in range(2)]
    found = replan.fixed_values(problems)
    assert {"1f1b, as they come", "zb-h1, shortest first", "synthesised, longest first"} <= set(found)
    assert not any(name.startswith("gpipe") for name in found)  # holds six where three of the longest fit
    assert all(len(values) == 2 for values in found.values())
